"""What is sent to the services of a running site: started, ended, waited for, one load a service."""

from __future__ import annotations

import asyncio

from joulery.runtime.serving.hosted import Hosted
from joulery.runtime.serving.loading import Load, LoadResult, start_load
from joulery.runtime.serving.session import Session
from joulery.store.run import SAMPLES
from joulery.ui.up.front import Front


class Loads:
    """The loads of a session.

    Args:
        session: Whose services they go to.
        gate: The gateway they ask.
    """

    def __init__(self, session: Session, gate: Front) -> None:
        self._session, self._gate = session, gate
        self._loads: dict[str, Load] = {}
        self._waiting: dict[str, asyncio.Task[LoadResult]] = {}
        self._alone = len(session.hosted) == 1

    def start(self, one: Hosted) -> None:
        """Start what is sent to a service, if anything is.

        Raises:
            JouleryError: The inputs do not fit, or cannot be read.
        """
        if one.load is None:
            return
        view = next(view for view in self._session.engine.replicas() if view.spec.service == one.name)
        load = self._loads[one.name] = start_load(
            one.load,
            rate_rps=one.rate_rps,
            service=one.name,
            specs=view.inputs,
            url=self._gate.server.url,
            token=self._gate.token,
            folder=self._session.writer.path,
            scratch=self._session.writer.path / SAMPLES,
            tag="" if self._alone else f"-{one.name}",
        )
        self._waiting[one.name] = asyncio.create_task(load.wait(), name=f"load {one.name}")

    def end(self, name: str | None = None) -> None:
        """Ask the load of a service, or every load, to send nothing more."""
        for service, load in self._loads.items():
            if name in (None, service):
                load.end()

    async def outcomes(self) -> dict[str, LoadResult]:
        """What the clients saw, once all have ended, those too that were started meanwhile.

        Raises:
            ActuationError: One failed; it said why on standard error.
        """
        while pending := [task for task in self._waiting.values() if not task.done()]:
            await asyncio.wait(pending)
        return {name: task.result() for name, task in self._waiting.items()}
