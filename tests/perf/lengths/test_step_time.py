"""Steps of continuous batching: what is learned from them, and when answers end."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from joulery.domain.errors import DataError
from joulery.perf.lengths.step_time import (
    _COST_WEIGHT,
    BatchedRequest,
    StepCost,
    StepTimes,
    _least,
    batch_finish_s,
)

PRIOR = StepCost(0.02)
TRUTH = StepCost(0.012, 0.0004, 4e-7, 0.3)


def learned(truth: StepCost, slowdowns: tuple[float, ...], count: int = 120, noise: float = 0.03) -> StepTimes:
    random, times = np.random.default_rng(0), StepTimes(PRIOR)
    for _ in range(count):
        sequences, slowdown = int(random.integers(1, 64)), float(random.choice(slowdowns))
        kv = float(sequences * random.integers(50, 2000))
        step_s = truth.step_s(sequences, kv) * (1 + truth.elasticity_ratio * (slowdown - 1))
        times.observe(step_s * random.normal(1, noise), sequences, kv, slowdown)
    return times


def test_costs_and_elasticity_are_learned_where_batch_and_clock_change() -> None:
    cost = learned(TRUTH, (1.0, 1.38, 2.0)).cost
    assert cost.elasticity_ratio == pytest.approx(TRUTH.elasticity_ratio, abs=0.051)
    for sequences, kv in ((1, 100.0), (16, 8000.0), (60, 60_000.0)):
        assert cost.step_s(sequences, kv) == pytest.approx(TRUTH.step_s(sequences, kv), rel=0.06)


@pytest.mark.parametrize("elasticity", [0.0, 0.5, 1.0])
def test_memory_bound_work_is_not_learned_too_short(elasticity: float) -> None:
    """An answer of 2.00 s at every clock was learned as 1.46 s, because its clock was mostly low."""
    truth, times = StepCost(0.02, elasticity_ratio=elasticity), StepTimes(PRIOR)
    for number in range(40):
        slowdown = 1.0 if number % 5 == 0 else 1.38
        times.observe(0.02 * (1 + elasticity * (slowdown - 1)), 1, 100.0 + number, slowdown)
    (took_s,) = batch_finish_s(times.cost, [BatchedRequest(100.0)], 1)
    assert took_s == pytest.approx(100 * truth.step_s(1, 0), rel=0.03)
    assert times.cost.elasticity_ratio == pytest.approx(elasticity, abs=0.051)


def test_at_one_clock_alone_its_part_is_unknown_and_the_prior_stays() -> None:
    cost = learned(StepCost(0.012, 0.0004, 0.0, 0.0), (1.38,)).cost
    assert cost.elasticity_ratio == 1.0
    assert cost.step_s(8, 0) * 1.38 == pytest.approx(0.012 + 8 * 0.0004, rel=0.06)  # right at the clock that was seen


def test_a_restarted_engine_is_learned_anew() -> None:
    times = learned(TRUTH, (1.0,))
    for number in range(300):
        times.observe(0.1, 1 + number % 8, 100.0)
    assert times.cost.step_s(4, 100.0) == pytest.approx(0.1, rel=0.05)
    assert times.observed == 256


@pytest.mark.parametrize("row", [(0.0, 1, 0.0, 1.0), (1.0, 0, 0.0, 1.0), (1.0, 1, -1.0, 1.0), (math.nan, 1, 0.0, 1.0)])
def test_impossible_steps_are_refused(row: tuple[float, float, float, float]) -> None:
    with pytest.raises(DataError, match="a step of"):
        StepTimes(PRIOR).observe(*row)


def by_steps(cost: StepCost, sequences: list[BatchedRequest], capacity: int) -> list[float]:
    """The same, one token at a time."""
    finish_s, now_s = [0.0] * len(sequences), 0.0
    waiting, active = list(range(len(sequences))), dict[int, float]()
    held = {number: one.kv_tokens for number, one in enumerate(sequences)}
    while waiting or active:
        while waiting and (len(active) < capacity or sequences[waiting[0]].running):
            number = waiting.pop(0)
            now_s += sequences[number].read_s
            active[number] = sequences[number].left_tokens
        kv = sum(held[number] for number in active) + len(active) / 2  # a token half way through its step
        now_s += cost.step_s(len(active), kv) if min(active.values()) > 0 else 0.0
        done = [number for number, left in active.items() if left <= 1]
        active = {number: left - 1 for number, left in active.items()}
        for number in active:
            held[number] += 1
        for number in done:
            finish_s[number] = now_s
            del active[number]
    return finish_s


@given(
    lefts=st.lists(st.integers(1, 30), min_size=1, max_size=12),
    running=st.integers(0, 12),
    capacity=st.integers(1, 8),
    read_s=st.floats(0, 1),
    kv=st.floats(0, 5000),
)
def test_ends_are_those_of_token_after_token(
    lefts: list[int], running: int, capacity: int, read_s: float, kv: float
) -> None:
    sequences = [
        BatchedRequest(float(left), kv, 0.0 if number < running else read_s, number < running)
        for number, left in enumerate(lefts)
    ]
    cost = StepCost(0.01, 0.002, 1e-6)
    assert batch_finish_s(cost, sequences, capacity).tolist() == pytest.approx(by_steps(cost, sequences, capacity))


def test_a_batch_with_room_takes_a_request_at_once() -> None:
    """Eight slots of a server would have made the ninth wait for the first that ends."""
    sequences = [BatchedRequest(100.0, running=True) for _ in range(8)] + [BatchedRequest(10.0)]
    finish_s = batch_finish_s(StepCost(0.02, 0.0001), sequences, 64)
    assert finish_s[-1] == pytest.approx(10 * (0.02 + 9 * 0.0001))
    assert finish_s[0] == pytest.approx(10 * (0.02 + 9 * 0.0001) + 90 * (0.02 + 8 * 0.0001))


class CountedCost(StepCost):
    """Counts how often a step is priced."""

    asked = 0

    def step_s(self, sequences: float, kv_tokens: float) -> float:
        CountedCost.asked += 1
        return super().step_s(sequences, kv_tokens)


def test_the_work_grows_with_the_requests_not_with_their_tokens() -> None:
    sequences = [BatchedRequest(1000.0 * left) for left in range(1, 513)]
    CountedCost.asked = 0
    batch_finish_s(CountedCost(0.012, 0.0004, 4e-7, 0.3), sequences, 64)
    assert CountedCost.asked == len(sequences), "one price for each request that ends, none for each token"


@given(st.integers(0, 10_000), st.integers(1, 40), st.sampled_from([0.0, 1.0]))
def test_the_costs_are_those_of_non_negative_least_squares(seed: int, steps: int, prior: float) -> None:
    from scipy.optimize import nnls

    random = np.random.default_rng(seed)
    rows = random.uniform(0.1, 1.0, (1, steps, 3)) * random.choice([0.0, 1.0, 50.0], 3)
    known = prior * random.uniform(0.01, 0.1, 3)
    (costs,), (missed,) = _least(rows, known)
    scale = math.sqrt(_COST_WEIGHT) / max(known.sum(), 1e-9)
    expected, distance = nnls(np.vstack([rows[0], scale * np.eye(3)]), np.concatenate([np.ones(steps), scale * known]))
    assert np.all(costs >= 0)
    assert missed == pytest.approx(distance**2, rel=1e-6, abs=1e-9)
    assert rows[0] @ costs == pytest.approx(rows[0] @ expected, rel=1e-3, abs=1e-3)
