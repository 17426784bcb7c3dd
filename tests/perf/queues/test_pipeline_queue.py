"""The recursion of pipelines against one request at a time."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from joulery.domain.errors import ConfigError, DataError
from joulery.perf.queues import pipeline_queue
from joulery.perf.queues.pipeline_queue import (
    PipelineWorkload,
    Routes,
    goodput_by_model,
    score_candidates,
    serve_pipelines,
)


def one_by_one(workload: PipelineWorkload, routes: Routes, candidate: int, overhead_s: float):
    """The specification, literally: latency (infinite when refused) and route of each request."""
    free, latency, chosen = np.zeros(routes.devices), np.full(len(workload), np.inf), np.full(len(workload), -1)
    for index, (arrival, model) in enumerate(zip(workload.arrival_s, workload.model, strict=True)):
        there = [k for k, path in enumerate(routes.device[candidate, model]) if path[0] >= 0]
        if not there:
            continue
        last = {k: [d for d in routes.device[candidate, model, k] if d >= 0][-1] for k in there}
        chosen[index] = k = min(there, key=lambda k: free[last[k]])
        t, after = arrival, {}
        for stage, device in enumerate(routes.device[candidate, model, k]):
            if device >= 0:
                t = max(t, free[device]) + routes.stage_s[candidate, model, k, stage]
                after[device] = t
        if t - arrival + overhead_s <= workload.slo_s[model]:
            latency[index] = t - arrival + overhead_s
            for device, when in after.items():
                free[device] = when
    return latency, chosen


def a_fleet(random, candidates, models, groups, stages, hosted=0.7) -> Routes:
    device = np.full((candidates, models, groups, stages), -1)
    stage_s = np.zeros(device.shape)
    for c in range(candidates):
        for m in range(models):
            for slot, group in enumerate(g for g in range(groups) if random.random() < hosted):
                used = int(random.integers(1, stages + 1))
                device[c, m, slot, :used] = group * stages + np.arange(used)
                stage_s[c, m, slot, :used] = 0.2 * random.random(used)
    return Routes(stage_s, device, groups * stages)


def a_workload(random, n, models, gap_s=0.05) -> PipelineWorkload:
    arrival_s = np.cumsum(random.exponential(gap_s, n))
    return PipelineWorkload(arrival_s, random.integers(0, models, n), 0.1 + random.random(models))


@settings(deadline=None, max_examples=40)
@given(
    st.integers(0, 2**32 - 1), st.integers(1, 3), st.integers(1, 4), st.integers(1, 4), st.integers(1, 4),
    st.integers(1, 700), st.sampled_from([0.0, 0.011]),
)  # fmt: skip
def test_blocks_side_by_side_give_the_sequential_result(seed, candidates, models, groups, stages, n, overhead_s):
    random = np.random.default_rng(seed)
    workload, routes = a_workload(random, n, models), a_fleet(random, candidates, models, groups, stages)
    outcome = serve_pipelines(workload, routes, overhead_s)
    for candidate in range(candidates):
        latency, chosen = one_by_one(workload, routes, candidate, overhead_s)
        assert np.array_equal(outcome.latency_s[candidate], latency)
        assert np.array_equal(outcome.route[candidate], chosen)


def test_a_long_memory_needs_more_passes_and_stays_exact(monkeypatch) -> None:
    random = np.random.default_rng(3)
    monkeypatch.setattr(pipeline_queue, "_WARM_UP", 1)
    workload, routes = a_workload(random, 900, 2, gap_s=0.08), a_fleet(random, 1, 2, 6, 1, hosted=1.0)
    outcome = serve_pipelines(workload, routes)
    assert outcome.passes > 2
    assert np.array_equal(outcome.latency_s[0], one_by_one(workload, routes, 0, 0.0)[0])


def test_one_pass_is_close() -> None:
    random = np.random.default_rng(5)
    workload, routes = a_workload(random, 5000, 4), a_fleet(random, 1, 4, 4, 2)
    exact, quick = serve_pipelines(workload, routes), serve_pipelines(workload, routes, passes=1)
    assert quick.passes == 1
    assert exact.accepted.mean() == pytest.approx(quick.accepted.mean(), abs=0.01)


def test_an_md1_queue_without_limits_has_its_textbook_wait() -> None:
    random = np.random.default_rng(1)
    n, service_s, load = 200_000, 1.0, 0.7
    arrival_s = np.cumsum(random.exponential(service_s / load, n))
    workload = PipelineWorkload(arrival_s, np.zeros(n, np.int64), np.array([np.inf]))
    routes = Routes(np.full((1, 1, 1, 1), service_s), np.zeros((1, 1, 1, 1), np.int64), 1)
    wait_s = serve_pipelines(workload, routes).latency_s.mean() - service_s
    assert wait_s == pytest.approx(load * service_s / (2 * (1 - load)), rel=0.03)


def test_counts_and_scores() -> None:
    workload = PipelineWorkload(np.array([0.0, 0.1, 5.0]), np.array([0, 0, 1]), np.array([1.5, 1.0, 1.0]))
    stage_s = np.array([1.0, 2.0])[:, None, None, None] * np.ones((2, 3, 1, 1))
    outcome = serve_pipelines(workload, Routes(stage_s, np.zeros((2, 3, 1, 1), np.int64), 1))
    asked, answered = goodput_by_model(workload, outcome)
    assert asked.tolist() == [2, 1, 0]
    assert answered.tolist() == [[1, 1, 0], [0, 0, 0]]  # the second waits too long; two seconds are too many for all
    one, none = score_candidates(outcome, [3, 7])
    assert one == pytest.approx(2 / 3 - 1.0 / 1e4 + 3e-6)
    assert none == pytest.approx(7e-6)


def test_nothing_to_do() -> None:
    empty = PipelineWorkload(np.array([]), np.array([], np.int64), np.array([1.0]))
    routes = Routes(np.ones((1, 1, 1, 1)), np.zeros((1, 1, 1, 1), np.int64), 1)
    assert serve_pipelines(empty, routes).latency_s.shape == (1, 0)


def test_bad_input() -> None:
    with pytest.raises(DataError, match="in order of arrival"):
        PipelineWorkload(np.array([1.0, 0.5]), np.array([0, 0]), np.array([1.0]))
    with pytest.raises(DataError, match="each request needs a model"):
        PipelineWorkload(np.array([1.0]), np.array([1]), np.array([1.0]))
    with pytest.raises(DataError, match="runs on device 3 of 2"):
        Routes(np.ones((1, 1, 1, 1)), np.full((1, 1, 1, 1), 3), 2)
    with pytest.raises(DataError, match="routes have shapes"):
        Routes(np.ones((1, 1, 1)), np.zeros((1, 1, 1), np.int64), 1)
    routes = Routes(np.ones((1, 1, 1, 1)), np.zeros((1, 1, 1, 1), np.int64), 1)
    with pytest.raises(ConfigError, match="overhead cannot be negative"):
        serve_pipelines(PipelineWorkload(np.array([0.0]), np.array([0]), np.array([1.0])), routes, -1.0)
