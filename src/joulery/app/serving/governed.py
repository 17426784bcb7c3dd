"""Governed clocks of ``joulery up``: controllers of the session's services and of its language models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack

from joulery.app.serving.governed_llm import bind_to_clock, governed_llms
from joulery.app.serving.llm import LLMSite
from joulery.app.wiring.governed_clocks import governed_clocks
from joulery.runtime.llm.governed import colocated_llms
from joulery.runtime.llm.service import LLMService
from joulery.runtime.serving.colocated import ColocatedServices
from joulery.runtime.serving.governed_services import colocated_services
from joulery.runtime.serving.governing import ClockController, GovernedClock
from joulery.runtime.serving.session import Session


async def govern(
    session: Session, stack: AsyncExitStack, announce: Callable[[GovernedClock], None]
) -> list[ClockController]:
    """Govern the clocks that the site names; the stack reverts leased clocks when it unwinds."""
    clocks, holder = await governed_clocks(session.site, stack, session.warn)
    keepers = []
    for clock in clocks:
        keeper = ClockController(
            clock,
            lambda now_s: colocated_services(session.hosted, session.engine, now_s),
            session.site.mode,
            holder,
            lambda: session.on_trial,
            tell=session.warn,
        )
        session.govern(keeper)
        announce(clock)
        keepers.append(keeper)
    return keepers


def join_keepers(keepers: Sequence[ClockController], text: LLMSite) -> None:
    """Let controllers govern the language models that their devices run.

    Raises:
        ConfigError: A model has two clocks.
    """
    owners: dict[str, str] = {}
    for keeper in keepers:
        llms = governed_llms(text, keeper.clock)
        bind_to_clock(text, llms, keeper, owners)
        keeper.residents = _both(keeper.residents, llms)


def _both(services: ColocatedServices, llms: Sequence[LLMService]) -> ColocatedServices:
    """Services and language models of one device."""
    return lambda now_s: (*services(now_s), *colocated_llms(llms, now_s))
