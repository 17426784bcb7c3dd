"""``joulery submit``: a training job for this machine's scheduler."""

from __future__ import annotations

import getpass
import json
import os
import time
from pathlib import Path

import click

from joulery.domain.errors import ConfigError


@click.command("submit", context_settings={"ignore_unknown_options": True})
@click.option("--site", type=click.Path(path_type=Path), default=Path("site.yaml"), help="The site file (site.yaml).")
@click.option("--name", help="What recurring jobs of one kind share; the command's name unless given.")
@click.option("--owner", help="Who pays; the user unless given.")
@click.option("--min", "least", type=click.IntRange(1), default=1, help="Fewest slots it can use (1).")
@click.option("--max", "most", type=click.IntRange(1), help="Most slots it can use; as many as --min unless given.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.argument("cmd", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- CMD...")
def command(
    site: Path, name: str | None, owner: str | None, least: int, most: int | None, as_json: bool, cmd: tuple[str, ...]
) -> None:
    """Queue CMD; joulery schedule starts it, and may stop it with SIGTERM and start it again later.

    CMD runs in this folder with this environment and JOULERY_GPUS (slots it has), JOULERY_RESTART_COUNT and
    JOULERY_PROGRESS (append "epoch k/K" to this file and it can grow where that pays).
    """
    from joulery.app.schedule import jobs_of, machine_slots
    from joulery.config import load
    from joulery.store.jobs import JobBook

    jobs = jobs_of(load(site))
    if jobs.backend != "local":
        raise ConfigError("jobs of Slurm are submitted with sbatch", hint="see docs/how-to/slurm.md")
    most = least if most is None else most
    if most < least:
        raise ConfigError("is less than --min", pointer="--max", got=str(most), expected=f"at least {least}")
    slots = len(machine_slots(jobs.slots))
    if least > slots:
        raise ConfigError(
            "no such job can ever run here", pointer="--min", got=str(least), expected=f"at most {slots} slots"
        )
    number = JobBook(jobs.state).add(
        {
            "command": list(cmd),
            "cwd": str(Path.cwd()),
            "environment": dict(os.environ),
            "name": name or Path(cmd[0]).name,
            "owner": owner or getpass.getuser(),
            "min_slots": least,
            "max_slots": min(most, slots),
            "submit_s": time.time(),
        }
    )
    click.echo(json.dumps({"job": number}) if as_json else f"job {number}")
