"""Engines, made from plain settings or from the site file."""

from __future__ import annotations

from collections.abc import Iterable

from joulery.adapters.engines.embedded.engine import LocalEngine, LocalSettings
from joulery.config.serving import RayEngine, ServingConfig
from joulery.domain.errors import ConfigError
from joulery.domain.ports import Engine, Places
from joulery.domain.serving.engine import ModelKind, ModelRef


def local_engine(
    *,
    cores: tuple[int, ...] = (),
    queue: int = 1024,
    deadline_s: float = 30.0,
    drain_s: float = 10.0,
    stderr: int | None = None,
    places: Places | None = None,
) -> Engine:
    """The embedded engine; see :class:`joulery.adapters.engines.embedded.engine.LocalSettings`.

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
    upstreams: bool = False,
) -> Engine:
    """The engine that a site file asks for; it runs nothing yet.

    Args:
        serving: Which, and its limits.
        upstreams: Whether its services are on other servers.
        cores: The CPU cores an embedded engine may use; empty for all.
        stderr: File descriptor for what its models print; None for standard error.
        places: Hands out parts of GPUs to an embedded engine; None to run on the CPU alone.
    """
    if upstreams:
        return upstream_engine(queue=serving.queue, deadline_s=serving.deadline_s, drain_s=serving.drain_s)
    if not isinstance(serving.engine, RayEngine):
        return local_engine(
            cores=cores,
            queue=serving.queue,
            deadline_s=serving.deadline_s,
            drain_s=serving.drain_s,
            stderr=stderr,
            places=places,
        )
    from joulery.adapters.engines.ray_serve.cluster import RayPlace
    from joulery.adapters.engines.ray_serve.engine import RayServeEngine
    from joulery.adapters.engines.ray_serve.settings import RaySettings

    asked = serving.engine
    return RayServeEngine(
        RaySettings(
            place=RayPlace(asked.address, asked.dashboard or "", asked.cpus),
            claim_ratio=asked.claim_ratio,
            queue=serving.queue,
            deadline_s=serving.deadline_s,
            drain_s=serving.drain_s,
            direct=asked.direct,
            nodes={node.name: node.address for node in asked.nodes},
        )
    )


def upstream_engine(*, queue: int = 1024, deadline_s: float = 30.0, drain_s: float = 10.0) -> Engine:
    """The engine whose models are on other servers; see
    :class:`joulery.adapters.engines.remote.upstreams.UpstreamEngine`.
    """
    from joulery.adapters.engines.remote.open_inference import OpenInferenceSettings
    from joulery.adapters.engines.remote.upstreams import UpstreamEngine

    return UpstreamEngine(OpenInferenceSettings(queue, deadline_s, drain_s))


def engine_for(
    models: Iterable[ModelRef],
    *,
    queue: int = 1024,
    deadline_s: float = 30.0,
    drain_s: float = 10.0,
    places: Places | None = None,
) -> Engine:
    """The engine that can run these models: this machine's, or one that asks other servers.

    Args:
        models: Every model to serve.
        queue: Requests that may wait for one service.
        deadline_s: Seconds within which a request is answered.
        drain_s: Seconds that a stop waits for accepted requests.
        places: Hands out parts of GPUs; None for CPU cores.

    Raises:
        ConfigError: Some are here and some elsewhere.
    """
    remote = {model.kind is ModelKind.REMOTE for model in models}
    if len(remote) > 1:
        raise ConfigError(
            "models of this machine and models on other servers cannot be served together",
            pointer="--model",
            hint="start joulery serve once for each kind",
        )
    if remote == {True}:
        from joulery.adapters.engines.remote.open_inference import OpenInferenceEngine, OpenInferenceSettings

        return OpenInferenceEngine(OpenInferenceSettings(queue, deadline_s, drain_s))
    return local_engine(queue=queue, deadline_s=deadline_s, drain_s=drain_s, places=places)
