"""``joulery serve``: models behind the gateway."""

from __future__ import annotations

import json
import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import TYPE_CHECKING

import click

from joulery.domain.errors import ConfigError

if TYPE_CHECKING:
    from joulery.app.serving.llm import LLMSite
    from joulery.config.devices import GpuDeviceConfig
    from joulery.config.site import Site
    from joulery.domain.ports import Places
    from joulery.domain.serving.engine import ReplicaSpec, Transition
    from joulery.domain.serving.service import Slice

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


@click.command("serve")
@click.argument("site", metavar="[SITE]", required=False, type=click.Path(path_type=Path))
@click.option(
    "--model",
    "models",
    multiple=True,
    metavar="NAME[/VARIANT]=MODEL",
    help="A file ending in .onnx, module:function, or http://HOST:PORT/MODEL of a Triton or like server. Repeatable.",
)
@click.option("--replicas", type=click.IntRange(1), default=1, help="Worker processes of each model (1).")
@click.option("--cores", type=click.IntRange(1), default=1, help="CPU cores of each replica (1).")
@click.option("--share", type=click.FloatRange(0, 1, min_open=True), default=1.0, help="Share of their time (1).")
@click.option(
    "--on", metavar="SLICE", help="GPU slice to run on: whole, mps:0.4 (a share of it), or a MIG profile: 3g.20gb."
)
@click.option("--gpu", "gpus", multiple=True, metavar="GPU", help="With --on: which, by index or UUID (0). Repeatable.")
@click.option("--threads", type=click.IntRange(0), default=0, help="Threads inside an operator (one a core).")
@click.option("--listen", metavar="HOST:PORT", help="Where (127.0.0.1:8080); port 0 takes a free one.")
@click.option(
    "--token-file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="File with the bearer token.",
)
@click.option("--queue", type=click.IntRange(0), default=1024, help="Requests that may wait for one NAME (1024).")
@click.option("--deadline", type=click.FloatRange(0, min_open=True), default=30.0, help="Seconds to answer in (30).")
@click.option("--drain", type=click.FloatRange(0), default=10.0, help="Seconds a stop waits for requests (10).")
@click.option("--out", type=click.Path(path_type=Path), metavar="DIR", help="With SITE: keep the run here.")
@click.option("--json", "as_json", is_flag=True, help="Print startup details as one JSON object.")
def command(
    site: Path | None,
    models: tuple[str, ...],
    replicas: int,
    cores: int,
    share: float,
    on: str | None,
    gpus: tuple[str, ...],
    threads: int,
    listen: str | None,
    token_file: Path | None,
    queue: int,
    deadline: float,
    drain: float,
    out: Path | None,
    as_json: bool,
) -> None:
    """Serve models, or all services of a site file, over the Open Inference Protocol until Ctrl-C or SIGTERM.

    A site's services run as under joulery up, with their controllers and meters, but without its load.

    \b
    joulery serve site.yaml
    joulery serve --model double=shop.models:double
    joulery serve --model photos/small=lite0.onnx --model photos/large=lite2.onnx --listen :8000
    """
    if (site is None) is (not models):
        raise ConfigError("name a site file or models, one of both", expected="SITE, or --model NAME=MODEL")
    # Before numpy is there: sums that a request waits for stay on the thread that makes them. Handed to a pool, they
    # would wait for a core of a machine whose cores are busy with models.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if site is not None:
        _only_site_options()
        _serve_site(site, listen, out, as_json=as_json)
        return
    import asyncio

    import uvloop

    from joulery.app.wiring.engine import engine_for
    from joulery.domain.serving.service import Slice, SliceKind
    from joulery.gateway.access import address, read_token
    from joulery.gateway.admin import admin_app
    from joulery.gateway.app import Gateway
    from joulery.gateway.metrics import Metrics
    from joulery.gateway.run import serve
    from joulery.gateway.server import GatewayServer, ServerLimits

    host, port = address(listen or "127.0.0.1:8080")
    token = None if token_file is None else read_token(token_file)
    slice_ = Slice(SliceKind.CPU, cores=cores, share_ratio=share) if on is None else _gpu_slice(on)
    target = [spec for model in models for spec in [_replica(model, slice_, threads)] * replicas]

    async def run() -> None:
        async with _places(gpus, slice_) as places:
            refs = (spec.model for spec in target)
            engine = engine_for(refs, queue=queue, deadline_s=deadline, drain_s=drain, places=places)
            metrics = Metrics({spec.service for spec in target})
            app = Gateway(engine, token=token, telemetry=[metrics.request], admin=admin_app(metrics))
            limits = ServerLimits(drain_s=drain)
            server = GatewayServer(app, host, port, limits=limits, protected=token is not None)
            await serve(engine, server, target, lambda change: _say(server.url, change, as_json=as_json))

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


def _gpu_slice(text: str) -> Slice:
    """The part of a GPU that ``--on`` names.

    Raises:
        ConfigError: It is none.
    """
    from joulery.domain.serving.service import Slice, SliceKind

    piece = Slice.parse(text)
    if piece.kind is SliceKind.CPU:
        raise ConfigError(
            "no part of a GPU", pointer="--on", got=text, expected="whole, mps:0.4 or a MIG profile such as 3g.20gb"
        )
    return piece


@asynccontextmanager
async def _places(gpus: tuple[str, ...], piece: Slice) -> AsyncIterator[Places | None]:
    """Parts of this machine's GPUs, leased; None where nothing runs on them."""
    from joulery.domain.serving.service import SliceKind

    if piece.kind is SliceKind.CPU:
        yield None
        return
    from joulery.app.wiring.gpus import local_gpus
    from joulery.app.wiring.leases import held_leases

    async with held_leases(lambda text: click.echo(text, err=True)) as holder:
        with closing(local_gpus(_gpu_configs(gpus, piece), holder)) as here:
            yield here.places


def _gpu_configs(gpus: tuple[str, ...], piece: Slice) -> tuple[GpuDeviceConfig, ...]:
    """The GPUs named, used as a slice needs them."""
    from joulery.config.devices import GpuDeviceConfig

    named = tuple(int(gpu) if gpu.isdigit() else gpu for gpu in gpus) or (0,)
    mode = piece.kind.value
    cuts = ((piece.profile,),) if mode == "mig" else None
    return tuple(GpuDeviceConfig.model_validate({"gpu": gpu, "mode": mode, "mig_partitions": cuts}) for gpu in named)


def _only_site_options() -> None:
    """Refuse options that a site file replaces.

    Raises:
        ConfigError: There is one.
    """
    from click.core import ParameterSource

    context = click.get_current_context()
    for name in ("replicas", "cores", "share", "on", "gpus", "threads", "token_file", "queue", "deadline", "drain"):
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            option = "--" + name.replace("_", "-")
            raise ConfigError(f"{option} is set in the site file", pointer=option, hint="change the file")


def _serve_site(file: Path, listen: str | None, out: Path | None, *, as_json: bool) -> None:
    """All services of a site file, until stopped."""
    import sys

    from joulery.app.serving.up import Options
    from joulery.config import load
    from joulery.ui.cli.up import listening, run
    from joulery.ui.reports.up_screen import AddressOnly

    site = listening(load(file), listen)
    if site.language_models and not site.services:
        _serve_text(site, out, as_json=as_json)
        return
    screen = AddressOnly(lambda url: click.echo(json.dumps({"url": url, "pid": os.getpid()}))) if as_json else None
    report = run(Options(site, stay=True, out=out, send=False, argv=tuple(sys.argv), file=file), screen)
    if as_json and report is not None:
        click.echo(json.dumps(report))


def _serve_text(site: Site, out: Path | None, *, as_json: bool) -> None:
    """The language models of a site file, until stopped."""
    import asyncio
    import sys

    import uvloop

    from joulery.app.serving.llm_site import serve_llms

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(
            serve_llms(
                site,
                lambda url, text: _say_text(url, text, as_json=as_json),
                out=out,
                argv=tuple(sys.argv),
                fact=(lambda text: None) if as_json else click.echo,
            )
        )


def _say_text(url: str, text: LLMSite, *, as_json: bool) -> None:
    """Print the address and the language models."""
    llms = text.llms.values()
    if as_json:
        models = [{"model": llm.name, "engine": llm.engine.name, "variant": llm.engine.variant} for llm in llms]
        click.echo(json.dumps({"url": url, "pid": os.getpid(), "models": models}))
        return
    for note in text.notes:
        click.echo(note)
    for llm in llms:
        order = "FIFO" if llm.settings.aging is None else "shortest predicted first"
        keeper = "the engine's own queue" if llm.engine.dialect.orders else f"{llm.settings.max_num_seqs} at once"
        click.echo(f"{llm.name}: {llm.engine.name}, {order}, {keeper}")
    click.echo(f"serving at {url}/v1 (Ctrl-C stops)")


def _replica(text: str, slice_: Slice, threads: int) -> ReplicaSpec:
    """One replica of ``NAME[/VARIANT]=MODEL``."""
    from joulery.domain.serving.engine import ModelKind, ModelRef, ReplicaSpec
    from joulery.domain.serving.service import Slice, SliceKind

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


def _say(url: str, change: Transition, *, as_json: bool) -> None:
    """Print the address and the replicas."""
    if as_json:
        replicas = [{"service": spec.service, "variant": spec.variant} for spec in change.started]
        click.echo(json.dumps({"url": url, "pid": os.getpid(), "ready_s": change.ready_s, "replicas": replicas}))
        return
    for spec in dict.fromkeys(change.started):
        click.echo(f"{change.started.count(spec)} x {spec}")
    click.echo(f"serving at {url} (ready after {change.ready_s:.1f} s; Ctrl-C stops)")
