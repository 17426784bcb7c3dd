"""The contract of a device, checked on every device and its fake."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from joulery.adapters.devices.cpufreq import CpufreqClock
from joulery.adapters.devices.emulated import EmulatedClock
from joulery.adapters.devices.node_commands import NodeCommands
from joulery.adapters.devices.nvidia_clock import NvidiaClock
from joulery.adapters.devices.nvidia_mig import NvidiaMig
from joulery.adapters.devices.nvidia_mps import NvidiaMps
from joulery.adapters.devices.power.nvidia_power import NvidiaPower
from joulery.adapters.devices.power.rapl_power import RaplPower
from joulery.app.wiring.devices import KINDS, open_device
from joulery.domain.errors import ActuationError, CapabilityError, ConfigError
from joulery.domain.gpu.device import (
    ClockSetting,
    DeviceSpec,
    Knob,
    MigSetting,
    MpsSetting,
    PowerSetting,
    SleepSetting,
)
from joulery.domain.ports import Device
from tests.fakes.cpufreq import KernelFiles, cpufreq_tree
from tests.fakes.cpufreq import settings as cpu_settings
from tests.fakes.mps import daemon, no_daemon_left, on_path
from tests.fakes.nvml import NvmlFake, gpu
from tests.fakes.powercap import PowercapFiles, limits, powercap_tree

A100 = "NVIDIA A100-SXM4-40GB"


@dataclass
class Case:
    """A device, and the world behind it.

    ``again`` opens the same device as another process would; ``fail`` has the next calls of the vendor fail.
    """

    kind: str
    again: Callable[[], Device[Any]]
    world: Callable[[], object]
    wanted: tuple[Any, ...]
    impossible: Any
    fail: Callable[[int, int], None] = lambda start, width: None
    device: Device[Any] = field(init=False)

    def __post_init__(self) -> None:
        self.device = self.again()


def _cpufreq(folder: Path) -> Case:
    tree, files = cpufreq_tree(folder / "cpu"), KernelFiles()

    def fail(start: int, width: int) -> None:
        files.fail_at = frozenset(range(files.calls + start, files.calls + start + width))

    wanted = (ClockSetting(1600.0), ClockSetting(2400.0, boost=False), ClockSetting(governor="performance"))
    again = lambda: CpufreqClock(str(tree), files=files)  # noqa: E731
    return Case("cpufreq", again, lambda: cpu_settings(tree), wanted, ClockSetting(9000.0), fail)


def _emulated(folder: Path) -> Case:
    file = folder / "state.json"
    again = lambda: EmulatedClock("V100", (200.0, 800.0, 1380.0), state=str(file))  # noqa: E731
    world = lambda: json.loads(file.read_text()) if file.exists() else {"ceiling_mhz": None}  # noqa: E731
    return Case("emulated-clock", again, world, (ClockSetting(800.0), ClockSetting(200.0)), ClockSetting(9000.0))


def _failing(nvml: NvmlFake) -> Callable[[int, int], None]:
    def fail(start: int, width: int) -> None:
        nvml.fail_at = frozenset(range(len(nvml.calls) + start, len(nvml.calls) + start + width))

    return fail


def _nvidia_clock(folder: Path) -> Case:
    nvml = NvmlFake(gpu(A100))
    again = lambda: NvidiaClock(0, nvml, sleep=lambda seconds: None)  # noqa: E731
    wanted = (ClockSetting(1005.0), ClockSetting(600.0))
    return Case("nvidia-clock", again, lambda: nvml.boards[0]["locked"], wanted, ClockSetting(9000.0), _failing(nvml))


def _nvidia_mig(folder: Path) -> Case:
    nvml = NvmlFake(gpu(A100))
    wanted = (
        MigSetting(("3g.20gb", "4g.20gb")),
        MigSetting(("2g.10gb", "2g.10gb", "1g.5gb")),
        MigSetting(("7g.40gb",)),
    )
    again = lambda: NvidiaMig(0, nvml)  # noqa: E731
    return Case("nvidia-mig", again, nvml.layout, wanted, MigSetting(("7g.40gb",) * 2), _failing(nvml))


def _nvidia_mps(folder: Path) -> Case:
    nvml = NvmlFake(gpu(A100))
    wanted = (MpsSetting(True, 0.5), MpsSetting(True, 0.25))
    again = lambda: NvidiaMps(0, nvml, str(folder))  # noqa: E731

    def world() -> object:
        found = daemon(folder)
        return None if found is None else found[1:]

    return Case("nvidia-mps", again, world, wanted, None, _failing(nvml))


def _nvidia_power(folder: Path) -> Case:
    nvml = NvmlFake(gpu(A100))
    wanted = (PowerSetting(250.0), PowerSetting(100.0))
    again = lambda: NvidiaPower(0, nvml)  # noqa: E731
    return Case("nvidia-power", again, lambda: nvml.boards[0]["limit_mw"], wanted, PowerSetting(999.0), _failing(nvml))


def _rapl_power(folder: Path) -> Case:
    tree, files = powercap_tree(folder / "powercap"), PowercapFiles()

    def fail(start: int, width: int) -> None:
        files.fail_at = frozenset(range(files.calls + start, files.calls + start + width))

    wanted = (PowerSetting(90.0), PowerSetting(60.5))
    again = lambda: RaplPower(str(tree), files)  # noqa: E731
    return Case("rapl-power", again, lambda: limits(tree), wanted, PowerSetting(999.0), fail)


def _node_commands(folder: Path) -> Case:
    state = folder / "state"
    state.write_text("awake")
    write = lambda word: (sys.executable, "-c", f"open({str(state)!r}, 'w').write({word!r})")  # noqa: E731
    again = lambda: NodeCommands("south", write("asleep"), write("awake"))  # noqa: E731
    return Case("node-commands", again, state.read_text, (SleepSetting(asleep=True), SleepSetting()), None)


CASES = {
    "cpufreq": _cpufreq,
    "emulated-clock": _emulated,
    "node-commands": _node_commands,
    "nvidia-clock": _nvidia_clock,
    "nvidia-mig": _nvidia_mig,
    "nvidia-mps": _nvidia_mps,
    "nvidia-power": _nvidia_power,
    "rapl-power": _rapl_power,
}


@pytest.fixture(params=list(CASES))
def case(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Case]:
    monkeypatch.setenv("PATH", on_path())
    with no_daemon_left(tmp_path):
        yield CASES[request.param](tmp_path)


def test_every_kind_is_held_to_it() -> None:
    assert set(CASES) == set(KINDS)
    with pytest.raises(ConfigError, match="no such kind of device"):
        open_device(DeviceSpec("toaster"))


def test_looking_changes_nothing(case: Case) -> None:
    before = case.world()
    able, found = case.device.capability(), case.device.observe()
    assert able.knob is DeviceSpec(case.kind).knob
    assert able.device
    assert able.name
    assert able.emulated == (case.kind == "emulated-clock")
    assert (able.knob is Knob.CLOCK) == bool(able.clocks_mhz)
    assert (able.knob is Knob.POWER) == bool(able.limits_w)
    assert list(able.clocks_mhz) == sorted(able.clocks_mhz)
    assert found.setting == case.device.observe().setting
    assert case.world() == before


def test_what_is_set_is_seen_and_setting_it_again_does_nothing(case: Case) -> None:
    worlds = []
    for wanted in case.wanted:
        done = case.device.apply(wanted)
        assert done.after == case.device.observe().setting
        worlds.append(case.world())
        again = case.device.apply(wanted)
        assert again.before == again.after == done.after
        assert case.world() == worlds[-1]
    assert all(first != second for first, second in pairwise(worlds))


def test_another_process_brings_back_what_was_seen(case: Case) -> None:
    before = case.world()
    memento = json.loads(json.dumps(dict(case.device.observe().memento)))
    for wanted in case.wanted:
        case.device.apply(wanted)
        case.again().reset(memento)
        assert case.world() == before
        case.device = case.again()


def test_a_state_in_between_comes_back_too(case: Case) -> None:
    case.device.apply(case.wanted[0])
    memento, between = json.loads(json.dumps(dict(case.device.observe().memento))), case.world()
    case.device.apply(case.wanted[1])
    case.again().reset(memento)
    assert case.world() == between


def test_the_factorys_state_needs_no_memory(case: Case) -> None:
    before = case.world()
    case.device.apply(case.wanted[0])
    case.again().reset()
    assert case.world() == before


def test_what_cannot_be_is_refused_and_changes_nothing(case: Case) -> None:
    case.device.apply(case.wanted[0])
    before = case.world()
    if case.impossible is not None:
        with pytest.raises(ConfigError) as caught:
            case.device.apply(case.impossible)
        assert caught.value.got
        assert caught.value.expected
    assert case.world() == before


@pytest.mark.parametrize("kind", ["cpufreq", "nvidia-clock", "nvidia-mig", "nvidia-power", "rapl-power"])
@settings(max_examples=25)
@given(steps=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 40), st.integers(0, 3)), min_size=1, max_size=4))
def test_through_any_history_of_failures_it_is_what_was_last_said(
    kind: str, tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[int, int, int]]
) -> None:
    """Random settings, random calls that fail: without an error the new state, with one the old, or it says dirty."""
    case = CASES[kind](tmp_path_factory.mktemp("device"))
    for choice, start, width in steps:
        wanted, before = case.wanted[choice % len(case.wanted)], case.world()
        case.fail(start, width)
        try:
            done = case.device.apply(wanted)
        except (ActuationError, CapabilityError) as error:
            case.fail(0, 0)
            if getattr(error, "left_dirty", ()):
                return
            assert case.world() == before
        else:
            case.fail(0, 0)
            assert case.device.observe().setting == done.after
            assert getattr(done.after, "profiles", None) is None or done.after == wanted
            if wanted.__class__ is ClockSetting and wanted.clock_mhz is not None:
                assert done.after.clock_mhz == wanted.clock_mhz
