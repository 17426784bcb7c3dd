"""Governed clocks of ``joulery up``: keepers of what the session hosts, and of language models beside it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack

from joulery.app.serving.governed_llm import claim, governed_desks
from joulery.app.serving.llm import TextSite
from joulery.app.serving.view import ServeView
from joulery.app.wiring.clocks import clock_fact, governed_clocks
from joulery.runtime.llm.governed import desk_residents
from joulery.runtime.llm.service import LLMService
from joulery.runtime.serving.colocated import Residents
from joulery.runtime.serving.governed_services import hosted_residents
from joulery.runtime.serving.governing import ClockKeeper
from joulery.runtime.serving.session import ServingSession


async def govern(session: ServingSession, stack: AsyncExitStack, view: ServeView) -> list[ClockKeeper]:
    """Have the clocks that the site file names governed; those that are set are on loan until the stack unwinds."""
    clocks, holder = await governed_clocks(session.site, stack, session.warn)
    keepers = []
    for clock in clocks:
        keeper = ClockKeeper(
            clock,
            lambda now_s: hosted_residents(tuple(session.services.values()), session.engine, now_s),
            session.site.mode,
            holder,
            lambda: session.on_trial,
            tell=session.warn,
        )
        session.govern(keeper)
        view.fact("clock", clock_fact(clock, session.site.mode))
        keepers.append(keeper)
    return keepers


def join_keepers(keepers: Sequence[ClockKeeper], text: TextSite) -> None:
    """Have keepers see the language models that their devices run.

    Raises:
        ConfigError: A model has two clocks.
    """
    owners: dict[str, str] = {}
    for keeper in keepers:
        desks = governed_desks(text, keeper.clock)
        claim(desks, keeper, owners)
        keeper.residents = _both(keeper.residents, desks)


def _both(services: Residents, desks: Sequence[LLMService]) -> Residents:
    """Services and language models that share a device."""
    return lambda now_s: (*services(now_s), *desk_residents(desks, now_s))
