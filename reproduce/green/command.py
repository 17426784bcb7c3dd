"""``python -m reproduce green``: the evaluation of GREEN (NSDI'25, section 8)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click

from joulery.ui.kit.console import progress_bar
from reproduce.claim import output_options, print_claims, write_page
from reproduce.green.claims import claims
from reproduce.green.evaluation import GreenEvaluation, document, run
from reproduce.green.page import page


@click.command("green")
@click.option(
    "--data", type=click.Path(path_type=Path), metavar="DIR", help="Folder with the paper's traces and grids."
)
@click.option("--seeds", type=click.IntRange(1, 100), default=3, help="Seeds of the one-day workload (3).")
@click.option("--days", type=click.IntRange(1), metavar="N", help="Only the first N days of the year.")
@output_options
def command(data: Path | None, seeds: int, days: int | None, html: Path | None, as_json: bool) -> None:
    """Run GREEN's evaluation (NSDI'25, section 8): Figs. 8 to 13, Tables 2 to 4, and carbon against completion time.

    Without --data, jobs are synthetic with the published mix of sizes and grids are bundled typical days (assumed).
    Every result is simulated.
    """
    evaluation = replace(GreenEvaluation(), data=data, seeds=seeds, days=days)
    with progress_bar("simulating", quiet=as_json) as report:
        figures = run(evaluation, lambda done, total: report(done, total, ""))
    found = claims(figures)
    if html is not None:
        write_page(html, page(figures, found, evaluation.source))
    notes = (evaluation.source, "Every figure of ours is simulated.")
    print_claims(found, document(evaluation, figures), as_json=as_json, notes=notes)
