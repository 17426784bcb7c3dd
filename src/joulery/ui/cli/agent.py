"""``joulery agent``: the energy of each job of this node, left where the scheduler reads it."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click


@click.command("agent")
@click.argument("site", type=click.Path(path_type=Path))
@click.option("--sample", default="30 s", metavar="TIME", help="Distance of the samples (30 s).")
@click.option("--once", is_flag=True, help="One sample, then end.")
@click.option("--node", help="The node's name; SLURMD_NODENAME or the host's unless given.")
@click.option(
    "--prolog", type=click.Path(path_type=Path), metavar="DIR", help="Folder of a prolog's files: GPUs by job."
)
@click.option(
    "--progress-socket",
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="Listen here for lines of progress; they go to the files in jobs.slurm.progress.",
)
@click.option("--json", "as_json", is_flag=True, help="Say each sample as one JSON object.")
def command(
    site: Path,
    sample: str,
    once: bool,
    node: str | None,
    prolog: Path | None,
    progress_socket: Path | None,
    as_json: bool,
) -> None:
    """Meter the jobs of Slurm on this node until Ctrl-C, into the folder jobs.slurm.meters of SITE.

    Run it as root on every node: the kernel shows processes of others to root alone.
    """
    from joulery.config import load
    from joulery.config.quantity import TIME, flag_quantity
    from joulery.domain.errors import ConfigError
    from joulery.runtime.compose.schedule import jobs_of, node_meter
    from joulery.runtime.compose.schedule import progress_socket as open_progress
    from joulery.runtime.schedule.agent import AgentTimes, run_agent
    from joulery.runtime.schedule.run import stopped_by_signals
    from joulery.runtime.schedule.spool import SpoolWriter

    config = load(site)
    folder = jobs_of(config).slurm.meters
    if folder is None:
        raise ConfigError(
            "says nowhere to leave what is metered",
            file=str(site),
            pointer="jobs.slurm.meters",
            hint="name a folder on a disk that all nodes share",
        )
    name = node or os.environ.get("SLURMD_NODENAME") or platform.node().partition(".")[0]
    listener = None if progress_socket is None else open_progress(config, progress_socket)
    meter = node_meter(config, name if node else "", prolog)
    times = AgentTimes(flag_quantity(sample, TIME, "--sample"), 1 if once else None)
    spool = SpoolWriter(folder, name, f"{time.time_ns():x}")
    try:
        with stopped_by_signals() as stop:
            run_agent(meter, spool, times, _say_json if as_json else _say, stop)
    finally:
        meter.close()
        if listener is not None:
            listener.close()


def _say_json(sample: Mapping[str, Any]) -> None:
    click.echo(json.dumps(sample))


def _say(sample: Mapping[str, Any]) -> None:
    jobs = ", ".join(f"job {job} {total['energy_j'] / 1e3:.1f} kJ" for job, total in sample["jobs"].items())
    away = "" if sample["written"] else " (not written: the folder is away; the next sample makes up for it)"
    click.echo(f"{jobs or 'no jobs'}; the node {sample['machine_j'] / 1e3:.1f} kJ{away}")
