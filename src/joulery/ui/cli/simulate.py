"""``joulery simulate``: run a scenario and compare policies."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from joulery.ui.cli.native_output import without_solver_lines
from joulery.ui.cli.options import option


@click.command("simulate")
@click.argument("scenario", type=click.Path())
@click.option(
    "--policy",
    "--policies",
    "policies",
    multiple=True,
    metavar="P[,P]",
    help="Policies to compare. Repeatable.",
)
@click.option("--seeds", type=click.IntRange(1, 10_000), metavar="N", help="Number of seeds (the scenario's).")
@click.option("--profile", metavar="DIR", help="kind variants: a folder of exhaustive profiles.")
@click.option("--carbon", metavar="FILE", help="kinds variants and training: a CSV file of carbon intensity.")
@click.option("--column", metavar="NAME", help="kinds variants and training: its column in g/kWh.")
@click.option("--loss", metavar="P[,P]", help="kind variants: accuracy that may be lost, instead of lambda: 0.8%.")
@click.option("--trace", metavar="FILE", help="kind training: a CSV file of jobs (submit_s, duration_s).")
@click.option(
    "--requests",
    metavar="FILE",
    help="kind ordering: a Parquet log (output_tokens, pred_cls5 and, if there, pred_cls3).",
)
@click.option("--arrivals", metavar="FILE", help="kind clocks: a Parquet log of arrivals (t_s).")
@click.option(
    "--plan", metavar="FILE", help="kind clocks: a plan (joulery plan --out) with the models that share a GPU."
)
@option(
    "--carbon-forecast",
    old="--foresight",
    metavar="F",
    help="kind training: the schedulers' forecast: oracle, typical, recorded, an error (27 %), or a file.",
)
@click.option(
    "--slack-hours",
    metavar="H",
    help="kind training: jobs of more than an hour may end so many hours later, to wait for cleaner ones.",
)
@click.option("--days", metavar="N", help="kind training: only jobs of the first N days.")
@click.option("--seed", metavar="N", help="kinds training and clocks: this one seed.")
@click.option("--html", "--page", "page", type=click.Path(path_type=Path), metavar="FILE", hidden=True)
@click.option(
    "--out", type=click.Path(path_type=Path), metavar="DIR", help="Keep the result as a run in this new folder."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    scenario: str,
    policies: tuple[str, ...],
    seeds: int | None,
    out: Path | None,
    page: Path | None,
    as_json: bool,
    **inputs: str | None,
) -> None:
    """Run SCENARIO in virtual time: the policies of the live system, side by side on the same requests or jobs.

    It needs no GPU and changes nothing. The same file and seeds give the same output.
    """
    import json

    from joulery.app.simulation import Overrides, run_scenario
    from joulery.config.scenario import load_scenario
    from joulery.domain.errors import ConfigError

    made = load_scenario(scenario)
    if page is not None:
        paper = {"variants": "clover", "training-figures": "green"}.get(made.kind)
        raise ConfigError(
            f"a scenario of kind {made.kind} has no page",
            pointer="--html",
            hint=f"the paper's figures: python -m reproduce {paper} --html {page}, in a clone" if paper else "",
        )
    names = tuple(name for entry in policies for name in entry.split(",") if name)
    given = {name: value for name, value in inputs.items() if value is not None}
    with without_solver_lines(), _Bar(hidden=as_json or not sys.stderr.isatty()) as bar:
        found = run_scenario(made, Overrides(names, seeds, given), bar.show)
    if out is not None:
        from joulery.store.run.directory import create_run

        with create_run(out, kind="simulate", argv=sys.argv, details={"scenario": made.name}) as run:
            for row in found.document["results"]:
                run.log("result", **row)
            run.write_report(found.document)
    if as_json:
        click.echo(json.dumps(found.document))
        return
    from rich.console import Console

    from joulery.ui.reports.simulation import result_view

    console = Console(highlight=False)
    for part in found.view:
        console.print(result_view(part))
    if out is not None:
        click.echo(f"kept in {out}", err=True)


class _Bar:
    """A progress bar on standard error, removed at the end."""

    def __init__(self, *, hidden: bool) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

        self._progress = Progress(
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
            disable=hidden,
        )
        self._task = self._progress.add_task("simulating", total=None)

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def show(self, done: int, total: int) -> None:
        """Show that ``done`` of ``total`` parts are done."""
        self._progress.update(self._task, completed=done, total=total)
