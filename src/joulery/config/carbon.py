"""``carbon``: where the carbon intensity of the grid comes from. There is no default: without it, no grams."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from joulery.config.parsing.problem import problem
from joulery.config.parsing.quantity import INTENSITY, GramsPerKwh, Ratio, Seconds, parse_quantity
from joulery.config.parsing.section import FeedFile, InputFile, Name, Section, Text
from joulery.domain.energy.carbon import Fill, FillRule, Scope, Signal
from joulery.domain.errors import ConfigError


def _fill_rule(value: str) -> str:
    try:
        FillRule.parse(value)
    except ConfigError as error:
        raise problem(error.message, expected=error.expected or "") from None
    return value


FillText = Annotated[str, Field(max_length=40), AfterValidator(_fill_rule)]
"""``error``, ``gap``, ``previous:3h`` or ``linear:3h``; for kind uk also ``forecast``."""


def _matching(pattern: str, says: str, example: str) -> AfterValidator:
    """Text that matches ``pattern``, or an error with an example."""

    def check(value: str) -> str:
        if len(value) > 300 or re.fullmatch(pattern, value, re.ASCII) is None:
            raise problem(says, expected=example)
        return value

    return AfterValidator(check)


Variable = Annotated[
    str, _matching(r"[A-Za-z_]\w*", "is not the name of an environment variable", "such as ELECTRICITYMAPS_TOKEN")
]
"""Name of an environment variable."""
Url = Annotated[
    str,
    _matching(r"https?://[^\s/?#]+(/[^\s?#]*)?", "is not a base URL", "such as https://proxy.example.org/carbon"),
]
"""Base URL of a service."""
Day = Annotated[str, _matching(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", "is not a day", "YYYY-MM-DD, such as 2020-06-10")]
"""A UTC day."""


class ReplayConfig(Section):
    """Replays a stretch of the series faster than real time, in a loop: for demonstrations."""

    ALIASES: ClassVar = {"lasts": "duration"}

    day: Day
    """The UTC day at which the stretch begins, quoted: "2020-06-10"."""
    span_s: Seconds = Field(alias="span", default=86400.0)
    """Length of the stretch, such as 24 h."""
    duration_s: Seconds = Field(alias="duration")
    """Duration of one replay of the stretch, such as 90 s."""


class _Filling(Section):
    fill: FillText = "error"
    """Rule where the intensity is unknown: error, gap, previous:3h, linear:3h."""

    @property
    def fill_rule(self) -> FillRule:
        """The rule that ``fill`` names."""
        return FillRule.parse(self.fill)

    @model_validator(mode="after")
    def _forecast_is_for_uk(self) -> _Filling:
        if self.fill_rule.kind is Fill.FORECAST and getattr(self, "kind", "") != "uk":
            raise problem(
                "only kind uk publishes forecasts next to history",
                expected="error, gap, previous:3h, linear:3h",
                at=("fill",),
            )
        return self


class CarbonFile(_Filling):
    """A CSV or Parquet file, one row a step, stamped with its beginning. ``up`` and ``serve`` follow it as it grows."""

    kind: Literal["file"]
    path: FeedFile
    """The file, relative to the site file; up and serve run without grams until it is there."""
    forecast: InputFile | None = None
    """A file of the same form with the forecast."""
    forecast_column: Text | None = None
    """Its column of the intensity; found as for the file itself when left out."""
    zone: Name | None = None
    """A name for the series; the file's when left out."""
    column: Text | None = None
    """Column of the intensity in g/kWh; ci_lifecycle or ci_direct (by scope) when left out."""
    time_column: Text | None = None
    """Column of the time stamps; found by its name (timestamp_utc ...) when left out."""
    timezone: Text | None = None
    """Time zone of stamps without an offset, such as Europe/Berlin."""
    signal: Annotated[Signal, Field(strict=False)] = Signal.AVERAGE
    """average or marginal."""
    scope: Annotated[Scope, Field(strict=False)] | None = None
    """direct or lifecycle; from the column's name when left out, else lifecycle."""
    step_s: Seconds | None = Field(alias="step", default=None)
    """Length of a step; inferred from the stamps when left out."""
    replay: ReplayConfig | None = None
    """Show a stretch of the file faster than it was."""


class CarbonUk(_Filling):
    """Great Britain's Carbon Intensity API; needs no key."""

    kind: Literal["uk"]
    zone: Text = "GB"
    """GB, GB-1 to GB-17, GB-London and so on, or an outward postcode such as GB-RG10."""
    url: Url | None = None
    """Address of a mirror or proxy of the service."""


class CarbonElectricityMaps(_Filling):
    """Electricity Maps; needs a token."""

    kind: Literal["electricity-maps"]
    zone: Text
    """Its zone key, such as DE or US-CAL-CISO."""
    scope: Annotated[Scope, Field(strict=False)] = Scope.LIFECYCLE
    """lifecycle or direct emission factors."""
    estimates: bool = True
    """Whether hours the provider estimated count; they are flagged. False leaves them as gaps."""
    token_env: Variable = "ELECTRICITYMAPS_TOKEN"
    """Environment variable that holds the token."""
    url: Url | None = None
    """Address of a mirror or proxy of the service."""


class CarbonWattTime(_Filling):
    """WattTime's marginal emission rate; needs an account."""

    kind: Literal["watttime"]
    zone: Text
    """Its region, such as CAISO_NORTH."""
    estimates: bool = True
    """Whether points with imputed data count; they are flagged. False leaves them as gaps."""
    user_env: Variable = "WATTTIME_USER"
    """Environment variable that holds the account's name."""
    password_env: Variable = "WATTTIME_PASSWORD"
    """Environment variable that holds its password."""
    url: Url | None = None
    """Address of a mirror or proxy of the service."""


class CarbonTypical(Section):
    """The bundled typical day by month of 2020, in UTC hours: assumed, to try things out."""

    kind: Literal["typical"]
    zone: Literal["GB", "FR", "DE"]
    """GB, FR or DE."""
    replay: ReplayConfig | None = None
    """Replay a stretch of it faster than real time."""


class CarbonConstant(Section):
    """One constant intensity, stated by the user."""

    kind: Literal["constant"]
    g_per_kwh: GramsPerKwh = Field(alias="intensity")
    """The intensity, such as 250 g/kWh."""
    source: Text = "stated by the user"
    """Source of the value."""
    signal: Annotated[Signal, Field(strict=False)] = Signal.AVERAGE
    """average or marginal."""
    scope: Annotated[Scope, Field(strict=False)] = Scope.LIFECYCLE
    """direct or lifecycle."""


class CarbonSupply(Section):
    """An own supply by technology, at the median life-cycle factors of IPCC AR5."""

    kind: Literal["own-supply"]
    shares: dict[str, Ratio]
    """Share of each technology (wind, solar, gas ...); together 100 %."""


class CarbonPlugin(_Filling):
    """A source from a plug-in: an entry point of the group ``joulery.carbon``."""

    kind: Literal["plugin"]
    name: Text
    """Name of the entry point."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments for it."""


CarbonConfig = Annotated[
    CarbonFile
    | CarbonUk
    | CarbonElectricityMaps
    | CarbonWattTime
    | CarbonTypical
    | CarbonConstant
    | CarbonSupply
    | CarbonPlugin,
    Field(discriminator="kind"),
]

SERVICES = frozenset({"uk", "electricity-maps", "watttime", "typical"})
"""Kinds that are named by a zone."""


def carbon_from_flags(
    *,
    zone: str | None = None,
    file: str | None = None,
    column: str | None = None,
    time_column: str | None = None,
    timezone: str | None = None,
    scope: str | None = None,
    fill: str | None = None,
) -> CarbonConfig | None:
    """The section that command-line flags or keyword arguments describe; None when they ask for no carbon.

    Args:
        zone: ``GB`` and its regions, or ``typical:GB``, ``electricity-maps:DE``, ``watttime:CAISO_NORTH``, ``uk:GB``.
        file: A CSV or Parquet file, or an intensity such as ``250 g/kWh``.
        column: Column of the file's intensity.
        time_column: Column of its time stamps.
        timezone: Time zone of the file's stamps where they carry no offset.
        scope: ``direct`` or ``lifecycle``.
        fill: What to do about gaps: ``error``, ``gap``, ``previous:3h``, ``linear:3h``, ``forecast``.

    Raises:
        ConfigError: They contradict one another, or name what does not exist.
    """
    if zone is not None and file is not None:
        raise ConfigError("--zone and --carbon both name a source of the intensity", hint="give one of them")
    extra = {"column": column, "time_column": time_column, "timezone": timezone, "scope": scope, "fill": fill}
    given = {key: value for key, value in extra.items() if value is not None}
    if file is not None:
        return _from_file(file, given)
    if zone is not None:
        return _from_zone(zone, given)
    if given:
        flags = ", ".join(map(_flag, given))
        raise ConfigError(f"{flags} without a source of carbon intensity", hint="add --zone Z or --carbon FILE")
    return None


def _flag(key: str) -> str:
    return f"--{key.replace('_', '-')}"


_INTENDED_INTENSITY = re.compile(r"[-+]?\d+([.,]\d+)?(\s*[A-Za-z][^.]*)?")
"""A number, alone or with a unit; a file name that begins with a number has a full stop behind it."""


def _from_file(file: str, given: dict[str, str]) -> CarbonConfig:
    try:
        stated = parse_quantity(file, INTENSITY)
    except PydanticCustomError as error:
        if not Path(file).is_file():
            if _INTENDED_INTENSITY.fullmatch(file):
                context = error.context or {}
                raise ConfigError(
                    f"--carbon {context['message']}", got=file, expected=context["expected"], hint=context["hint"]
                ) from None
            raise ConfigError("--carbon no such file", got=file, hint="check the path") from None
        return _validated({"kind": "file", "path": Path(file), **given})
    return _validated({"kind": "constant", "intensity": stated, **given})


def _from_zone(zone: str, given: dict[str, str]) -> CarbonConfig:
    kind, _, name = zone.rpartition(":")
    if not kind and (zone.upper() == "GB" or zone.upper().startswith("GB-")):
        kind = "uk"
    if kind not in SERVICES:
        raise ConfigError(
            "unknown grid zone" if not kind else "unknown service of carbon intensity",
            pointer="--zone",
            got=zone,
            expected="GB or a region of it, electricity-maps:ZONE, watttime:REGION, typical:GB (FR, DE)",
            hint=_zone_hint(zone.upper() if not kind else ""),
        )
    return _validated({"kind": kind, "zone": name, **given})


def _zone_hint(zone: str) -> str:
    """Hint for a zone without its service."""
    without = 'without a network: --carbon FILE, or --carbon "250 g/kWh"'
    if not zone:
        return without
    known = f"typical:{zone} (a typical day, assumed), " if zone in ("FR", "DE") else ""
    return f"name the service that knows it: {known}electricity-maps:{zone} (needs a token); {without}"


def _validated(values: dict[str, object]) -> CarbonConfig:
    """``values`` as a section, the first finding as one error that names its flag."""
    adapter: TypeAdapter[CarbonConfig] = TypeAdapter(CarbonConfig)
    try:
        return adapter.validate_python(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key, context = str(first["loc"][1]), first.get("ctx", {})
        flag = "--carbon" if key in {"path", "intensity"} else _flag(key)
        messages = {"extra_forbidden": "does not apply to this source", "literal_error": "is unknown to this source"}
        message = messages.get(first["type"], first["msg"])
        raise ConfigError(f"{flag} {message}", got=str(first["input"]), expected=context.get("expected")) from None
