"""Limits of the engine on Ray Serve."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from joulery.adapters.engines.ray_serve.cluster import RayPlace
from joulery.adapters.engines.ray_serve.listener import LOOPBACK, NODE_ADDRESS


@dataclass(frozen=True, slots=True)
class RaySettings:
    """Limits of the engine.

    Attributes:
        place: Where Ray runs.
        claim_ratio: CPUs a replica claims from Ray for each core of its slice; at most 0.5 where old and new
            replicas must fit side by side.
        queue: Requests that may wait for one service.
        deadline_s: A request that names no shorter limit is answered within this.
        drain_s: How long ``close`` waits for running requests.
        launch_s: How long a change may take.
        nodes: Address of each node that replicas are placed on, by its name; empty where Ray places them.
        direct: Whether replicas listen for requests on connections of joulery's own: at their node's address, or, on a
            cluster started here and where None, on loopback.
    """

    place: RayPlace = field(default_factory=RayPlace)
    claim_ratio: float = 0.5
    queue: int = 1024
    deadline_s: float = 30.0
    drain_s: float = 10.0
    launch_s: float = 180.0
    nodes: Mapping[str, str] = field(default_factory=dict)
    direct: bool | None = None

    @property
    def listens(self) -> str:
        """Address at which replicas listen: ``127.0.0.1``, ``node`` (at their node's address), or empty for nowhere."""
        if self.direct is False:
            return ""
        return NODE_ADDRESS if self.direct and not self.place.local else LOOPBACK
