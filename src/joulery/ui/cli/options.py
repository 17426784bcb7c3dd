"""Options that several verbs share, types of their values, and renamed options, read for one release."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from joulery.domain.errors import ConfigError
from joulery.domain.renames import warn_renamed

F = TypeVar("F", bound=Callable[..., Any])


def option(*names: str, old: str, **settings: Any) -> Callable[[F], F]:
    """Like ``click.option``, with an old name that is accepted with a warning that names the new one.

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
    """An option that uses the value of its old name where only that is given."""

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


class NearChoice(click.Choice[str]):
    """A choice of names; the error for a wrong name suggests the nearest one."""

    def get_invalid_choice_message(self, value: Any, ctx: click.Context | None) -> str:
        """Click's message about a wrong name, and the name that was probably meant."""
        return super().get_invalid_choice_message(value, ctx) + _meant(str(value), self.choices)


class KeyList(click.ParamType):  # type: ignore[type-arg]
    """One or more of some names, separated by commas: ``month,account``.

    Args:
        names: The names.
        repeats: Whether a name may be listed twice.
    """

    name = "keys"

    def __init__(self, names: Sequence[str], *, repeats: bool = False) -> None:
        self._names = tuple(names)
        self._repeats = repeats

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        """The names, as click shows a choice."""
        return f"[{'|'.join(self._names)}],..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The text as given, checked."""
        entries = [word.strip() for word in str(value).removesuffix(",").split(",")]
        for word in entries:
            if word not in self._names:
                known = ", ".join(self._names)
                self.fail(f"{word!r} is not one of {known}.{_meant(word, self._names)}", param, ctx)
        if len(set(entries)) < len(entries) and not self._repeats:
            self.fail(f"{value!r} names a key twice.", param, ctx)
        return ",".join(entries)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Completions of the last word of the list."""
        before, comma, last = incomplete.rpartition(",")
        return [CompletionItem(f"{before}{comma}{name}") for name in self._names if name.startswith(last)]


def _meant(word: str, names: Sequence[str]) -> str:
    """A question that names the nearest of some names; empty where none is near."""
    from joulery.config.parsing.problem import nearest

    near = nearest(word, names)
    return f" Did you mean {near!r}?" if near else ""


class Month(click.ParamType):  # type: ignore[type-arg]
    """A calendar month, ``2026-11``."""

    name = "month"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The month as given, checked."""
        text = str(value)
        if re.fullmatch(r"\d{4}-(0[1-9]|1[0-2])", text) is None:
            self.fail(f"{text!r} is not a month: write it as 2026-11.", param, ctx)
        return text


class Time(click.ParamType):  # type: ignore[type-arg]
    """A length of time with its unit, as seconds: ``80 ms``, ``30 s``, ``5 min``, ``24h``, ``30d``.

    Args:
        example: A value that makes sense for the flag, for messages.
        bare: The unit of a number without one; None refuses such a number, as it is ambiguous.
        zero: Whether the time may be 0.
    """

    name = "time"

    def __init__(self, example: str = "30 s", *, bare: str | None = None, zero: bool = False) -> None:
        self._example, self._bare, self._zero = example, bare, zero

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        """The placeholder of a time in help."""
        return "TIME"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The time in seconds; a default that is a number already is in seconds.

        Raises:
            ConfigError: It is not a time, lacks a required unit, or is too short.
        """
        if isinstance(value, float):
            return value
        flag = max(param.opts, key=len) if param is not None else ""
        return self.seconds(str(value).strip(), flag)

    def seconds(self, text: str, flag: str) -> float:
        """Seconds of a flag's text.

        Raises:
            ConfigError: As :meth:`convert`.
        """
        # Imported on use: a command that takes its default reads no quantity, and --help none at all.
        from joulery.config.parsing.quantity import TIME, flag_quantity

        number = _BARE.fullmatch(text) is not None
        try:
            return flag_quantity(
                f"{text} {self._bare}" if number and self._bare else text, TIME, flag, self._example, zero=self._zero
            )
        except ConfigError as error:
            error.got = repr(text)
            if number and not self._bare:
                low, mid, high = ("us", "ms", "s") if self._example.endswith(("us", "ms")) else ("s", "min", "h")
                error.hint = f"write {text} {low}, {text} {mid} or {text} {high}"
            raise


class TimeList(click.ParamType):  # type: ignore[type-arg]
    """Lengths of time, separated by commas, as seconds: ``6 ms,12 ms``.

    Args:
        example: As for :class:`Time`.
        bare: As for :class:`Time`.
    """

    name = "times"

    def __init__(self, example: str, *, bare: str) -> None:
        self._one = Time(example, bare=bare)

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        """The placeholder of a list of times in help."""
        return "TIME,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, ...]:
        """The times in seconds.

        Raises:
            ConfigError: One of them is not a time above 0.
        """
        return tuple(self._one.convert(one, param, ctx) for one in str(value).split(","))


_BARE = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", re.ASCII)
"""A number without a unit."""
cluster_option = click.option("--cluster", metavar="NAME", help="Which of the site's clusters, where it lists several.")
"""``--cluster NAME``: one of the site's clusters."""
html_option = click.option(
    "--html", type=click.Path(path_type=Path), metavar="FILE", help="Write one HTML page; - for standard output."
)
"""``--html FILE``: write one self-contained page."""


def format_option(*formats: str, help: str) -> Callable[[F], F]:
    """``--format``, with its former value ``html`` read but not shown."""
    return click.option(
        "--format", "form", type=NearChoice((*formats, "html")), metavar=f"[{'|'.join(formats)}]", help=help
    )


def chosen_format(form: str | None, *, as_json: bool, html: Path | None, out: Path | None) -> tuple[str, Path | None]:
    """The output format and its file, from ``--format``, ``--json``, ``--html`` and ``--out``.

    Raises:
        ConfigError: Two of them contradict one another.
    """
    named = [name for name, given in (("--json", as_json), ("--html", html is not None), ("--format", form)) if given]
    if len(named) > 1 and not (as_json and form == "json" and html is None):
        raise ConfigError(f"{named[0]} contradicts {' and '.join(named[1:])}", got=form, hint="give one of them")
    if html is not None:
        if out is not None:
            raise ConfigError("--html names its own file", pointer="--out", got=str(out), hint="leave --out out")
        return "html", None if str(html) == "-" else html
    if form == "html":
        warn_renamed("--format html", "--html FILE")
    return "json" if as_json else form or "text", out


_FLAGS = (
    click.option("--zone", metavar="Z", help="Grid zone: GB, electricity-maps:DE, watttime:CAISO_NORTH, typical:FR."),
    click.option(
        "--carbon", metavar="FILE", help='Carbon intensity: a CSV or Parquet file, or a constant: "250 g/kWh".'
    ),
    click.option("--column", metavar="NAME", help="Column of the file that holds g/kWh."),
    click.option("--time-column", metavar="NAME", help="Column of the file that holds the time stamps."),
    click.option("--timezone", metavar="TZ", help="Time zone of timestamps without an offset."),
    click.option("--scope", type=NearChoice(["lifecycle", "direct"]), help="Emissions to count."),
    click.option("--fill", metavar="RULE", help="Gaps: error, gap, previous:3h, linear:3h, forecast."),
)


def carbon_flags(command: F) -> F:
    """Add ``--zone``, ``--carbon``, ``--column``, ``--time-column``, ``--timezone``, ``--scope`` and ``--fill``.

    The command receives them under these names; those given go to
    :func:`joulery.app.wiring.carbon.source_from_flags`.
    """
    for flag in reversed(_FLAGS):
        command = flag(command)
    return command
