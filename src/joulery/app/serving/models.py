"""``joulery serve --model``: serve models without a site file."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path

from joulery.app.wiring.engine import engine_for
from joulery.app.wiring.gpus import local_gpus
from joulery.app.wiring.grpc import grpc_server
from joulery.app.wiring.leases import held_leases
from joulery.config.devices import GpuDeviceConfig
from joulery.domain.errors import ConfigError
from joulery.domain.ports import Places
from joulery.domain.serving.engine import ModelKind, ModelRef, ReplicaSpec, Transition
from joulery.domain.serving.service import Slice, SliceKind
from joulery.gateway.access import address, read_token
from joulery.gateway.admin import admin_app
from joulery.gateway.app import Gateway
from joulery.gateway.metrics import Metrics
from joulery.gateway.server import GatewayServer, ServerLimits, serve
from joulery.gateway.tls import TlsFiles

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


@dataclass(frozen=True, slots=True)
class ModelsRequest:
    """The flags of ``joulery serve --model``.

    Attributes:
        models: ``NAME[/VARIANT]=MODEL``, one or more.
        listen: ``HOST:PORT``; port 0 takes a free one.
        replicas: Worker processes of each model.
        cores, share_ratio: CPU cores of each replica, and the share of their time.
        on: Slice of a GPU to run on; None for CPU cores.
        gpus: GPUs by index or UUID; the first when empty.
        threads: Threads inside an operator; one a core when 0.
        token_file: File with the bearer token; None for no token.
        queue: Requests that may wait for one name.
        deadline_s: Seconds within which a request is answered.
        drain_s: Seconds that a stop waits for running requests.
        grpc: ``HOST:PORT`` of the protocol over gRPC; None for HTTP alone.
        tls_certificate, tls_key: PEM files of the gateway's certificate and key; None for plain HTTP.
    """

    models: tuple[str, ...]
    listen: str
    replicas: int
    cores: int
    share_ratio: float
    on: str | None
    gpus: tuple[str, ...]
    threads: int
    token_file: Path | None
    queue: int
    deadline_s: float
    drain_s: float
    grpc: str | None = None
    tls_certificate: Path | None = None
    tls_key: Path | None = None

    @property
    def tls(self) -> TlsFiles | None:
        """The certificate and key; None for plain HTTP.

        Raises:
            ConfigError: One is given without the other.
        """
        if self.tls_certificate is None and self.tls_key is None:
            return None
        if self.tls_certificate is None or self.tls_key is None:
            raise ConfigError("TLS needs a certificate and its key", expected="--tls-certificate and --tls-key")
        return TlsFiles(self.tls_certificate, self.tls_key)


async def serve_models(
    request: ModelsRequest, ready: Callable[[str, str, Transition], None], say: Callable[[str], None]
) -> None:
    """Serve models until SIGTERM or SIGINT.

    Args:
        request: The flags of the command.
        ready: Receives the address, the gRPC address (empty without gRPC) and the replicas once requests are answered.
        say: Receives remarks about leased GPUs.

    Raises:
        JouleryError: A flag is wrong, or the port, a GPU or a replica is not available; nothing is left running.
    """
    host, port = address(request.listen)
    token = None if request.token_file is None else read_token(request.token_file)
    cpu = Slice(SliceKind.CPU, cores=request.cores, share_ratio=request.share_ratio)
    piece = cpu if request.on is None else _gpu_slice(request.on)
    specs = [_replica(model, piece, request.threads) for model in request.models]
    _each_once([f"{spec.service}/{spec.variant}" for spec in specs])
    target = [spec for spec in specs for _ in range(request.replicas)]
    async with _places(request.gpus, piece, say) as places:
        engine = engine_for(
            (spec.model for spec in target),
            queue=request.queue,
            deadline_s=request.deadline_s,
            drain_s=request.drain_s,
            places=places,
        )
        metrics = Metrics({spec.service for spec in target})
        app = Gateway(engine, token=token, telemetry=[metrics.request], admin=admin_app(metrics))
        limits = ServerLimits(drain_s=request.drain_s)
        server = GatewayServer(app, host, port, limits=limits, protected=token is not None, tls=request.tls)
        server.beside = grpc_server(app, request.grpc, token=token, tls=request.tls, drain_s=request.drain_s)
        await serve(engine, server, target, lambda change: ready(server.url, server.beside_address, change))


def _gpu_slice(text: str) -> Slice:
    """Parse the slice of a GPU that ``--on`` names.

    Raises:
        ConfigError: The text is not a slice of a GPU.
    """
    piece = Slice.parse(text)
    if piece.kind is SliceKind.CPU:
        raise ConfigError(
            "no part of a GPU", pointer="--on", got=text, expected="whole, mps:0.4 or a MIG profile such as 3g.20gb"
        )
    return piece


@asynccontextmanager
async def _places(gpus: tuple[str, ...], piece: Slice, say: Callable[[str], None]) -> AsyncIterator[Places | None]:
    """Lease slices of this machine's GPUs; None where nothing runs on them."""
    if piece.kind is SliceKind.CPU:
        yield None
        return
    async with held_leases(say) as holder:
        with closing(local_gpus(_gpu_configs(gpus, piece), holder)) as here:
            yield here.places


def _gpu_configs(gpus: tuple[str, ...], piece: Slice) -> tuple[GpuDeviceConfig, ...]:
    """Settings of the named GPUs, as the slice needs them."""
    named = tuple(int(gpu) if gpu.isdigit() else gpu for gpu in gpus) or (0,)
    mode = piece.kind.value
    partitions = ((piece.profile,),) if mode == "mig" else None
    return tuple(
        GpuDeviceConfig.model_validate({"gpu": gpu, "mode": mode, "mig_partitions": partitions}) for gpu in named
    )


def _replica(text: str, slice_: Slice, threads: int) -> ReplicaSpec:
    """Parse one replica of ``NAME[/VARIANT]=MODEL``."""
    name, equals, model = text.partition("=")
    service, slash, variant = name.partition("/")
    if not (equals and _NAME.fullmatch(service) and _NAME.fullmatch(variant if slash else service)):
        raise ConfigError(
            "not a model to serve", pointer="--model", got=text, expected="NAME=MODEL or NAME/VARIANT=MODEL"
        )
    reference = ModelRef.parse(model)
    if reference.kind is ModelKind.REMOTE:
        return ReplicaSpec(service, variant or service, Slice(SliceKind.WHOLE), reference)
    return ReplicaSpec(service, variant or service, slice_, reference, threads)


def _each_once(names: Sequence[str]) -> None:
    """Refuse two models of the same name and variant, since either would answer the requests.

    Raises:
        ConfigError: A name occurs twice.
    """
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        name = twice.partition("/")[0]
        raise ConfigError(
            "two models have the same name and variant",
            pointer="--model",
            got=twice,
            hint=f"name each: --model {name}/small=MODEL --model {name}/large=MODEL; for more replicas: --replicas",
        )
