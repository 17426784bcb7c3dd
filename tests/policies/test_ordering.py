import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from joulery.domain.errors import ConfigError
from joulery.policies.ordering import Aging, SpeculativeQueue
from tests.data_folder import data_folder

Job = tuple[float, float, float]


def run(jobs: list[Job], aging: Aging) -> tuple[list[int], dict[int, float]]:
    """One server, never preempted: dispatch order and finish times of (arrival, service, predicted) jobs."""
    queue, order, finish = SpeculativeQueue(aging), [], {}
    by_arrival = sorted(range(len(jobs)), key=lambda i: (jobs[i][0], i))
    now_s, at = 0.0, 0
    while at < len(jobs) or len(queue):
        if not len(queue):
            now_s = max(now_s, jobs[by_arrival[at]][0])
        while at < len(jobs) and jobs[by_arrival[at]][0] <= now_s:
            queue.push(by_arrival[at], jobs[by_arrival[at]][0], jobs[by_arrival[at]][2])
            at += 1
        number = queue.pop(now_s)
        order.append(number)
        now_s += jobs[number][1]
        finish[number] = now_s
    return order, finish


def slow_order(jobs: list[Job], aging: Aging) -> list[int]:
    """The same by the definition: at every dispatch look at every waiting request."""
    waiting, order, now_s = set(range(len(jobs))), [], 0.0
    while waiting:
        here = [i for i in waiting if jobs[i][0] <= now_s]
        if not here:
            now_s = min(jobs[i][0] for i in waiting)
            continue
        number = min(here, key=lambda i: (aging.key_s(jobs[i][2], now_s - jobs[i][0]), jobs[i][0], i))
        waiting.discard(number)
        order.append(number)
        now_s += jobs[number][1]
    return order


def test_golden_dispatch_orders_and_finish_times() -> None:
    for case in json.loads((data_folder("muserve") / "cases_ssjf_aging_examples.json").read_text()):
        jobs = list(zip(case["arrival_s"], case["service_s"], case["predicted_s"], strict=True))
        order, finish = run(jobs, Aging(case["alpha"]))
        assert order == case["dispatch_order"]
        assert finish == pytest.approx({int(k): v for k, v in case["finish_s"].items()}, abs=1e-9)


# Times on a grid of 1/64 s and dyadic rates keep every key exact, so that ties are ties in both.
grid = st.integers(0, 640).map(lambda n: n / 64)
jobs_on_grid = st.lists(st.tuples(grid, grid, grid), max_size=25)


@given(jobs_on_grid, st.sampled_from([0.0, 0.125, 0.5, 4.0]), st.sampled_from([0.0, 0.5, 3.0]))
def test_the_heaps_agree_with_the_definition(jobs: list[Job], rate: float, grace_s: float) -> None:
    aging = Aging(rate, grace_s)
    order, _ = run(jobs, aging)
    assert order == slow_order(jobs, aging)
    assert sorted(order) == list(range(len(jobs)))


@given(jobs_on_grid)
def test_great_aging_is_first_come_first_served(jobs: list[Job]) -> None:
    order, _ = run(jobs, Aging(1e6))
    by_arrival = [jobs[i][0] for i in order]
    assert by_arrival == sorted(by_arrival)


@given(jobs_on_grid, st.sampled_from([0.125, 0.5]))
def test_no_job_is_overtaken_from_beyond_the_starvation_bound(jobs: list[Job], rate: float) -> None:
    order, _ = run(jobs, Aging(rate))
    if not jobs:
        return
    predicted = [job[2] for job in jobs]
    bound_s = (max(predicted) - min(predicted)) / rate
    position = {number: at for at, number in enumerate(order)}
    for early in order:
        for late in order:
            if jobs[late][0] > jobs[early][0] + bound_s:
                assert position[early] < position[late]


def test_cancelled_requests_never_run_and_may_come_back() -> None:
    queue = SpeculativeQueue(Aging(0.1, grace_s=1.0))
    for number in range(4):
        queue.push(number, float(number), 10.0 - number)
    assert queue.cancel(3) and not queue.cancel(3) and len(queue) == 3
    queue.push(3, 50.0, 0.5)
    predicted, arrival = [10.0, 9.0, 8.0, 0.5], [0.0, 1.0, 2.0, 50.0]
    expected = sorted(range(4), key=lambda n: queue.aging.key_s(predicted[n], 60.0 - arrival[n]))
    assert [queue.pop(60.0) for _ in range(4)] == expected
    with pytest.raises(IndexError):
        queue.pop(61.0)


def test_nonsense_is_refused() -> None:
    queue = SpeculativeQueue()
    queue.push(1, 0.0, 1.0)
    with pytest.raises(ConfigError, match="once"):
        queue.push(1, 0.0, 1.0)
    with pytest.raises(ConfigError, match="finite"):
        queue.push(2, 0.0, float("nan"))
    with pytest.raises(ConfigError, match="at least 0"):
        Aging(-0.1)


def test_speculation_pays_on_a_loaded_server() -> None:
    rng = np.random.default_rng(3)
    n = 4000
    service = rng.exponential(1.0, n) ** 1.3
    arrival = np.cumsum(rng.exponential(service.mean() / 0.9, n))
    jobs = list(zip(arrival.tolist(), service.tolist(), service.tolist(), strict=True))
    mean = {}
    for name, aging in {"fcfs": Aging(1e6), "sjf": Aging(0.0)}.items():
        order, finish = run(jobs, aging)
        assert sorted(order) == list(range(n))
        mean[name] = np.mean([finish[i] - jobs[i][0] for i in range(n)])
    assert mean["sjf"] < 0.75 * mean["fcfs"]


spaced = st.integers(0, 640).map(lambda n: n / 64 + 1 / 256)
"""Predictions that differ have head starts that differ by more than rounding."""


@given(st.lists(st.tuples(grid, grid, spaced), max_size=25), st.sampled_from([2.0, 30.0, 120.0]))
def test_boost_serves_by_arrival_less_the_head_start(jobs: list[Job], decay_s: float) -> None:
    aging = Aging.boost(decay_s)
    order, _ = run(jobs, aging)
    assert sorted(order) == list(range(len(jobs)))
    now_s = 0.0
    waiting = set(range(len(jobs)))
    for number in order:
        now_s = max(now_s, min(jobs[i][0] for i in waiting))
        best = min(aging.key_s(jobs[i][2], now_s - jobs[i][0]) for i in waiting if jobs[i][0] <= now_s)
        assert aging.key_s(jobs[number][2], now_s - jobs[number][0]) <= best + 1e-6
        waiting.discard(number)
        now_s += jobs[number][1]


def test_a_head_start_grows_for_short_answers_and_vanishes_for_long_ones() -> None:
    aging = Aging.boost(120.0)
    starts = [-aging.size_s(seconds) for seconds in (0.0, 0.001, 1.0, 10.0, 100.0, 1e4)]
    assert starts == sorted(starts, reverse=True) and starts[0] == starts[1] < 1500
    assert starts[-1] == pytest.approx(0.0, abs=1e-9)
    assert Aging(0.5).size_s(3.0) == 3.0
    with pytest.raises(ConfigError, match="decay"):
        Aging(decay_s=-1.0)
