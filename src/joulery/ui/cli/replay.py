"""``joulery replay``: repeat the decisions of a recorded run, and compare them."""

from __future__ import annotations

import json
from dataclasses import asdict

import click


@click.command("replay")
@click.argument("run", type=click.Path(), metavar="RUN")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(run: str, as_json: bool) -> int:
    """Feed the observations in RUN's log to its policy again, and compare the decisions.

    The policy is made from the log itself. Exit code 1 where a decision differs: the log was altered, or this joulery
    decides differently than the one that wrote it.
    """
    from joulery.app.runs.replay import decide_again
    from joulery.domain.format import moment
    from joulery.store.run.directory import open_run

    replayed = decide_again(open_run(run).log())
    if as_json:
        click.echo(json.dumps(asdict(replayed)))
    else:
        same = "all the same" if not replayed.differences else f"{len(replayed.differences)} steps differ"
        click.echo(f"{replayed.steps} steps decided again, {replayed.decisions} decisions in the log: {same}")
        for difference in replayed.differences:
            logged = "; ".join(decision.reason for decision in difference.logged) or "nothing"
            again = "; ".join(decision.reason for decision in difference.again) or "nothing"
            click.echo(f"  {moment(difference.t_s)} {difference.service}: {logged}\n    now: {again}")
    return 1 if replayed.differences else 0
