"""``joulery measure``: run a command, and report its energy and carbon."""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import click

from joulery.domain.errors import CapabilityError, JouleryError
from joulery.ui.cli import report_error
from joulery.ui.cli.options import NearChoice, Time, carbon_flags
from joulery.ui.cli.streams import discard, lost_if_refused

if TYPE_CHECKING:
    from joulery.accounting.operations.align import Estimator
    from joulery.app.measuring import JobPlace, Measured, Tracing
    from joulery.app.runs.recorded import RunView


@click.command(
    "measure",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    options_metavar="[OPTIONS] --",
)
@carbon_flags
@click.option("--carbon-at", metavar="WHEN", help="Look the intensity up as if the run had started then (assumed).")
@click.option("--owner", metavar="O", help="Owner to charge.")
@click.option(
    "--out", type=click.Path(path_type=Path), metavar="DIR", help="Keep the run here (a new folder in runs/)."
)
@click.option("--period", "period_s", type=Time("4 ms"), help="Sampling period, such as 4 ms (10 ms).")
@click.option(
    "--idle", type=NearChoice(["whole", "share", "none"]), default="whole", help="Idle energy to charge (whole)."
)
@click.option("--pue", type=float, default=1.0, metavar="X", help="Facility energy per IT energy (1).")
@click.option(
    "--embodied", type=float, default=0.0, metavar="KG", help="CO2e of making the machine, kg; with --lifetime."
)
@click.option("--lifetime", type=float, default=0.0, metavar="YEARS", help="Years over which --embodied is spread.")
@click.option(
    "--meter",
    "meters",
    multiple=True,
    metavar="M",
    help="rapl, nvml, amd, jetson, dcgm:URL, ipmi, redfish:URL, slurm, cpu-model[:IDLE,MAX], replay:FILE, fake:WATTS. "
    "Repeatable (all that this machine has).",
)
@click.option(
    "--trace",
    "framework",
    type=NearChoice(["torch", "jax", "tensorflow"]),
    help="Record its operations, for joules by layer.",
)
@click.option("--steps", metavar="S", help="Steps to trace: skip=1,warmup=1,active=3,repeat=3.")
@click.option(
    "--estimator",
    type=NearChoice(["recency", "regression"]),
    default="recency",
    help="Traced: energy of operations from the last reading, or by regression over all readings.",
)
@click.option(
    "--node",
    metavar="K/N",
    help="Node K of N of a job, from 0: its run is DIR/node-K (as srun sets).",
)
@click.option("--json", "as_json", is_flag=True, help="Print the footprint as one line of JSON, on standard error too.")
@click.argument("command_line", nargs=-1, required=True, metavar="CMD...")
def command(
    command_line: tuple[str, ...],
    carbon_at: str | None,
    owner: str | None,
    out: Path | None,
    period_s: float | None,
    idle: str,
    pue: float,
    embodied: float,
    lifetime: float,
    meters: tuple[str, ...],
    framework: str | None,
    steps: str | None,
    estimator: Estimator,
    node: str | None,
    as_json: bool,
    **flags: str | None,
) -> int:
    """Run CMD and measure it with its child processes: joules by device, grams of CO2-equivalent.

    CMD keeps its standard streams, its signals and its exit code. The footprint goes to standard error and, with the
    readings, to a run directory that `joulery report` renders.

    Of several tasks on a node (srun, torchrun) the first measures all. Of several nodes each leaves its run in DIR on a
    shared disk, and the first prints their sum; `joulery report DIR` does so again.
    """
    from joulery.app.measuring import PERIOD_S, Settings, Terms, job_place, measure_command, moment_s, open_carbon
    from joulery.app.wiring.meters import parse_meter

    given = {name: value for name, value in flags.items() if value is not None}
    settings = Settings(PERIOD_S if period_s is None else period_s, tuple(parse_meter(text) for text in meters) or None)
    at_s = None if carbon_at is None else moment_s(carbon_at)
    terms = Terms(idle, pue, given, at_s, embodied, lifetime)
    source = open_carbon(given)
    tracing = _tracing(framework, steps, estimator)
    place = job_place(os.environ, node)
    guard = ExitCodeFirst()
    with guard:
        measured = measure_command(
            command_line,
            settings=settings,
            terms=terms,
            source=source,
            owner=owner,
            out=out,
            ended=guard.ended,
            tracing=tracing,
            place=place,
        )
        guard.exit_code = measured.exit_code
        with lost_if_refused():
            _print_result(measured, place, as_json=as_json)
    return guard.exit_code


class ExitCodeFirst:
    """Keeps the exit code of the measured command, whatever fails in joulery after the command has ended.

    Attributes:
        exit_code: The exit code once the command has ended.
    """

    def __init__(self) -> None:
        self.exit_code = 0
        self._ended = False

    def ended(self, exit_code: int) -> None:
        """Store the exit code of the command, which has ended."""
        self.exit_code = exit_code
        self._ended = True

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is None or not self._ended:
            return False
        with lost_if_refused():
            if isinstance(error, KeyboardInterrupt):
                click.echo(
                    "joulery: interrupted while writing the report; `joulery report` makes it from the run", err=True
                )
            elif isinstance(error, BrokenPipeError):
                discard(sys.stderr)
            elif isinstance(error, JouleryError):
                report_error(error, as_json=False)
            else:
                traceback.print_exception(error)
        return isinstance(error, Exception | KeyboardInterrupt)


def _tracing(framework: str | None, steps: str | None, estimator: Estimator) -> Tracing | None:
    if framework is None:
        if steps is not None:
            raise click.UsageError("--steps needs --trace")
        return None
    from joulery.app.measuring import run_tracing

    return run_tracing(framework, steps, estimator)


def _print_result(measured: Measured, place: JobPlace, *, as_json: bool) -> None:
    if measured.error is not None:
        message, _, hint = measured.error.partition("\n  ")
        report_error(CapabilityError(message, hint=hint), as_json=as_json)
    for text in measured.warnings:
        click.echo(f"joulery: warning: {text}", err=True)
    if measured.account is None or measured.path is None:
        return
    nodes = _nodes(measured.path, place)
    if as_json:
        job = {"job": _job_document(nodes, place)} if nodes else {}
        click.echo(json.dumps({**measured.account.report, "run": str(measured.path), **job}), err=True)
        return
    from joulery.app.runs.recorded import RunView, measured_label
    from joulery.ui.kit.console import table_console
    from joulery.ui.reports.table import roll_up
    from joulery.ui.reports.text import print_text

    console = table_console(110, stderr=True)
    footprint = measured.account.charged.run
    label = measured_label(measured.manifest, footprint)
    view = RunView(measured.path, measured.manifest, footprint, measured.account.report, label)
    with console.capture() as captured:  # printed in one go: rich would end the program on a closed pipe
        print_text(roll_up([view], "component"), console)
        console.print(f"  kept in {measured.path}: joulery report {measured.path}", style="dim", soft_wrap=True)
        if nodes:
            console.print(f"\nthe job, {len(nodes)} of {place.nodes} nodes", style="bold")
            print_text(roll_up(nodes, "component"), console)
            folder = measured.path.parent
            console.print(f"  kept in {folder}: joulery report {folder}", style="dim", soft_wrap=True)
    click.echo(captured.get(), err=True, nl=False)
    if "tracing" in measured.manifest:
        from joulery.ui.cli.report_anatomy import layers_text

        click.echo(layers_text([measured.path]), err=True, nl=False)


def _nodes(run: Path, place: JobPlace) -> list[RunView]:
    """The runs of the job's nodes that have ended, for its first node; empty for any other and for a job on one."""
    if place.nodes < 2 or place.node or run.name != place.folder:
        return []
    from joulery.app.runs.job_runs import runs_in, wait_for_nodes
    from joulery.app.runs.recorded import load_run

    wait_for_nodes(run.parent, place.nodes)
    return [view for one in runs_in(run.parent) if not (view := load_run(one)).interrupted]


def _job_document(nodes: list[RunView], place: JobPlace) -> dict[str, object]:
    """The sum of a job's nodes, JSON-ready."""
    from joulery.ui.reports.table import as_json, roll_up

    document = as_json(roll_up(nodes, "component"), with_rows=False)
    return {**document, "nodes": place.nodes, "reported": len(nodes)}
