"""``joulery jobs``: list the training jobs of a site, or cancel one."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from joulery.domain.errors import ConfigError
from joulery.ui.cli.options import cluster_option, html_option
from joulery.ui.cli.statements import put_out

if TYPE_CHECKING:
    from joulery.config.site import Site


@click.command("jobs")
@click.option("--site", type=click.Path(path_type=Path), default=Path("site.yaml"), help="The site file (site.yaml).")
@cluster_option
@click.option("--cancel", type=int, metavar="ID", help="End this job for good (backend local).")
@click.option("--forecasts", is_flag=True, help="How good the forecasts of starts, ends and grams were.")
@click.option("--listen", metavar="[HOST:]PORT", help="Serve the scheduler's screen there until Ctrl-C.")
@html_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    site: Path,
    cluster: str | None,
    cancel: int | None,
    forecasts: bool,
    listen: str | None,
    html: Path | None,
    as_json: bool,
) -> None:
    """List the jobs of SITE: state, slots, progress, restarts, joules and grams so far; why a job waits, until when."""
    from joulery.app.schedule import cancel_job, jobs_by_cluster
    from joulery.config import load

    jobs = load(site)
    if cancel is not None:
        state = cancel_job(jobs, cancel, cluster)
        click.echo(json.dumps({"job": cancel, "state": state}) if as_json else f"job {cancel}: {state}")
        return
    if forecasts:
        _forecasts(jobs, cluster, as_json)
        return
    if html is not None or listen is not None:
        _screen(jobs, cluster, html, listen)
        if listen is not None or not as_json:
            return
    rows, problems = jobs_by_cluster(jobs, cluster)
    if as_json:
        problem_entries = [{"cluster": name, **error.as_dict()} for name, error in problems.items()]
        several = cluster is None and len(jobs.clusters) > 1
        click.echo(json.dumps({"jobs": rows} | ({"problems": problem_entries} if several else {}), default=str))
    else:
        click.echo(_table(rows), nl=False)
        for name, error in problems.items():
            click.echo(f"joulery: {name}: {error}" + (f"\n  {error.hint}" if error.hint else ""), err=True)
    if problems:
        click.get_current_context().exit(max(error.exit_code for error in problems.values()))


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A table with one line per job; reasons are wrapped only on a terminal too narrow for them."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from joulery.domain.format import grams, si

    # Why a job waits takes room: its columns are there while one does.
    waiting = any(row["rank"] or row["waits_because"] for row in rows)
    table = Table(box=None, header_style="bold", pad_edge=False)
    several = any("cluster" in row for row in rows)
    for title in (*(("cluster",) if several else ()), *_TITLES, *(_WAITING if waiting else ())):
        wraps = title == "reason"
        table.add_column(
            title,
            justify="right" if title in _NUMBERS else "left",
            no_wrap=not wraps,
            min_width=24 if wraps else None,
        )
    for row in rows:
        cells = (
            *((str(row["cluster"]),) if several else ()),
            str(row["job"]), str(row["name"]), str(row["owner"]), str(row["state"]),
            str(row["slots"] or "-"), _ratio(row["progress_ratio"]), str(row["restarts"]),
            si(row["energy_j"], "J"), grams(row["carbon_g"]),
            *((str(row["rank"] or ""), _reason(row)) if waiting else ()),
        )  # fmt: skip
        table.add_row(*(Text(cell) for cell in cells))
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 10_000)
    with console.capture() as captured:
        console.print(table)
    return "".join(f"{line.rstrip()}\n" for line in captured.get().splitlines())


def _forecasts(site: Site, cluster: str | None, as_json: bool) -> None:
    """Print how good the forecasts were."""
    from joulery.app.schedule import forecast_coverage

    rows = forecast_coverage(site, cluster)
    if as_json:
        click.echo(json.dumps({"forecasts": rows}))
        return
    for row in rows:
        text = f"{row['kind']}: {row['checked']} checked"
        if row["median_error"] is not None:
            text += f", median error {row['median_error']:+.0%}"
        if row["with_interval"]:
            text += f"; {row['inside']} of {row['with_interval']} within their interval"
            text += f" ({row['coverage_ratio']:.0%}, meant for {row['level_ratio']:.0%})"
        else:
            text += "; no interval before 19 outcomes are known"
        click.echo(text)
        if row["reliable"] is False:
            click.echo(f"  intervals of {row['kind']} are too narrow: fewer outcomes lie within than chance explains")


def _screen(site: Site, cluster: str | None, html: Path | None, listen: str | None) -> None:
    """Write the scheduler's screen to a file, or serve it."""
    from joulery.app.scheduler_view import scheduler_view, serve_page
    from joulery.ui.dashboard.scheduler import scheduler_page

    if html is not None:
        put_out(scheduler_page(scheduler_view(site, cluster)), None if str(html) == "-" else html)
        return
    host, _, port = str(listen).rpartition(":")
    if not port.isdecimal():
        raise ConfigError("not an address", pointer="--listen", got=listen, expected="8090 or 127.0.0.1:8090")
    scheduler_view(site, cluster)
    name = host.strip("[]") or "127.0.0.1"

    def view() -> dict[str, Any]:
        return scheduler_view(site, cluster)

    with serve_page(name, int(port), lambda: scheduler_page(view(), live=True), view) as server:
        click.echo(f"http://{name}:{server.server_address[1]}/dashboard, metrics at /metrics")
        with suppress(KeyboardInterrupt):
            server.serve_forever()


_TITLES = ("job", "name", "owner", "state", "slots", "done", "restarts", "energy", "carbon")
_WAITING = ("rank", "reason")
_NUMBERS = frozenset({"job", "slots", "done", "restarts", "rank"})


def _reason(row: Mapping[str, Any]) -> str:
    """Reason why a job waits, and its approximate start in local time."""
    start_s, low_s, high_s = (row[f"expected_start_{name}"] for name in ("s", "low_s", "high_s"))
    about = "" if start_s is None else f"about {_clock(start_s)}: "
    if low_s is not None and high_s is not None:
        about = f"about {_clock(start_s)} ({_clock(low_s)} to {_clock(high_s)}): "
    return f"{about}{row['waits_because'] or ''}"


def _clock(at_s: float) -> str:
    return time.strftime("%a %H:%M", time.localtime(at_s))


def _ratio(value: object) -> str:
    return f"{value:.0%}" if isinstance(value, float) and not math.isnan(value) else "-"
