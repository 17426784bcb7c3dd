"""``joulery report --from-sacct``: energy and carbon of past Slurm jobs, and a trace of them to simulate."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from joulery.domain.errors import ConfigError
from joulery.ui.cli.options import KeyList, Month, Time, carbon_flags, chosen_format, format_option, html_option, option
from joulery.ui.cli.statements import put_out, written_statement

if TYPE_CHECKING:
    from joulery.accounting.past import PastUse
    from joulery.app.past_jobs import PastJobsRequest, PastReport, WhatIf
    from joulery.ui.kit.statement import Statement
    from joulery.ui.reports.savings import SavingsReport

_FLAG = "--from-sacct"
# joulery.app.past_jobs.BY, repeated here so that --help imports nothing heavy; a test compares the two.
BY = ("owner", "account", "partition", "state", "name", "cluster", "month")
# joulery.ui.kit.statement.FORMATS, likewise.
FORMATS = ("text", "json", "csv", "markdown")


class ReportOrSacct(click.Command):
    """The report of runs, of past jobs with ``--from-sacct``, or of a scheduler's jobs with ``--since``."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """The context of the command that the flags name."""
        if any(word == _FLAG or word.startswith(f"{_FLAG}=") for word in args):
            return sacct_command.make_context(info_name, args, parent, **extra)
        if any(word.partition("=")[0] in ("--since", "--jobs", "--month") for word in args):
            from joulery.ui.cli.report_jobs import jobs_command

            return jobs_command.make_context(info_name, args, parent, **extra)
        return super().make_context(info_name, args, parent, **extra)


@click.command("report")
@click.option(
    _FLAG,
    "file",
    type=click.Path(path_type=Path),
    required=True,
    help="Output of sacct -P, with header; - for standard input.",
)
@click.option(
    "--since", "since_s", type=Time("30d"), help="Only what ran in the last 30d, 12h ...; everything unless given."
)
@click.option("--by", type=KeyList(BY), default="owner", help="Grouping keys of the table (owner); month splits jobs.")
@click.option("--month", type=Month(), metavar="YYYY-MM", help="Only what jobs used in this calendar month.")
@click.option("--gpu-power", metavar="W", help='Power of a GPU while a job holds it, such as "250 W".')
@click.option("--cpu-power", metavar="W", help='Power of a core while a job holds it, such as "5 W" (not counted).')
@click.option("--node-power", metavar="W", help="Power a node adds while a job holds it (not counted).")
@click.option("--pue", type=click.FloatRange(1), default=1.0, help="Facility energy per IT energy (1).")
@click.option("--sacct-timezone", metavar="TZ", help="Time zone of the stamps in FILE; this machine's unless given.")
@click.option("--trace", type=click.Path(path_type=Path), metavar="CSV", help="Write the jobs for joulery simulate.")
@click.option("--what-if", metavar="P", help="Simulate these jobs under another scheduler, such as lean.")
@click.option("--gpus", type=click.IntRange(min=1), metavar="N", help="GPUs of the cluster (the most held at once).")
@click.option(
    "--node-gpus", type=click.IntRange(1, 1024), metavar="N", help="GPUs of a node; jobs are placed on nodes."
)
@click.option("--keep-gpus", is_flag=True, help="With --what-if: jobs keep the GPUs they had; none is resized.")
@click.option("--nodes", metavar="GROUPS", help="Nodes by GPU type: TYPE:NODESxGPUS,... such as a100:2x8,v100:4x4.")
@click.option(
    "--jobs",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="A scheduler's state: power and progress as measured.",
)
@click.option(
    "--meters", type=click.Path(path_type=Path), metavar="FOLDER", help="The agents' folder: power limits as measured."
)
@option("--samples", old="--draws", type=click.IntRange(2, 1000), default=10, help="Samples behind the interval (10).")
@carbon_flags
@format_option(*FORMATS, help="Output format (text); markdown suits a mail.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@html_option
@click.option("--out", type=click.Path(path_type=Path), help="Write to this file instead of standard output.")
def sacct_command(
    file: Path,
    since_s: float | None,
    by: str,
    month: str | None,
    gpu_power: str | None,
    cpu_power: str | None,
    node_power: str | None,
    pue: float,
    sacct_timezone: str | None,
    trace: Path | None,
    what_if: str | None,
    gpus: int | None,
    node_gpus: int | None,
    keep_gpus: bool,
    nodes: str | None,
    jobs: Path | None,
    meters: Path | None,
    samples: int,
    form: str | None,
    as_json: bool,
    html: Path | None,
    out: Path | None,
    **carbon: str | None,
) -> None:
    """Report joules and grams of past Slurm jobs by owner, account, partition, cluster or month.

    Joules are elapsed time times the stated power of what the jobs held (modelled), or Slurm's own measurement
    where sacct printed ConsumedEnergyRaw.

    \b
    sacct -a -X -P -S now-30days \\
        -o JobID,JobName,User,Account,Partition,State,Submit,Eligible,Start,End,ElapsedRaw,AllocTRES,ReqTRES > jobs.txt
    joulery report --from-sacct jobs.txt --gpu-power "250 W" --by owner --zone GB
    joulery report --from-sacct jobs.txt --gpu-power "250 W" --by account,owner --month 2026-11 --format markdown
    """
    from joulery.app.past_jobs import PastJobsRequest, WhatIf, report_past

    form, out = chosen_format(form, as_json=as_json, html=html, out=out)
    if what_if is not None and form not in ("text", "json"):
        raise ConfigError("--what-if goes with text and json", pointer="--what-if", got=form)
    wanted = PastJobsRequest(
        file=Path("/dev/stdin") if str(file) == "-" else file,
        since_s=since_s,
        by=by,
        gpu_w=_watts(gpu_power, "--gpu-power"),
        cpu_w=_watts(cpu_power, "--cpu-power") or 0.0,
        node_w=_watts(node_power, "--node-power") or 0.0,
        pue=pue,
        timezone=sacct_timezone,
        carbon={name: value for name, value in carbon.items() if value is not None},
        month=month,
    )
    report = report_past(wanted)
    if trace is not None:
        _write_trace(report, trace, jobs)
    asked = what_if and WhatIf(what_if, gpus, samples, node_gpus, jobs, nodes, meters, keep_gpus)
    saved = _saved(report, asked) if asked else None
    put_out(_written(report, saved, form, wanted), out)


def _write_trace(report: PastReport, trace: Path, jobs: Path | None) -> None:
    from joulery.app.past_jobs import write_trace

    kept = write_trace(report.jobs, trace, jobs)
    example = f"joulery simulate examples/green-year.yaml --trace {trace}"
    click.echo(f"{kept} jobs written to {trace}: {example}", err=True)


def _watts(text: str | None, flag: str) -> float | None:
    from joulery.config.parsing.quantity import POWER, flag_quantity

    return None if text is None else flag_quantity(text, POWER, flag)


def _saved(report: PastReport, wanted: WhatIf) -> SavingsReport:
    from joulery.app.past_jobs import simulated_savings
    from joulery.ui.reports.savings import SavingsReport

    found = simulated_savings(report, wanted)
    return SavingsReport(found.savings, report.total.carbon_g / 1e3, found)


def _written(report: PastReport, saved: SavingsReport | None, form: str, wanted: PastJobsRequest) -> str:
    if form == "json":
        return json.dumps(report.document() | ({} if saved is None else {"what_if": saved.document()})) + "\n"
    if form == "text":
        return _text(report, wanted.by) + ("" if saved is None else f"\n\n{saved.text()}") + "\n"
    return written_statement(_statement(report, wanted.month), form)


def _statement(report: PastReport, month: str | None) -> Statement:
    from joulery.ui.kit.statement import Statement, StatementRow

    def row(use: PastUse, keys: tuple[str, ...]) -> StatementRow:
        joules = (use.energy_j, use.carbon_covered_j)
        return StatementRow.of(keys, use.jobs, use.gpu_s, joules, use.carbon_g, str(use.quality))

    rows = tuple(row(use, report.values[use.key]) for use in report.uses)
    title = f"Energy and carbon of Slurm jobs{'' if month is None else f', {month}'}"
    return Statement(title, report.by, rows, row(report.total, ()), report.notes)


def _text(report: PastReport, by: str) -> str:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column(by.replace(",", " / "))
    for title in ("jobs", "GPU h", "energy", "carbon", "quality"):
        table.add_column(title, justify="right")
    shown = _shown(report.uses)
    for use in shown:
        table.add_row(*_cells(use))
    if left := len(report.uses) - len(shown):
        table.add_row(f"and {left} more: --format csv has them")
    table.add_section()
    table.add_row(*_cells(report.total))
    console = Console(width=110, highlight=False, no_color=True)
    with console.capture() as captured:
        console.print(table)
        for note in report.notes:
            console.print(note)
    return captured.get().rstrip("\n")


def _shown(uses: Sequence[PastUse]) -> Sequence[PastUse]:
    several = any(" / " in use.key for use in uses)
    return uses if several else uses[:40]


def _amount(value: float, unit: str) -> str:
    """An amount with two decimals, or with two significant digits if it is small."""
    return f"{value:.2f} {unit}" if value >= 0.1 or value == 0 else f"{value:.2g} {unit}"


def _cells(use: PastUse) -> tuple[str, ...]:
    from joulery.domain.energy.carbon import JOULES_PER_KWH

    grams = _amount(use.carbon_g / 1e3, "kg") if use.carbon_covered_j > 0 else "–"
    return (
        use.key,
        f"{use.jobs}",
        f"{use.gpu_s / 3600:.1f}",
        _amount(use.energy_j / JOULES_PER_KWH, "kWh"),
        grams,
        str(use.quality),
    )
