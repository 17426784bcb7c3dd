"""Create engines from plain settings or from the site file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from joulery.adapters.engines.embedded.engine import LocalEngine, LocalSettings
from joulery.config.serving import RayEngine, ServingConfig
from joulery.domain.errors import ConfigError
from joulery.domain.ports import Engine, Places
from joulery.domain.serving.engine import ModelKind, ModelRef

_ALL = 1_000_000
"""Number of requests that may wait for replicas which accept all requests."""


def local_engine(
    *,
    cores: tuple[int, ...] = (),
    queue: int = 1024,
    deadline_s: float = 30.0,
    drain_s: float = 10.0,
    stderr: int | None = None,
    places: Places | None = None,
) -> Engine:
    """Create the embedded engine; see :class:`joulery.adapters.engines.embedded.engine.LocalSettings`.

    Args:
        places: Hands out slices of GPUs; None to run on the CPU only.
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
    here: Mapping[str, tuple[tuple[int, ...], ...]] = {},
) -> Engine:
    """Create the engine that a site file names; it runs no replicas yet.

    Args:
        serving: Kind of the engine, and its limits.
        upstreams: Whether its services are on other servers.
        here: Of services with some variants on this machine and some on other servers, the cores of each replica.
        cores: The CPU cores an embedded engine may use; empty for all.
        stderr: File descriptor for the output of its models; None for standard error.
        places: Hands out slices of GPUs to an embedded engine; None to run on the CPU only.
    """
    if upstreams:
        return upstream_engine(
            queue=serving.queue,
            deadline_s=serving.deadline_s,
            drain_s=serving.drain_s,
            here=here,
            stderr=stderr,
        )
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


def upstream_engine(
    *,
    queue: int = 1024,
    deadline_s: float = 30.0,
    drain_s: float = 10.0,
    here: Mapping[str, tuple[tuple[int, ...], ...]] = {},
    stderr: int | None = None,
) -> Engine:
    """Create the engine whose models are on other servers; see
    :class:`joulery.adapters.engines.remote.upstreams.UpstreamEngine`.

    Args:
        here: Of services with some variants on this machine, the CPU cores of each replica; empty for none.
        stderr: File descriptor for the output of models on this machine; None for standard error.
    """
    from joulery.adapters.engines.remote.beside_upstreams import LocalVariants
    from joulery.adapters.engines.remote.open_inference import OpenInferenceSettings
    from joulery.adapters.engines.remote.upstreams import UpstreamEngine

    local = None
    if here:
        cores = tuple(sorted({core for groups in here.values() for group in groups for core in group}))
        # A request waits in the service's queue: that of the replicas takes all that the slots send.
        settings = LocalSettings(cores=cores, queue=_ALL, deadline_s=deadline_s, drain_s=drain_s, stderr=stderr)
        local = LocalVariants(LocalEngine(settings), here)
    return UpstreamEngine(OpenInferenceSettings(queue, deadline_s, drain_s), local=local)


def engine_for(
    models: Iterable[ModelRef],
    *,
    queue: int = 1024,
    deadline_s: float = 30.0,
    drain_s: float = 10.0,
    places: Places | None = None,
) -> Engine:
    """Create the engine that can run these models: this machine's, or one for models on other servers.

    Args:
        models: Every model to serve.
        queue: Requests that may wait for one service.
        deadline_s: Seconds within which a request is answered.
        drain_s: Seconds that a stop waits for accepted requests.
        places: Hands out slices of GPUs; None for CPU cores.

    Raises:
        ConfigError: Some models are on this machine and some on other servers.
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
