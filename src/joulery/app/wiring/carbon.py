"""Open sources of carbon intensity from sections of the site file or from flags."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.metadata import entry_points
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from joulery.adapters.carbon.cache import Cached, provider_folder
from joulery.adapters.carbon.file import FileFormat, SeriesSource, read_carbon_file
from joulery.adapters.carbon.fill import Filled
from joulery.adapters.carbon.followed import FollowedFile
from joulery.adapters.carbon.replay import ReplayedCarbon
from joulery.adapters.carbon.stated import Stated, TypicalDay, own_supply
from joulery.adapters.carbon.timestamps import instant_s
from joulery.app.wiring.models import cache_folder as root_of_caches
from joulery.config.carbon import (
    CarbonConfig,
    CarbonConstant,
    CarbonElectricityMaps,
    CarbonFile,
    CarbonPlugin,
    CarbonSupply,
    CarbonTypical,
    CarbonUk,
    CarbonWattTime,
    ReplayConfig,
    carbon_from_flags,
)
from joulery.domain.energy.carbon import Fill, FillRule
from joulery.domain.errors import ConfigError, DataError
from joulery.domain.ports import CarbonSource
from joulery.steady_time import unix_s

if TYPE_CHECKING:
    from joulery.adapters.carbon.http import CarbonService

PLUGINS = "joulery.carbon"
"""Group of the entry points that make sources."""
_JUDGED_LINES = 3
"""Lines of a header and two rows: with fewer, the length of a step is not known, and more may follow."""


def carbon_source(
    config: CarbonConfig,
    cache_dir: Path | None = None,
    *,
    environ: Mapping[str, str] = os.environ,
    now_s: Callable[[], float] = time.time,
) -> CarbonSource:
    """Open the source of a ``carbon`` section, whose gaps are filled by the section's rule.

    A file is read and checked at once, and credentials are looked up; services are only contacted when needed. A replay
    begins now.

    Args:
        config: The section.
        cache_dir: Root of the caches (``$XDG_CACHE_HOME/joulery``); None to ask services every time.
        environ: Environment with the credentials.
        now_s: Unix seconds.

    Raises:
        ConfigError: A zone that does not exist.
        DataError: The file cannot be used.
        CapabilityError: The credentials are missing.
    """
    if isinstance(config, CarbonFile):
        return Filled(_replayed(file_source(config), config.replay, now_s), config.fill_rule)
    if isinstance(config, CarbonTypical):
        return Filled(_replayed(TypicalDay(config.zone, now_s), config.replay, now_s), FillRule())
    if isinstance(config, CarbonConstant):
        return Stated(config.g_per_kwh, source=config.source, signal=config.signal, scope=config.scope, now_s=now_s)
    if isinstance(config, CarbonSupply):
        return own_supply(config.shares)
    if isinstance(config, CarbonPlugin):
        return Filled(_plugin(config), config.fill_rule)
    return Filled(_service(config, cache_dir, environ, now_s), config.fill_rule)


def live_carbon_source(config: CarbonConfig, cache_dir: Path | None = None) -> CarbonSource:
    """Open the source of a running site: a file is reread when it changes, and may be missing or end in the past.

    A gap of the file is an error elsewhere; here the intensity is unknown for that time.

    Args:
        config: The section.
        cache_dir: As for :func:`carbon_source`.

    Raises:
        ConfigError, CapabilityError: As :func:`carbon_source`.
        DataError: The file has rows and cannot be used: a column is missing, or a value is not a number.
    """
    if not isinstance(config, CarbonFile) or config.replay is not None:
        # The run's own clock: by a wall clock that was put forward since, a replay would begin after the run.
        return carbon_source(config, cache_dir, now_s=unix_s)
    rule = FillRule(Fill.GAP) if config.fill_rule.kind is Fill.ERROR else config.fill_rule
    paths = [path for path in (config.path, config.forecast) if path is not None]
    followed = FollowedFile(lambda: file_source(config, rule), paths)
    try:
        followed.known()
    except DataError:
        if _has_rows(config.path):
            raise
    return followed


def _has_rows(path: Path) -> bool:
    """Whether a file has two rows below its header, which is enough to detect errors."""
    try:
        with path.open("rb") as stream:
            return sum(bool(line.strip()) for line in islice(stream, _JUDGED_LINES)) == _JUDGED_LINES
    except OSError:
        return False


def source_from_flags(flags: Mapping[str, str]) -> CarbonSource | None:
    """Open the source that command-line flags or keyword arguments describe; None without any.

    Args:
        flags: ``zone`` or ``carbon`` (a file, or a stated intensity), ``column``, ``time_column``, ``timezone``,
            ``scope``, ``fill``.

    Raises:
        JouleryError: As ``carbon_from_flags`` and :func:`carbon_source`.
    """
    config = carbon_from_flags(**{("file" if name == "carbon" else name): value for name, value in flags.items()})
    return None if config is None else carbon_source(config, root_of_caches())


def file_source(config: CarbonFile, rule: FillRule | None = None) -> SeriesSource:
    """Read the file of a section; its gaps are filled by ``rule``, else by the section's rule."""
    how = FileFormat(
        zone=config.zone or "",
        column=config.column or "",
        time_column=config.time_column or "",
        timezone=config.timezone or "",
        signal=config.signal,
        scope=config.scope,
        step_s=config.step_s or 0.0,
        fill=rule or config.fill_rule,
    )
    actual = read_carbon_file(config.path, how)
    if config.forecast is None:
        return SeriesSource(actual)
    expected = replace(how, column=config.forecast_column or "", scope=actual.scope)
    return SeriesSource(actual, read_carbon_file(config.forecast, expected, forecast=True))


def _replayed(source: CarbonSource, replay: ReplayConfig | None, now_s: Callable[[], float]) -> CarbonSource:
    if replay is None:
        return source
    try:
        from_s = instant_s(f"{replay.day}T00:00Z")
    except DataError as error:
        raise ConfigError("is not a day of the calendar", pointer="carbon.replay.day", got=replay.day) from error
    stretch = source.history(from_s, from_s + replay.span_s)
    return ReplayedCarbon(stretch, from_s, replay.span_s, begins_s=now_s(), duration_s=replay.duration_s)


def _plugin(config: CarbonPlugin) -> CarbonSource:
    """Open the source that an installed package offers under this name."""
    found = {point.name: point for point in entry_points(group=PLUGINS)}
    if config.name not in found:
        raise ConfigError(
            "no installed package offers this source of carbon intensity",
            pointer="carbon.name",
            got=config.name,
            expected=", ".join(sorted(found)) or f"an entry point of the group {PLUGINS}",
        )
    try:
        source = found[config.name].load()(**config.options)
    except (ImportError, AttributeError, TypeError) as error:
        where = found[config.name].value
        raise ConfigError(f"the source {config.name} ({where}) does not start: {error}", pointer="carbon") from error
    if not (callable(getattr(source, "history", None)) and callable(getattr(source, "forecast", None))):
        raise ConfigError(f"the source {config.name} has no history and forecast to ask", pointer="carbon.name")
    made: CarbonSource = source
    return made


def _service(
    config: CarbonUk | CarbonElectricityMaps | CarbonWattTime,
    cache_dir: Path | None,
    environ: Mapping[str, str],
    now_s: Callable[[], float],
) -> CarbonSource:
    from joulery.adapters.carbon import electricity_maps, uk, watttime  # an HTTP client, which files do without

    source: CarbonSource
    if isinstance(config, CarbonUk):
        stand_in = config.fill_rule.kind is Fill.FORECAST
        source = uk.UkCarbon(config.zone, stand_in, _at(uk.default_service(), config.url, now_s))
        step_s, variant = uk.STEP_S, "forecast" if stand_in else "actual"
    elif isinstance(config, CarbonElectricityMaps):
        token = environ.get(config.token_env, "")
        service = _at(electricity_maps.default_service(), config.url, now_s)
        source = electricity_maps.ElectricityMaps(config.zone, token, config.scope, config.estimates, service)
        step_s, variant = electricity_maps.STEP_S, f"{config.scope}-{config.estimates}"
    else:
        user, password = environ.get(config.user_env, ""), environ.get(config.password_env, "")
        service = _at(watttime.default_service(), config.url, now_s)
        source = watttime.WattTime(config.zone, user, password, config.estimates, service)
        step_s, variant = watttime.STEP_S, str(config.estimates)
    if cache_dir is None:
        return source
    return Cached(source, provider_folder(cache_dir, config.kind, config.zone, variant), step_s, now_s=now_s)


def _at(service: CarbonService, url: str | None, now_s: Callable[[], float]) -> CarbonService:
    return replace(service, base_url=url.rstrip("/") if url else service.base_url, now_s=now_s)
