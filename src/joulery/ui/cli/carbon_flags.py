"""The flags that say where carbon intensity comes from, the same for every verb that needs it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from joulery.domain.ports import CarbonSource

F = TypeVar("F", bound=Callable[..., Any])

_FLAGS = (
    click.option("--zone", metavar="Z", help="Grid zone: GB, electricity-maps:DE, watttime:CAISO_NORTH, typical:FR."),
    click.option(
        "--carbon", metavar="FILE", help='Carbon intensity from a CSV or Parquet file, or stated: "250 g/kWh".'
    ),
    click.option("--column", metavar="NAME", help="Column of the file that holds g/kWh."),
    click.option("--timezone", metavar="TZ", help="Time zone of the file's stamps, where they carry no offset."),
    click.option("--scope", type=click.Choice(["lifecycle", "direct"]), help="Which emissions to count."),
    click.option("--fill", metavar="RULE", help="Gaps in the intensity: error, gap, previous:3h, linear:3h, forecast."),
)


def carbon_flags(command: F) -> F:
    """Add ``--zone``, ``--carbon``, ``--column``, ``--timezone``, ``--scope`` and ``--fill`` to a command.

    The command receives them under these names and hands them to :func:`source_from_flags`.
    """
    for flag in reversed(_FLAGS):
        command = flag(command)
    return command


def source_from_flags(
    *,
    zone: str | None = None,
    carbon: str | None = None,
    column: str | None = None,
    timezone: str | None = None,
    scope: str | None = None,
    fill: str | None = None,
) -> CarbonSource | None:
    """The source that the flags describe; None when they ask for no carbon. A file is read and checked now.

    Raises:
        ConfigError: The flags contradict one another or name what does not exist.
        DataError: The file cannot be used.
        CapabilityError: Credentials are missing.
    """
    from joulery.runtime.compose.carbon import source_from_flags as source

    flags = {"zone": zone, "carbon": carbon, "column": column, "timezone": timezone, "scope": scope, "fill": fill}
    return source({name: value for name, value in flags.items() if value is not None})
