from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter

from joulery.adapters.carbon.timestamps import instant_s
from joulery.app.wiring.carbon import carbon_source, source_from_flags
from joulery.config.carbon import CarbonConfig
from joulery.domain.energy.carbon import Scope, Signal
from joulery.domain.errors import CapabilityError, ConfigError, DataError, StaleDataError
from joulery.domain.ports import CarbonSource
from joulery.domain.quality import Quality
from tests.adapters.carbon import test_electricity_maps, test_uk, test_watttime
from tests.adapters.carbon.local import served

T0 = instant_s("2023-01-01T00:00Z")


def source(
    cache: Path | None = None, now_s: float = T0, environ: dict[str, str] | None = None, **section: Any
) -> CarbonSource:
    config: Any = TypeAdapter(CarbonConfig).validate_python(section)
    return carbon_source(config, cache, environ=environ or {}, now_s=lambda: now_s)


def grid(folder: Path, name: str = "grid.csv", header: str = "timestamp_utc,ci_lifecycle,ci_direct") -> Path:
    path = folder / name
    rows = [f"2023-01-01T{hour:02}:00Z,{100 + hour},{10 + hour}" for hour in range(24) if hour != 5]
    path.write_text("\n".join([header, *rows]) + "\n")
    return path


def test_a_file_is_read_as_its_section_says(tmp_path: Path) -> None:
    path = grid(tmp_path)
    found = source(kind="file", path=path, zone="GB", scope="direct", fill="linear:1h").history(T0, T0 + 86400)
    assert found.g_per_kwh.tolist() == [10.0 + hour for hour in range(24)]
    assert (found.zone, found.scope, found.signal) == ("GB", Scope.DIRECT, Signal.AVERAGE)
    named = source(kind="file", path=path, column="ci_direct", signal="marginal", fill="gap", scope="lifecycle")
    series = named.history(T0, T0 + 86400)
    assert (series.scope, series.signal) == (Scope.LIFECYCLE, Signal.MARGINAL)
    assert np.isnan(series.g_per_kwh).nonzero()[0].tolist() == [5]
    with pytest.raises(DataError, match=r"grid\.csv:7"):
        source(kind="file", path=path)


def test_a_file_in_local_time_with_a_stated_step(tmp_path: Path) -> None:
    path = tmp_path / "one.csv"
    path.write_text("when,x\n2023-01-01T01:00,5\n")
    found = source(kind="file", path=path, time_column="when", timezone="Europe/Berlin", step=1800.0).history(
        T0, T0 + 1800
    )
    assert (found.edges_s.tolist(), found.g_per_kwh.tolist()) == ([T0, T0 + 1800], [5.0])


def test_a_file_may_have_a_forecast_beside_it(tmp_path: Path) -> None:
    forecast = grid(tmp_path, "forecast.csv", "timestamp_utc,a,b")
    both = source(
        kind="file", path=grid(tmp_path), forecast=forecast, forecast_column="b", column="ci_direct", fill="gap"
    )
    found = both.forecast(T0, T0 + 7200)
    assert found.g_per_kwh.tolist() == [10.0, 11.0]
    assert (found.issued_at_s, found.scope, found.quality) == (T0, Scope.DIRECT, Quality.MODELLED)
    with pytest.raises(CapabilityError, match="holds no forecast"):
        source(kind="file", path=grid(tmp_path), fill="gap").forecast(T0, T0 + 1)


def test_a_file_that_does_not_reach_the_run_is_refused_or_bridged(tmp_path: Path) -> None:
    path = grid(tmp_path)
    with pytest.raises(StaleDataError, match="newest value ends at 2023-01-02T00:00:00Z"):
        source(kind="file", path=path, fill="linear:1h").history(T0 + 23 * 3600, T0 + 25 * 3600)
    bridged = source(kind="file", path=path, fill="previous:2h").history(T0 + 23 * 3600, T0 + 25 * 3600)
    assert bridged.g_per_kwh.tolist() == [123.0, 123.0]
    assert bridged.estimated.tolist() == [False, True]


def test_a_replay_begins_now(tmp_path: Path) -> None:
    replay = {"day": "2023-01-01", "span": 14400.0, "duration": 8.0}
    found = source(now_s=5000.0, kind="file", path=grid(tmp_path), fill="gap", replay=replay).history(5000.0, 5008.0)
    assert found.g_per_kwh.tolist() == [100.0, 101.0, 102.0, 103.0]
    assert found.edges_s.tolist() == [5000.0, 5002.0, 5004.0, 5006.0, 5008.0]
    day = {"day": "2020-06-10", "duration": 90.0}
    typical = source(now_s=5000.0, kind="typical", zone="GB", replay=day).history(5000.0, 5090.0)
    assert len(typical) == 24 and typical.quality is Quality.ASSUMED
    with pytest.raises(ConfigError, match=r"carbon\.replay\.day: "):
        source(kind="typical", zone="GB", replay={"day": "2020-02-30", "duration": 90.0})
    with pytest.raises(DataError, match="covers"):
        source(kind="file", path=grid(tmp_path), fill="gap", replay=day)


def test_stated_intensities() -> None:
    constant = source(
        now_s=7.0, kind="constant", intensity=250.0, source="the utility", scope="direct", signal="marginal"
    )
    series = constant.history(0.0, 10.0)
    assert (series.g_per_kwh.tolist(), series.source, series.scope) == ([250.0], "the utility", Scope.DIRECT)
    assert (series.signal, constant.forecast(0.0, 1.0).issued_at_s) == (Signal.MARGINAL, 7.0)
    supply = source(kind="own-supply", shares={"wind": 0.5, "hydro": 0.5})
    assert supply.history(0.0, 1.0).g_per_kwh.tolist() == [17.5]


def test_the_uk_service(tmp_path: Path) -> None:
    noon = test_uk.NOON
    with served(test_uk.api) as local:
        allowed = source(tmp_path, noon + 4000, kind="uk", url=local.url + "/", fill="forecast")
        assert allowed.history(noon, noon + 5400).estimated.tolist() == [False, False, True]
        strict = source(tmp_path, noon + 4000, kind="uk", url=local.url)
        with pytest.raises(StaleDataError, match="2018-01-20T13:00:00Z") as caught:
            strict.history(noon, noon + 5400)
        assert "for GB also forecast" in caught.value.hint
        asked = len(local.questions)
        again = source(tmp_path, noon + 86400, kind="uk", url=local.url).history(noon, noon + 3600)
        assert len(local.questions) == asked, "settled half-hours come from the cache"
        uncached = source(None, noon + 86400, kind="uk", url=local.url).history(noon, noon + 3600)
        assert len(local.questions) == asked + 1
    assert again.g_per_kwh.tolist() == uncached.g_per_kwh.tolist() == [263.0, 263.0]
    assert len(list((tmp_path / "carbon").iterdir())) == 2


def test_electricity_maps_with_a_token(tmp_path: Path) -> None:
    now_s = test_electricity_maps.NOW
    section = {"kind": "electricity-maps", "zone": "DE", "token_env": "MY_TOKEN", "scope": "direct", "estimates": False}
    with served(test_electricity_maps.api) as local:
        em = source(tmp_path, now_s, {"MY_TOKEN": "secret"}, url=local.url, **section)
        series = em.history(now_s - 7200, now_s - 3600)
        assert series.scope is Scope.DIRECT and not np.isnan(series.g_per_kwh).any()
        with pytest.raises(StaleDataError):
            em.history(now_s - 7200, now_s)
    with pytest.raises(CapabilityError, match="needs a token"):
        source(kind="electricity-maps", zone="DE")


def test_watttime_with_an_account(tmp_path: Path) -> None:
    now_s = test_watttime.NOW
    with served(test_watttime.Api()) as local:
        environ = {"WATTTIME_USER": "ada", "WATTTIME_PASSWORD": "lovelace"}
        wt = source(tmp_path, now_s, environ, kind="watttime", zone="CAISO_NORTH", url=local.url)
        assert wt.history(now_s - 700, now_s - 100).signal is Signal.MARGINAL
        wt.history(now_s - 700, now_s - 100)
        assert len(local.questions) == 2
    with pytest.raises(CapabilityError, match="needs an account"):
        source(environ={"WATTTIME_USER": "ada"}, kind="watttime", zone="CAISO_NORTH")


def test_a_zone_of_the_uk_that_does_not_exist_is_found_at_once() -> None:
    with pytest.raises(ConfigError, match="unknown zone"):
        source(kind="uk", zone="GB-99")


def test_flags_make_a_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert source_from_flags({}) is None
    found = source_from_flags({"carbon": str(grid(tmp_path)), "column": "ci_direct", "fill": "gap"})
    assert found is not None
    assert found.history(T0, T0 + 3600).g_per_kwh.tolist() == [10.0]
    typical = source_from_flags({"zone": "typical:FR"})
    assert typical is not None and typical.history(T0, T0 + 1).zone == "FR"
    with pytest.raises(ConfigError):
        source_from_flags({"zone": "GB", "carbon": "x.csv"})
    assert not (tmp_path / "cache").exists()


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package with entry points that make sources, or fail to."""
    info = tmp_path / "site" / "gridco-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: gridco\nVersion: 1.0\n")
    points = {"gridco": "gridco_plugin:source", "broken": "gridco_plugin:absent", "dumb": "builtins:dict"}
    lines = "".join(f"{name} = {target}\n" for name, target in points.items())
    (info / "entry_points.txt").write_text(f"[joulery.carbon]\n{lines}")
    (tmp_path / "site" / "gridco_plugin.py").write_text(
        "from tests.fakes.carbon import Scripted\ndef source(values):\n    return Scripted([values], zone='gridco')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path / "site"))


@pytest.mark.usefixtures("package")
def test_a_source_from_a_plugin() -> None:
    options = {"values": [1.0, float("nan"), 3.0]}
    found = source(kind="plugin", name="gridco", options=options, fill="linear:1h").history(0.0, 3.0)
    assert (found.zone, found.g_per_kwh.tolist()) == ("gridco", [1.0, 2.0, 3.0])


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    ("section", "says"),
    [
        ({"name": "absent"}, r"no installed package offers .* \(got absent, expected .*gridco"),
        ({"name": "broken"}, r"the source broken \(gridco_plugin:absent\) does not start: .*absent"),
        ({"name": "gridco"}, r"the source gridco .* does not start: .*values"),
        ({"name": "dumb"}, "the source dumb has no history and forecast to ask"),
    ],
)
def test_a_plugin_that_cannot_be_used(section: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        source(kind="plugin", **section)
