"""``joulery compare``: traced runs side by side."""

from __future__ import annotations

import json
from pathlib import Path

import click

from joulery.ui.cli.options import NearChoice, chosen_format, format_option, html_option
from joulery.ui.cli.report_anatomy import write


@click.command("compare")
@click.argument("runs", nargs=-1, required=True, type=click.Path(), metavar="RUN RUN...")
@click.option(
    "--by",
    type=NearChoice(["layer", "module", "op", "phase"]),
    default="layer",
    help="Grouping of the changes (layer).",
)
@click.option(
    "--pattern",
    "patterns",
    multiple=True,
    metavar="P=NAME",
    help="Rename components that match P; P= leaves them out.",
)
@click.option("--top", type=click.IntRange(min=1), default=20, metavar="N", help="Changes to show (20).")
@format_option("text", "json", help="Output format (text).")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@html_option
@click.option("--out", type=click.Path(path_type=Path), help="Write to this file instead of standard output.")
def command(
    runs: tuple[str, ...],
    by: str,
    patterns: tuple[str, ...],
    top: int,
    form: str | None,
    as_json: bool,
    html: Path | None,
    out: Path | None,
) -> None:
    """Compare the energy of operations in traced runs: similarity, and what got better or worse."""
    from joulery.accounting.operations.rows import fold_from
    from joulery.app.runs.anatomies import load_anatomies
    from joulery.ui.reports.anatomy.compared import comparison_page, print_comparison, text_width
    from joulery.ui.reports.anatomy.comparison import as_object, compare
    from joulery.ui.reports.anatomy.text import as_text

    anatomies = load_anatomies(runs)
    comparison = compare(anatomies, by=by, folds=[fold_from(text) for text in patterns])
    form, out = chosen_format(form, as_json=as_json, html=html, out=out)
    if form == "json":
        content = (json.dumps(as_object(comparison)) + "\n").encode()
    elif form == "html":
        content = comparison_page(comparison, anatomies, top=top).encode()
    else:
        content = as_text(lambda console: print_comparison(comparison, console, top=top), width=text_width(comparison))
    write(content, form, out)
