"""Open devices from a spec, from which another process can open them too."""

from __future__ import annotations

import os
from importlib.metadata import entry_points
from typing import Any, cast

from joulery.domain.errors import ConfigError
from joulery.domain.gpu.device import ClockSetting, DeviceSpec, PowerSetting
from joulery.domain.ports import Device

KINDS = (
    *("cpufreq", "emulated-clock", "node-commands", "rapl-power"),
    *("nvidia-clock", "nvidia-mig", "nvidia-mps", "nvidia-power"),
)


def open_device(spec: DeviceSpec) -> Device[Any]:
    """Open the device of a spec, without changing it.

    Raises:
        CapabilityError: The device is not available here.
        ConfigError: No such kind, or no such device.
    """
    options = dict(spec.options)
    if spec.kind == "cpufreq":
        from joulery.adapters.devices.cpufreq import ROOT, CpufreqClock

        cpus = options.get("cpus")
        return CpufreqClock(options.get("root", ROOT), None if cpus is None else tuple(cpus))
    if spec.kind == "emulated-clock":
        from joulery.adapters.devices.emulated import EmulatedClock

        return EmulatedClock(**options)
    if spec.kind == "node-commands":
        from joulery.adapters.devices.node_commands import NodeCommands

        return NodeCommands(**options)
    if spec.kind == "nvidia-clock":
        from joulery.adapters.devices.nvidia_clock import NvidiaClock

        return NvidiaClock(**options)
    if spec.kind == "nvidia-mig":
        from joulery.adapters.devices.nvidia_mig import NvidiaMig

        return NvidiaMig(**options)
    if spec.kind == "nvidia-mps":
        from joulery.adapters.devices.nvidia_mps import NvidiaMps

        return NvidiaMps(**options)
    if spec.kind == "nvidia-power":
        from joulery.adapters.devices.power.nvidia_power import NvidiaPower

        return NvidiaPower(**options)
    if spec.kind == "rapl-power":
        from joulery.adapters.devices.power.rapl_power import RaplPower

        return RaplPower(**options)
    for plug_in in entry_points(group="joulery.devices", name=spec.kind):
        return cast("Device[Any]", plug_in.load()(**options))
    raise ConfigError("no such kind of device", got=spec.kind, expected=", ".join(KINDS))


def open_clock(spec: DeviceSpec) -> Device[ClockSetting]:
    """Open the clock of a spec, as :func:`open_device` does."""
    return cast("Device[ClockSetting]", open_device(spec))


def open_power(spec: DeviceSpec) -> Device[PowerSetting]:
    """Open the power limit of a spec, as :func:`open_device` does."""
    return cast("Device[PowerSetting]", open_device(spec))


def rapl_spec() -> DeviceSpec:
    """The power limit of this machine's CPUs; ``JOULERY_POWERCAP`` names another tree than the kernel's."""
    root = os.environ.get("JOULERY_POWERCAP")
    return DeviceSpec("rapl-power", {"root": root} if root else {})


def cpufreq_spec(cpus: tuple[int, ...] | None = None) -> DeviceSpec:
    """The CPU clock of this machine; ``JOULERY_CPUFREQ`` names another tree than the kernel's (containers, tests)."""
    options: dict[str, Any] = {} if cpus is None else {"cpus": list(cpus)}
    root = os.environ.get("JOULERY_CPUFREQ")
    return DeviceSpec("cpufreq", {**options, "root": root} if root else options)
