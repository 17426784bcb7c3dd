"""``joulery report --from-sacct``: energy and carbon of past Slurm jobs, and a trace of them to simulate."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from joulery.ui.cli.options import carbon_flags, option

if TYPE_CHECKING:
    from joulery.accounting.past import PastUse
    from joulery.app.past_jobs import PastReport

_FLAG = "--from-sacct"
_BY = ("owner", "account", "partition", "state", "name")


class ReportOrSacct(click.Command):
    """The report of runs; of past jobs where ``--from-sacct`` is given, of a scheduler's where ``--since`` is."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """The context of the command that the flags name."""
        if any(word == _FLAG or word.startswith(f"{_FLAG}=") for word in args):
            return sacct_command.make_context(info_name, args, parent, **extra)
        if any(word in ("--since", "--jobs") or word.startswith(("--since=", "--jobs=")) for word in args):
            from joulery.ui.cli.report_jobs import jobs_command

            return jobs_command.make_context(info_name, args, parent, **extra)
        return super().make_context(info_name, args, parent, **extra)


@click.command("report")
@click.option(_FLAG, "file", type=click.Path(path_type=Path), required=True, help="Output of sacct -P, with header.")
@click.option("--since", metavar="TIME", help="Only what ran in the last 30d, 12h ...; everything unless given.")
@click.option("--by", type=click.Choice(_BY), default="owner", help="Grouping key of the table (owner).")
@click.option("--gpu-power", metavar="W", help='Power of a GPU while a job holds it, such as "250 W".')
@click.option("--cpu-power", metavar="W", help='Power of a core while a job holds it, such as "5 W" (not counted).')
@click.option("--node-power", metavar="W", help="Power a node adds while a job holds it (not counted).")
@click.option("--pue", type=click.FloatRange(1), default=1.0, help="Facility energy per IT energy (1).")
@click.option("--sacct-timezone", metavar="TZ", help="Time zone of the stamps in FILE; this machine's unless given.")
@click.option("--trace", type=click.Path(path_type=Path), metavar="CSV", help="Write the jobs for joulery simulate.")
@click.option("--what-if", metavar="P", help="Simulate these jobs under another scheduler, such as lean.")
@click.option("--gpus", type=click.IntRange(min=1), metavar="N", help="GPUs of the cluster (the most held at once).")
@option("--samples", old="--draws", type=click.IntRange(2, 1000), default=10, help="Samples behind the interval (10).")
@carbon_flags
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def sacct_command(
    file: Path,
    since: str | None,
    by: str,
    gpu_power: str | None,
    cpu_power: str | None,
    node_power: str | None,
    pue: float,
    sacct_timezone: str | None,
    trace: Path | None,
    what_if: str | None,
    gpus: int | None,
    samples: int,
    as_json: bool,
    **carbon: str | None,
) -> None:
    """Report joules and grams of past Slurm jobs by owner, account or partition.

    Joules are elapsed time times the stated power of what the jobs held (modelled), or Slurm's own measurement
    where sacct printed ConsumedEnergyRaw.

    \b
    sacct -a -X -P -S now-30days \\
        -o JobID,JobName,User,Account,Partition,State,Submit,Eligible,Start,End,ElapsedRaw,AllocTRES > jobs.txt
    joulery report --from-sacct jobs.txt --gpu-power "250 W" --by owner --zone GB
    """
    from joulery.app.past_jobs import PastJobsRequest, report_past, write_trace
    from joulery.config.parsing.quantity import POWER, TIME, flag_quantity

    def watts(text: str | None, flag: str) -> float | None:
        return None if text is None else flag_quantity(text, POWER, flag)

    wanted = PastJobsRequest(
        file=file,
        since_s=None if since is None else flag_quantity(since, TIME, "--since"),
        by=by,
        gpu_w=watts(gpu_power, "--gpu-power"),
        cpu_w=watts(cpu_power, "--cpu-power") or 0.0,
        node_w=watts(node_power, "--node-power") or 0.0,
        pue=pue,
        timezone=sacct_timezone,
        carbon={name: value for name, value in carbon.items() if value is not None},
    )
    report = report_past(wanted)
    if trace is not None:
        kept = write_trace(report.jobs, trace)
        click.echo(
            f"{kept} jobs written to {trace}: joulery simulate examples/green-year.yaml --trace {trace}", err=True
        )
    saved = None
    if what_if is not None:
        from joulery.app.past_jobs import simulated_savings
        from joulery.ui.reports.savings import SavingsReport

        saved = SavingsReport(simulated_savings(report, what_if, gpus, samples), report.total.carbon_g / 1e3)
    if as_json:
        click.echo(json.dumps(report.document() | ({} if saved is None else {"what_if": saved.document()})))
        return
    click.echo(_text(report, by) + ("" if saved is None else f"\n\n{saved.text()}"))


def _text(report: PastReport, by: str) -> str:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column(by)
    for title in ("jobs", "GPU h", "energy", "carbon", "quality"):
        table.add_column(title, justify="right")
    for use in _shown(report.uses):
        table.add_row(*_cells(use))
    table.add_section()
    table.add_row(*_cells(report.total))
    console = Console(width=110, highlight=False, no_color=True)
    with console.capture() as captured:
        console.print(table)
        for note in report.notes:
            console.print(note)
    return captured.get().rstrip("\n")


def _shown(uses: Sequence[PastUse]) -> Sequence[PastUse]:
    return uses[:40]


def _cells(use: PastUse) -> tuple[str, ...]:
    from joulery.domain.energy.carbon import JOULES_PER_KWH

    grams = f"{use.carbon_g / 1e3:.2f} kg" if use.carbon_covered_j > 0 else "-"
    return (
        use.key,
        f"{use.jobs}",
        f"{use.gpu_s / 3600:.1f}",
        f"{use.energy_j / JOULES_PER_KWH:.2f} kWh",
        grams,
        str(use.quality),
    )
