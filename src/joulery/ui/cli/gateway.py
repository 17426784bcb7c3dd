"""``joulery gateway``: one more gateway in front of an engine that several share."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import click

from joulery.domain.errors import ConfigError
from joulery.ui.cli.numpy_threads import keep_numpy_on_one_thread
from joulery.ui.cli.options import Time


@click.command("gateway")
@click.option(
    "--join", required=True, metavar="HOST:PORT", help="The engine server to join: serving.gateways.join of its site."
)
@click.option("--listen", default="127.0.0.1:8080", metavar="HOST:PORT", help="Address (127.0.0.1:8080).")
@click.option("--grpc", metavar="HOST:PORT", help="Address of the Open Inference Protocol over gRPC (extra grpc).")
@click.option("--name", metavar="NAME", help="Its name among the gateways (the machine's name).")
@click.option(
    "--join-token-file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="File with the token of gateways of other machines: serving.gateways.join_token_file.",
)
@click.option(
    "--join-certificate",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="PEM file of the certificate of serving.gateways.join_tls: encrypts the connection.",
)
@click.option(
    "--token-file", type=click.Path(path_type=Path), metavar="FILE", help="File with the bearer token of clients."
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
@click.option("--shared-port", is_flag=True, help="Share the port with other gateways of this machine (SO_REUSEPORT).")
@click.option("--open-monitoring", is_flag=True, help="Answer /metrics and /v2/health/ready without the token.")
@click.option(
    "--drain",
    "drain_s",
    type=Time("10 s", bare="s", zero=True),
    default=10.0,
    help="How long a stop waits for requests; a plain number is seconds (10).",
)
@click.option(
    "--give-up",
    "give_up_s",
    type=Time("30 s", bare="s"),
    help="End when the engine server was away for so long; a plain number is seconds (never).",
)
@click.option("--json", "as_json", is_flag=True, help="Print startup details as one JSON object.")
@click.option("--start", default="", hidden=True)
def command(
    join: str,
    listen: str,
    grpc: str | None,
    name: str | None,
    join_token_file: Path | None,
    join_certificate: Path | None,
    token_file: Path | None,
    tls_certificate: Path | None,
    tls_key: Path | None,
    shared_port: bool,
    open_monitoring: bool,
    drain_s: float,
    give_up_s: float | None,
    as_json: bool,
    start: str,
) -> None:
    """Answer clients with the replicas of a running joulery up that has serving.gateways, until Ctrl-C or SIGTERM.

    The gateways of the site's own machine are started by joulery up; this one runs on another machine.

    \b
    joulery gateway --join 10.0.0.5:8090 --join-token-file join.token --listen :8080
    """
    keep_numpy_on_one_thread()
    import asyncio

    import uvloop

    from joulery.app.serving.gateways.gateway_process import GatewayRequest, run_gateway, tls_files

    _check_join(join, join_token_file, join_certificate)
    request = GatewayRequest(
        join,
        listen,
        name or os.uname().nodename,
        token_file,
        join_token_file,
        tls_files(tls_certificate, tls_key),
        shared_port,
        open_monitoring,
        drain_s,
        give_up_s,
        start,
        join_certificate,
        grpc,
    )

    def say(url: str, named: str, grpc_at: str) -> None:
        facts = {"gateway": named, "url": url, "join": join, "pid": os.getpid()}
        click.echo(_announced(facts, grpc_at, as_json=as_json))

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run_gateway(request, say))


def _announced(facts: dict[str, Any], grpc_at: str, *, as_json: bool) -> str:
    """Text printed once a gateway listens."""
    if as_json:
        return json.dumps({**facts, "grpc": grpc_at} if grpc_at else facts)
    where = f"{facts['url']}, gRPC at {grpc_at}" if grpc_at else facts["url"]
    return f"gateway {facts['gateway']} at {where}, joining {facts['join']}"


def _check_join(join: str, token_file: Path | None, certificate: Path | None) -> None:
    """Check that the flags fit the engine server's address.

    Raises:
        ConfigError: They do not fit.
    """
    if join.startswith("unix:") and certificate is not None:
        raise ConfigError("a socket of this machine is not encrypted", pointer="--join-certificate")
    if not join.startswith("unix:") and token_file is None:
        raise ConfigError(
            "an engine server on another machine needs a token",
            pointer="--join-token-file",
            expected="the file of serving.gateways.join_token_file",
        )
