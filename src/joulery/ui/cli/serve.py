"""``joulery serve``: serve models behind the gateway."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from joulery.domain.errors import ConfigError
from joulery.ui.cli.numpy_threads import keep_numpy_on_one_thread
from joulery.ui.cli.options import Time

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from joulery.domain.serving.engine import Transition


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
@click.option(
    "--share",
    "share_ratio",
    type=click.FloatRange(0, 1, min_open=True),
    default=1.0,
    help="Share of the cores' time (1).",
)
@click.option(
    "--on", metavar="SLICE", help="GPU slice to run on: whole, mps:0.4 (a share of it), or a MIG profile: 3g.20gb."
)
@click.option(
    "--gpu", "gpus", multiple=True, metavar="GPU", help="With --on: the GPU, by index or UUID (0). Repeatable."
)
@click.option("--threads", type=click.IntRange(0), default=0, help="Threads inside an operator (one a core).")
@click.option("--listen", metavar="HOST:PORT", help="Address (127.0.0.1:8080); port 0 takes a free one.")
@click.option("--grpc", metavar="HOST:PORT", help="Answer over gRPC as well (none).")
@click.option(
    "--token-file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="File with the bearer token.",
)
@click.option(
    "--tls-certificate",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Serve HTTPS: PEM file of the certificate and its chain.",
)
@click.option(
    "--tls-key", type=click.Path(path_type=Path), metavar="FILE", help="PEM file of its key, without a passphrase."
)
@click.option("--queue", type=click.IntRange(0), default=1024, help="Requests that may wait for one NAME (1024).")
@click.option(
    "--deadline",
    "deadline_s",
    type=Time("30 s", bare="s"),
    default=30.0,
    help="Time for an answer; a plain number is seconds (30).",
)
@click.option(
    "--drain",
    "drain_s",
    type=Time("10 s", bare="s", zero=True),
    default=10.0,
    help="How long a stop waits for requests; a plain number is seconds (10).",
)
@click.option(
    "--plan",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="With SITE: run this plan of joulery plan --out.",
)
@click.option("--out", type=click.Path(path_type=Path), metavar="DIR", help="With SITE: keep the run here.")
@click.option("--json", "as_json", is_flag=True, help="Print startup details as one JSON object.")
def command(
    site: Path | None,
    models: tuple[str, ...],
    listen: str | None,
    plan: Path | None,
    out: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Serve models, or all services of a site file, over the Open Inference Protocol until Ctrl-C or SIGTERM.

    A site's services run as under joulery up, with their controllers and meters, but without its load.

    \b
    joulery serve site.yaml
    joulery serve --model double=shop.models:double
    joulery serve --model photos/small=lite0.onnx --model photos/large=lite2.onnx --listen :8000
    """
    if (site is None) is (not models):
        raise ConfigError("name either a site file or models", expected="SITE, or --model NAME=MODEL")
    keep_numpy_on_one_thread()
    if site is not None:
        _only_site_options()
        _serve_site(site, listen, plan, out, as_json=as_json)
        return
    if plan is not None:
        raise ConfigError("--plan goes with a site file", pointer="--plan", hint="joulery serve SITE --plan FILE")
    import asyncio

    import uvloop

    from joulery.app.serving.models import ModelsRequest, serve_models

    request = ModelsRequest(models, listen or "127.0.0.1:8080", **options)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(
            serve_models(
                request,
                lambda url, grpc, change: _say(url, grpc, change, as_json=as_json),
                lambda text: click.echo(text, err=True),
            )
        )


_MODEL_OPTIONS = (
    *("replicas", "cores", "share_ratio", "on", "gpus", "threads", "grpc", "token_file"),
    *("tls_certificate", "tls_key"),
    *("queue", "deadline_s", "drain_s"),
)
"""Parameters that the site file sets instead."""


def _only_site_options() -> None:
    """Refuse options that the site file sets instead.

    Raises:
        ConfigError: One of them is given.
    """
    from click.core import ParameterSource

    context = click.get_current_context()
    for parameter in context.command.params:
        name = parameter.name or ""
        if name in _MODEL_OPTIONS and context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            option = parameter.opts[0]
            raise ConfigError(f"{option} is set in the site file", pointer=option, hint="change the file")


def _serve_site(file: Path, listen: str | None, plan: Path | None, out: Path | None, *, as_json: bool) -> None:
    """Serve all services of a site file, until stopped."""
    import sys

    from joulery.app.serving.up import Options
    from joulery.config import load
    from joulery.ui.cli.up import listening, run
    from joulery.ui.reports.up_screen import AddressOnly

    site = listening(load(file), listen)
    screen = AddressOnly(_say_address) if as_json else None
    options = Options(site, stay=True, out=out, send=False, argv=tuple(sys.argv), file=file, plan=plan)
    report = run(options, screen)
    if as_json and report is not None:
        click.echo(json.dumps(report))


def _say_address(url: str, grpc: str, models: Sequence[Mapping[str, str]]) -> None:
    """Print the address and the language models as one JSON object."""
    click.echo(json.dumps({"url": url, **_grpc(grpc), "pid": os.getpid(), "models": list(models)}))


def _grpc(address: str) -> dict[str, str]:
    return {"grpc": address} if address else {}


def _say(url: str, grpc: str, change: Transition, *, as_json: bool) -> None:
    """Print the address and the replicas."""
    if as_json:
        replicas = [{"service": spec.service, "variant": spec.variant} for spec in change.started]
        started = {"url": url, **_grpc(grpc), "pid": os.getpid(), "ready_s": change.ready_s, "replicas": replicas}
        click.echo(json.dumps(started))
        return
    for spec in dict.fromkeys(change.started):
        click.echo(f"{change.started.count(spec)} x {spec}")
    beside = f" and grpc {grpc}" if grpc else ""
    click.echo(f"serving at {url}{beside} (ready after {change.ready_s:.1f} s; Ctrl-C stops)")
