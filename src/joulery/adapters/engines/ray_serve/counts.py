"""Correction of replica counts on Ray: counts that another scaler changed are set back to the plan's."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Protocol

from joulery.adapters.engines.ray_serve.applications import RayApp, drifted
from joulery.adapters.engines.ray_serve.replica import DEPLOYMENT
from joulery.domain.errors import ActuationError

SET_BACK_S = 10.0
"""Seconds between two checks of Ray's target replica counts."""


class Scaling(Protocol):
    """Reads and sets replica counts."""

    async def applications(self) -> dict[str, Any]:
        """See :meth:`.cluster.RayCluster.applications`."""
        ...

    async def scale(self, application: str, deployment: str, replicas: int) -> None:
        """See :meth:`.cluster.RayCluster.scale`."""
        ...


class ReplicaCounts:
    """Keeps Ray's replica counts at the plan's.

    Args:
        cluster: Reads and sets the counts.
        now_s: The clock, seconds.

    Attributes:
        remarks: Messages about counts that were set back, by application.
    """

    def __init__(self, cluster: Scaling, now_s: Callable[[], float] = time.monotonic) -> None:
        self._cluster, self._now_s = cluster, now_s
        self._seen_s = -math.inf
        self.remarks: dict[str, str] = {}

    async def set_back(self, apps: Mapping[str, RayApp]) -> None:
        """Set counts that someone else changed to the plan's, at most every :data:`SET_BACK_S`."""
        if self._now_s() < self._seen_s + SET_BACK_S:
            return
        self._seen_s = self._now_s()
        with suppress(ActuationError):
            for name, count in drifted(apps, await self._cluster.applications()).items():
                planned = len(apps[name].plan)
                await self._cluster.scale(name, DEPLOYMENT, planned)
                self.remarks[name] = (
                    f"Ray was to run {name} with {count} replicas, which joulery did not ask for: it is set back to "
                    f"{planned}; bound replicas by minimum_replicas and maximum_replicas of the service instead"
                )
