import math

import numpy as np
import pytest

from joulery.domain.energy.carbon import CarbonSeries, Signal
from joulery.domain.errors import DataError
from joulery.domain.quality import Quality


def series(values: list[float], **extra: object) -> CarbonSeries:
    return CarbonSeries("GB", np.arange(len(values) + 1) * 3600.0, values, source="test", **extra)  # type: ignore[arg-type]


def test_steps_are_right_open() -> None:
    s = series([100.0, 300.0])
    assert s.at([-1.0, 0.0, 3599.9, 3600.0, 7200.0]).tolist()[1:4] == [100.0, 100.0, 300.0]
    assert math.isnan(s.at(-1.0)[0]) and math.isnan(s.at(7200.0)[0])
    assert s.integral(1800.0, 5400.0) == 1800 * 100 + 1800 * 300
    assert s.mean(1800.0, 5400.0) == 200.0


def test_a_gap_stays_a_gap() -> None:
    s = series([100.0, float("nan"), 300.0])
    assert math.isnan(s.integral(0.0, 7200.0))
    assert s.integral(0.0, 3600.0) == 360000.0
    assert s.covered_s(0.0, 10800.0) == 7200.0
    assert math.isnan(s.integral(-1.0, 100.0)) and math.isnan(s.integral(10000.0, 10801.0))


@pytest.mark.parametrize(
    ("edges", "values", "says"),
    [
        ([0.0, 1.0], [1.0, 2.0], "do not fit"),
        ([0.0, 0.0], [1.0], "increase"),
        ([0.0, 1.0], [-1.0], "-1.0 g/kWh"),
        ([0.0, 1.0], [float("inf")], "inf g/kWh"),
    ],
)
def test_nonsense_is_refused(edges: list[float], values: list[float], says: str) -> None:
    with pytest.raises(DataError, match=says):
        CarbonSeries("GB", edges, values, source="test")


def test_marginal_intensity_may_be_negative_and_columns_are_read_only() -> None:
    s = series([-5.0], signal=Signal.MARGINAL)
    with pytest.raises(ValueError, match="read-only"):
        s.g_per_kwh[0] = 1.0


def test_history_is_measured_and_a_forecast_modelled_unless_it_says_otherwise() -> None:
    assert series([1.0]).quality is Quality.MEASURED
    assert series([1.0], issued_at_s=0.0).quality is Quality.MODELLED
    assert series([1.0], issued_at_s=0.0, quality=Quality.ASSUMED).quality is Quality.ASSUMED
