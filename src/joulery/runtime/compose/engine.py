"""Engines, made from plain settings or from the site file."""

from __future__ import annotations

from joulery.adapters.engines.local import LocalEngine, LocalSettings
from joulery.config.serving import RayEngine, ServingConfig
from joulery.domain.ports import Engine, Places


def local_engine(
    *,
    cores: tuple[int, ...] = (),
    queue: int = 1024,
    deadline_s: float = 30.0,
    drain_s: float = 10.0,
    stderr: int | None = None,
    places: Places | None = None,
) -> Engine:
    """The embedded engine; see :class:`joulery.adapters.engines.local.LocalSettings`.

    Args:
        places: Hands out parts of GPUs; None to run on the CPU alone.
    """
    settings = LocalSettings(cores=cores, queue=queue, deadline_s=deadline_s, drain_s=drain_s, stderr=stderr)
    return LocalEngine(settings, places=places)


def site_engine(
    serving: ServingConfig,
    *,
    cores: tuple[int, ...] = (),
    stderr: int | None = None,
    places: Places | None = None,
) -> Engine:
    """The engine that a site file asks for; it runs nothing yet.

    Args:
        serving: Which, and its limits.
        cores: The CPU cores an embedded engine may use; empty for all.
        stderr: File descriptor for what its models print; None for standard error.
        places: Hands out parts of GPUs to an embedded engine; None to run on the CPU alone.
    """
    if not isinstance(serving.engine, RayEngine):
        return local_engine(
            cores=cores,
            queue=serving.queue,
            deadline_s=serving.deadline_s,
            drain_s=serving.drain_s,
            stderr=stderr,
            places=places,
        )
    from joulery.adapters.engines.ray_cluster import RayPlace
    from joulery.adapters.engines.ray_serve import RayServeEngine, RaySettings

    asked = serving.engine
    return RayServeEngine(
        RaySettings(
            place=RayPlace(asked.address, asked.dashboard or "", asked.cpus),
            claim_ratio=asked.claim_ratio,
            queue=serving.queue,
            deadline_s=serving.deadline_s,
            drain_s=serving.drain_s,
        )
    )
