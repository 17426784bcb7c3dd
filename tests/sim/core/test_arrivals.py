"""Arrival processes: rate, variability, independence of gaps, determinism."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from joulery.domain.errors import DataError
from joulery.sim.core.arrivals import RateSeries, Recorded, Renewal, constant, gamma, poisson, unit_renewal
from joulery.sim.core.streams import Streams

CVS = st.sampled_from([0.0, 0.3, 1.0, 2.0, 4.0])
SERIES = st.lists(st.tuples(st.floats(0.1, 50.0), st.floats(0.0, 30.0)), min_size=1, max_size=6).map(
    lambda steps: RateSeries(np.cumsum([0.0, *(length for length, _ in steps)])[:-1], [rate for _, rate in steps])
)


def rng(*name):
    return Streams(11)("arrivals", *name)


@pytest.mark.parametrize("cv", [0.5, 1.0, 2.0, 4.0])
def test_gaps_have_the_rate_and_cv_asked_for_and_are_uncorrelated(cv):
    gaps = np.diff(gamma(20.0, cv).times_s(20_000.0, rng(f"{cv}")))
    assert np.mean(gaps) == pytest.approx(1 / 20.0, rel=0.03)
    assert np.std(gaps) / np.mean(gaps) == pytest.approx(cv, rel=0.03)
    lagged = np.corrcoef(gaps[:-1], gaps[1:])[0, 1]
    assert abs(lagged) < 0.03
    assert not np.all(np.diff(gaps) >= 0)


def test_poisson_counts_are_poisson():
    counts = np.histogram(poisson(5.0).times_s(40_000.0, rng()), bins=np.arange(0.0, 40_001.0))[0]
    assert np.mean(counts) == pytest.approx(5.0, rel=0.01)
    assert np.var(counts) == pytest.approx(5.0, rel=0.03)
    assert np.mean(counts == 0) == pytest.approx(math.exp(-5.0), rel=0.15)


def test_constant_is_a_metronome_with_a_phase():
    times = constant(4.0).times_s(100.0, rng())
    assert np.allclose(np.diff(times), 0.25)
    assert 0 <= times[0] < 0.25
    assert len(times) == 400
    assert constant(4.0).times_s(100.0, rng("other"))[0] != times[0]


@pytest.mark.parametrize("cv", [0.0, 0.5, 1.0, 4.0])
def test_windows_expect_the_integral_of_the_rate_from_the_first_second(cv):
    """Equilibrium: an ordinary Gamma process of cv 4 would put 7.5 arrivals too many into every window."""
    source = Streams(5)("equilibrium", f"{cv}")
    counts = [len(unit_renewal(10.0, cv, source)) for _ in range(6000)]
    spread = math.sqrt(max(np.var(counts), 1e-9) / len(counts))
    assert abs(np.mean(counts) - 10.0) < 4 * spread + 1e-9


def test_rate_series_puts_arrivals_where_the_rate_is():
    rate = RateSeries([0.0, 1000.0, 3000.0, 4000.0], [2.0, 10.0, 0.0, 5.0])
    for cv in (0.0, 1.0, 2.0):
        times = Renewal(rate, cv).times_s(6000.0, rng(f"{cv}"))
        counts = np.histogram(times, bins=[0, 1000, 3000, 4000, 6000])[0]
        assert counts[2] == 0
        assert counts[[0, 1, 3]] == pytest.approx([2000, 20_000, 10_000], rel=0.1 if cv else 0.001)


def test_piecewise_poisson_with_a_constant_rate_is_the_poisson_process():
    split = Renewal(RateSeries([0.0, 10.0, 20.0], [3.0, 3.0, 3.0]))
    assert np.allclose(split.times_s(50.0, rng()), poisson(3.0).times_s(50.0, rng()))


@given(SERIES, st.floats(0.0, 500.0))
def test_times_of_inverts_expected(series, t_s):
    count = float(series.expected(t_s))
    back = float(series.times_of(count))
    assert float(series.expected(back)) == pytest.approx(count, rel=1e-9, abs=1e-9) if back < math.inf else True
    assert count >= 0


@given(SERIES, CVS, st.floats(0.5, 100.0), st.floats(0.0, 1.0))
@settings(max_examples=60)
def test_a_shorter_window_is_the_beginning_of_a_longer_one(series, cv, end_s, part):
    process = Renewal(series, cv)
    longer = process.times_s(end_s, rng())
    shorter = process.times_s(part * end_s, rng())
    assert np.array_equal(shorter, longer[longer < part * end_s])


@given(SERIES, CVS, st.floats(0.0, 200.0))
@settings(max_examples=60)
def test_times_are_ordered_and_inside_the_window(series, cv, end_s):
    times = Renewal(series, cv).times_s(end_s, rng())
    assert times.dtype == np.float64
    assert np.all(np.diff(times) >= 0)
    assert np.all((times >= 0) & (times < end_s))


def test_blocks_join_without_a_seam():
    times = unit_renewal(30_000.0, 1.0, rng())
    gaps = np.diff(times)
    assert np.array_equal(unit_renewal(20_000.0, 1.0, rng()), times[times < 20_000.0])
    assert gaps.max() < 25


def test_zero_rate_and_empty_window_have_no_arrivals():
    assert len(poisson(0.0).times_s(100.0, rng())) == 0
    assert len(poisson(5.0).times_s(0.0, rng())) == 0
    assert len(constant(0.0).times_s(100.0, rng())) == 0


def test_recorded_times_are_returned_as_they_were():
    log = Recorded([0.0, 1.0, 1.0, 7.5])
    generator = rng()
    assert log.times_s(7.5, generator).tolist() == [0.0, 1.0, 1.0]
    assert log.times_s(8.0, generator).tolist() == [0.0, 1.0, 1.0, 7.5]
    assert generator.random() == rng().random(), "a recording draws nothing"
    with pytest.raises(ValueError, match="read-only"):
        log.recorded_s[0] = 1.0


@pytest.mark.parametrize(
    ("times", "row"), [([0.0, 2.0, 1.0], 3), ([-1.0], 1), ([0.0, math.nan], 2), ([0.0, math.inf], 2)]
)
def test_bad_recordings_name_the_row(times, row):
    with pytest.raises(DataError, match="no earlier") as caught:
        Recorded(times)
    assert caught.value.row == row


@pytest.mark.parametrize("cv", [-0.1, math.nan, math.inf, 51.0])
def test_impossible_variability_is_refused(cv):
    with pytest.raises(DataError, match="coefficient of variation"):
        gamma(1.0, cv)


@pytest.mark.parametrize(
    ("edges", "rates", "text"),
    [
        ([], [], "one rate per edge"),
        ([0.0, 1.0], [1.0], "one rate per edge"),
        ([1.0], [1.0], "start at 0"),
        ([0.0, 0.0], [1.0, 1.0], "increase"),
        ([0.0, math.inf], [1.0, 1.0], "increase"),
        ([0.0], [-1.0], "rate 0"),
        ([0.0, 1.0], [1.0, math.nan], "rate 1"),
        ([0.0], [math.inf], "rate 0"),
    ],
)
def test_bad_rate_series_are_refused(edges, rates, text):
    with pytest.raises(DataError, match=text):
        RateSeries(edges, rates)
