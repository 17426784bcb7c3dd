"""``joulery ledger``: energy and carbon of all runs, and what is left of each budget."""

from __future__ import annotations

import json
import math
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from joulery.ui.cli.options import NearChoice

if TYPE_CHECKING:
    from joulery.store.ledger import Ledger

BY = ("owner", "workload", "run", "device", "hour")
as_json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
ledger_option = click.option(
    "--ledger",
    "path",
    type=click.Path(path_type=Path),
    help="Ledger file ($JOULERY_LEDGER, or in the state folder).",
)


@click.group("ledger")
def command() -> None:
    """Keep what runs cost by owner, workload, device and hour, and carbon budgets."""


@command.command()
@click.argument("runs", nargs=-1, type=click.Path(), metavar="[RUN]...")
@click.option(
    "--jobs",
    "folders",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="State folder of a scheduler (jobs.state), or the folder of those of a site's clusters: record its jobs, each "
    "in the last hour it ran in a month.",
)
@ledger_option
@as_json_option
def add(runs: tuple[str, ...], folders: tuple[Path, ...], path: Path | None, as_json: bool) -> None:
    """Record RUN, or the jobs of a scheduler; recording one again replaces it."""
    from joulery.app.runs.bookkeeping import book
    from joulery.app.runs.job_bookkeeping import book_clusters
    from joulery.app.runs.recorded import load_run
    from joulery.domain.errors import ConfigError

    if not runs and not folders:
        raise ConfigError("nothing to record", expected="joulery ledger add RUN, or --jobs FOLDER")
    views = [load_run(run, with_timeline=True) for run in runs]
    with _open(path) as ledger:
        for view in views:
            book(view, ledger)
        now_s = time.time()
        names = [view.name for view in views] + book_clusters(folders, ledger, now_s)
        click.echo(json.dumps({"ledger": str(ledger.path), "recorded": names}) if as_json else "\n".join(names))


@command.command()
@click.option("--by", type=NearChoice(BY), default="owner", show_default=True, help="Grouping of the table.")
@click.option("--owner", help="Only runs charged to this owner.")
@click.option("--since", help="Only hours from this UTC time on, such as 2026-11-01.")
@click.option("--until", help="Only hours before this UTC time.")
@ledger_option
@as_json_option
def show(by: str, owner: str | None, since: str | None, until: str | None, path: Path | None, as_json: bool) -> None:
    """Print energy and carbon."""
    with _open(path, read_only=True) as ledger:
        rows = ledger.rows(by, owner=owner, start_s=_time(since, "--since"), end_s=_time(until, "--until"))
    lines = [
        {
            by: _hour(row.key) if by == "hour" else row.key,
            "energy_j": row.energy_j,
            "carbon_g": None if math.isnan(row.carbon_g) else row.carbon_g,
            "quality": row.quality.value,
        }
        for row in rows
    ]
    if as_json:
        click.echo(json.dumps({"by": by, "rows": lines}))
        return
    from joulery.domain.format import grams, si

    _table(
        (by, "energy", "carbon", "quality"),
        [
            (str(line[by]), si(row.energy_j, "J"), grams(row.carbon_g), row.quality.value)
            for line, row in zip(lines, rows, strict=True)
        ],
    )


@command.command()
@click.argument("owner", required=False)
@click.argument("amount", required=False)
@click.option("--from", "since", help="Start of the budget, UTC, such as 2026-11-01.")
@click.option("--to", "until", help="End of the budget, UTC.")
@ledger_option
@as_json_option
def budget(
    owner: str | None, amount: str | None, since: str | None, until: str | None, path: Path | None, as_json: bool
) -> None:
    """Print the current budgets and their remainder; with OWNER AMOUNT (such as '5 kg'), set one."""
    from joulery.domain.errors import ConfigError

    if owner is not None:
        if amount is None or since is None or until is None:
            raise ConfigError("a budget needs an owner, an amount, --from and --to", hint="nlp '5 kg' --from … --to …")
        from joulery.store.ledger import Budget

        start_s, end_s = _time(since, "--from"), _time(until, "--to")
        assert start_s is not None
        assert end_s is not None
        with _open(path) as ledger:
            ledger.set_budget(Budget(owner, start_s, end_s, _grams(amount)))
    with _open(path, read_only=True) as ledger:
        found = ledger.budgets(time.time())
    answer: list[dict[str, Any]] = [
        {"owner": one.owner, "start_s": one.start_s, "end_s": one.end_s, "carbon_g": one.carbon_g, "left_g": left_g}
        for one, left_g in found
    ]
    if as_json:
        click.echo(json.dumps({"budgets": answer}))
        return
    from joulery.domain.format import grams, moment

    _table(
        ("owner", "budget", "left", "until"),
        [(one.owner, grams(one.carbon_g), grams(left_g), moment(one.end_s)) for one, left_g in found],
    )


def _open(path: Path | None, *, read_only: bool = False) -> Ledger:
    from joulery.app.runs.bookkeeping import default_ledger
    from joulery.store.ledger import Ledger

    return Ledger(path or default_ledger(), read_only=read_only)


def _time(text: str | None, flag: str) -> float | None:
    """A UTC time as Unix seconds."""
    from joulery.domain.errors import ConfigError

    if text is None:
        return None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError("not a time", pointer=flag, got=text, expected="2026-11-01 or 2026-11-01T08:00") from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _grams(text: str) -> float:
    from joulery.config.parsing.quantity import MASS, flag_quantity

    return flag_quantity(text, MASS, "AMOUNT")


def _hour(key: str) -> str:
    return f"{datetime.fromtimestamp(int(key), UTC):%Y-%m-%dT%H:00Z}"


def _table(names: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in names:
        table.add_column(name, justify="right" if name in {"energy", "carbon", "budget", "left"} else "left")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console = Console(highlight=False)
    with console.capture() as captured:  # printed in one go: rich would end the program on a closed pipe
        console.print(table if rows else "nothing yet")
    click.echo(captured.get(), nl=False)
