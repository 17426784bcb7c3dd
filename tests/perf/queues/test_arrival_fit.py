"""The arrival process of a log: known processes are found again, and plans from a log keep what it does next."""

import numpy as np
import pytest

from joulery.domain.errors import DataError
from joulery.perf.queues.arrival_fit import fit_arrivals


def gamma_times(cv, rate, length_s, seed=0):
    rng = np.random.default_rng(seed)
    shape = 1 / cv**2
    gaps = rng.gamma(shape, 1 / (shape * rate), int(1.3 * rate * length_s) + 1000)
    times = np.cumsum(gaps)
    return times[times < length_s]


@pytest.mark.parametrize("cv", [1.0, 2.0, 3.0])
def test_the_variation_of_a_renewal_process_is_found_again(cv):
    fits = [fit_arrivals(gamma_times(cv, 100.0, 600.0, seed), 0.1) for seed in range(8)]
    for fit in fits:
        assert fit.mean_rps == pytest.approx(100.0, rel=0.12)
        assert cv**2 * 0.8 <= fit.scv_high <= cv**2 * 2.2
        assert fit.rate_rps >= fit.mean_rps
    assert np.mean([fit.scv for fit in fits]) == pytest.approx(cv**2, rel=0.4)


def test_evenly_spaced_requests_have_no_variation():
    fit = fit_arrivals(np.arange(6000) / 100.0, 0.05)
    assert (fit.scv, fit.scv_high) == (0.0, 0.0)
    assert fit.rate_rps == pytest.approx(100.0, rel=0.01)


def test_bursts_with_independent_gaps_inside_are_seen():
    """A rate that switches every second: the gaps look almost Poisson, the counts do not."""
    rng = np.random.default_rng(1)
    times = np.concatenate(
        [second + np.sort(rng.uniform(0, 1, rng.poisson(200 if rng.random() < 0.3 else 40))) for second in range(900)]
    )
    gaps = np.diff(times)
    fit = fit_arrivals(times, 0.1)
    assert gaps.var() / gaps.mean() ** 2 < 4
    assert fit.scv > 20 and fit.window_s >= 1.0


def test_a_rate_that_drifts_is_planned_for_at_its_peak_and_is_no_burst():
    rng = np.random.default_rng(2)
    times = np.concatenate(
        [minute * 60 + rng.uniform(0, 60, rng.poisson(60 * (100 + 3 * minute))) for minute in range(8)]
    )
    fit = fit_arrivals(times, 0.05)
    assert fit.rate_rps == pytest.approx(121.0, rel=0.03)
    assert fit.scv < 1.5


def test_what_half_of_a_log_says_to_plan_with_covers_the_other_half_of_a_steady_one():
    times = gamma_times(2.0, 100.0, 600.0)
    first, second = (fit_arrivals(half, 0.1) for half in (times[times < 300.0], times[times >= 300.0]))
    assert second.scv <= first.scv_high
    calm, wild = (fit_arrivals(gamma_times(cv, 100.0, 300.0), 0.1) for cv in (1.0, 4.0))
    assert wild.scv > max(4 * calm.scv, calm.scv_high)


def test_a_log_that_says_nothing_is_an_error():
    with pytest.raises(DataError, match="too few"):
        fit_arrivals(np.arange(50.0), 0.1)
    with pytest.raises(DataError, match="same time"):
        fit_arrivals(np.zeros(500), 0.1)
