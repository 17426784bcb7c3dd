"""Power limits of ``joulery up``: control of the devices under ``fleet.power_limits``."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack

from joulery.app.serving.llm import LLMSite
from joulery.app.serving.view import ServeView
from joulery.app.wiring.leases import held_leases
from joulery.app.wiring.limited_devices import limited_cpus, limited_gpu
from joulery.config.devices import PowerLimitConfig
from joulery.config.site import Mode
from joulery.domain.errors import ConfigError
from joulery.policies.clocks.power_limit import LIMIT_RATIOS
from joulery.policies.clocks.service_limit import ServiceLimitTuner
from joulery.runtime.leasing.leases import LeaseHolder
from joulery.runtime.leasing.limited_device import LimitedDevice
from joulery.runtime.llm.service import LLMService
from joulery.runtime.serving.governing import ClockController
from joulery.runtime.serving.limiting import PowerLimitController, ServedLoad, ServedLoads, llm_load, service_load
from joulery.runtime.serving.plans.planned import PlanControl
from joulery.runtime.serving.session import ServingSession
from joulery.store.leases import LeaseBook

_ROUNDING = 1e-6
Limited = tuple[PowerLimitController, PowerLimitConfig]


async def limit_power(
    session: ServingSession, stack: AsyncExitStack, view: ServeView, keepers: Sequence[ClockController] = ()
) -> list[Limited]:
    """Start a controller for each device whose power is limited; limits are leased until the stack unwinds.

    Args:
        session: The services.
        stack: Restores the former limits when it unwinds.
        view: Shows the limited devices.
        keepers: Controllers of clocks: a device has one or the other.

    Raises:
        CapabilityError: A limit may not be set, or another process holds it.
        ConfigError: A governor sets the clock of the device, or the device accepts no limit within the bounds.
    """
    site, found = session.site, list[Limited]()
    if not site.fleet.power_limits:
        return found
    if site.mode is not Mode.ACT:
        view.fact(
            "limit", f"mode {site.mode}: the effect of a power limit is known only once it is set; no limit is set"
        )
        return found
    lease_s = min(config.lease_s for config in site.fleet.power_limits)
    holder = await stack.enter_async_context(held_leases(session.warn, lease_s))
    for index, config in enumerate(site.fleet.power_limits):
        device = await asyncio.to_thread(_device, config, holder)
        if device.label in {keeper.clock.name for keeper in keepers}:
            raise ConfigError(
                f"a governor sets the clock of {device.label} already",
                pointer=f"fleet.power_limits.{index}",
                expected="one owner for each device",
            )
        policy = limit_policy(config, device)
        controller = PowerLimitController(
            device,
            policy,
            _services(session, device.label, config),
            session.engine,
            holder,
            lambda: session.on_trial,
            session.warn,
        )
        session.limit(controller)
        view.fact("limit", limit_fact(device, policy))
        found.append((controller, config))
    return found


def limit_policy(config: PowerLimitConfig, device: LimitedDevice) -> ServiceLimitTuner:
    """Create the policy of a device, within the limits that the device accepts.

    Raises:
        ConfigError: The device accepts none of the limits to try.
    """
    low = max(config.min_ratio, device.low_w / device.full_w) - _ROUNDING
    ratios = tuple(ratio for ratio in LIMIT_RATIOS if ratio >= low)
    if not ratios:
        raise ConfigError(
            f"{device.label} takes no limit to try",
            pointer="fleet.power_limits",
            got=f"at least {100 * low:.0f} % of {device.full_w:g} W",
            expected=f"a lowest limit of {100 * LIMIT_RATIOS[0]:.0f} % or less",
        )
    return ServiceLimitTuner(
        device.label,
        config.eta,
        config.max_slowdown,
        ratios,
        config.trial_s,
        config.settle_s,
        config.period_s,
        config.baseline_ratio,
        config.review_s,
    )


def limit_fact(device: LimitedDevice, policy: ServiceLimitTuner) -> str:
    """Describe a limited device in one sentence: its limits and the bound on service time."""
    low_w, parts = device.limit_w(policy.ratios[-1]), f" for each of {device.parts} packages" * (device.parts > 1)
    span = f"{low_w:g} to {device.full_w:g} W{parts}"
    bound = f"service time at most {policy.max_slowdown:g} x that at full power"
    return f"{device.label} ({device.model}): {span}, {bound}; set, leased"


def join_limits(limits: Sequence[Limited], text: LLMSite) -> Iterator[tuple[str, str]]:
    """Connect limits to the language models that their devices run; yield these as text."""
    for controller, config in limits:
        label, named = controller.device.label, config.services
        llms = [llm for name, llm in text.llms.items() if (name in named if named else label in text.devices[name])]
        controller.loads = _with_models(controller.loads, llms)
        if llms:
            yield "limit", f"{label} serves {', '.join(llm.name for llm in llms)}"


def _with_models(services: ServedLoads, llms: Sequence[LLMService]) -> ServedLoads:
    return lambda now_s: (*services(now_s), *(llm_load(llm, now_s) for llm in llms))


def _device(config: PowerLimitConfig, holder: LeaseHolder) -> LimitedDevice:
    leases = LeaseBook()
    return limited_cpus(holder, leases) if config.device == "cpu" else limited_gpu(config.gpu, holder, leases)


def _services(session: ServingSession, device: str, config: PowerLimitConfig) -> ServedLoads:
    """The services of a device: those that it names; else the plan's; else those on that GPU, or on no stated GPU."""

    def loads(now_s: float) -> Sequence[ServedLoad]:
        control, services = session.control, tuple(session.services.values())
        if config.services:
            services = tuple(one for one in services if one.name in config.services)
        elif isinstance(control, PlanControl) and device in control.plan.shared:
            mine = control.plan.services_on(device)
            services = tuple(one for one in services if one.name in mine)
        else:
            services = tuple(one for one in services if not one.setup.gpus or device in one.setup.gpus)
        return [service_load(one, session.engine, now_s) for one in services]

    return loads
