"""The flags of the carbon intensity's source, shared by every verb that needs one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])

_FLAGS = (
    click.option("--zone", metavar="Z", help="Grid zone: GB, electricity-maps:DE, watttime:CAISO_NORTH, typical:FR."),
    click.option(
        "--carbon", metavar="FILE", help='Carbon intensity: a CSV or Parquet file, or a constant: "250 g/kWh".'
    ),
    click.option("--column", metavar="NAME", help="Column of the file that holds g/kWh."),
    click.option("--timezone", metavar="TZ", help="Time zone of timestamps without an offset."),
    click.option("--scope", type=click.Choice(["lifecycle", "direct"]), help="Emissions to count."),
    click.option("--fill", metavar="RULE", help="Gaps: error, gap, previous:3h, linear:3h, forecast."),
)


def carbon_flags(command: F) -> F:
    """Add ``--zone``, ``--carbon``, ``--column``, ``--timezone``, ``--scope`` and ``--fill`` to a command.

    The command receives them under these names; those given go to
    :func:`joulery.app.wiring.carbon.source_from_flags`.
    """
    for flag in reversed(_FLAGS):
        command = flag(command)
    return command
