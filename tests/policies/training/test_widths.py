"""How many GPUs a job gets at a price of its completion time."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from joulery.domain.errors import ConfigError
from joulery.policies.training.green import Green
from joulery.policies.training.queues import TrackedJob
from joulery.policies.training.widths import JobWidths, WidthPrices, prices, with_measured, with_power
from tests.policies.training.test_green import view

points = st.dictionaries(
    st.integers(1, 8), st.tuples(st.floats(0.05, 1.0), st.floats(50.0, 5000.0)), min_size=1, max_size=8
)
VALLEY = {1: 1.0, 2: 0.95, 3: 0.8, 4: 0.83, 5: 0.86, 6: 0.9, 7: 0.83, 8: 0.85}
"""Efficiency falls at three GPUs and rises again: with gamma 0.85 a job stops at two."""


def widths(known: dict[int, float], price_w: float, *, cap: int = 8, **changes: object) -> JobWidths:
    power_w = {n: 300.0 * n for n in known}
    return JobWidths({0: known}, {0: power_w}, 0.85, cap, prices=WidthPrices(price_w), **changes)  # type: ignore[arg-type]


@given(
    known=points, price_w=st.floats(0, 1e4), gpu_w=st.floats(0, 1e3), hour=st.floats(0.25, 4), most=st.integers(1, 8)
)
def test_no_measured_number_of_gpus_costs_less_than_the_one_chosen(
    known: dict[int, tuple[float, float]], price_w: float, gpu_w: float, hour: float, most: int
) -> None:
    """Work on n GPUs takes power and price over speed, and speed is efficiency times power."""
    rule = JobWidths(
        {3: {n: d for n, (d, _) in known.items()}},
        {3: {n: w for n, (_, w) in known.items()}},
        0.9,
        8,
        prices=WidthPrices(price_w, gpu_w, hour),
    )
    chosen = rule.newcomer(3, most).gpus
    costs = {n: (w + (price_w + gpu_w * n) * hour) / (d * w) for n, (d, w) in known.items() if n <= most}
    assert costs.get(chosen, 1.0) <= min(costs.values(), default=1.0) * (1 + 1e-9)
    assert 1 <= chosen <= most


@given(known=points, low=st.floats(0, 500), more=st.floats(0, 500))
def test_a_higher_price_of_time_never_chooses_a_slower_number(
    known: dict[int, tuple[float, float]], low: float, more: float
) -> None:
    def speed(price_w: float) -> float:
        tables = ({0: {n: each[at] for n, each in known.items()}} for at in (0, 1))
        efficiency, power_w = known[JobWidths(*tables, 0.9, 8, prices=WidthPrices(price_w)).newcomer(0, 8).gpus]
        return efficiency * power_w

    assert speed(low + more) >= speed(low) * (1 - 1e-9)


def test_a_number_beyond_a_valley_is_found_where_gamma_stops_before_it() -> None:
    assert widths(VALLEY, 0.0).newcomer(0, 8).gpus == 1
    assert widths(VALLEY, 60.0).newcomer(0, 8).gpus == 6
    assert JobWidths({0: VALLEY}, {}, 0.85, 8).newcomer(0, 8).gpus == 2
    assert widths(VALLEY, 60.0).newcomer(0, 5).gpus == 2, "no wider than its owner allows"
    assert widths(VALLEY, 60.0).newcomer(0, 8, 7).gpus == 8, "no narrower"


def test_one_job_of_a_kind_tries_the_next_number_and_the_others_settle() -> None:
    rule = widths({1: 1.0, 2: 0.95}, 60.0)
    first, second = (rule.grown(TrackedJob(True, 2, 0.95), 0, 8, 1e5, 120.0) for _ in range(2))
    assert (first.upper, first.gpus) == (True, 3)
    assert (second.upper, second.gpus) == (False, 2)
    short = widths({1: 1.0, 2: 0.95}, 60.0).grown(TrackedJob(True, 2, 0.95), 0, 8, 300.0, 120.0)
    assert (short.upper, short.gpus) == (False, 2), "a job that soon ends tries nothing"
    first, second = (widths({1: 1.0}, 60.0).grown(TrackedJob(True, 1), 0, 8, 1e5, 120.0) for _ in range(2))
    assert first.gpus == second.gpus == 2, "while nothing wider is known every job may grow"


def test_a_kind_is_tried_no_wider_once_a_number_costs_far_more() -> None:
    rule = widths({1: 1.0, 2: 0.98, 3: 0.5}, 60.0)
    settled = rule.grown(TrackedJob(True, 3, 0.5), 0, 8, 1e5, 120.0)
    assert (settled.upper, settled.gpus) == (False, 2)
    assert rule.newcomer(0, 8) == TrackedJob(False, 2)


def test_a_dirty_hour_lowers_the_price_and_keeps_no_long_job_narrow() -> None:
    power_w = {0: {n: 300.0 * n for n in VALLEY}}
    seen = {hour: prices(0.2, power_w, view(0.0, [0], [np.nan], g_per_kwh=hour), 0) for hour in (100.0, 200.0, 400.0)}
    rules = {hour: JobWidths({0: VALLEY}, power_w, 0.85, 8, prices=found) for hour, found in seen.items()}
    assert [rule.newcomer(0, 8).gpus for rule in rules.values()] == [6, 6, 1]
    assert rules[400.0].wanted(0, 8, 1, executed_s=3600.0) == 1
    assert rules[400.0].wanted(0, 8, 1, executed_s=5 * 3600.0) == 6
    unknown = prices(0.2, power_w, view(0.0, [0], [np.nan], g_per_kwh=0.0, mean_g_per_kwh=0.0), 32)
    assert unknown == WidthPrices(60.0, 30.0, 1.0), "half as many wait as there are GPUs"
    assert prices(0.2, {}, view(0.0, [], []), 0) is None


def test_power_is_learned_where_efficiency_is_and_follows_slowly() -> None:
    def after(known: object, job_w: float, degradation: float = 0.9) -> object:
        return with_power(known, view(0.0, [2], [degradation], job_w=np.array([job_w])))  # type: ignore[arg-type]

    assert after({}, np.nan) == after({}, 500.0, np.nan) == {}
    first = after({}, 500.0)
    assert first == {0: {2: 500.0}}
    assert after(first, 503.0) is first
    assert after(first, 580.0) == {0: {2: 510.0}}


def test_a_first_outlier_of_efficiency_fades_and_what_never_changes_stays_the_same_object() -> None:
    def after(known: object, *degradation: float) -> object:
        count = len(degradation)
        seen = view(0.0, [4] * count, list(degradation), kind=np.zeros(count, np.int64))
        return with_measured(known, seen)  # type: ignore[arg-type]

    assert after({}, np.nan) == {}
    known = after({}, 0.2)
    assert known == {0: {4: 0.2}}
    assert after(known, 0.2, np.nan) is known
    assert after(known, 0.6) == {0: {4: pytest.approx(0.25)}}
    assert after(known, 0.6, 0.65) == {0: {4: pytest.approx(0.30)}}, "jobs of one round count one after another"
    for _ in range(30):
        known = after(known, 0.8)
    assert known == {0: {4: pytest.approx(0.8, abs=0.02)}}


def test_a_kind_that_looked_wasteful_once_widens_again_when_it_proves_otherwise() -> None:
    policy = Green(price_ratio=0.2, cap=4, theta=1.0)
    rows = {"kind": np.zeros(2, np.int64), "job_w": np.array([300.0, 560.0])}
    seen = policy.step(policy.initial(), view(0.0, [1, 2], [1.0, 0.4], **rows)).state
    assert policy._widths(seen, view(0.0, [], [])).newcomer(0, 2).gpus == 1
    for at in range(1, 20):
        seen = policy.step(seen, view(1800.0 * at, [1, 2], [1.0, 0.97], **rows)).state
    assert policy._widths(seen, view(0.0, [], [])).newcomer(0, 2).gpus == 2


def test_what_a_policy_knows_of_power_survives_a_restart_and_an_earlier_journal_is_read() -> None:
    policy = Green(price_ratio=0.2, cap=8)
    state = policy.step(policy.initial(), view(0.0, [1], [1.0], job_w=np.array([300.0]))).state
    document = json.loads(json.dumps(policy.remember(state)))
    assert policy.recall(document).power_w == {0: {1: 300.0}}
    del document["power_w"]
    assert policy.recall(document).power_w == {}


@pytest.mark.parametrize("price", [-0.1, float("nan"), float("inf")])
def test_a_price_that_is_none_is_refused(price: float) -> None:
    with pytest.raises(ConfigError, match="price"):
        Green(price_ratio=price)


@pytest.mark.parametrize("gpus", [64, 6, 4, 2, 1])
def test_no_job_wants_more_gpus_than_there_are(gpus: int) -> None:
    """It would wait for ever: a new one of a known kind, and one that had more before GPUs went away."""
    policy = Green(price_ratio=0.2, cap=8)
    power_w = {n: 300.0 * n for n in VALLEY}
    known = policy.recall({"jobs": {}, "profile": {"0": VALLEY}, "power_w": {"0": power_w}})
    seen = view(0.0, [0], [np.nan], gpus=gpus)
    assert policy.step(known, seen).decisions[0].value.run == {0: min(gpus, 6)}
    before = policy.recall(
        {"jobs": {"0": [False, 6, 0.9, 0, False]}, "profile": {"0": VALLEY}, "power_w": {"0": power_w}}
    )
    assert 1 <= policy.step(before, seen).decisions[0].value.run[0] <= gpus
