import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from joulery.domain.errors import ConfigError, DataError
from joulery.sim.core.hourly_intensity import Intensity, day_ahead, forecast, typical
from joulery.sim.core.streams import Streams


def test_the_typical_day_is_that_of_the_days_before_and_of_no_day_to_come() -> None:
    hours = np.repeat(np.arange(40.0), 24) + np.tile(np.arange(24.0), 40)
    expected = np.array(typical(Intensity(hours)).values).reshape(40, 24)
    assert expected[0] == pytest.approx(np.arange(24.0))
    assert expected[1] == pytest.approx(np.arange(24.0)) and expected[2] == pytest.approx(0.5 + np.arange(24.0))
    assert expected[39] == pytest.approx(np.mean(np.arange(11, 39)) + np.arange(24.0))
    changed = hours.copy()
    changed[20 * 24 :] += 1000.0
    assert np.array(typical(Intensity(changed)).values)[: 21 * 24] == pytest.approx(expected.ravel()[: 21 * 24])
    assert len(typical(Intensity(hours[:50])).values) == 50


@given(st.floats(0.01, 0.6), st.integers(0, 5))
def test_a_made_up_forecast_is_as_wrong_as_stated(error_ratio: float, seed: int) -> None:
    truth = Intensity(np.linspace(50.0, 500.0, 24 * 60))
    forecast = np.array(day_ahead(truth, error_ratio, Streams(seed)("forecast")).values)
    assert float(np.mean(np.abs(forecast / np.array(truth.values) - 1))) == pytest.approx(error_ratio, rel=1e-6)
    assert bool(np.all(forecast > 0))


def test_its_errors_grow_through_the_day_and_last_for_hours() -> None:
    truth = Intensity(np.full(24 * 400, 100.0))
    log = np.log(np.array(day_ahead(truth, 0.2, Streams(1)("forecast")).values) / 100.0).reshape(400, 24)
    spread = log.std(axis=0)
    assert spread[0] < 0.6 * spread[6] < spread[23]
    assert 0.8 < float(np.corrcoef(log[:, 10], log[:, 11])[0, 1]) < 0.98
    assert day_ahead(truth, 0.0, Streams(1)("forecast")).values == truth.values
    for bad in (-0.1, 1.0):
        with pytest.raises(ConfigError, match="is a share"):
            day_ahead(truth, bad, Streams(1)("forecast"))


def test_a_recorded_forecast_covers_the_same_hours() -> None:
    truth = Intensity(np.ones(24))
    assert forecast(np.full(24, 3.0), truth).values == [3.0] * 24
    with pytest.raises(DataError, match="23 hours, the intensity 24"):
        forecast(np.ones(23), truth)
    with pytest.raises(DataError, match="hour 5"):
        forecast(np.where(np.arange(24) == 5, np.nan, 1.0), truth)
