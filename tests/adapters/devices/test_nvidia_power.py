"""GPU power limits through a driver with the real one's constants, errors and rules."""

from __future__ import annotations

import pynvml
import pytest

from joulery.adapters.devices.power.nvidia_power import NvidiaPower
from joulery.domain.errors import ActuationError, CapabilityError, ConfigError
from joulery.domain.gpu.device import PowerSetting
from tests.fakes.nvml import NvmlFake, as_administrator, gpu

A100 = "NVIDIA A100-SXM4-40GB"


def test_a_limit_is_set_read_back_and_given_back_to_what_it_was() -> None:
    nvml = NvmlFake(gpu(A100, limit_mw=350_000))
    device = NvidiaPower(0, nvml)
    former = device.observe()
    assert former.setting == PowerSetting(350.0)
    assert device.apply(PowerSetting(220.4)).after == PowerSetting(220.0)
    assert nvml.boards[0]["limit_mw"] == 220_000
    device.reset(former.memento)
    assert nvml.boards[0]["limit_mw"] == 350_000
    assert device.reset().after == PowerSetting(None)
    assert nvml.boards[0]["limit_mw"] == 400_000
    device.close()
    assert nvml.opened == 0


def test_a_limit_between_the_last_whole_watt_and_the_constraint_is_taken_as_it_is() -> None:
    nvml = NvmlFake(gpu(A100, limits_mw=[100_500, 400_000]))
    NvidiaPower(0, nvml).apply(PowerSetting(100.5))
    assert nvml.boards[0]["limit_mw"] == 100_500


@pytest.mark.parametrize("limit_w", [99.0, 401.0, 1e9])
def test_limits_outside_the_constraints_are_refused(limit_w: float) -> None:
    nvml = NvmlFake(gpu(A100))
    with pytest.raises(ConfigError, match="100 to 400 W"):
        NvidiaPower(0, nvml).apply(PowerSetting(limit_w))
    assert nvml.boards[0]["limit_mw"] == 400_000


@pytest.mark.parametrize("limit_w", [0.0, -5.0, float("nan"), float("inf")])
def test_a_limit_that_is_no_power_is_refused(limit_w: float) -> None:
    with pytest.raises(ConfigError, match="must be positive"):
        PowerSetting(limit_w)


def test_without_the_capability_one_error_holds_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    as_administrator(monkeypatch, may=False)
    nvml = NvmlFake(gpu(A100, persistence=0), root=False)
    device = NvidiaPower(0, nvml)
    found = device.capability()
    assert (found.settable, found.grant) == (False, "sudo -E joulery ...")
    assert "sudo nvidia-smi -pm 1" in found.detail
    with pytest.raises(CapabilityError, match="CAP_SYS_ADMIN") as caught:
        device.apply(PowerSetting(200.0))
    assert caught.value.grant == "sudo -E joulery ..."
    assert nvml.boards[0]["limit_mw"] == 400_000


def test_a_board_without_power_management_is_named() -> None:
    nvml = NvmlFake(gpu(A100, limits_mw=[]))
    with pytest.raises(CapabilityError, match="does not support"):
        NvidiaPower(0, nvml)
    assert nvml.opened == 0


def test_another_limit_of_the_machine_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    as_administrator(monkeypatch)
    nvml = NvmlFake(gpu(A100, other_limit_mw=300_000))
    assert "300 W" in NvidiaPower(0, nvml).capability().detail


def test_a_limit_that_the_driver_forgets_at_once_is_an_error() -> None:
    class Forgetful(NvmlFake):
        def nvmlDeviceSetPowerManagementLimit(self, handle: object, limit_mw: int) -> None:
            return

    nvml = Forgetful(gpu(A100))
    with pytest.raises(ActuationError, match="reads 400000") as caught:
        NvidiaPower(0, nvml).apply(PowerSetting(200.0))
    assert caught.value.rolled_back


def test_a_lost_board_is_said_to_be_lost() -> None:
    nvml = NvmlFake(gpu(A100))
    device = NvidiaPower(0, nvml)
    nvml.boards[0]["lost"] = True
    for act in (device.observe, lambda: device.apply(PowerSetting(200.0)), device.capability):
        with pytest.raises(CapabilityError, match="is lost"):
            act()


def test_the_calls_are_those_of_the_real_module() -> None:
    for name in ("GetPowerManagementLimit", "GetPowerManagementDefaultLimit", "GetPowerManagementLimitConstraints"):
        assert callable(getattr(pynvml, f"nvmlDevice{name}"))
    assert callable(pynvml.nvmlDeviceSetPowerManagementLimit)
