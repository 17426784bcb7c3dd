from pathlib import Path

import pytest

from joulery.config import load
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
    carbon_from_flags,
)
from joulery.domain.energy.carbon import Fill, FillRule, Scope, Signal
from joulery.domain.errors import ConfigError
from tests.config.site_text import written


def section(folder: Path, text: str) -> CarbonConfig | None:
    (folder / "grid.csv").write_text("timestamp_utc,x\n")
    return load(written(folder, f"joulery: 1\ncarbon: {{{text}}}\n")).carbon


def test_there_is_no_default(tmp_path: Path) -> None:
    assert load(written(tmp_path, "joulery: 1\n")).carbon is None


def test_a_file(tmp_path: Path) -> None:
    plain = section(tmp_path, "kind: file, path: grid.csv")
    assert isinstance(plain, CarbonFile)
    assert (plain.path, plain.fill_rule, plain.signal, plain.scope, plain.step_s, plain.replay) == (
        tmp_path / "grid.csv",
        FillRule(),
        Signal.AVERAGE,
        None,
        None,
        None,
    )
    full = section(
        tmp_path,
        "kind: file, path: grid.csv, forecast: grid.csv, forecast_column: f, zone: DE, column: x, time_column: t, "
        "timezone: Europe/Berlin, signal: marginal, scope: direct, step: 30 min, fill: previous:2h, "
        'replay: {day: "2020-06-10", span: 12 h, duration: 90 s}',
    )
    assert isinstance(full, CarbonFile) and full.replay is not None
    assert (full.forecast_column, full.zone, full.column, full.time_column) == ("f", "DE", "x", "t")
    assert (full.signal, full.scope, full.step_s) == (Signal.MARGINAL, Scope.DIRECT, 1800.0)
    assert full.fill_rule == FillRule(Fill.PREVIOUS, 7200.0)
    assert (full.replay.day, full.replay.span_s, full.replay.duration_s) == ("2020-06-10", 43200.0, 90.0)


def test_services(tmp_path: Path) -> None:
    uk = section(tmp_path, "kind: uk, zone: GB-13, fill: forecast, url: https://mirror.example.org/carbon")
    assert isinstance(uk, CarbonUk)
    assert (uk.zone, uk.fill_rule.kind, uk.url) == ("GB-13", Fill.FORECAST, "https://mirror.example.org/carbon")
    em = section(tmp_path, "kind: electricity-maps, zone: DE, scope: direct, estimates: false, token_env: T")
    assert isinstance(em, CarbonElectricityMaps)
    assert (em.scope, em.estimates, em.token_env) == (Scope.DIRECT, False, "T")
    wt = section(tmp_path, "kind: watttime, zone: CAISO_NORTH")
    assert isinstance(wt, CarbonWattTime)
    assert (wt.user_env, wt.password_env, wt.estimates) == ("WATTTIME_USER", "WATTTIME_PASSWORD", True)


def test_stated_typical_and_plugged_in(tmp_path: Path) -> None:
    constant = section(tmp_path, "kind: constant, intensity: 0.25 kg/kWh, source: the utility")
    assert isinstance(constant, CarbonConstant)
    assert (constant.g_per_kwh, constant.source, constant.scope) == (250.0, "the utility", Scope.LIFECYCLE)
    supply = section(tmp_path, "kind: own-supply, shares: {wind: 60 %, gas: 0.4}")
    assert isinstance(supply, CarbonSupply)
    assert supply.shares == {"wind": 0.6, "gas": 0.4}
    plugin = section(tmp_path, "kind: plugin, name: gridco, options: {site: A, cells: [1, 2]}, fill: gap")
    assert isinstance(plugin, CarbonPlugin)
    assert (plugin.name, plugin.options, plugin.fill) == ("gridco", {"site": "A", "cells": [1, 2]}, "gap")
    typical = section(tmp_path, 'kind: typical, zone: FR, replay: {day: "2024-01-17", duration: 60 s}')
    assert isinstance(typical, CarbonTypical) and typical.replay is not None
    assert typical.replay.span_s == 86400.0


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("kind: guess", "carbon.kind: is not a known kind"),
        ("zone: GB", "missing key 'kind'"),
        ("kind: file", "missing key 'path'"),
        ("kind: file, path: absent/grid.csv", "carbon.path: no such folder"),
        ("kind: file, path: grid.csv, fill: zero", "carbon.fill: not a rule for gaps"),
        ("kind: file, path: grid.csv, fill: linear", "carbon.fill: not a rule for gaps"),
        ("kind: file, path: grid.csv, fill: forecast", "carbon.fill: only kind uk"),
        ("kind: file, path: grid.csv, step: 30", "carbon.step: a time needs a unit"),
        ("kind: file, path: grid.csv, replay: {day: tomorrow, duration: 9 s}", "carbon.replay.day: is not a day"),
        ("kind: uk, fil: gap", "carbon.fil"),
        ("kind: uk, url: carbon.example.org", "carbon.url: is not a base URL"),
        ("kind: electricity-maps", "missing key 'zone'"),
        ("kind: electricity-maps, zone: DE, token_env: sk-123", "carbon.token_env: is not the name of an environment"),
        ("kind: electricity-maps, zone: DE, token: abc", "carbon.token"),
        ("kind: watttime, zone: X, fill: forecast", "carbon.fill: only kind uk"),
        ("kind: typical, zone: SE", "carbon.zone: is not a known value"),
        ("kind: constant, intensity: 250", "carbon.intensity: a carbon intensity needs a unit"),
        ("kind: constant, intensity: -1 g/kWh", "carbon.intensity: must be at least 0"),
        ("kind: own-supply, shares: {wind: 160}", "carbon.shares.wind"),
    ],
)
def test_mistakes_point_at_their_line(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        section(tmp_path, text)
    assert says in str(caught.value)
    assert "site.yaml:2" in str(caught.value)


def test_flags(tmp_path: Path) -> None:
    path = tmp_path / "grid.csv"
    path.write_text("x")
    file = carbon_from_flags(file=str(path), column="c", timezone="UTC", scope="direct", fill="gap")
    assert isinstance(file, CarbonFile)
    assert (file.path, file.column, file.timezone, file.scope) == (path, "c", "UTC", Scope.DIRECT)
    assert file.fill_rule.kind is Fill.GAP
    stated = carbon_from_flags(file="250 g/kWh", scope="direct")
    assert isinstance(stated, CarbonConstant)
    assert (stated.g_per_kwh, stated.scope) == (250.0, Scope.DIRECT)
    assert carbon_from_flags() is None


@pytest.mark.parametrize(
    ("zone", "model", "name"),
    [
        ("GB", CarbonUk, "GB"),
        ("gb-13", CarbonUk, "gb-13"),
        ("uk:GB-London", CarbonUk, "GB-London"),
        ("electricity-maps:DE", CarbonElectricityMaps, "DE"),
        ("watttime:CAISO_NORTH", CarbonWattTime, "CAISO_NORTH"),
        ("typical:DE", CarbonTypical, "DE"),
    ],
)
def test_zones(zone: str, model: type, name: str) -> None:
    found = carbon_from_flags(zone=zone)
    assert isinstance(found, model)
    assert found.zone == name  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"zone": "GB", "file": "x"}, "--zone and --carbon both name"),
        ({"zone": "DE"}, "unknown grid zone (got DE"),
        ({"zone": "co2signal:DE"}, "unknown service of carbon intensity (got co2signal:DE"),
        ({"zone": "typical:SE"}, "--zone"),
        ({"zone": "electricity-maps:"}, "--zone"),
        ({"zone": "GB", "column": "x"}, "--column does not apply to this source"),
        ({"zone": "typical:GB", "fill": "gap"}, "--fill does not apply to this source"),
        ({"zone": "GB", "fill": "zero"}, "--fill not a rule for gaps"),
        ({"file": "/nonexistent.csv"}, "--carbon no such file (got /nonexistent.csv"),
        ({"file": "-5 g/kWh"}, "--carbon must be at least 0"),
        ({"fill": "gap", "column": "x"}, "--column, --fill without a source"),
        ({"time_column": "x"}, "--time-column without a source"),
    ],
)
def test_flags_that_make_no_sense(flags: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        carbon_from_flags(**flags)
    assert says in str(caught.value)
