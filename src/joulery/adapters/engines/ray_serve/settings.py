"""Limits of the engine on Ray Serve."""

from __future__ import annotations

from dataclasses import dataclass, field

from joulery.adapters.engines.ray_serve.cluster import RayPlace


@dataclass(frozen=True, slots=True)
class RaySettings:
    """Limits of the engine.

    Attributes:
        place: Where Ray runs.
        claim_ratio: CPUs a replica claims in Ray's books for each core of its slice; at most 0.5 where old and new
            replicas must fit side by side.
        queue: Requests that may wait for one service.
        deadline_s: A request that names no shorter limit is answered within this.
        drain_s: How long ``close`` waits for running requests.
        launch_s: How long a change may take.
    """

    place: RayPlace = field(default_factory=RayPlace)
    claim_ratio: float = 0.5
    queue: int = 1024
    deadline_s: float = 30.0
    drain_s: float = 10.0
    launch_s: float = 180.0
