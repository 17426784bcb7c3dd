"""Governed clocks of a site file: the device, its governor, and what is assumed about the two."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack

import numpy as np

from joulery.app.wiring.devices import cpufreq_spec, open_clock
from joulery.app.wiring.leases import held_leases
from joulery.config.devices import ClockConfig
from joulery.config.site import Mode, Site
from joulery.domain.arrays import FloatArray
from joulery.domain.errors import CapabilityError, ConfigError
from joulery.domain.gpu.device import DeviceSpec
from joulery.domain.ports import Policy
from joulery.perf.power.clock_curves import V100
from joulery.perf.power.clock_scaling import stretched_knee_mhz
from joulery.policies.clocks.governor import (
    AboveKnee,
    DeviceView,
    FixedClock,
    GovernorState,
    MiadGovernor,
    PredictiveGovernor,
)
from joulery.policies.clocks.lowest_clock import ClockRange
from joulery.runtime.leasing.leases import LeaseHolder
from joulery.runtime.serving.governing import GovernedClock
from joulery.store.leases import state_folder
from joulery.store.plans import read_plan

_EMULATED_MHZ = (*range(200, 1400, 60), 1380)
"""Clocks of the emulated V100, MHz."""


def governed_clock(config: ClockConfig, mode: Mode) -> GovernedClock:
    """The device of a site file with its governor; nothing is set.

    Raises:
        CapabilityError: The device is not here; or, in mode act, may not be set: the error says what grants it.
        ConfigError: None of its clocks lies within the bounds.
        DataError: The plan that bounds it cannot be used.
    """
    spec = _spec(config)
    device = open_clock(spec)
    able = device.capability()
    if mode is Mode.ACT and not able.settable:
        raise CapabilityError(
            f"the clock of {able.device} ({able.name}) is to be governed and may not be set: {able.detail}",
            resource=able.device,
            grant=able.grant or None,
        )
    low, high = config.min_mhz or 0.0, config.max_mhz or np.inf
    if config.plan is not None:
        floor_mhz, ceiling_mhz = read_plan(config.plan).clock_bounds(config.plan_gpu)
        low, high = max(low, floor_mhz), min(high, ceiling_mhz)
    clocks = np.array([clock for clock in able.clocks_mhz if low <= clock <= high], np.float64)
    if not len(clocks):
        raise ConfigError(
            f"{able.device} has no clock within these bounds",
            pointer="fleet.clocks",
            got=f"{low:g} to {high:g} MHz",
            expected=f"{able.clocks_mhz[0]:g} to {able.clocks_mhz[-1]:g} MHz",
        )
    known = config.knee_mhz or (V100.knee_mhz if "V100" in able.name else None)
    knee = known if known is not None else stretched_knee_mhz(able.clocks_mhz[-1])
    policy = AboveKnee(_governor(config, clocks), clocks, min(knee, float(clocks[-1])))
    return GovernedClock(config, device, spec, able.device, policy, clocks, knee, known is None)


async def governed_clocks(
    site: Site, stack: AsyncExitStack, tell: Callable[[str], None]
) -> tuple[list[GovernedClock], LeaseHolder | None]:
    """The clocks that a site file has governed, and who lends them in mode act; nothing is set.

    Args:
        site: The site.
        stack: What is set later is on loan until it unwinds.
        tell: Told what becomes of the loans.

    Raises:
        CapabilityError, ConfigError, DataError: As :func:`governed_clock`.
    """
    clocks = [governed_clock(config, site.mode) for config in site.fleet.clocks]
    if not clocks or site.mode is not Mode.ACT:
        return clocks, None
    shortest_s = min(clock.config.lease_s for clock in clocks)
    return clocks, await stack.enter_async_context(held_leases(tell, shortest_s))


def clock_fact(clock: GovernedClock, mode: Mode) -> str:
    """Whose clock is governed, by which rule, and what is only assumed, as a sentence."""
    able = clock.device.capability()
    knee = f"knee {clock.knee_mhz:.0f} MHz" + (" (assumed, from a V100)" if clock.knee_assumed else "")
    span = f"{clock.clocks_mhz[0]:g} to {clock.clocks_mhz[-1]:g} MHz"
    does = "set, on loan" if mode is Mode.ACT else f"mode {mode}: nothing is set"
    real = "; emulated: nothing real changes" if able.emulated else ""
    return f"{clock.name} ({able.name}): {clock.config.governor}, {span}, {knee}; {does}{real}"


def _spec(config: ClockConfig) -> DeviceSpec:
    if config.device == "cpu":
        return cpufreq_spec()
    if config.device == "nvidia":
        return DeviceSpec("nvidia-clock", {"gpu": config.gpu})
    state = state_folder() / "emulated-0.json"
    options = {"name": "emulated V100", "clocks_mhz": list(map(float, _EMULATED_MHZ)), "state": str(state)}
    return DeviceSpec("emulated-clock", options)


def _governor(config: ClockConfig, clocks: FloatArray) -> Policy[GovernorState, DeviceView]:
    if config.governor == "fixed":
        wanted = config.clock_mhz or float(clocks[-1])
        return FixedClock(float(min((clock for clock in clocks if clock >= wanted), default=clocks[-1])))
    if config.governor == "miad":
        limits = ClockRange(float(clocks[0]), float(clocks[-1]), config.step_mhz)
        return MiadGovernor(limits, tuple(map(float, clocks)))
    return PredictiveGovernor(clocks)
