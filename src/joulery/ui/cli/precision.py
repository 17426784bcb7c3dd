"""``joulery precision``: how far the joules of operations can be trusted."""

from __future__ import annotations

import json

import click

PERIODS_MS = (6.0, 8.0, 10.0, 12.0, 16.0, 20.0, 24.0, 28.0, 32.0, 36.0)
"""The periods of Figure 7a; those the run was read slower than are left out."""


@click.command("precision")
@click.argument("runs", nargs=-1, required=True, type=click.Path(), metavar="RUN...")
@click.option("--periods", metavar="MS,MS...", help="Sampling periods to thin the readings to, milliseconds.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(runs: tuple[str, ...], periods: str | None, as_json: bool) -> None:
    """Judge traced runs: similarity under sparser sampling (ASSS) and more repetitions (ASSW), and what is resolved.

    Name repetitions of one program for ASSW. A correlation near 1 proves little: the last table says, device by
    device, what the sensor can resolve and what error to expect.
    """
    from joulery.app.runs.anatomies import load_anatomies
    from joulery.domain.errors import ConfigError
    from joulery.ui.reports.anatomy.judged import as_object, judge, print_judgement
    from joulery.ui.reports.anatomy.text import as_text

    try:
        wanted = PERIODS_MS if periods is None else tuple(float(text) for text in periods.split(","))
    except ValueError as error:
        raise ConfigError("no list of periods", pointer="--periods", got=periods, expected="such as 6,12,24") from error
    if not all(0 < period < float("inf") for period in wanted):
        raise ConfigError("a period is a time", pointer="--periods", got=periods, expected="milliseconds above 0")
    judgement = judge(load_anatomies(runs), [period / 1e3 for period in wanted])
    if as_json:
        click.echo(json.dumps(as_object(judgement)))
        return
    click.echo(as_text(lambda console: print_judgement(judgement, console)), nl=False)
