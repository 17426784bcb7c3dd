"""Leases: written down first, and taken back whatever becomes of their holder. Real processes, invented hardware."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from joulery.adapters.devices.cpufreq import CpufreqClock
from joulery.adapters.devices.emulated import EmulatedClock
from joulery.app.wiring.devices import open_device
from joulery.app.wiring.leases import start_watchdog
from joulery.domain.errors import ActuationError, CapabilityError, DataError
from joulery.domain.gpu.device import ClockSetting, DeviceChange, DeviceSpec
from joulery.runtime.leasing.leases import LeaseHolder
from joulery.runtime.leasing.watchdog import Watchdog, revert_lease
from joulery.store.leases import LeaseBook, lives, owner_of
from tests.fakes.cpufreq import cpufreq_tree, settings
from tests.fakes.nvml import STATE, NvmlFake, gpu
from tests.fakes.powercap import limits, powercap_tree
from tests.waiting import PATIENCE_S, ended, wait_until

FAKES = Path(__file__).resolve().parents[2] / "fakes/path"

HOLDER = """
import json, os, signal, sys, time
from joulery.domain.gpu.device import ClockSetting, DeviceSpec, PowerSetting
from joulery.app.wiring.devices import open_device
from joulery.app.wiring.leases import start_watchdog
from joulery.runtime.leasing.leases import LeaseHolder
from joulery.store.leases import LeaseBook
folder, kind, options, lasts_s, value = sys.argv[1:]
from pathlib import Path
spec = DeviceSpec(kind, json.loads(options))
holder = LeaseHolder(LeaseBook(Path(folder)), float(lasts_s), watch=start_watchdog)
signal.signal(signal.SIGTERM, lambda *_: (holder.close(), os._exit(0)))
wanted = (PowerSetting if kind.endswith("-power") else ClockSetting)(float(value))
holder.set(open_device(spec), spec, wanted, "a test")
print("set", holder._watchdog.pid, flush=True)
while True:
    time.sleep(0.1)
    holder.renew()
"""


class Holding:
    """A process that holds a lease."""

    def __init__(self, folder: Path, kind: str, options: dict[str, Any], value: float, lasts_s: float = 60.0) -> None:
        arguments = [str(folder), kind, json.dumps(options), str(lasts_s), str(value)]
        self.process = subprocess.Popen([sys.executable, "-c", HOLDER, *arguments], stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        word, pid = self.process.stdout.readline().split()
        assert word == b"set"
        self.watchdog = int(pid)

    def kill(self, number: int) -> None:
        self.process.send_signal(number)
        self.process.wait()

    def end(self) -> None:
        assert self.process.stdout is not None
        self.process.stdout.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait()
        wait_until(lambda: ended(self.watchdog))


@pytest.fixture
def hold(tmp_path: Path) -> Iterator[Callable[..., Holding]]:
    started: list[Holding] = []

    def start(kind: str, options: dict[str, Any], value: float, lasts_s: float = 60.0) -> Holding:
        started.append(Holding(tmp_path / "leases", kind, options, value, lasts_s))
        return started[-1]

    yield start
    for one in started:
        one.end()


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return cpufreq_tree(tmp_path / "cpu")


@pytest.fixture
def book(tmp_path: Path) -> LeaseBook:
    return LeaseBook(tmp_path / "leases")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_cpu_clock_comes_back_when_its_controller_is_killed_or_stopped(
    hold: Callable[..., Holding], tree: Path, book: LeaseBook, number: int
) -> None:
    before = settings(tree)
    held = hold("cpufreq", {"root": str(tree)}, 2000.0)
    assert settings(tree)["cpufreq/policy0/scaling_max_freq"] == "2000000"
    assert book.names() == ("cpu.clock",)
    held.kill(number)
    wait_until(lambda: book.names() == ())
    assert settings(tree) == before
    wait_until(lambda: ended(held.watchdog))


def test_the_gpu_clock_comes_back_when_its_controller_is_killed(
    hold: Callable[..., Holding], book: LeaseBook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = tmp_path / "boards.json"
    nvml = NvmlFake(gpu("NVIDIA A100-SXM4-40GB"), file=state)
    monkeypatch.setenv(STATE, str(state))
    monkeypatch.setenv("PYTHONPATH", f"{FAKES}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    held = hold("nvidia-clock", {"gpu": nvml.boards[0]["uuid"]}, 1005.0)
    assert nvml.boards[0]["locked"] == [210, 1005]
    held.kill(signal.SIGKILL)
    wait_until(lambda: book.names() == ())
    assert nvml.boards[0]["locked"] is None


def test_power_limits_return_to_what_they_were_when_their_controller_is_killed(
    hold: Callable[..., Holding], book: LeaseBook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The former limit comes back, not the factory's: an administrator may have set it."""
    state = tmp_path / "boards.json"
    nvml = NvmlFake(gpu("NVIDIA A100-SXM4-40GB", limit_mw=350_000), file=state)
    monkeypatch.setenv(STATE, str(state))
    monkeypatch.setenv("PYTHONPATH", f"{FAKES}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    tree = powercap_tree(tmp_path / "powercap")
    before = limits(tree)
    held = [hold("nvidia-power", {"gpu": 0}, 250.0), hold("rapl-power", {"root": str(tree)}, 80.0)]
    assert nvml.boards[0]["limit_mw"] == 250_000
    assert limits(tree)["intel-rapl:1/constraint_0_power_limit_uw"] == "80000000"
    assert len(book.names()) == 2
    for one in held:
        one.kill(signal.SIGKILL)
    wait_until(lambda: book.names() == ())
    assert nvml.boards[0]["limit_mw"] == 350_000
    assert limits(tree) == before


def test_a_controller_that_hangs_loses_its_lease(hold: Callable[..., Holding], tree: Path, book: LeaseBook) -> None:
    """A stopped process renews nothing; its setting is back long before it ends."""
    before = settings(tree)
    held = hold("cpufreq", {"root": str(tree)}, 2000.0, lasts_s=2.0)
    held.process.send_signal(signal.SIGSTOP)
    wait_until(lambda: book.names() == ())
    assert settings(tree) == before
    assert held.process.poll() is None


def test_a_lease_that_is_renewed_outlives_its_term(hold: Callable[..., Holding], tree: Path, book: LeaseBook) -> None:
    hold("cpufreq", {"root": str(tree)}, 2000.0, lasts_s=4.0)
    first = book.read("cpu.clock")
    assert first is not None
    wait_until(lambda: (book.read("cpu.clock") or first).renewed_s > first.renewed_s + 4.2)
    assert settings(tree)["cpufreq/policy0/scaling_max_freq"] == "2000000"


def test_a_watchdog_that_is_killed_is_replaced(hold: Callable[..., Holding], tree: Path, book: LeaseBook) -> None:
    before = settings(tree)
    held = hold("cpufreq", {"root": str(tree)}, 2000.0)
    os.kill(held.watchdog, signal.SIGKILL)
    wait_until(lambda: bool(children(held.process.pid) - {held.watchdog}))
    (successor,) = children(held.process.pid) - {held.watchdog}
    wait_until(lambda: b"joulery.app.wiring.lease_watchdog" in Path(f"/proc/{successor}/cmdline").read_bytes())
    held.kill(signal.SIGKILL)
    wait_until(lambda: book.names() == ())
    assert settings(tree) == before
    wait_until(lambda: ended(successor))


def children(pid: int) -> set[int]:
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[1]) == pid and fields[0] != "Z":
            found.add(int(folder.name))
    return found


def test_a_live_lease_is_refused_and_that_of_a_dead_process_is_taken_over(
    hold: Callable[..., Holding], tree: Path, book: LeaseBook
) -> None:
    before = settings(tree)
    held = hold("cpufreq", {"root": str(tree)}, 2000.0)
    spec = DeviceSpec("cpufreq", {"root": str(tree)})
    with (
        LeaseHolder(book, watch=start_watchdog) as mine,
        pytest.raises(CapabilityError, match=f"leased by process {held.process.pid}"),
    ):
        mine.set(CpufreqClock(str(tree)), spec, ClockSetting(1800.0), "mine")
    os.kill(held.watchdog, signal.SIGKILL)  # both at once, as a container that ends
    held.kill(signal.SIGKILL)
    assert book.names() == ("cpu.clock",)
    with LeaseHolder(book, watch=start_watchdog) as mine:
        mine.set(CpufreqClock(str(tree)), spec, ClockSetting(1800.0), "mine")
        assert settings(tree)["cpufreq/policy1/scaling_max_freq"] == "1800000"
    assert settings(tree) == before


def test_the_lease_is_on_the_disk_before_the_device_is_touched(tree: Path, book: LeaseBook) -> None:
    seen: list[tuple[str, ...]] = []

    class Witness(CpufreqClock):
        def apply(self, wanted: ClockSetting, /) -> Any:
            lease = book.read("cpu.clock")
            assert lease is not None
            assert lease.wanted == "at most 2000 MHz"
            assert lease.before["files"]["cpufreq/policy0/scaling_max_freq"] == "3200000"
            seen.append(book.names())
            return super().apply(wanted)

    with LeaseHolder(book, watch=no_watchdog) as holder:
        holder.set(Witness(str(tree)), DeviceSpec("cpufreq", {"root": str(tree)}), ClockSetting(2000.0), "why")
        holder.set(Witness(str(tree)), DeviceSpec("cpufreq", {"root": str(tree)}), ClockSetting(2000.0), "why")
    assert len(seen) == 2


class NoWatchdog(Watchdog):
    """A watchdog that is not there, for tests of the holder alone."""

    def __init__(self) -> None: ...

    @property
    def alive(self) -> bool:
        return True

    def dismiss(self, *, wait: bool) -> None: ...


def no_watchdog(book: LeaseBook, owner: object) -> Watchdog:
    return NoWatchdog()


def test_a_setting_that_fails_leaves_no_lease_unless_it_left_dirt(tree: Path, book: LeaseBook) -> None:
    spec = DeviceSpec("cpufreq", {"root": str(tree)})

    class Failing(CpufreqClock):
        left_dirty: tuple[str, ...] = ()

        def apply(self, wanted: ClockSetting, /) -> Any:
            raise ActuationError("no", left_dirty=self.left_dirty)

    device = Failing(str(tree))
    with LeaseHolder(book, watch=no_watchdog) as holder:
        with pytest.raises(ActuationError):
            holder.set(device, spec, ClockSetting(2000.0), "why")
        assert book.names() == ()
        device.left_dirty = ("the CPU clock",)
        with pytest.raises(ActuationError):
            holder.set(device, spec, ClockSetting(2000.0), "why")
        assert book.names() == ("cpu.clock",)
    assert book.names() == ()


def test_closing_says_what_could_not_be_set_back_and_keeps_its_lease(tree: Path, book: LeaseBook) -> None:
    class Stuck(CpufreqClock):
        def reset(self, memento: Any = None, /) -> Any:
            raise ActuationError("stuck", left_dirty=("the CPU clock",))

    holder = LeaseHolder(book, watch=no_watchdog)
    spec = DeviceSpec("cpufreq", {"root": str(tree)})
    holder.set(Stuck(str(tree)), spec, ClockSetting(2000.0), "why")
    with pytest.raises(ActuationError, match="stuck"):
        holder.close()
    assert book.names() == ("cpu.clock",)
    assert "3200 MHz" not in revert_lease(book, "cpu.clock", open_device)
    assert book.names() == ()
    assert settings(tree)["cpufreq/policy0/scaling_max_freq"] == "3200000"


def test_a_lease_that_was_taken_away_is_reported_and_renewed(tree: Path, book: LeaseBook) -> None:
    spec = DeviceSpec("cpufreq", {"root": str(tree)})
    with LeaseHolder(book, watch=no_watchdog) as holder:
        holder.set(CpufreqClock(str(tree)), spec, ClockSetting(2000.0), "why")
        assert holder.renew() == ()
        revert_lease(book, "cpu.clock", open_device)
        assert holder.renew() == ("cpu.clock",)
        assert holder.held == ()
        holder.set(CpufreqClock(str(tree)), spec, ClockSetting(1900.0), "why")
    assert settings(tree)["cpufreq/policy0/scaling_max_freq"] == "3200000"


def test_two_holders_of_one_process_let_go_one_after_the_other(tmp_path: Path, tree: Path, book: LeaseBook) -> None:
    spec = DeviceSpec("cpufreq", {"root": str(tree)})
    emulated = DeviceSpec("emulated-clock", {"state": str(tmp_path / "deep/state.json")})
    with LeaseHolder(book, watch=start_watchdog) as first:
        first.set(CpufreqClock(str(tree)), spec, ClockSetting(2000.0), "why")
        with LeaseHolder(book, watch=start_watchdog) as second:
            second.set(open_device(emulated), emulated, ClockSetting(1000.0), "why")
        assert book.names() == ("cpu.clock",)
        assert settings(tree)["cpufreq/policy0/scaling_max_freq"] == "2000000"
    assert book.names() == ()


def test_where_no_lease_can_be_written_nothing_is_set(tmp_path: Path, tree: Path) -> None:
    before = settings(tree)
    (tmp_path / "file").write_text("")
    spec = DeviceSpec("cpufreq", {"root": str(tree)})
    with (
        LeaseHolder(LeaseBook(tmp_path / "file/leases"), watch=no_watchdog) as holder,
        pytest.raises(CapabilityError, match=r"nothing is set, .*lease") as caught,
    ):
        holder.set(CpufreqClock(str(tree)), spec, ClockSetting(2000.0), "why")
    assert "JOULERY_STATE" in caught.value.hint
    assert settings(tree) == before


def test_damaged_leases_are_errors_for_a_person(book: LeaseBook) -> None:
    book.folder.mkdir()
    (book.folder / "cpu.clock.json").write_text("{")
    with pytest.raises(DataError, match="not a lease"):
        book.read("cpu.clock")
    (book.folder / "cpu.clock.json").write_text('{"schema": "joulery.lease/9"}')
    with pytest.raises(DataError, match="this version"):
        book.read("cpu.clock")
    (book.folder / "cpu.clock.json").write_text('{"schema": "joulery.lease/1"}')
    with pytest.raises(DataError, match="not a lease"):
        book.read("cpu.clock")


def test_a_process_is_more_than_its_number() -> None:
    me = owner_of(os.getpid())
    assert me is not None
    assert lives(me)
    from dataclasses import replace

    assert not lives(replace(me, start_ticks=me.start_ticks - 1))
    assert not lives(replace(me, boot_id="another"))
    assert owner_of(2**22 + 1) is None


class SlowClock(EmulatedClock):
    """A clock that takes its time to be set."""

    def __init__(self) -> None:
        super().__init__(clocks_mhz=(1000.0, 2000.0))
        self.begun, self.goes_on = threading.Event(), threading.Event()

    def apply(self, wanted: ClockSetting, /) -> DeviceChange[ClockSetting]:
        self.begun.set()
        assert self.goes_on.wait(PATIENCE_S)
        return super().apply(wanted)


def test_what_is_being_set_while_the_holder_closes_is_taken_back_and_nothing_is_set_later(book: LeaseBook) -> None:
    holder = LeaseHolder(book, watch=lambda book, owner: NoWatchdog())  # type: ignore[arg-type,return-value]
    device, spec = SlowClock(), DeviceSpec("emulated-clock")
    setting = threading.Thread(target=holder.set, args=(device, spec, ClockSetting(1000.0), "idle"))
    setting.start()
    assert device.begun.wait(PATIENCE_S)
    closing = threading.Thread(target=holder.close)
    closing.start()
    device.goes_on.set()
    setting.join()
    closing.join()
    assert device.observe().setting == ClockSetting() and book.names() == () and holder.held == ()
    with pytest.raises(CapabilityError, match="being reverted"):
        holder.set(device, spec, ClockSetting(1000.0), "idle")
    assert device.observe().setting == ClockSetting() and book.names() == ()
