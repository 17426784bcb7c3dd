"""Connect the language models of a site to the gateway of its session."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack

from joulery.app.serving.llm import LLMSite, open_llm_site
from joulery.config.site import Site
from joulery.gateway.body import BodyReader
from joulery.gateway.llm_metrics import LLMMetrics
from joulery.gateway.metrics import Metrics
from joulery.gateway.openai import OpenAIRoutes
from joulery.runtime.llm.hosted import HostedModels
from joulery.runtime.llm.service import LLMService, LLMSettings

_REFRESH_S = 1.0


def mount_llms(
    site: Site, bodies: BodyReader, metrics: Metrics, stack: AsyncExitStack, stderr: int | None = None
) -> tuple[LLMSite, HostedModels, OpenAIRoutes]:
    """Create the site's language models and their routes; their engines are not started yet.

    Args:
        site: The site.
        bodies: Reads requests within the gateway's limits.
        metrics: Counts their requests.
        stack: Closes the opened resources.
        stderr: File descriptor for the output of engines; None for standard error.

    Returns:
        The models, their ticks and totals, and the routes under ``/v1``.

    Raises:
        JouleryError: A named meter, predictor or model is not available.
    """
    text = open_llm_site(site, stack=stack, stderr=stderr)
    models = HostedModels(text.llms, [service.name for service in site.services])
    watch = LLMMetrics(metrics.registry, text.llms, text.meter)
    routes = OpenAIRoutes(
        text.llms,
        bodies,
        [metrics.request, models.request],
        [watch.ended, models.charge],
        text.aliases,
        text.families,
    )
    return text, models, routes


def llm_facts(text: LLMSite) -> Iterator[tuple[str, str]]:
    """Facts about each model (its engine and order) and notes about the meters, as names and texts."""
    for llm in text.llms.values():
        order = _order(llm.settings)
        keeper = "the engine's own queue" if llm.engine.dialect.orders else f"{llm.settings.max_num_seqs} at once"
        yield "model", f"{llm.name}: {llm.engine.name}, {order}, {keeper}"
    for family in text.families:
        accuracy = family.policy.accuracy_ratio
        names = ", ".join(f"{name} {100 * accuracy[name]:.1f} %" for name in family.models)
        yield "family", f"{family.name}: {names}{'' if family.acts else f'; mode advise: {family.policy.best} answers'}"
    for note in text.notes:
        yield "meter", note


def _order(settings: LLMSettings) -> str:
    """The order of a model's requests as text."""
    if settings.reranking is not None:
        return "shortest expected remainder first"
    if settings.aging is None:
        return "FIFO"
    return "head start by length" if settings.aging.decay_s else "shortest predicted first"


async def start_llms(text: LLMSite) -> None:
    """Read the carbon intensity, start the engines and load the predictors.

    Raises:
        JouleryError: An engine is not available.
    """
    await text.grid.refresh()
    loading = [asyncio.to_thread(llm.forecaster.load) for llm in text.llms.values()]
    await asyncio.gather(*(llm.engine.start() for llm in text.llms.values()), *loading)


async def settle_llm_meter(text: LLMSite) -> None:
    """Once a second, read the carbon intensity if due and the meters; read the load of the engines meanwhile."""
    following = [asyncio.create_task(_follow_load(llm), name=f"load of {llm.name}") for llm in text.llms.values()]
    try:
        while True:
            await asyncio.sleep(_REFRESH_S)
            await text.grid.refresh()
            text.meter.settle()
    finally:
        for task in following:
            task.cancel()
        await asyncio.gather(*following, return_exceptions=True)


async def _follow_load(llm: LLMService) -> None:
    """Read the load of one engine repeatedly; a slow one delays neither the others nor the meters."""
    while True:
        await llm.read_load()
        await asyncio.sleep(_REFRESH_S)
