import contextlib
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from joulery.adapters.meters.cpu_model import DEFAULT, CpuModelMeter, CpuPower, cpu_power, open_cpu_model
from joulery.adapters.meters.cputimes import open_cpu_times
from joulery.domain.energy.channel import ReadingKind
from joulery.domain.errors import ConfigError
from joulery.domain.quality import Quality
from tests.adapters.meters.proc import GENOA, Machine


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def two(tmp_path: Path) -> Machine:
    return Machine(tmp_path, [0, 0, 1, 1])


@pytest.fixture
def meter(two: Machine, clock: Clock) -> Iterator[CpuModelMeter]:
    model = CpuModelMeter(open_cpu_times(two.proc, two.sys), CpuPower("test", 2.0, 10.0), clock=clock)
    yield model
    model.close()


def test_power_is_idle_plus_the_utilised_part_of_the_rest(meter: CpuModelMeter, two: Machine, clock: Clock) -> None:
    assert meter.read() == (0.0, 0.0)
    clock.now_s += 10
    two.busy([1000, 500, 0, 0])
    # Socket 0: 2 CPUs idle at 2 W, 15 CPU seconds at 8 W more. Socket 1: idle.
    assert meter.read() == pytest.approx((2 * 2 * 10 + 8 * 15, 40))


def test_a_full_socket_draws_its_maximum(meter: CpuModelMeter, two: Machine, clock: Clock) -> None:
    clock.now_s += 7
    two.busy([700, 700, 0, 0])
    assert meter.read()[0] == pytest.approx(2 * 10 * 7)


def test_what_was_busy_before_it_was_opened_does_not_count(tmp_path: Path, clock: Clock) -> None:
    machine = Machine(tmp_path, [0])
    machine.busy([12345])
    model = CpuModelMeter(open_cpu_times(machine.proc, machine.sys), CpuPower("test", 1.0, 2.0), clock=clock)
    assert model.read() == (0.0,)
    model.close()


def test_a_channel_says_that_it_is_a_model(meter: CpuModelMeter) -> None:
    channel = meter.channels[1]
    assert (channel.device, channel.component, channel.kind) == ("cpu:1", "server", ReadingKind.COUNTER)
    assert (channel.meter, channel.quality) == ("cpu-model", Quality.MODELLED)
    assert (channel.idle_w, channel.max_w, channel.band_ratio) == (4.0, 20.0, 0.5)
    (note,) = meter.notes()
    assert "modelled, not measured" in note
    assert "± 50 %" in note
    assert meter.notes() == ()


def test_a_note_about_an_unknown_processor_has_the_word_of_its_figures(tmp_path: Path, clock: Clock) -> None:
    machine = Machine(tmp_path, [0])
    machine.busy([0])
    with contextlib.closing(CpuModelMeter(open_cpu_times(machine.proc, machine.sys), DEFAULT, clock=clock)) as meter:
        (note,) = meter.notes()
        assert note.startswith(f"CPU power is {meter.channels[0].quality}, not measured: 1.14 W idle")
        assert meter.channels[0].quality is Quality.ASSUMED


@given(seconds=st.floats(0.01, 1e5), ratio=st.floats(0, 1))
def test_energy_lies_between_idle_and_maximum(
    tmp_path_factory: pytest.TempPathFactory, seconds: float, ratio: float
) -> None:
    machine = Machine(tmp_path_factory.mktemp("machine"), [0, 0])
    clock = Clock()
    model = CpuModelMeter(open_cpu_times(machine.proc, machine.sys), CpuPower("test", 3.0, 5.0), clock=clock)
    clock.now_s += seconds
    machine.busy([math.floor(100 * seconds * ratio)] * 2)
    (joules,) = model.read()
    assert 6 * seconds * (1 - 1e-9) <= joules <= 10 * seconds * (1 + 1e-9)
    model.close()


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({}, "EPYC 4th Gen"),
        ({"model": "1"}, "EPYC 3rd Gen"),
        ({"cpu family": "23", "model": "49"}, "EPYC 2nd Gen"),
        ({"vendor_id": "GenuineIntel", "cpu family": "6", "model": "85", "stepping": "4"}, "Skylake"),
        ({"vendor_id": "GenuineIntel", "cpu family": "6", "model": "85", "stepping": "7"}, "Cascade Lake"),
        ({"vendor_id": "GenuineIntel", "cpu family": "6", "model": "143"}, "Sapphire Rapids"),
    ],
)
def test_the_table_knows_servers_by_family_model_and_stepping(
    tmp_path: Path, change: dict[str, str], name: str
) -> None:
    power = cpu_power(Machine(tmp_path, [0], {**GENOA, **change}).proc)
    assert power.name == name
    assert power.quality is Quality.MODELLED
    assert 0.4 < power.idle_w < power.max_w < 9


@pytest.mark.parametrize(
    "change",
    [
        {"cpu family": "26", "model": "2"},
        {"vendor_id": "GenuineIntel"},
        {"vendor_id": "GenuineIntel", "cpu family": "6", "model": "85", "stepping": "11"},
        {"cpu family": "x"},
    ],
)
def test_an_unknown_processor_is_assumed_and_errs_upward(tmp_path: Path, change: dict[str, str]) -> None:
    power = cpu_power(Machine(tmp_path, [0], {**GENOA, **change}).proc)
    assert power is DEFAULT
    assert power.quality is Quality.ASSUMED


def test_an_arm_machine_has_no_such_fields(tmp_path: Path) -> None:
    machine = Machine(tmp_path, [0], {"CPU implementer": "0x41", "CPU part": "0xd0c"})
    assert cpu_power(machine.proc) is DEFAULT
    model = open_cpu_model(proc=machine.proc, sys=machine.sys)
    assert model.channels[0].quality is Quality.ASSUMED
    model.close()


def test_the_users_watts_are_the_machines_and_sockets_share_them(tmp_path: Path) -> None:
    machine = Machine(tmp_path, [0, 0, 0, 1])
    model = open_cpu_model(40.0, 120.0, 0.1, proc=machine.proc, sys=machine.sys)
    assert [(c.idle_w, c.max_w, c.band_ratio) for c in model.channels] == [(30.0, 90.0, 0.1), (10.0, 30.0, 0.1)]
    assert all(channel.quality is Quality.MODELLED for channel in model.channels)
    model.close()


@pytest.mark.parametrize(
    ("idle", "most", "band", "says"),
    [
        (None, 5.0, 0.5, "idle and max watts, or neither"),
        (5.0, None, 0.5, "idle and max watts, or neither"),
        (5.0, 5.0, 0.5, "0 <= idle < max"),
        (-1.0, 5.0, 0.5, "0 <= idle < max"),
        (1.0, math.inf, 0.5, "0 <= idle < max"),
        (math.nan, 5.0, 0.5, "0 <= idle < max"),
        (1.0, 5.0, 1.5, "a band is a ratio"),
    ],
)
def test_nonsense_is_refused(idle: float | None, most: float | None, band: float, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        open_cpu_model(idle, most, band)
