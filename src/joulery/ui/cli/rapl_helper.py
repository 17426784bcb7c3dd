"""``joulery rapl-helper``: provide the processors' energy counters to users without root."""

from __future__ import annotations

import json
import os
from pathlib import Path

import click


@click.command("rapl-helper")
@click.option(
    "--listen",
    type=click.Path(path_type=Path),
    default=Path("/run/joulery/rapl.sock"),
    metavar="PATH",
    help="The socket (/run/joulery/rapl.sock).",
)
@click.option("--group", default="joulery", metavar="NAME", help="Answer root and members of this group (joulery).")
@click.option("--user", default="65534", metavar="NAME", help="Become this user once the counters are open (65534).")
@click.option("--root", type=click.Path(path_type=Path), hidden=True, help="The powercap folder.")
@click.option("--json", "as_json", is_flag=True, help="Print startup details as one JSON object.")
def command(listen: Path, group: str, user: str, root: Path | None, as_json: bool) -> None:
    """Read the processors' energy counters (RAPL) as root, for users who may not, until a signal ends it.

    The meter rapl uses the helper by itself where the kernel denies the counters. The helper answers readings and
    nothing else, to root and to members of one group, at most a hundred new readings a second.
    """
    from joulery.app.wiring.rapl_helper import HelperConfig, run_rapl_helper

    config = HelperConfig(listen, group, user) if root is None else HelperConfig(listen, group, user, root)

    def started(counters: int) -> None:
        if as_json:
            click.echo(json.dumps({"socket": str(listen), "counters": counters, "pid": os.getpid()}))
        else:
            _say(f"{counters} counters on {listen}, for group {group}")

    run_rapl_helper(config, _say, started)


def _say(text: str) -> None:
    click.echo(f"joulery rapl-helper: {text}", err=True)
