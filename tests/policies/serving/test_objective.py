import csv
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from joulery.policies.serving.objective import Objective, ReplanTrigger, carbon_change_ratio, rank, weigh
from tests.data_folder import data_folder

ratios = st.floats(0.0, 1.0)
positive = st.floats(1e-3, 1e6)


@pytest.mark.parametrize(
    ("energy", "intensity", "accuracy_change", "expected"),
    [(0.4, 500, -0.04, 4.4), (1.2, 500, -0.02, 2.2), (0.4, 100, -0.04, 6.0), (1.2, 100, -0.02, 7.0)],
)
def test_figure_6(energy, intensity, accuracy_change, expected):
    """Clover Fig. 6: lambda 0.1, C_base 1000. The paper prints 3.2 where its equations give 2.2."""
    score = weigh(0.1, carbon_change_ratio(energy * intensity, 1000.0), accuracy_change)
    assert 100 * score == pytest.approx(expected, abs=1e-9)


def test_figure_6_through_the_objective():
    # 1000 g a request at 250 g/kWh and PUE 1.5; config. A has energy 0.4 in units of 1 kWh.
    objective = Objective(0.1, 1.0, 1000 * 3.6e6 / 250 / 1.5, 250.0, 1.5, 1.0)
    assert objective.base_carbon_g == pytest.approx(1000.0)
    assert 100 * objective.score(0.96, 0.4 * 3.6e6, 500.0) == pytest.approx(4.4, abs=1e-9)
    assert 100 * objective.score(0.98, 1.2 * 3.6e6, 500.0) == pytest.approx(2.2, abs=1e-9)
    assert 100 * objective.score(0.98, 1.2 * 3.6e6, 100.0) == pytest.approx(7.0, abs=1e-9)


@pytest.mark.parametrize(("column", "expected"), [("CISO_March", 24), ("CISO_Sep", 17), ("ESO_March", 17)])
def test_the_trigger_fires_as_often_as_in_the_published_runs(column, expected):
    with (data_folder("clover") / "carbon_traces_48h.csv").open() as file:
        series = [float(row[column]) for row in csv.DictReader(file)]
    trigger = ReplanTrigger(250.0 * 1.5, 1.5, 0.05)
    planned, fired = math.inf, 0
    for g_per_kwh in series:
        if trigger.intensity_moved(g_per_kwh, planned):
            planned, fired = g_per_kwh, fired + 1
    assert len(series) == 49 and fired == expected


@given(ratios, ratios, positive, st.floats(0, 2000), st.floats(1, 3))
def test_more_carbon_or_less_accuracy_never_scores_higher(lambda_ratio, accuracy, energy, g_per_kwh, pue):
    objective = Objective(lambda_ratio, 0.9, 10.0, 250.0, 1.5, pue)
    score = objective.score(accuracy, energy, g_per_kwh)
    assert objective.score(accuracy, energy * 1.5, g_per_kwh) <= score
    assert objective.score(accuracy, energy, g_per_kwh + 10) <= score
    assert objective.score(accuracy * 0.9, energy, g_per_kwh) <= score


def test_many_scores_are_those_of_each_to_the_last_digit():
    objective, random = Objective(0.37, 0.776, 0.2, 250.0, 1.5, 1.1), np.random.default_rng(3)
    accuracy_ratio, energy_j = random.uniform(0.6, 0.8, 300), random.lognormal(-2, 1, 300)
    for g_per_kwh in (-5.0, 0.0, 133.7):
        each = [
            objective.score(*pair, g_per_kwh) for pair in zip(accuracy_ratio.tolist(), energy_j.tolist(), strict=True)
        ]
        assert objective.scores(accuracy_ratio, energy_j, g_per_kwh).tolist() == each


def test_the_baseline_at_its_own_intensity_scores_zero():
    objective = Objective(0.3, 0.776, 0.2, 250.0, 1.5, 1.5)
    assert objective.score(0.776, 0.2, 250.0) == pytest.approx(0.0, abs=1e-12)
    assert objective.score(0.776, 0.2, 0.0) == pytest.approx(0.3)
    assert objective.score(0.776, 0.2, -50.0) == objective.score(0.776, 0.2, 0.0), "wasting never pays"


@given(st.floats(-10, 10), st.floats(-10, 10), st.floats(0, 2), st.floats(0, 2))
def test_a_violation_never_outranks_a_candidate_that_keeps_the_limit(score, other, latency_s, other_s):
    keeps, breaks = rank(score, min(latency_s, 1.0), 1.0), rank(other, 1.0 + 1e-9 + other_s, 1.0)
    assert keeps > breaks
    assert rank(other, math.inf, 1.0) < breaks, "the nearest violation is the least bad"


def test_a_move_is_more_than_a_share_of_the_base_in_either_direction():
    trigger = ReplanTrigger(250.0)
    assert not trigger.intensity_moved(262.5, 250.0)
    assert trigger.intensity_moved(262.6, 250.0) and trigger.intensity_moved(237.4, 250.0)
    assert not trigger.intensity_moved(-50.0, 0.0), "below zero counts as zero"
    previous = ReplanTrigger(250.0, of_previous=True)
    assert previous.intensity_moved(106.0, 100.0) and not trigger.intensity_moved(106.0, 100.0)
    assert trigger.demand_moved(131.0, 100.0) and trigger.demand_moved(76.0, 100.0)
    assert not trigger.demand_moved(129.0, 100.0) and not trigger.demand_moved(78.0, 100.0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"lambda_ratio": 1.1},
        {"lambda_ratio": -0.1},
        {"base_energy_j": 0.0},
        {"base_g_per_kwh": math.nan},
        {"pue": math.inf},
        {"base_accuracy_ratio": -0.5},
    ],
)
def test_nonsense_is_refused(wrong):
    good = {"lambda_ratio": 0.5, "base_accuracy_ratio": 0.8, "base_energy_j": 1.0, "base_g_per_kwh": 250.0}
    with pytest.raises(ValueError, match="expected"):
        Objective(**{**good, **wrong})
