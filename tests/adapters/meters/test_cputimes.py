from pathlib import Path

import pytest

from joulery.adapters.meters.cputimes import open_cpu_times, sockets_of_cpus
from joulery.domain.errors import CapabilityError
from tests.adapters.meters.proc import Machine


def test_busy_time_is_summed_by_socket(tmp_path: Path) -> None:
    machine = Machine(tmp_path, [0, 0, 1, 1])
    times = open_cpu_times(machine.proc, machine.sys)
    assert (times.sockets, times.cpus) == ((0, 1), (2, 2))
    machine.busy([100, 200, 10, 0])
    assert times.read() == pytest.approx((3.0, 0.1))
    times.close()
    times.close()


def test_user_nice_system_irq_and_softirq_are_busy_and_the_rest_is_not(tmp_path: Path) -> None:
    machine = Machine(tmp_path, [0])
    times = open_cpu_times(machine.proc, machine.sys)
    (machine.proc / "stat").write_text(
        "cpu 0 0 0 0 0 0 0 0 0 0\ncpu0 1 10 100 1000000 2000000 1000 10000 3000000 4000000 5000000\nintr 0\n"
    )
    assert times.read() == pytest.approx((111.11,))
    times.close()


def test_a_count_never_falls_and_an_offline_cpu_keeps_its_own(tmp_path: Path) -> None:
    machine = Machine(tmp_path, [0, 0])
    times = open_cpu_times(machine.proc, machine.sys)
    machine.busy([100, 50])
    assert times.read() == pytest.approx((1.5,))
    machine.busy([90, 60])
    assert times.read() == pytest.approx((1.6,))
    machine.busy([110, 0], offline=[1])
    assert times.read() == pytest.approx((1.7,))
    times.close()


def test_a_cpu_that_came_later_does_not_count(tmp_path: Path) -> None:
    machine = Machine(tmp_path, [0])
    times = open_cpu_times(machine.proc, machine.sys)
    machine.busy([100, 5000])
    assert times.read() == pytest.approx((1.0,))
    times.close()


def test_a_machine_that_does_not_say_its_sockets_has_one(tmp_path: Path) -> None:
    machine = Machine(tmp_path, [-1, -1])
    assert sockets_of_cpus(machine.sys) == {0: 0, 1: 0}
    assert set(sockets_of_cpus(tmp_path / "nothing").values()) == {0}


def test_no_proc_is_said(tmp_path: Path) -> None:
    with pytest.raises(CapabilityError, match=r"cannot read .*stat: No such file"):
        open_cpu_times(tmp_path / "proc", tmp_path / "sys")


def test_the_real_machine_counts_up() -> None:
    times = open_cpu_times()
    before = times.read()
    while times.read() == before:
        sum(range(10000))
    assert all(b >= a for a, b in zip(before, times.read(), strict=True))
    times.close()
