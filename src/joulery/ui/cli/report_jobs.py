"""``joulery report --since``: energy and carbon of the jobs of ``joulery schedule``, by owner."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from joulery.app.schedule import LiveUse

# joulery.runtime.schedule.usage.BY, repeated here so that --help imports nothing heavy; a test compares the two.
BY = ("owner", "name", "partition", "state", "job")


@click.command("report")
@click.option("--since", metavar="TIME", required=True, help="Jobs that ended in the last 30d, 12h ..., or still run.")
@click.option("--by", type=click.Choice(BY), default="owner", help="Grouping key of the table (owner).")
@click.option(
    "--jobs",
    "folder",
    type=click.Path(path_type=Path),
    default=Path("joulery-jobs"),
    help="State folder of the scheduler: jobs.state of its site file (joulery-jobs).",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def jobs_command(since: str, by: str, folder: Path, as_json: bool) -> None:
    """Report joules and grams of the jobs of joulery schedule by owner, name or partition.

    \b
    joulery report --by owner --since 30d
    """
    from joulery.app.schedule import used_by
    from joulery.config.parsing.quantity import TIME, flag_quantity

    uses, total = used_by(folder, by, time.time() - flag_quantity(since, TIME, "--since"))
    if as_json:
        click.echo(json.dumps({"rows": [use.as_dict() for use in uses], "total": total.as_dict()}))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column(by)
    for title in ("jobs", "running", "slot h", "energy", "carbon", "quality"):
        table.add_column(title, justify="right")
    for use in uses:
        table.add_row(*_cells(use))
    table.add_section()
    table.add_row(*_cells(total))
    console = Console(width=110, highlight=False, no_color=True)
    with console.capture() as captured:
        console.print(table)
        if total.unmetered_s > 0:
            console.print(f"nothing measured {total.unmetered_s / max(total.executed_s, 1e-9):.1%} of their time")
    click.echo(captured.get().rstrip("\n"))


def _cells(use: LiveUse) -> tuple[str, ...]:
    from joulery.domain.format import grams, si

    carbon = grams(use.carbon_g) if use.carbon_covered_j > 0 else "-"
    energy = si(use.energy_j, "J") if use.energy_j > 0 else "-"
    return use.key, f"{use.jobs}", f"{use.running}", f"{use.slot_s / 3600:.2f}", energy, carbon, str(use.quality)
