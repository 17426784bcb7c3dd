"""``joulery monitor``: the sampler for programs in any language, over HTTP on a Unix socket."""

from __future__ import annotations

import json
import os
import signal
import socket
from pathlib import Path

import click

from joulery.domain.errors import ConfigError
from joulery.ui.cli.options import Time
from joulery.unix_sockets import clear_socket_path


@click.command("monitor")
@click.option(
    "--socket", "path", required=True, type=click.Path(path_type=Path), metavar="PATH", help="Unix socket to listen on."
)
@click.option(
    "--runs", type=click.Path(path_type=Path), default=Path("runs"), metavar="DIR", help="Runs go here (runs)."
)
@click.option("--period", "period_s", type=Time("4 ms"), help="Sampling period, such as 4 ms (10 ms).")
@click.option("--meter", "meters", multiple=True, metavar="M", help="As for joulery measure. Repeatable.")
@click.option("--json", "as_json", is_flag=True, help="Print startup details as one JSON object.")
def command(path: Path, runs: Path, period_s: float | None, meters: tuple[str, ...], as_json: bool) -> None:
    """Measure processes that ask for it over a Unix socket, until Ctrl-C or SIGTERM.

    \b
    curl --unix-socket PATH -d '{"pid": 1234}' http://joulery/sessions       start
    curl --unix-socket PATH http://joulery/sessions/1/power                  read
    curl --unix-socket PATH -X DELETE http://joulery/sessions/1              stop; prints the report
    """
    import uvicorn

    from joulery.app.measuring import PERIOD_S, open_monitor

    monitor, app = open_monitor(runs, PERIOD_S if period_s is None else period_s, meters)
    listening = _listen(path)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off", access_log=False))
    started = json.dumps({"socket": str(path), "pid": os.getpid()}) if as_json else f"listening on {path}"
    click.echo(started, err=not as_json)
    # uvicorn ends on these, then raises them again for the handlers before it, which have nothing left to do.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    try:
        server.run(sockets=[listening])
    finally:
        monitor.close()
        listening.close()
        path.unlink(missing_ok=True)


def _listen(path: Path) -> socket.socket:
    """A Unix socket for this user alone; it replaces a stale one.

    Raises:
        ConfigError: Another process listens there, the path is not a socket, or it cannot be made.
    """
    clear_socket_path(path, socket.SOCK_STREAM, "--socket")
    listening = socket.socket(socket.AF_UNIX)
    mask = os.umask(0o177)
    try:
        listening.bind(str(path))
        listening.listen()
    except OSError as error:
        listening.close()
        raise ConfigError(f"no socket can be made: {error}", pointer="--socket", got=str(path)) from error
    finally:
        os.umask(mask)
    return listening
