"""Governed clocks of a site: the device, its governor, and the assumptions about both."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np

from joulery.app.wiring.devices import cpufreq_spec, open_clock
from joulery.app.wiring.leases import held_leases
from joulery.config.devices import ClockConfig
from joulery.config.site import Mode, Site
from joulery.domain.arrays import FloatArray
from joulery.domain.errors import CapabilityError, ConfigError, DataError
from joulery.domain.gpu.clock_profile import ClockProfile
from joulery.domain.gpu.device import ClockSetting, DeviceSpec
from joulery.domain.ports import Device, Policy
from joulery.perf.power.clock_curves import V100
from joulery.perf.power.clock_scaling import above_idle_ratio, scaled_knee_mhz, slowdown_ratio
from joulery.policies.clocks.governor import (
    AboveKnee,
    BusyIdleClocks,
    DeviceView,
    FixedClock,
    GovernorState,
    MiadGovernor,
    PredictiveGovernor,
)
from joulery.policies.clocks.lowest_clock import ClockRange
from joulery.policies.clocks.observation import ClockCurves
from joulery.runtime.leasing.leases import LeaseHolder
from joulery.runtime.serving.governing import GovernedClock
from joulery.store.leases import state_folder
from joulery.store.plans import read_plan

Bounds = tuple[float, float]
"""The lowest and the highest clock, MHz."""
_ROUNDING_MHZ = 1e-6
_EMULATED_MHZ = (*range(200, 1400, 60), 1380)
"""Clocks of the emulated V100, MHz."""


def governed_clock(config: ClockConfig, mode: Mode, bounds_mhz: Bounds | None = None) -> GovernedClock:
    """Open a device of the site with its governor; nothing is set.

    Args:
        config: Section of the clock in the site file.
        mode: Mode of the site; only mode act sets the clock.
        bounds_mhz: Lowest and highest clock of the plan in force; those of the section's plan when None.

    Raises:
        CapabilityError: The device is missing or, in mode act, may not be set; the error names the missing permission.
        ConfigError: None of its clocks lies within the bounds.
        DataError: The plan that bounds its clock cannot be read.
    """
    spec = _spec(config)
    device = open_clock(spec)
    able = device.capability()
    if mode is Mode.ACT and not able.settable:
        raise CapabilityError(
            f"the clock of {able.device} ({able.name}) may not be set: {able.detail}",
            resource=able.device,
            grant=able.grant or None,
        )
    if bounds_mhz is None and config.plan is not None:
        bounds_mhz = read_plan(config.plan).clock_bounds(config.plan_gpu)
    return _bounded(config, device, spec, bounds_mhz)


def bounded(clock: GovernedClock, bounds_mhz: Bounds | None) -> GovernedClock:
    """The same device with a governor that stays within other bounds; None for those of its section alone.

    Raises:
        ConfigError: None of its clocks lies within the bounds.
    """
    return _bounded(clock.config, clock.device, clock.spec, bounds_mhz)


def _bounded(
    config: ClockConfig, device: Device[ClockSetting], spec: DeviceSpec, bounds_mhz: Bounds | None
) -> GovernedClock:
    able = device.capability()
    low, high = config.min_mhz or 0.0, config.max_mhz or np.inf
    if bounds_mhz is not None:
        low, high = max(low, bounds_mhz[0]), min(high, bounds_mhz[1])
        if bounds_mhz[0] == bounds_mhz[1]:  # one clock: the nearest below that the device has
            low = max((each for each in able.clocks_mhz if each <= low + _ROUNDING_MHZ), default=low)
    clocks = np.array(
        [each for each in able.clocks_mhz if low - _ROUNDING_MHZ <= each <= high + _ROUNDING_MHZ], np.float64
    )
    if not len(clocks):
        raise ConfigError(
            f"{able.device} has no clock within these bounds",
            pointer="fleet.clocks",
            got=f"{low:g} to {high:g} MHz",
            expected=f"{able.clocks_mhz[0]:g} to {able.clocks_mhz[-1]:g} MHz",
        )
    known = config.knee_mhz or (V100.knee_mhz if "V100" in able.name else None)
    knee = known if known is not None else scaled_knee_mhz(able.clocks_mhz[-1])
    curves = _curves(config, clocks)
    policy = _governor(config, clocks, min(knee, float(clocks[-1])))
    return GovernedClock(config, device, spec, able.device, policy, clocks, knee, known is None, curves)


async def governed_clocks(
    site: Site, stack: AsyncExitStack, tell: Callable[[str], None], planned: Sequence[ClockConfig] = ()
) -> tuple[list[GovernedClock], LeaseHolder | None]:
    """Open the governed clocks of a site and, in mode act, the holder of their leases; nothing is set.

    Args:
        site: The site.
        stack: Reverts leased clocks when it unwinds.
        tell: Receives messages about the leases.
        planned: Further clocks: those of GPUs that a plan in force bounds.

    Raises:
        CapabilityError, ConfigError, DataError: As :func:`governed_clock`.
    """
    clocks = [governed_clock(config, site.mode) for config in (*site.fleet.clocks, *planned)]
    if not clocks or site.mode is not Mode.ACT:
        return clocks, None
    shortest_s = min(clock.config.lease_s for clock in clocks)
    holder = await stack.enter_async_context(held_leases(tell, shortest_s))
    for clock in clocks:
        holder.require_guard(clock.device.capability())
    return clocks, holder


def clock_fact(clock: GovernedClock, mode: Mode) -> str:
    """Describe a clock in one sentence: the device, its governor, its clocks, and the assumptions."""
    able = clock.device.capability()
    knee = f"knee {clock.knee_mhz:.0f} MHz" + (" (assumed, from a V100)" if clock.knee_assumed else "")
    span = f"{clock.clocks_mhz[0]:g} to {clock.clocks_mhz[-1]:g} MHz"
    does = "set, leased" if mode is Mode.ACT else f"mode {mode}: nothing is set"
    real = "; emulated: nothing real changes" if able.emulated else ""
    return f"{clock.name} ({able.name}): {clock.config.governor}, {span}, {knee}; {does}{real}"


def _curves(config: ClockConfig, clocks: FloatArray) -> ClockCurves:
    """Clock curves: by the profile of the model, else assumed from a V100 and the work's elasticity.

    Raises:
        DataError: The profile cannot be read, or has no power.
    """
    if config.profile is None:
        return ClockCurves(lambda elasticity: slowdown_ratio(clocks, elasticity), above_idle_ratio(clocks))
    profile = _read_profile(config.profile)
    above_w = profile.power_w - float(np.nanmin(profile.idle_w))
    if not bool(np.all(above_w > 0)):  # NaN too
        raise DataError(
            "a governor needs the power of a profile at each clock, busy and idle",
            file=str(config.profile),
            hint="joulery profile MODEL --clocks --out FILE",
        )
    scaled = profile.clocks_mhz * clocks[-1] / profile.clocks_mhz[-1]
    slowdown = np.interp(clocks, scaled, profile.latency_s / profile.latency_s[-1])
    return ClockCurves(lambda elasticity: slowdown, np.interp(clocks, scaled, above_w / above_w[-1]))


def _read_profile(file: Path) -> ClockProfile:
    try:
        return ClockProfile.from_dict(json.loads(file.read_text()))
    except (OSError, ValueError) as error:
        raise DataError(f"not a clock profile: {error}", file=str(file)) from error


def _spec(config: ClockConfig) -> DeviceSpec:
    if config.device == "cpu":
        return cpufreq_spec()
    if config.device == "nvidia":
        return DeviceSpec("nvidia-clock", {"gpu": config.gpu})
    state = state_folder() / "emulated-0.json"
    options = {"name": "emulated V100", "clocks_mhz": list(map(float, _EMULATED_MHZ)), "state": str(state)}
    return DeviceSpec("emulated-clock", options)


def _governor(config: ClockConfig, clocks: FloatArray, knee_mhz: float) -> Policy[GovernorState, DeviceView]:
    """Create the governor of a clock; a reactive one stays at or above the knee while there is work."""
    if config.governor == "predictive":
        floor_mhz, assumed = config.knee_mhz or 0.0, config.profile is None
        return PredictiveGovernor(clocks, knee_mhz=knee_mhz, floor_mhz=floor_mhz, assumed=assumed)
    if config.governor == "busy-idle":
        busy_mhz = float(clocks[np.argmin(np.abs(clocks - (config.clock_mhz or knee_mhz)))])
        return BusyIdleClocks(busy_mhz, float(clocks[0]))
    if config.governor == "fixed":
        wanted = config.clock_mhz or float(clocks[-1])
        inner: Policy[GovernorState, DeviceView] = FixedClock(
            float(min((clock for clock in clocks if clock >= wanted), default=clocks[-1]))
        )
    else:
        limits = ClockRange(float(clocks[0]), float(clocks[-1]), config.step_mhz)
        inner = MiadGovernor(limits, tuple(map(float, clocks)))
    return AboveKnee(inner, clocks, knee_mhz)
