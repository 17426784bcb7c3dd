"""Options of the command line: renamed flags keep their old spelling, hidden, for one release."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from joulery.domain.renames import warn_renamed

F = TypeVar("F", bound=Callable[..., Any])


def option(*names: str, old: str, **settings: Any) -> Callable[[F], F]:
    """Like ``click.option``, with an old name that is read and names the new one on standard error.

    Args:
        names: As for ``click.option``: the new flag, a short one, the parameter's name.
        old: The flag's former name (``--draws``). Help does not show it.
        settings: As for ``click.option``.
    """
    former = f"former_{old.lstrip('-').replace('-', '_')}"
    same = {key: settings[key] for key in ("is_flag", "flag_value", "multiple", "nargs", "count") if key in settings}

    def decorate(command: F) -> F:
        click.option(old, former, hidden=True, expose_value=False, type=click.UNPROCESSED, **same)(command)
        return click.option(*names, cls=_Renamed, former=former, old=old, **settings)(command)

    return decorate


class _Renamed(click.Option):
    """An option that takes the value of its old name where only that is given."""

    def __init__(self, *args: Any, former: str, old: str, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._former, self._old = former, old

    def consume_value(self, ctx: click.Context, opts: Mapping[str, Any]) -> tuple[Any, ParameterSource]:
        """The value given under either name.

        Raises:
            UsageError: Both names are given.
        """
        if self._former not in opts:
            return super().consume_value(ctx, opts)
        new = max(self.opts, key=len)
        if self.name in opts:
            raise click.UsageError(f"{self._old} is the old name of {new}: give {new} alone", ctx)
        warn_renamed(self._old, new)
        return opts[self._former], ParameterSource.COMMANDLINE
