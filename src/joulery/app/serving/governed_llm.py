"""Governed clocks of language models: which models a clock affects, and the driver of its governor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

from joulery.app.serving.llm import LLMSite
from joulery.app.wiring.governed_clocks import governed_clocks
from joulery.config.site import Site
from joulery.domain.errors import ConfigError
from joulery.domain.serving.timeline import DecisionRecord
from joulery.policies.clocks.governor import DeviceView, GovernorState
from joulery.runtime.llm.governed import colocated_llms, slo_of
from joulery.runtime.llm.service import LLMService
from joulery.runtime.serving.driver import FAILED, LiveDriver
from joulery.runtime.serving.governing import ClockController, GovernedClock


def governed_llms(text: LLMSite, clock: GovernedClock) -> tuple[LLMService, ...]:
    """The language models whose SLOs a clock keeps: those it names, else those its device runs.

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

    The clocks of a model that runs on several devices are governed alike: each governor sees the same requests. Its
    work is counted at the speed of the first of them.

    Args:
        text: The language models of the site.
        llms: The models.
        keeper: Controller of the device that runs them.
        owners: Clock of each model bound so far, by name; these are added.

    Raises:
        ConfigError: A model has another clock already, of a device that does not run it.
    """
    for llm in llms:
        llm.changed = _poke_all(llm.changed, keeper)
        other = owners.setdefault(llm.name, keeper.clock.name)
        if other == keeper.clock.name:
            llm.work_clock = keeper.work_clock
        elif not {other, keeper.clock.name} <= set(text.devices[llm.name]):
            raise ConfigError(
                f"{llm.name} has two clocks, {other} and {keeper.clock.name}",
                pointer="fleet.clocks",
                hint="name the services of each clock: services: [...]",
            )


def _poke_all(before: Callable[[], None], keeper: ClockController) -> Callable[[], None]:
    """Steps the governor of a further device when a request arrives or ends."""

    def changed() -> None:
        before()
        keeper.poke()

    return changed


async def govern_llms(
    site: Site,
    text: LLMSite,
    stack: AsyncExitStack,
    log: Callable[..., None],
    record: Callable[[DecisionRecord], None],
    tell: Callable[[str], None],
) -> Mapping[GovernedClock, LiveDriver[GovernorState, DeviceView]]:
    """Drivers of the governors of a site that serves language models only; nothing is set yet.

    Args:
        site: The site.
        text: Its language models.
        stack: Reverts leased clocks when it unwinds.
        log: Writes a line of the run's log: its kind, and fields.
        record: Receives each decision with its outcome.
        tell: Receives messages for the operator.

    Raises:
        CapabilityError: A clock is missing or, in mode act, may not be set; the error names the missing permission.
        ConfigError: A clock has no model to govern, or a model has two clocks.
    """
    clocks, holder = await governed_clocks(site, stack, tell)
    governed = {clock: governed_llms(text, clock) for clock in clocks}
    for index, (clock, llms) in enumerate(governed.items()):
        if not llms:
            raise ConfigError(
                f"no language model of this site runs on {clock.name}",
                pointer=f"fleet.clocks.{index}",
                expected="an engine on this machine's CPU, or one with device: " + clock.name,
            )
    drivers, owners = {}, dict[str, str]()
    for clock, llms in governed.items():
        keeper = ClockController(clock, _colocated(llms), site.mode, holder, tell=tell)
        bind_to_clock(text, llms, keeper, owners)
        drivers[clock] = keeper.driver(log, lambda done: _recorded(done, record, tell))
    return drivers


def describe_slos(llms: Sequence[LLMService]) -> str:
    """The SLOs in words: ``small: 99 % within 300 s (its deadline)``."""
    described = []
    for llm in llms:
        slo = slo_of(llm)
        assumed = " (its deadline; no slo is stated)" if llm.settings.slo is None else ""
        described.append(f"{llm.name}: {100 * slo.quantile:g} % within {slo.latency_s:g} s{assumed}")
    return ", ".join(described)


def _colocated(llms: Sequence[LLMService]) -> Callable[[float], Any]:
    return lambda now_s: colocated_llms(llms, now_s)


def _recorded(done: DecisionRecord, record: Callable[[DecisionRecord], None], tell: Callable[[str], None]) -> None:
    """Log a decision; a failed one also goes to the operator."""
    record(done)
    if done.outcome == FAILED:
        tell(f"{done.decision.kind}: {done.detail}")
