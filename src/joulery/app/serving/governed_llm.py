"""Which language models a governed clock slows down and speeds up, and who decides on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

from joulery.app.serving.llm import LLMSite
from joulery.app.wiring.clocks import governed_clocks
from joulery.config.site import Site
from joulery.domain.errors import ConfigError
from joulery.domain.serving.timeline import DecisionRecord
from joulery.policies.clocks.governor import DeviceView, GovernorState
from joulery.runtime.llm.governed import colocated_llms, slo_of
from joulery.runtime.llm.service import LLMService
from joulery.runtime.serving.driver import FAILED, LiveDriver
from joulery.runtime.serving.governing import ClockController, GovernedClock


def governed_llms(text: LLMSite, clock: GovernedClock) -> tuple[LLMService, ...]:
    """The language models whose describe_slos a clock keeps: those it names, else those its device runs.

    An emulated device runs all that run on this machine.
    """
    named = clock.config.services
    if named:
        return tuple(llm for name, llm in text.llms.items() if name in named)
    emulated = clock.device.capability().emulated
    return tuple(
        llm
        for name, llm in text.llms.items()
        if (device := text.devices[name]) is not None and (emulated or device == clock.name)
    )


def claim(llms: Sequence[LLMService], keeper: ClockController, owners: dict[str, str]) -> None:
    """Have the work of these models counted at the speed of a keeper's device.

    Args:
        llms: The models.
        keeper: Of the device that runs them.
        owners: Whose they are already, by name; these are added.

    Raises:
        ConfigError: One of them has another clock already.
    """
    for llm in llms:
        other = owners.setdefault(llm.name, keeper.clock.name)
        if other != keeper.clock.name:
            raise ConfigError(
                f"{llm.name} would have two clocks, {other} and {keeper.clock.name}",
                pointer="fleet.clocks",
                hint="name the services of each clock",
            )
        llm.work_clock = keeper.work_clock


async def govern_llms(
    site: Site,
    text: LLMSite,
    stack: AsyncExitStack,
    log: Callable[..., None],
    record: Callable[[DecisionRecord], None],
    tell: Callable[[str], None],
) -> Mapping[GovernedClock, LiveDriver[GovernorState, DeviceView]]:
    """Governors for the clocks of a site that serves language models alone; nothing is set yet.

    Args:
        site: The site.
        text: Its language models.
        stack: What is set is on loan until it unwinds.
        log: Writes a line of the run's log: its kind, and fields.
        record: Takes each decision with its outcome.
        tell: Told what a person should know.

    Raises:
        CapabilityError: A clock is not here; or, in mode act, may not be set: the error says what grants it.
        ConfigError: A clock has nothing to govern, or a model has two.
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
        keeper = ClockController(clock, _seen(llms), site.mode, holder, tell=tell)
        claim(llms, keeper, owners)
        drivers[clock] = keeper.driver(log, lambda done: _told(done, record, tell))
    return drivers


def describe_slos(llms: Sequence[LLMService]) -> str:
    """What is kept, for people: ``small: 99 % within 300 s (its deadline)``."""
    said = []
    for llm in llms:
        slo = slo_of(llm)
        assumed = " (its deadline; no slo is stated)" if llm.settings.slo is None else ""
        said.append(f"{llm.name}: {100 * slo.quantile:g} % within {slo.latency_s:g} s{assumed}")
    return ", ".join(said)


def _seen(llms: Sequence[LLMService]) -> Callable[[float], Any]:
    return lambda now_s: colocated_llms(llms, now_s)


def _told(done: DecisionRecord, record: Callable[[DecisionRecord], None], tell: Callable[[str], None]) -> None:
    """A decision goes to the log; what failed, to a person too."""
    record(done)
    if done.outcome == FAILED:
        tell(f"{done.decision.kind}: {done.detail}")
