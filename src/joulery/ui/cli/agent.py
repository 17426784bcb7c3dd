"""``joulery agent``: writes the energy of each job of this node to the folder the scheduler reads."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from joulery.ui.cli.numpy_threads import keep_numpy_on_one_thread
from joulery.ui.cli.options import Time, cluster_option, option
from joulery.ui.cli.streams import keep_going

if TYPE_CHECKING:
    from joulery.app.limits_config import LimitsConfig
    from joulery.config.site import Site


@dataclass(frozen=True, slots=True)
class AgentFlags:
    """The flags of ``joulery agent`` from which its configuration is made."""

    sample_s: float
    once: bool
    node: str | None
    prolog: Path | None
    progress_socket: Path | None


@click.command("agent")
@click.argument("site", type=click.Path(path_type=Path))
@cluster_option
@option("--period", "sample_s", old="--sample", type=Time("30 s"), default=30.0, help="Sampling period (30 s).")
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
@click.option("--json", "as_json", is_flag=True, help="Print each sample as one JSON object.")
@click.option("--orders", hidden=True, help="The site file's settings, already read.")
def command(
    site: Path,
    cluster: str | None,
    sample_s: float,
    once: bool,
    node: str | None,
    prolog: Path | None,
    progress_socket: Path | None,
    as_json: bool,
    orders: str | None,
) -> None:
    """Meter the jobs of Slurm on this node until Ctrl-C, into the folder jobs.slurm.meters of SITE.

    With jobs.policy.kind swift, lean or frugal and mode act it also limits the power of their GPUs, as leased settings.
    Run it as root on every node: the kernel shows processes of others to root alone.
    """
    keep_numpy_on_one_thread()
    if orders is None:
        # Reading a site takes more memory than metering jobs: this process replaces itself by one that read no site.
        given = _orders(site, cluster, AgentFlags(sample_s, once, node, prolog, progress_socket))
        flags = ["--json"] if as_json else []
        argv = [sys.executable, "-P", "-m", "joulery", "agent", str(site), "--orders", given, *flags]
        os.execv(sys.executable, argv)
    from joulery.app.node_agent import AgentConfig, run_node_agent

    run_node_agent(AgentConfig.from_json(orders), keep_going(_say_json if as_json else _say))


def _orders(site: Path, cluster: str | None, flags: AgentFlags) -> str:
    """The configuration of the agent as JSON, from its flags and the site file."""
    from joulery.app.node_agent import AgentConfig, AgentTimes
    from joulery.app.wiring.cluster import jobs_of, one_cluster, progress_folder
    from joulery.app.wiring.site_meters import meter_specs
    from joulery.config import load
    from joulery.domain.errors import ConfigError

    config = one_cluster(load(site), cluster)
    folder = jobs_of(config).slurm.meters
    if folder is None:
        raise ConfigError(
            "names no folder for the energy of jobs",
            file=str(site),
            pointer="jobs.slurm.meters",
            hint="name a folder on a disk that all nodes share",
        )
    name = flags.node or os.environ.get("SLURMD_NODENAME") or platform.node().partition(".")[0]
    conf = jobs_of(config).slurm.conf
    slurm = {"node": name} | ({} if conf is None else {"conf": str(conf.absolute())})
    progress = None if flags.progress_socket is None else (str(flags.progress_socket), str(progress_folder(config)))
    return AgentConfig(
        folder=str(folder),
        node=name,
        only=name if flags.node else "",
        cluster=jobs_of(config).slurm.cluster or "",
        meters=meter_specs(config.meters, {"slurm": slurm}),
        times=AgentTimes(flags.sample_s, 1 if flags.once else None),
        prolog=None if flags.prolog is None else str(flags.prolog),
        progress=progress,
        limits=_limits(config),
    ).to_json()


def _limits(config: Site) -> LimitsConfig | None:
    """Settings of jobs' power limits; only in mode act."""
    from joulery.app.limits_config import limits_config
    from joulery.app.wiring.cluster import jobs_of

    limits = limits_config(jobs_of(config))
    if limits is not None and config.mode != "act":
        click.echo(f"mode {config.mode}: no power limits are set", err=True)
        return None
    return limits


def _say_json(sample: Mapping[str, Any]) -> None:
    click.echo(json.dumps(sample))


def _say(sample: Mapping[str, Any]) -> None:
    if "text" in sample:
        click.echo(_limit_text(sample))
        return
    jobs = ", ".join(f"job {job} {total['energy_j'] / 1e3:.1f} kJ" for job, total in sample["jobs"].items())
    away = "" if sample["written"] else " (not written: the folder is away; the next sample makes up for it)"
    click.echo(f"{jobs or 'no jobs'}; the node {sample['machine_j'] / 1e3:.1f} kJ{away}")


def _limit_text(entry: Mapping[str, Any]) -> str:
    """A change of a power limit, or a note, as text."""
    if entry["kind"] == "note" or "limits_w" not in entry:
        job = f"job {entry['job']} " if entry["kind"] == "limit" else ""
        return f"{job}{entry['text']}"
    limits = ", ".join(f"{gpu} {limit_w:g} W" for gpu, limit_w in entry["limits_w"].items())
    return f"job {entry['job']}: {limits} (work by {entry['work'] or 'nothing yet'}); {entry['text']}"
