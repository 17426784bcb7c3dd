"""Governed clocks of ``joulery up``: keepers of what the session hosts, and of language models beside it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack

from joulery.app.serving.governed_llm import bind_to_clock, governed_llms
from joulery.app.serving.llm import LLMSite
from joulery.app.serving.view import ServeView
from joulery.app.wiring.governed_clocks import clock_fact, governed_clocks
from joulery.runtime.llm.governed import colocated_llms
from joulery.runtime.llm.service import LLMService
from joulery.runtime.serving.colocated import ColocatedServices, colocated_services
from joulery.runtime.serving.governing import ClockController
from joulery.runtime.serving.session import ServingSession


async def govern(session: ServingSession, stack: AsyncExitStack, view: ServeView) -> list[ClockController]:
    """Start a controller for each clock of the site file; each set clock is leased until the stack unwinds."""
    clocks, holder = await governed_clocks(session.site, stack, session.warn)
    keepers = []
    for clock in clocks:
        keeper = ClockController(
            clock,
            lambda now_s: colocated_services(tuple(session.services.values()), session.engine, now_s),
            session.site.mode,
            holder,
            lambda: session.on_trial,
            tell=session.warn,
        )
        session.govern(keeper)
        view.fact("clock", clock_fact(clock, session.site.mode))
        keepers.append(keeper)
    return keepers


def join_keepers(keepers: Sequence[ClockController], text: LLMSite) -> None:
    """Have keepers see the language models that their devices run.

    Raises:
        ConfigError: A model has two clocks.
    """
    owners: dict[str, str] = {}
    for keeper in keepers:
        llms = governed_llms(text, keeper.clock)
        bind_to_clock(text, llms, keeper, owners)
        keeper.residents = _both(keeper.residents, llms)


def _both(services: ColocatedServices, llms: Sequence[LLMService]) -> ColocatedServices:
    """Services and language models that share a device."""
    return lambda now_s: (*services(now_s), *colocated_llms(llms, now_s))
