"""Predicted first tokens: list scheduling, and an SLO that admitted requests keep at its quantile."""

from __future__ import annotations

import heapq
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from joulery.perf.queues.first_token import FirstTokens, slot_wait_s

TIMES = st.lists(st.floats(0, 100), max_size=8)


@given(TIMES, TIMES, st.integers(1, 5))
def test_the_wait_is_that_of_the_slot_that_is_free_first(running, queued, slots):
    free = [0.0] * slots
    for needs in (*sorted(running)[:slots], *sorted(running)[slots:], *queued):
        free.sort()
        free[0] += needs
    assert slot_wait_s(running, queued, slots) == pytest.approx(min(free))


@given(TIMES, TIMES, st.integers(1, 5), st.floats(0, 100))
def test_one_more_request_never_shortens_the_wait(running, queued, slots, more):
    assert slot_wait_s(running, [*queued, more], slots) >= slot_wait_s(running, queued, slots)
    assert slot_wait_s(running, queued, slots + 1) <= slot_wait_s(running, queued, slots) + 1e-9


def test_a_free_slot_is_no_wait_and_few_first_tokens_are_no_margin():
    assert slot_wait_s([5.0], [], 2) == 0.0
    seen = FirstTokens()
    for number in range(19):
        seen.add(float(number), 3.0, 1.0)
    assert seen.margin_s(0.95, 19.0) == 0.0 and math.isnan(seen.quantile_s(0.95, 19.0))
    seen.add(19.0, 3.0, 1.0)
    assert seen.margin_s(0.95, 19.0) == 2.0 and seen.quantile_s(0.95, 19.0) == 3.0
    assert seen.margin_s(0.95, 100.0) == 0.0, "a minute later nothing is known again"


SLOTS, MEAN_S, PROMPT_S, LIMIT_S, QUANTILE = 4, 1.0, 0.1, 1.0, 0.95


def played(load: float, seed: int, *, admits: bool = True, wrong: float = 0.5) -> tuple[float, float, float]:
    """A model of four slots under Poisson arrivals: share within the SLO, share refused, share of its slots busy.

    Lengths are log-normal and predicted with log-normal errors of ``wrong``; requests wait first come, first served.
    """
    rng = np.random.default_rng(seed)
    count = 3000
    at_s = np.cumsum(rng.exponential(MEAN_S / (SLOTS * load), count))
    takes_s = MEAN_S * rng.lognormal(-0.32, 0.8, count)
    says_s = takes_s * rng.lognormal(0.0, wrong, count)
    free_s, ends, begun = [0.0] * SLOTS, [], []
    first, seen, refused, busy_s = [], FirstTokens(), 0, 0.0
    learnt: list[tuple[float, float, float]] = []
    for now_s, needs_s, said_s in zip(at_s.tolist(), takes_s.tolist(), says_s.tolist(), strict=True):
        while learnt and learnt[0][0] <= now_s:
            seen.add(*heapq.heappop(learnt))
        wait_s, open_ = 0.0, []
        if admits:  # else the wait decides nothing, and the queue is long
            begun = open_ = [(start, end, said) for start, end, said in begun if end > now_s]
            running = [max(0.0, said - (now_s - start)) for start, _, said in open_ if start <= now_s]
            queued = [said for start, _, said in open_ if start > now_s]
            wait_s = slot_wait_s(running, queued, SLOTS)
        if open_ and max(0.0, wait_s + seen.margin_s(QUANTILE, now_s)) > LIMIT_S:
            refused += 1
            continue
        start_s = max(now_s, heapq.heappop(free_s))
        heapq.heappush(free_s, start_s + needs_s)
        begun.append((start_s, start_s + needs_s, said_s))
        first_s = start_s + PROMPT_S * rng.lognormal(0.0, 0.3) - now_s
        heapq.heappush(learnt, (now_s + first_s, first_s, wait_s))
        first.append(first_s)
        ends.append(start_s + needs_s)
        busy_s += needs_s
    within = float(np.mean(np.array(first) <= LIMIT_S))
    return within, refused / count, busy_s / (SLOTS * max(ends))


@pytest.mark.parametrize("load", [0.5, 0.9, 1.5, 4.0])
def test_admitted_requests_keep_the_slo_at_its_quantile(load):
    """Over five seeds the share within the SLO is at least the quantile, whatever arrives."""
    shares = np.array([played(load, seed) for seed in range(5)])
    within, refused, busy = shares.mean(axis=0)
    assert within >= QUANTILE, (within, refused, busy)
    if load < 0.6:
        assert refused < 0.04, "with room next to nothing is refused"
    if load > 1:
        assert busy > 0.8, "the slots stay busy while the rest is refused"
        unlimited = np.mean([played(load, seed, admits=False)[0] for seed in range(2)])
        assert unlimited < 0.2, "without it nearly all are late"


def test_predictions_that_are_far_off_cost_admissions_and_not_the_slo():
    good, bad = (np.mean([played(1.5, seed, wrong=wrong) for seed in range(3)], axis=0) for wrong in (0.2, 1.5))
    assert min(good[0], bad[0]) >= QUANTILE - 0.03
    assert bad[2] > 0.6
