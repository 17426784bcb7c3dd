"""``joulery schedule``: schedule training jobs by carbon and energy, on this machine or beside Slurm or Kueue."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from joulery.ui.cli.numpy_threads import keep_numpy_on_one_thread
from joulery.ui.cli.options import NearChoice, cluster_option
from joulery.ui.cli.streams import keep_going


@click.command("schedule")
@click.argument("site", type=click.Path(path_type=Path))
@cluster_option
@click.option("--backend", type=NearChoice(["local", "slurm", "kueue"]), help="The site's jobs.backend unless given.")
@click.option("--mode", type=NearChoice(["advise", "shadow", "act"]), help="The site's mode unless given.")
@click.option("--once", is_flag=True, help="One round and its actions, then end.")
@click.option("--release", is_flag=True, help="Release every job that joulery holds, then end.")
@click.option("--json", "as_json", is_flag=True, help="Print each line of the log as one JSON object.")
def command(
    site: Path, cluster: str | None, backend: str | None, mode: str | None, once: bool, release: bool, as_json: bool
) -> None:
    """Schedule the training jobs of SITE until Ctrl-C or SIGTERM.

    \b
    advise  print at each round the actions it would take
    shadow  play all actions through, also between rounds, and apply none
    act     apply them
    """
    keep_numpy_on_one_thread()
    from joulery.app.schedule import ScheduleRequest, release_now, run_schedule, stopped_by_signals
    from joulery.config.site import Mode

    if release:
        released = release_now(site, backend, cluster)
        click.echo(json.dumps({"released": released}) if as_json else f"released {len(released)} held jobs")
        return
    request = ScheduleRequest(site, backend, None if mode is None else Mode(mode), once, tuple(sys.argv), cluster)
    with stopped_by_signals() as stop:
        say = _say_json if as_json else _say
        run_schedule(request, say if once else keep_going(say), stop)


def _say_json(entry: Mapping[str, Any]) -> None:
    import orjson

    click.echo(orjson.dumps(entry, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS).decode())


def _say(entry: Mapping[str, Any]) -> None:
    import time

    text = _line(entry)
    click.echo(f"{time.strftime('%H:%M:%S')} {text}")


def _line(entry: Mapping[str, Any]) -> str:
    """One entry of the log as a line of text."""
    kind = entry["kind"]
    if kind == "action":
        who = f"job {entry['job']}" if "job" in entry else f"{len(entry['jobs'])} jobs"
        size = f" on {entry['slots']}" if "slots" in entry else ""
        remark = f" ({entry['remark']})" if entry["remark"] and entry["outcome"] == "failed" else ""
        return f"{entry['do']} {who}{size}: {entry['reason']} [{entry['outcome']}]{remark}"
    if kind == "over":
        from joulery.domain.format import duration, grams, si

        known_g = entry["carbon_g"] if entry["carbon_covered_j"] else None
        cost = f"{si(entry['energy_j'], 'J')}, {grams(known_g)}" if entry["energy_j"] else "not metered"
        return f"job {entry['job']} is over ({entry['state']}): {duration(entry['executed_s'])} on its slots, {cost}"
    if kind == "forecast":
        return _outcome(entry)
    if kind == "round" and "view" in entry:
        return f"round: {entry['text']}"
    return f"{kind}: {entry.get('text', '')}"


def _outcome(entry: Mapping[str, Any]) -> str:
    """Forecast and outcome of a job."""
    from joulery.domain.format import duration, grams

    form = grams if entry["of"] == "grams" else duration
    what = {"start": "starts in", "end": "ends in", "grams": "still causes"}[entry["of"]]
    return f"forecast: job {entry['job']} {what} {form(entry['expected'])}; it was {form(entry['outcome'])}"
