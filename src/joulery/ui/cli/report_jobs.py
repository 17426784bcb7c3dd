"""``joulery report --since``: energy and carbon of the jobs of ``joulery schedule``, by owner, account or month."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from joulery.domain.errors import ConfigError
from joulery.ui.cli.options import KeyList, Month, Time, chosen_format, format_option, html_option
from joulery.ui.cli.report_sacct import FORMATS
from joulery.ui.cli.statements import put_out, written_statement

if TYPE_CHECKING:
    from joulery.app.schedule import LiveUse
    from joulery.ui.kit.statement import StatementRow

# joulery.runtime.schedule.usage.BY, repeated here so that --help imports nothing heavy; a test compares the two.
BY = ("owner", "account", "name", "partition", "state", "job", "cluster", "month")


@click.command("report")
@click.option("--since", "since_s", type=Time("30d"), help="Jobs that ended in the last 30d, 12h ..., or still run.")
@click.option("--month", type=Month(), metavar="YYYY-MM", help="Only what jobs used in this calendar month (UTC).")
@click.option("--by", type=KeyList(BY), default="owner", help="Grouping keys of the table (owner); month splits jobs.")
@click.option(
    "--jobs",
    "folders",
    multiple=True,
    type=click.Path(path_type=Path),
    default=(Path("joulery-jobs"),),
    help="State folder of the scheduler, or the folder of those of a site's clusters: jobs.state (joulery-jobs).",
)
@format_option(*FORMATS, help="Output format (text); markdown suits a mail.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@html_option
@click.option("--out", type=click.Path(path_type=Path), help="Write to this file instead of standard output.")
def jobs_command(
    since_s: float | None,
    month: str | None,
    by: str,
    folders: tuple[Path, ...],
    form: str | None,
    as_json: bool,
    html: Path | None,
    out: Path | None,
) -> None:
    """Report joules and grams of the jobs of joulery schedule by owner, account, name, partition, cluster or month.

    \b
    joulery report --by owner --since 30d
    joulery report --by account,owner --month 2026-11 --format markdown
    """
    from joulery.app.schedule import used_by

    form, out = chosen_format(form, as_json=as_json, html=html, out=out)
    if since_s is None and month is None:
        raise ConfigError("which jobs?", pointer="--since", expected="--since 30d or --month 2026-11")
    from_s = -math.inf if since_s is None else time.time() - since_s
    uses, total = used_by(folders, by, from_s, month)
    names = tuple(by.split(","))
    if form == "json":
        rows = [use.as_dict() | _keys(use, names) for use in uses]
        put_out(json.dumps({"rows": rows, "total": total.as_dict()}) + "\n", out)
    elif form == "text":
        put_out(_text(uses, total, names), out)
    else:
        from joulery.ui.kit.statement import Statement

        title = f"Energy and carbon of scheduled jobs{'' if month is None else f', {month}'}"
        lines = tuple(_row(use, tuple(_keys(use, names).values()) or (use.key,)) for use in uses)
        statement = Statement(title, names, lines, _row(total, ()), _notes(total), slot="slot")
        put_out(written_statement(statement, form), out)


def _keys(use: LiveUse, names: tuple[str, ...]) -> dict[str, str]:
    """The keys of a row with their values; empty for a single key, which the row already has."""
    from joulery.app.schedule import SEPARATOR

    return dict(zip(names, use.key.split(SEPARATOR), strict=False)) if len(names) > 1 else {}


def _row(use: LiveUse, keys: tuple[str, ...]) -> StatementRow:
    from joulery.ui.kit.statement import StatementRow

    joules = (use.energy_j, use.carbon_covered_j)
    return StatementRow.of(keys, use.jobs, use.slot_s, joules, use.carbon_g, use.shown_quality)


def _notes(total: LiveUse) -> tuple[str, ...]:
    notes = []
    if total.unmetered_s > 0:
        notes.append(f"nothing measured {total.unmetered_s / max(total.executed_s, 1e-9):.1%} of their time")
    if 0 < total.carbon_covered_j < total.energy_j:
        share = total.carbon_covered_j / total.energy_j
        notes.append(f"grams cover {share:.1%} of the joules: the intensity of the rest is unknown")
    return tuple(notes)


def _text(uses: tuple[LiveUse, ...], total: LiveUse, names: tuple[str, ...]) -> str:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column(" / ".join(names))
    for title in ("jobs", "running", "slot h", "energy", "carbon", "quality"):
        table.add_column(title, justify="right")
    for use in uses:
        table.add_row(*_cells(use))
    table.add_section()
    table.add_row(*_cells(total))
    console = Console(width=110, highlight=False, no_color=True)
    with console.capture() as captured:
        console.print(table)
        for note in _notes(total):
            console.print(note)
    return captured.get().rstrip("\n") + "\n"


def _cells(use: LiveUse) -> tuple[str, ...]:
    from joulery.domain.format import grams, si

    carbon = grams(use.carbon_g) if use.carbon_covered_j > 0 else "-"
    energy = si(use.energy_j, "J") if use.energy_j > 0 else "-"
    slot_h = f"{use.slot_s / 3600:.2f}"
    return use.key, f"{use.jobs}", f"{use.running}", slot_h, energy, carbon, use.shown_quality or "-"
