"""GPU clocks through a driver with the real one's constants, errors and rules."""

from __future__ import annotations

import pynvml
import pytest

from joulery.adapters.devices.nvidia_clock import NvidiaClock
from joulery.domain.errors import ActuationError, CapabilityError, ConfigError
from joulery.domain.gpu.device import ClockSetting
from tests.fakes.nvml import NvmlFake, as_administrator, gpu

A100 = "NVIDIA A100-SXM4-40GB"


def opened(nvml: NvmlFake, which: int | str = 0) -> NvidiaClock:
    return NvidiaClock(which, nvml, sleep=lambda seconds: None)


def test_a_ceiling_is_locked_and_let_go() -> None:
    nvml = NvmlFake(gpu(A100))
    device = opened(nvml)
    assert device.observe().setting == ClockSetting(None)
    done = device.apply(ClockSetting(1000.0))
    assert nvml.boards[0]["locked"] == [210, 1005]
    assert done.after == ClockSetting(1005.0)
    assert device.observe().clock_mhz == 1005.0
    device.reset(device.observe().memento | {"ceiling_mhz": None})
    assert nvml.boards[0]["locked"] is None
    device.close()
    assert nvml.opened == 0


def test_the_clocks_are_those_of_the_highest_memory_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    as_administrator(monkeypatch)
    found = opened(NvmlFake(gpu("NVIDIA H200"))).capability()
    assert (found.clocks_mhz[0], found.clocks_mhz[-1], found.settable, found.grant) == (345.0, 1980.0, True, "")


def test_without_the_capability_the_message_has_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    as_administrator(monkeypatch, may=False)
    nvml = NvmlFake(gpu(A100, persistence=0), root=False)
    device = opened(nvml)
    found = device.capability()
    assert (found.settable, found.grant) == (False, "sudo -E joulery ...")
    assert "sudo nvidia-smi -pm 1" in found.detail
    with pytest.raises(CapabilityError) as caught:
        device.apply(ClockSetting(1000.0))
    assert caught.value.grant == "sudo -E joulery ..."
    assert "SYS_ADMIN" in caught.value.hint


def test_reset_lets_go_of_what_another_process_locked() -> None:
    nvml = NvmlFake(gpu(A100, locked=[210, 600]))
    device = opened(nvml)
    device.reset()
    assert nvml.boards[0]["locked"] is None


def test_a_lost_board_is_said_to_be_lost() -> None:
    nvml = NvmlFake(gpu(A100))
    device = opened(nvml)
    nvml.boards[0]["lost"] = True
    with pytest.raises(CapabilityError, match="is lost"):
        device.observe()
    with pytest.raises(ActuationError) as caught:
        device.apply(ClockSetting(600.0))
    assert caught.value.left_dirty


def test_a_clock_that_does_not_come_down_is_rolled_back() -> None:
    class Stubborn(NvmlFake):
        def nvmlDeviceGetClockInfo(self, handle: object, kind: int) -> int:
            return 1410

    nvml = Stubborn(gpu(A100))
    with pytest.raises(ActuationError, match="reads 1410") as caught:
        opened(nvml).apply(ClockSetting(600.0))
    assert caught.value.rolled_back
    assert nvml.boards[0]["locked"] is None


@pytest.mark.parametrize("clock_mhz", [209.0, 1411.0])
def test_clocks_outside_the_range(clock_mhz: float) -> None:
    with pytest.raises(ConfigError, match="no such clock"):
        opened(NvmlFake(gpu(A100))).apply(ClockSetting(clock_mhz))
    with pytest.raises(ConfigError, match="a clock alone"):
        opened(NvmlFake(gpu(A100))).apply(ClockSetting(1000.0, boost=True))


def test_boards_are_found_by_index_and_uuid() -> None:
    nvml = NvmlFake(gpu(A100), gpu("NVIDIA H200", 1))
    assert opened(nvml, nvml.boards[1]["uuid"]).device == "gpu:1"
    for which in (2, "GPU-none"):
        with pytest.raises(ConfigError, match="no such GPU") as caught:
            opened(nvml, which)
        assert caught.value.expected == "0 to 1, or a UUID (nvidia-smi -L)"


def test_a_board_without_settable_clocks() -> None:
    with pytest.raises(CapabilityError, match="does not support"):
        opened(NvmlFake(gpu(A100, memory_mhz=[])))


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    "code", [pynvml.NVML_ERROR_UNKNOWN, pynvml.NVML_ERROR_NO_PERMISSION, pynvml.NVML_ERROR_TIMEOUT]
)
@pytest.mark.parametrize("before_mhz", [None, 1200.0])
def test_whatever_single_call_fails_the_clock_is_old_or_new(late: bool, code: int, before_mhz: float | None) -> None:
    old = None if before_mhz is None else [210, 1200]
    for number in range(4):
        nvml = NvmlFake(gpu(A100))
        device = opened(nvml)
        if before_mhz is not None:
            device.apply(ClockSetting(before_mhz))
        nvml.fail_at, nvml.code, nvml.late = frozenset({len(nvml.calls) + number}), code, late
        try:
            device.apply(ClockSetting(600.0))
        except (ActuationError, CapabilityError) as error:
            assert nvml.boards[0]["locked"] == old
            assert not getattr(error, "left_dirty", ())
        else:
            assert nvml.boards[0]["locked"] == [210, 600]
