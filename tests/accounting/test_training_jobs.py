"""Tallies of training jobs: footprints, efficiency windows, degradation."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from joulery.accounting.training_jobs import Look, MeasureRules, Tally, job_grams, observe
from joulery.domain.energy.carbon import CarbonSeries
from joulery.domain.quality import Quality

RULES = MeasureRules(least_s=50.0, least_looks=5)
GRID = CarbonSeries("X", [0.0, 100.0, 100_000.0], [360.0, 720.0], source="test")


def look(t_s: float, ratio: float, *, slots: int = 1, restarts: int = 0, energy_j: float = 100.0) -> Look:
    return Look(t_s, 10.0, slots, restarts, ratio, energy_j, energy_j / 2)


def played(looks: list[Look], rules: MeasureRules = RULES, carbon: CarbonSeries | None = None) -> Tally:
    tally = Tally()
    for one in looks:
        tally = observe(tally, one, rules, carbon)
    return tally


def test_time_energy_and_grams_are_integrated_over_the_intensity_of_their_time() -> None:
    tally = played([look(t, 0.0) for t in range(10, 210, 10)], carbon=GRID)

    assert (tally.executed_s, tally.slot_s, tally.energy_j) == (200.0, 200.0, 2000.0)
    assert tally.carbon_g == pytest.approx((1000 * 360 + 1000 * 720) / 3.6e6, rel=1e-12)
    assert tally.carbon_covered_j == 2000.0


def test_nothing_accrues_while_it_waits() -> None:
    tally = played([look(10, 0.5, slots=0, energy_j=0.0), look(20, 0.5, slots=0, energy_j=math.nan)])

    assert (tally.executed_s, tally.energy_j, tally.unmetered_s, tally.window) == (0.0, 0.0, 0.0, None)
    assert tally.progress_ratio == 0.5


def test_energy_reported_after_a_stop_was_drawn_before_it() -> None:
    tally = played([look(10, 0.5), look(20, 0.5, slots=0)], carbon=GRID)

    assert (tally.executed_s, tally.slot_s, tally.energy_j, tally.window) == (10.0, 10.0, 200.0, None)
    assert tally.carbon_g == pytest.approx(200 * 360 / 3.6e6)


def test_a_window_with_a_hole_in_its_energy_begins_anew_where_it_is_measured() -> None:
    unknown = [look(10.0 * n, 0.01 * n, energy_j=math.nan) for n in range(1, 20)]
    known = [look(10.0 * n, 0.01 * n) for n in range(20, 40)]
    tally = played([*unknown, look(200.0, 0.2, energy_j=5000.0), *known])

    assert tally.efficiency[1] == pytest.approx(0.01 / 100.0)


def test_unmetered_time_is_said_and_no_energy_is_made_up() -> None:
    tally = played([look(10, 0.1, energy_j=math.nan), look(20, 0.2)])

    assert (tally.unmetered_s, tally.energy_j, tally.executed_s) == (10.0, 100.0, 20.0)


@pytest.mark.parametrize("carbon", [None, CarbonSeries("X", [0.0, 5.0], [100.0], source="test")])
def test_energy_of_unknown_intensity_has_no_grams(carbon: CarbonSeries | None) -> None:
    tally = played([look(10, 0.0)], carbon=carbon)

    assert (tally.carbon_g, tally.carbon_covered_j, tally.energy_j) == (0.0, 0.0, 100.0)


def test_negative_marginal_intensity_takes_grams_off() -> None:
    marginal = CarbonSeries("X", [0.0, 100.0], [-360.0], signal="marginal", source="test")  # type: ignore[arg-type]

    assert job_grams(1000.0, 0.0, 10.0, marginal) == pytest.approx(-0.1)


def test_a_window_opens_at_the_first_progress_and_is_read_where_progress_moves() -> None:
    # 30 s of restoring, an epoch every 20 s from then on.
    looks = [look(t, 0.0) for t in (10, 20, 30)] + [look(t, 0.01 * ((t - 20) // 20)) for t in range(40, 110, 10)]
    tally = played(looks)

    # Opened at t=40 (0.01), read at t=100 (0.04): 0.03 for 600 J.
    assert tally.efficiency == {1: pytest.approx(0.03 / 600)}
    assert tally.job_w == {1: pytest.approx(600 / 60)}
    assert tally.slot_w == pytest.approx(5.0)
    assert tally.rate_per_slot_s == pytest.approx(0.03 / 60)
    assert tally.rates == {1: pytest.approx(0.03 / 60)}
    assert tally.remaining_s == pytest.approx((1 - 0.04) / 0.0005)
    assert math.isnan(Tally().remaining_s)


def test_remaining_seconds_are_those_of_one_slot_and_stay_known_while_a_job_waits() -> None:
    looks = [look(t, 0.01 * (t // 20), slots=4) for t in range(10, 110, 10)]
    tally = played([*looks, look(120, 0.05, slots=0)])

    assert tally.rates == {4: pytest.approx(0.01 / 20)}
    # 0.01 every 20 s on four slots, 0.05 so far: 1,900 s more on four, 7,600 slot-seconds.
    assert tally.remaining_s == pytest.approx(7600.0)


def test_a_window_too_short_or_too_seldom_looked_at_says_nothing() -> None:
    assert played([look(10 * k, 0.1 * k) for k in range(1, 6)]).efficiency == {}
    assert played([look(10 * k, 0.01 * k) for k in range(1, 20)], MeasureRules(50.0, 1000)).efficiency == {}


def test_stopping_or_resizing_begins_a_new_window() -> None:
    ran = [look(10 * k, 0.01 * k) for k in range(1, 10)]
    wider = [look(100 + 10 * k, 0.1 + 0.03 * k, slots=2, restarts=1) for k in range(1, 10)]
    tally = played(ran + wider)

    assert set(tally.efficiency) == {1, 2}
    assert tally.degradation(1, 1) == 1.0
    assert tally.degradation(2, 1) == 1.0, "three times the progress for the same energy: clamped"
    assert math.isnan(tally.degradation(3, 1))
    assert math.isnan(played(ran).degradation(2, 2))


def test_degradation_is_relative_and_clamped() -> None:
    tally = Tally(efficiency={1: 1.0, 2: 0.7, 4: 0.001})

    assert tally.degradation(2, 1) == pytest.approx(0.7)
    assert tally.degradation(4, 1) == 0.05


def test_the_weakest_quality_of_the_energy_stays() -> None:
    tally = observe(Tally(), Look(10, 10, 1, 0, 0.0, 1.0, 1.0, Quality.ASSUMED), RULES, None)

    assert observe(tally, look(20, 0.0), RULES, None).quality is Quality.ASSUMED


def test_progress_that_goes_back_after_a_crash_does_not_count_as_negative_efficiency() -> None:
    tally = played([look(10 * k, r) for k, r in enumerate([0.0, 0.2, 0.3, 0.1, 0.1, 0.1, 0.1, 0.2, 0.35], 1)])

    assert all(value > 0 for value in tally.efficiency.values())


@given(
    st.lists(st.tuples(st.floats(0, 60), st.integers(0, 4), st.floats(0, 1e6), st.booleans()), min_size=1, max_size=40)
)
def test_energy_is_conserved_and_never_shrinks(steps: list[tuple[float, int, float, bool]]) -> None:
    tally, t_s, expected_j = Tally(), 0.0, 0.0
    for elapsed_s, slots, energy_j, known in steps:
        t_s += elapsed_s
        drawn = energy_j if known else math.nan
        after = observe(tally, Look(t_s, elapsed_s, slots, 0, 0.0, drawn, drawn), RULES, None)
        assert after.energy_j >= tally.energy_j
        assert after.executed_s >= tally.executed_s
        expected_j += energy_j if known else 0.0
        tally = after
    assert tally.energy_j == pytest.approx(expected_j, rel=1e-9, abs=1e-9)
    assert np.isfinite(tally.carbon_g)
