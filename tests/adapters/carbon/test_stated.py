import math

import pytest

from joulery.adapters.carbon.stated import FACTORS_G_PER_KWH, Stated, own_supply
from joulery.domain.energy.carbon import Scope, Signal
from joulery.domain.errors import ConfigError
from joulery.domain.quality import Quality


def test_a_stated_intensity_holds_at_all_times_and_is_assumed() -> None:
    source = Stated(250.0, now_s=lambda: 9.0)
    series = source.history(100.0, 200.0)
    assert (series.edges_s.tolist(), series.g_per_kwh.tolist()) == ([100.0, 200.0], [250.0])
    assert (series.quality, series.estimated.tolist(), series.issued_at_s) == (Quality.ASSUMED, [True], None)
    assert (series.signal, series.scope, series.source) == (Signal.AVERAGE, Scope.LIFECYCLE, "stated by the user")
    assert source.forecast(100.0, 200.0).issued_at_s == 9.0
    assert source.history(5.0, 5.0).at(5.0).tolist() == [250.0]
    direct = Stated(0.0, "x", "the utility", Signal.MARGINAL, Scope.DIRECT).history(0.0, 1.0)
    assert (direct.zone, direct.source, direct.signal, direct.scope) == (
        "x",
        "the utility",
        Signal.MARGINAL,
        Scope.DIRECT,
    )


@pytest.mark.parametrize("g_per_kwh", [-1.0, math.nan, math.inf])
def test_nonsense_is_refused(g_per_kwh: float) -> None:
    with pytest.raises(ConfigError, match="finite and at least 0"):
        Stated(g_per_kwh)


def test_an_own_supply_is_the_weighted_mean_of_its_technologies() -> None:
    supply = own_supply({"wind": 0.6, "gas": 0.4})
    assert supply.g_per_kwh == pytest.approx(0.6 * 11 + 0.4 * 490)
    assert supply.source == "own supply of 60 % wind, 40 % gas, IPCC AR5 median life-cycle factors"
    assert own_supply({"coal": 1.0}).g_per_kwh == FACTORS_G_PER_KWH["coal"] == 820.0
    assert sorted(FACTORS_G_PER_KWH.values(), reverse=True) == list(FACTORS_G_PER_KWH.values())


@pytest.mark.parametrize(
    ("shares", "says"),
    [
        ({"wind": 0.5}, "add up to 100 % .got 50 %"),
        ({"wind": 1.1, "gas": -0.1}, "at least 0"),
        ({}, "add up to 100 %"),
        ({"magic": 1.0}, "unknown technology .got magic"),
    ],
)
def test_shares_that_are_none(shares: dict[str, float], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        own_supply(shares)
