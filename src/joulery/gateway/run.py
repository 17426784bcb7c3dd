"""From start to stop: listen, bring the replicas up, serve until a signal, let everything finish."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Sequence

from joulery.domain.ports import Engine
from joulery.domain.serving.engine import ReplicaSpec, Transition
from joulery.gateway.server import GatewayServer


async def serve(
    engine: Engine,
    server: GatewayServer,
    target: Sequence[ReplicaSpec],
    ready: Callable[[Transition], None] = lambda transition: None,
) -> None:
    """Serve ``target`` until SIGTERM or SIGINT, then stop: no new connections, running requests finish, replicas end.

    The port is taken first, so that one in use is known before any model is loaded; until ``ready`` is called the
    gateway says that it is alive and not ready.

    Raises:
        JouleryError: The port or a replica is not available; nothing is left running.
    """
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    signals = (signal.SIGTERM, signal.SIGINT)
    for number in signals:
        loop.add_signal_handler(number, stop.set)
    try:
        await server.start()
        stopping = asyncio.create_task(stop.wait())
        starting = asyncio.create_task(engine.apply(target))
        await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            ready(starting.result())
            serving = asyncio.create_task(server.wait())
            await asyncio.wait((stopping, serving), return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                await serving
        starting.cancel()
        stopping.cancel()
        await asyncio.gather(starting, stopping, return_exceptions=True)
    finally:
        await server.stop()
        await engine.close()
        for number in signals:
            loop.remove_signal_handler(number)
