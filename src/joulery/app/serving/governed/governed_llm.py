"""Governed clocks of ``joulery up``, for the session's services and for language models."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack

from joulery.app.serving.governed.planned_clocks import describe, follow_plan, session_clocks
from joulery.app.serving.llm import LLMSite
from joulery.app.serving.view import ServeView
from joulery.domain.errors import ConfigError
from joulery.runtime.llm.governed import colocated_llms, slo_of
from joulery.runtime.llm.service import LLMService
from joulery.runtime.serving.governing import ClockController, GovernedClock
from joulery.runtime.serving.plans.colocated import ColocatedServices
from joulery.runtime.serving.session import ServingSession


def governed_llms(text: LLMSite, clock: GovernedClock) -> tuple[LLMService, ...]:
    """The language models whose SLOs a clock must keep: those that it names, else those that its device runs.

    An emulated device runs every model of this machine.
    """
    named = clock.config.services
    if named:
        return tuple(llm for name, llm in text.llms.items() if name in named)
    emulated = clock.device.capability().emulated
    return tuple(
        llm for name, llm in text.llms.items() if text.devices[name] and (emulated or clock.name in text.devices[name])
    )


def bind_to_clock(text: LLMSite, llms: Sequence[LLMService], keeper: ClockController, owners: dict[str, str]) -> None:
    """Count the work of models at the speed of a governed device.

    The clocks of a model that runs on several devices are governed alike, since each governor receives the same
    requests. Its work is counted at the speed of the first device.

    Args:
        text: The language models of the site.
        llms: The models.
        keeper: Controller of the device that runs them.
        owners: Clock of each model bound so far, by name; updated with these models.

    Raises:
        ConfigError: A model has another clock already, of a device that does not run it.
    """
    for llm in llms:
        llm.changed = _with_governor(llm.changed, keeper)
        other = owners.setdefault(llm.name, keeper.clock.name)
        if other == keeper.clock.name:
            llm.work_clock = keeper.work_clock
        elif not {other, keeper.clock.name} <= set(text.devices[llm.name]):
            raise ConfigError(
                f"{llm.name} has two clocks, {other} and {keeper.clock.name}",
                pointer="fleet.clocks",
                hint="name the services of each clock: services: [...]",
            )


def _with_governor(before: Callable[[], None], keeper: ClockController) -> Callable[[], None]:
    """Add the governor of a further device to the functions called when a request arrives or ends."""

    def changed() -> None:
        before()
        keeper.poke()

    return changed


def describe_slos(llms: Sequence[LLMService]) -> str:
    """The SLOs as text: ``small: 99 % within 300 s (its deadline)``."""
    described = []
    for llm in llms:
        slo = slo_of(llm)
        assumed = " (its deadline; no slo is stated)" if llm.settings.slo is None else ""
        described.append(f"{llm.name}: {100 * slo.quantile:g} % within {slo.latency_s:g} s{assumed}")
    return ", ".join(described)


async def govern(session: ServingSession, stack: AsyncExitStack, view: ServeView) -> list[ClockController]:
    """Start a controller for each clock of the site file and of a plan; clocks are leased until the stack unwinds.

    Raises:
        CapabilityError, ConfigError, DataError: As :func:`joulery.app.serving.governed.planned_clocks.session_clocks`.
    """
    clocks, holder = await session_clocks(session, stack, view)
    keepers = []
    for clock, residents in clocks:
        keeper = ClockController(
            clock, residents, session.site.mode, holder, lambda: session.on_trial, tell=session.warn
        )
        session.govern(keeper)
        view.fact("clock", describe(clock, session))
        keepers.append(keeper)
    follow_plan(session, keepers)
    return keepers


def join_keepers(keepers: Sequence[ClockController], text: LLMSite, *, alone: bool) -> Iterator[tuple[str, str]]:
    """Connect clock controllers to the language models that their devices run; yield the SLOs of each as text.

    Args:
        keepers: Controllers of the site's clocks.
        text: Its language models.
        alone: Whether the site serves only language models.

    Raises:
        ConfigError: A model has two clocks, or a site with only language models has a clock without one.
    """
    owners: dict[str, str] = {}
    for index, keeper in enumerate(keepers):
        llms = governed_llms(text, keeper.clock)
        if alone and not llms:
            raise ConfigError(
                f"no language model of this site runs on {keeper.clock.name}",
                pointer=f"fleet.clocks.{index}",
                expected="an engine on this machine's CPU, or one with device: " + keeper.clock.name,
            )
        bind_to_clock(text, llms, keeper, owners)
        keeper.residents = _both(keeper.residents, llms)
        if llms:
            yield "SLO", f"kept by {keeper.clock.name}: {describe_slos(llms)}"


def _both(services: ColocatedServices, llms: Sequence[LLMService]) -> ColocatedServices:
    """Services and language models that share a device."""
    return lambda now_s: (*services(now_s), *colocated_llms(llms, now_s))
