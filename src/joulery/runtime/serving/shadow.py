"""Shadow replays: the baseline's variant answers copies of requests while the service is idle; no client gets these.

A replay measures CPU seconds of the baseline's variant for real requests, on the slices that run, with nothing waiting
and nothing else running in the service. It does not measure the baseline under load, its queue, its neighbours, and
times at which the service is never idle. Replays correct the modelled baseline where no switchback is possible; they
are not a measured baseline.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from joulery.domain.errors import DataError
from joulery.domain.ports import Engine
from joulery.domain.serving.engine import InferRequest, ReplicaState, RequestError
from joulery.domain.serving.profile import Profile

MOST_RATIOS = 5000
"""Replays of a service that are kept; by then the correction is known to a few per mille."""


@dataclass(slots=True, eq=False)
class ShadowReplays:
    """The shadow replays of one service.

    Attributes:
        service: The service.
        variant: The baseline's variant.
        share_ratio: Replays as a share of the requests, at most.
        profile: What the variant is expected to cost on each slice.
        engine: Runs the replays; only where replicas have the variant loaded.
        on_trial: Whether layouts are on trial now: nothing is replayed then.
        ratios: CPU seconds of each replay over what the profile expects of the variant alone on that slice.
    """

    service: str
    variant: str
    share_ratio: float
    profile: Profile
    engine: Engine
    on_trial: Callable[[], bool]
    ratios: list[float] = field(default_factory=list)
    _seen: int = 0
    _sent: int = 0
    _latest: InferRequest | None = None
    _running: asyncio.Task[None] | None = None

    def saw(self, request: InferRequest) -> None:
        """Keep a request that was answered, to be replayed."""
        self._seen += 1
        self._latest = request

    def replay(self, queued: int) -> bool:
        """Replay the latest request where the service is idle and the budget allows; return whether it is replayed.

        Args:
            queued: Requests that wait or run.
        """
        busy = queued > 0 or self._running is not None or self.on_trial()
        if busy or self._latest is None or len(self.ratios) >= MOST_RATIOS:
            return False
        if self._sent + 1 > self.share_ratio * self._seen or not self._loaded():
            return False
        request, self._latest = self._latest._replace(variant=self.variant), None
        self._sent += 1
        self._running = asyncio.create_task(self._measure(request), name=f"shadow replay {self.service}")
        return True

    async def stop(self) -> None:
        """End the replay that runs. Safe to call twice."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)

    def _loaded(self) -> bool:
        """Whether every ready replica has the baseline's variant loaded."""
        views = [view for view in self.engine.replicas() if view.spec.service == self.service]
        ready = [view for view in views if view.state is ReplicaState.READY]
        return len(ready) == len(views) > 0 and all(
            self.variant == view.spec.variant or self.variant in view.warm for view in ready
        )

    async def _measure(self, request: InferRequest) -> None:
        try:
            with suppress(RequestError, DataError):
                slices = {view.id: view.spec.slice for view in self.engine.replicas()}
                response = await self.engine.infer(self.service, request)
                expected_s = self.profile.entry(self.variant, slices[response.replica]).alone.mean_cpu_s
                if response.variant == self.variant and math.isfinite(response.cpu_s) and expected_s > 0:
                    self.ratios.append(response.cpu_s / expected_s)
        finally:
            self._running = None
