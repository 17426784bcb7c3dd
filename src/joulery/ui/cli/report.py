"""``joulery report``: render recorded runs as text, JSON, tables or pages."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from joulery.domain.errors import ConfigError
from joulery.ui.cli import report_anatomy
from joulery.ui.cli.options import NearChoice, carbon_flags, chosen_format, format_option, html_option
from joulery.ui.cli.report_sacct import ReportOrSacct

if TYPE_CHECKING:
    from joulery.app.runs.recorded import RunView
    from joulery.domain.ports import CarbonSource
    from joulery.ui.reports.table import Rollup

# joulery.ui.reports.table.BY, repeated here so that --help imports nothing heavy; a test compares the two.
BY = ("component", "device", "meter", "quality", "owner", "workload", "run", "hour", "month", "owner-month")
FORMATS = ("text", "json", "csv", "markdown", "model-card")


@click.command("report", cls=ReportOrSacct)
@click.argument("runs", nargs=-1, required=True, type=click.Path(), metavar="RUN...")
@click.option(
    "--by",
    type=NearChoice((*BY, *report_anatomy.BY)),
    help="Grouping of the table (component); the last four need a traced run.",
)
@format_option(*FORMATS, *report_anatomy.FORMATS, help="Output format (text); the last five need a traced run.")
@click.option("--depth", type=click.IntRange(min=1), metavar="N", help="Traced: cut names after N components.")
@click.option("--top", type=click.IntRange(min=1), default=20, metavar="N", help="Traced: operations to show (20).")
@click.option("--fold", is_flag=True, help="Traced: add up self-similar layers (layer_0, layer_1 ... as transformer).")
@click.option("--pattern", "patterns", multiple=True, metavar="P=NAME", help="Traced: fold components that match P.")
@click.option("--phase", metavar="P", help="Traced: only this phase: forward, backward, recompute, optimizer or other.")
@click.option("--device", metavar="D", help="Traced: only this device.")
@click.option("--per", metavar="UNITS", help='SCI score (ISO/IEC 21031) per functional unit, such as "1000 requests".')
@carbon_flags
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@html_option
@click.option("--out", type=click.Path(path_type=Path), help="Write to this file instead of standard output.")
def command(
    runs: tuple[str, ...],
    by: str | None,
    form: str | None,
    depth: int | None,
    top: int,
    fold: bool,
    patterns: tuple[str, ...],
    phase: str | None,
    device: str | None,
    per: str | None,
    as_json: bool,
    html: Path | None,
    out: Path | None,
    **carbon: str | None,
) -> None:
    """Report what RUN cost: joules, grams, owners, and how well each is known. Several runs are added up.

    RUN is a run directory, or a folder whose run directories are added up, such as that of a job on several nodes.

    With --zone or --carbon, the grams of measured runs are recomputed on that grid; their joules stay.

    A traced run (measure --trace, account --out) is reported by operation too: --by module, layer, op or phase.

    Past jobs of a Slurm cluster: joulery report --from-sacct FILE (its own flags: report --from-sacct - --help). The
    jobs of joulery schedule: joulery report --by owner --since 30d (report --since 30d --help).
    """
    from joulery.app.runs.job_runs import runs_in
    from joulery.ui.reports.table import roll_up

    runs = tuple(str(one) for run in runs for one in runs_in(run))
    form, out = chosen_format(form, as_json=as_json, html=html, out=out)
    selection = report_anatomy.ReportSelection(by, depth, top, fold, patterns, phase, device)
    grid = _grid(carbon)
    if report_anatomy.wanted(selection, form):
        if grid is not None:
            raise ConfigError("the grams of operations stay as recorded", hint="leave --zone and --carbon out")
        report_anatomy.write(report_anatomy.render(runs, selection, form), form, out)
        return
    views = _read(runs, with_timeline=form == "html" or by == "hour", carbon=grid)
    rollup = roll_up(views, by or "component")
    text = _render(rollup, form, with_rows=by is not None, to_terminal=out is None, per=per)
    if by is None and form == "text" and any("tracing" in view.manifest for view in views):
        text += report_anatomy.layers_text(runs)
    if out is None:
        click.echo(text, nl=False)
        return
    from joulery.store.files import write_named

    write_named(out, text)
    click.echo(f"{out}", err=True)


def _grid(flags: dict[str, str | None]) -> CarbonSource | None:
    """The intensity that the flags name; None without any."""
    given = {name: value for name, value in flags.items() if value is not None}
    if not given:
        return None
    from joulery.app.wiring.carbon import source_from_flags

    return source_from_flags(given)


def _read(runs: tuple[str, ...], *, with_timeline: bool, carbon: CarbonSource | None) -> list[RunView]:
    """The runs, each once."""
    from joulery.app.runs.recorded import load_run
    from joulery.ui.kit.console import progress_bar

    views: list[RunView] = []
    with progress_bar("reading runs", quiet=not sys.stderr.isatty()) as report_progress:
        for number, run in enumerate(runs):
            report_progress(number, len(runs), run)
            views.append(load_run(run, with_timeline=with_timeline, carbon=carbon))
    names = [view.name for view in views]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"the run {twice[0]} is named twice", hint="a run counts once: leave the copy out")
    return views


def _render(rollup: Rollup, form: str, *, with_rows: bool, to_terminal: bool = False, per: str | None = None) -> str:
    import io
    import json

    from joulery.ui.reports import disclosure
    from joulery.ui.reports.html import render_html
    from joulery.ui.reports.table import as_csv, as_json

    score = None if per is None else disclosure.sci_score(rollup, disclosure.FunctionalUnit.parse(per))
    if form == "json":
        document = as_json(rollup, with_rows=with_rows)
        return json.dumps(document if score is None else {**document, "sci": score.as_dict()}, indent=2) + "\n"
    if form == "markdown":
        return disclosure.as_markdown(rollup, score)
    if score is not None and form != "text":
        raise ConfigError("--per goes with text, json and markdown", pointer="--per", got=form)
    if form == "model-card":
        return disclosure.as_model_card(rollup)
    if form == "csv":
        return as_csv(rollup)
    if form == "html":
        return render_html(rollup)
    from rich.console import Console

    from joulery.ui.reports.text import print_text

    # Captured and printed in one go: rich would end the program on a closed pipe.
    plain = Console(file=io.StringIO(), width=110, highlight=False, no_color=True)
    console = Console(highlight=False) if to_terminal else plain
    with console.capture() as captured:
        print_text(rollup, console)
        if score is not None:
            console.print(f"  {score}", soft_wrap=True)
    return captured.get()
