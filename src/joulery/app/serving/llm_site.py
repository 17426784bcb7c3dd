"""The language models of a site behind the gateway, until a signal."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from joulery.app.serving.governed_llm import describe_slos, govern_llms, governed_llms
from joulery.app.serving.llm import LLMSite, open_llm_site
from joulery.app.wiring.engine import local_engine
from joulery.app.wiring.governed_clocks import clock_fact
from joulery.config.site import Site
from joulery.domain.serving.timeline import DecisionRecord
from joulery.gateway.access import site_token
from joulery.gateway.admin import admin_app
from joulery.gateway.app import Gateway
from joulery.gateway.llm_metrics import LLMMetrics
from joulery.gateway.metrics import Metrics
from joulery.gateway.openai import OpenAIRoutes
from joulery.gateway.server import GatewayServer, ServerLimits
from joulery.policies.clocks.governor import DeviceView, GovernorState
from joulery.runtime.llm.statistics import LLMUsage
from joulery.runtime.measuring.measure import RUNS
from joulery.runtime.serving.driver import LiveDriver
from joulery.store.run.directory import create_run, new_run_id
from joulery.store.run.timeline import log_decision

_REFRESH_S = 1.0


async def serve_llms(
    site: Site,
    ready: Callable[[str, LLMSite], None],
    *,
    out: Path | None = None,
    argv: Sequence[str] = (),
    fact: Callable[[str], None] = lambda text: None,
) -> None:
    """Serve the site's language models until SIGTERM or SIGINT; then let running requests finish.

    Where clocks are governed, what the governors saw and decided is a run: its log says why each clock was set.

    Args:
        site: The site.
        ready: Called with the address once every model can be asked.
        out: The run directory; a new one in ``runs/`` when None.
        argv: The command line, for the run's manifest.
        fact: Receives one sentence for each governed clock.

    Raises:
        JouleryError: The port, an engine, a meter or a predictor is not to be had; nothing is left running.
    """
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        async with AsyncExitStack() as stack:
            serving = site.serving
            token = site_token(serving)
            metrics = Metrics([config.name for config in site.language_models])
            gateway = Gateway(local_engine(), token=token, admin=admin_app(metrics))
            limits = ServerLimits(drain_s=serving.drain_s)
            server = GatewayServer(gateway, serving.host, serving.port, limits=limits, protected=token is not None)
            await server.start()
            stack.push_async_callback(server.stop)
            text = mount_llms(site, gateway, metrics, stack)
            stack.push_async_callback(server.stop)  # before the llms close: what runs is finished
            stopping = asyncio.create_task(stop.wait())
            stack.callback(stopping.cancel)
            drivers = await _governors(site, text, metrics, stack, out, argv, fact)
            if not await _started(text, stopping):
                return
            governing = [asyncio.create_task(driver.run(), name="governor") for driver in drivers]
            ready(server.url, text)
            keeping = asyncio.create_task(settle_llm_meter(text), name="text meter")
            for task in (keeping, *governing):
                stack.push_async_callback(_ended, task)
            # Not to be cancelled: the server's own stop lets running requests finish.
            running = asyncio.create_task(server.wait(), name="serving")
            await asyncio.wait((running, keeping, stopping, *governing), return_when=asyncio.FIRST_COMPLETED)
            for task in (running, keeping, *governing):
                if task.done():
                    await task
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


async def _governors(
    site: Site,
    text: LLMSite,
    metrics: Metrics,
    stack: AsyncExitStack,
    out: Path | None,
    argv: Sequence[str],
    fact: Callable[[str], None],
) -> list[LiveDriver[GovernorState, DeviceView]]:
    """The drivers of the clocks that the site names; each set clock is leased until the stack unwinds.

    Raises:
        JouleryError: A clock is not here, may not be set, or has nothing to govern.
    """
    if not site.fleet.clocks:
        return []
    writer = stack.enter_context(create_run(out or RUNS / new_run_id(time.time()), kind="serve", argv=argv))

    def record(done: DecisionRecord) -> None:
        log_decision(writer, done)
        metrics.decision(done)

    drivers = await govern_llms(site, text, stack, writer.log, record, _Told())
    for clock in drivers:
        fact(f"clock {clock_fact(clock, site.mode)}")
        fact(f"kept by {clock.name}: {describe_slos(governed_llms(text, clock))}")
    return list(drivers.values())


class _Told:
    """Says a thing once, on standard error."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def __call__(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            sys.stderr.write(f"{text}\n")


async def _ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def mount_llms(
    site: Site,
    gateway: Gateway,
    metrics: Metrics,
    stack: AsyncExitStack,
    stderr: int | None = None,
    ledger: LLMUsage | None = None,
) -> LLMSite:
    """Put the site's language models behind a gateway; their engines are not started yet.

    Args:
        site: The site.
        gateway: Answers under ``/v1`` from now on.
        metrics: Counts their requests.
        stack: Closes what is opened.
        stderr: File descriptor for what engines print; None for standard error.
        ledger: Counts them, too, for a summary.

    Raises:
        JouleryError: A meter, a predictor or a model that was named is not to be had.
    """
    text = open_llm_site(site, stack=stack, stderr=stderr)
    watch = LLMMetrics(metrics.registry, text.llms, text.meter)
    sinks, watches = [metrics.request], [watch.ended]
    if ledger is not None:
        sinks.append(ledger.request)
        watches.append(ledger.charge)
    gateway.text = OpenAIRoutes(text.llms, gateway.bodies, sinks, watches, text.aliases)
    return text


async def start_llms(text: LLMSite) -> None:
    """Ask the grid, start the engines.

    Raises:
        JouleryError: An engine is not to be had.
    """
    await text.grid.refresh()
    await asyncio.gather(*(llm.engine.start() for llm in text.llms.values()))


async def _started(text: LLMSite, stopping: asyncio.Task[bool]) -> bool:
    """Start the engines; False when the end was asked for first."""
    starting = asyncio.create_task(start_llms(text))
    await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
    if starting.done():
        await starting
        return True
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    return False


async def settle_llm_meter(text: LLMSite) -> None:
    """Ask the grid where that is due, read the meters at least once a second."""
    while True:
        await asyncio.sleep(_REFRESH_S)
        await text.grid.refresh()
        text.meter.settle()
