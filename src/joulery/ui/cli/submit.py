"""``joulery submit``: queue a training job for this machine's scheduler."""

from __future__ import annotations

import json
import os
import time
from datetime import datetime
from pathlib import Path

import click

from joulery.domain.errors import ConfigError
from joulery.ui.cli.options import Time
from joulery.user import user_name


def _deadline_s(text: str, now_s: float) -> float:
    """A time of day or a time from now, as Unix seconds.

    Raises:
        ConfigError: It is neither, or it is in the past.
    """
    try:
        deadline_s = datetime.fromisoformat(text).timestamp()
    except ValueError:
        try:
            deadline_s = now_s + Time("24h").seconds(text, "--by")
        except ConfigError as error:
            expected = "a moment such as 2026-11-27T18:00, or a time from now such as 24h"
            raise ConfigError(error.message, pointer="--by", got=text, expected=expected, hint=error.hint) from None
    if deadline_s <= now_s:
        raise ConfigError("is over", pointer="--by", got=text, expected="a time to come")
    return deadline_s


@click.command("submit", context_settings={"ignore_unknown_options": True})
@click.option("--site", type=click.Path(path_type=Path), default=Path("site.yaml"), help="The site file (site.yaml).")
@click.option("--name", help="Name of this kind of job; the command's name unless given.")
@click.option("--owner", help="Owner of the job; the user unless given.")
@click.option("--min", "least", type=click.IntRange(1), default=1, help="Least number of slots it can use (1).")
@click.option("--max", "most", type=click.IntRange(1), help="Most slots it can use; as many as --min unless given.")
@click.option("--no-stop", is_flag=True, help="Never stop the job once it runs: it cannot save its state.")
@click.option("--by", metavar="WHEN", help="Needed at the latest: 2026-11-27T18:00, or a time from now such as 24h.")
@click.option(
    "--time", "limit_s", type=Time("6h"), help="Longest time it runs, such as 6h: with --by it may wait until then."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.argument("cmd", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- CMD...")
def command(
    site: Path,
    name: str | None,
    owner: str | None,
    least: int,
    most: int | None,
    no_stop: bool,
    by: str | None,
    limit_s: float | None,
    as_json: bool,
    cmd: tuple[str, ...],
) -> None:
    """Queue CMD; joulery schedule starts it, and may stop it with SIGTERM and start it again later.

    CMD runs in this folder with this environment and JOULERY_GPUS (its slots), JOULERY_RESTART_COUNT and
    JOULERY_PROGRESS (a file: append "epoch k/K" to it to report progress, so that the job may get more slots).

    With --by the job waits for hours of less carbon as long as its --time, or its progress, leaves room.
    """
    from joulery.app.schedule import submit_job
    from joulery.config import load
    from joulery.domain.format import duration
    from joulery.store.files import readable

    most = least if most is None else most
    if most < least:
        raise ConfigError("is less than --min", pointer="--max", got=str(most), expected=f"at least {least}")
    job = {
        "command": list(cmd),
        "cwd": str(Path.cwd()),
        "environment": dict(os.environ),
        "name": readable(name or Path(cmd[0]).name),
        "owner": readable(owner or user_name()),
    }
    now_s = time.time()
    deadline_s = None if by is None else _deadline_s(by, now_s)
    if deadline_s is not None and limit_s is not None and limit_s > deadline_s - now_s:
        click.echo(
            f"joulery: --time {duration(limit_s)} is longer than until --by {by}: the job may end too late", err=True
        )
    times = {"deadline_s": deadline_s, "limit_s": limit_s}
    number = submit_job(load(site), job, least, most, stoppable=not no_stop, **times)
    click.echo(json.dumps({"job": number}) if as_json else f"job {number}")
