"""``joulery precision``: judge the precision of the joules of operations."""

from __future__ import annotations

import json

import click

from joulery.ui.cli.options import TimeList

PERIODS_MS = (6.0, 8.0, 10.0, 12.0, 16.0, 20.0, 24.0, 28.0, 32.0, 36.0)
"""The periods of Figure 7a; those shorter than the run's own sampling period are left out."""


@click.command("precision")
@click.argument("runs", nargs=-1, required=True, type=click.Path(), metavar="RUN...")
@click.option(
    "--periods",
    "periods_s",
    type=TimeList("6 ms,12 ms", bare="ms"),
    help="Sampling periods to thin the readings to, such as 6 ms,12 ms; plain numbers are milliseconds.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(runs: tuple[str, ...], periods_s: tuple[float, ...] | None, as_json: bool) -> None:
    """Judge traced runs: similarity under sparser sampling (ASSS) and more repetitions (ASSW), and what is resolved.

    Name repetitions of one program for ASSW. A correlation near 1 proves little: the last table says, device by
    device, what the sensor can resolve and what error to expect.
    """
    from joulery.app.runs.anatomies import load_anatomies
    from joulery.ui.reports.anatomy.judged import as_object, judge, print_judgement
    from joulery.ui.reports.anatomy.text import as_text

    wanted_s = periods_s or [period / 1e3 for period in PERIODS_MS]
    judgement = judge(load_anatomies(runs), wanted_s)
    if as_json:
        click.echo(json.dumps(as_object(judgement)))
        return
    click.echo(as_text(lambda console: print_judgement(judgement, console)), nl=False)
