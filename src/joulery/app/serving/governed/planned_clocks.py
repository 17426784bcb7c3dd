"""Clocks of a joint plan on this machine's GPUs, each with a governor within the bounds of the plan in force.

The plan's clock is the lowest that a governor may set while the plan runs, since latencies were predicted at it; a
governor raises it, up to the plan's ceiling, if a deadline is at risk. Every clock is leased. A GPU without processes
of the plan is governed within its own range. While one plan replaces another, the bounds of both plans apply.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack

from joulery.app.serving.view import ServeView
from joulery.app.wiring.governed_clocks import Bounds, bounded, clock_fact, governed_clocks
from joulery.config.devices import ClockConfig
from joulery.config.site import Site
from joulery.domain.errors import ConfigError
from joulery.policies.clocks.observation import ColocatedService
from joulery.runtime.leasing.leases import LeaseHolder
from joulery.runtime.serving.governing import ClockController, GovernedClock
from joulery.runtime.serving.plans.colocated import ColocatedServices, colocated_services
from joulery.runtime.serving.plans.plan_in_force import PlanInForce
from joulery.runtime.serving.plans.planned import PlanControl
from joulery.runtime.serving.running_service import RunningService
from joulery.runtime.serving.session import ServingSession


async def session_clocks(
    session: ServingSession, stack: AsyncExitStack, view: ServeView
) -> tuple[list[tuple[GovernedClock, ColocatedServices]], LeaseHolder | None]:
    """Open the clocks to govern, each with the services of its device, and the holder of their leases; nothing is set.

    Args:
        session: The services; its control may run a plan.
        stack: Reverts leased clocks when it unwinds.
        view: Shows a note where the plan's clocks are not set.

    Raises:
        CapabilityError: A clock may not be set.
        ConfigError: A device has two clocks, or no clock within the bounds.
        DataError: A plan that bounds a clock cannot be read.
    """
    control = session.control
    plan = control.plan if isinstance(control, PlanControl) else None
    clocks, holder = await governed_clocks(session.site, stack, session.warn, planned_configs(session.site, plan))
    names = [clock.name for clock in clocks]
    if twice := next((name for at, name in enumerate(names) if name in names[:at]), None):
        raise ConfigError(f"the clock of {twice} is governed twice", pointer="fleet.clocks", got=twice)
    if plan is not None and not plan.shared and any(gpu.clock_set_mhz is not None for gpu in plan.gpus):
        view.fact("clock", "the plan's clocks are not set: CPU cores stand for its GPUs")
    found = []
    for clock in clocks:
        if plan is not None and clock.name in plan.clock_bounds_mhz:
            clock = bounded(clock, plan.clock_bounds_mhz[clock.name])
        found.append((clock, _residents(session, clock.name)))
    return found, holder


def planned_configs(site: Site, plan: PlanInForce | None) -> tuple[ClockConfig, ...]:
    """Clock settings for the GPUs of this machine without their own in the site; empty where the plan sets no clock."""
    if plan is None or not plan.clock_bounds_mhz:
        return ()
    named = {config.gpu for config in site.fleet.clocks if config.device == "nvidia"}
    return tuple(
        ClockConfig(device="nvidia", gpu=device.gpu) for device in site.fleet.devices if device.gpu not in named
    )


def follow_plan(session: ServingSession, keepers: Sequence[ClockController]) -> None:
    """Keep the governors within the bounds of whichever plan is in force."""
    control = session.control
    if not isinstance(control, PlanControl):
        return

    def bound(plans: Sequence[PlanInForce]) -> None:
        known = [plan.clock_bounds_mhz for plan in plans]
        for keeper in keepers:
            mine = [each[keeper.clock.name] for each in known if keeper.clock.name in each]
            keeper.rebound(bounded(keeper.clock, widest(mine)))

    control.bound_clocks = bound


def widest(bounds_mhz: Sequence[Bounds]) -> Bounds | None:
    """Bounds with which every plan keeps its SLOs: the highest floor, the highest ceiling; None without a plan."""
    if not bounds_mhz:
        return None
    return max(low for low, _ in bounds_mhz), max(high for _, high in bounds_mhz)


def describe(clock: GovernedClock, session: ServingSession) -> str:
    """Describe a clock in one sentence: the device, its governor, its clocks, and whether a plan bounds them."""
    control = session.control
    bound = isinstance(control, PlanControl) and clock.name in control.plan.clock_bounds_mhz
    return clock_fact(clock, session.site.mode) + ("; bounds of the plan" if bound else "")


def _residents(session: ServingSession, device: str) -> ColocatedServices:
    """The services of a device: those of the plan in force, if its processes share GPUs; else those that run there.

    A service without replicas on one of its GPUs is not on it: its governor lowers that GPU to its idle clock.
    """

    def residents(now_s: float) -> Sequence[ColocatedService]:
        control = session.control
        services = tuple(session.services.values())
        if isinstance(control, PlanControl) and device in control.plan.shared:
            mine = control.plan.services_on(device)
            services = tuple(one for one in services if one.name in mine)
        else:
            services = tuple(one for one in services if _is_on(one, device, session))
        return colocated_services(services, session.engine, now_s)

    return residents


def _is_on(one: RunningService, device: str, session: ServingSession) -> bool:
    """Whether a service has replicas on a device, or may have because no replica reports its device."""
    if device not in one.setup.gpus:
        return True
    found = {view.spec.device for view in session.engine.replicas() if view.spec.service == one.name} - {""}
    return not found or device in found
