"""The closed form of a FIFO-pull service against the simulation of it, and against what is known exactly."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from joulery.perf.queues.pull_model import _idle_wait, predict
from joulery.sim.core.arrivals import poisson
from joulery.sim.core.streams import Streams
from joulery.sim.queues.fifo_pull import PullInstance, Requests, metrics, pull


def one(value):
    return np.array(value, float)


def predicted(counts, host_s, gpu_s, rate_rps, *, contention=0.0, jitter_s=1e-3, size_cv=0.05, **more):
    return predict(one(counts), one(host_s), one(gpu_s), one(contention), one(jitter_s), one(size_cv), rate_rps, **more)


def simulated(counts, host_s, gpu_s, rate_rps, *, contention=0.0, jitter_s=1e-3, size_cv=0.05, requests=60_000):
    pool = [
        PullInstance(f"edge {edge}", host_s[edge], gpu_s[edge], 0.0, 0.0, 0.0)
        for edge, count in enumerate(counts)
        for _ in range(count)
    ]
    streams = Streams(5)
    arrival_s = poisson(rate_rps).times_s(requests / rate_rps, streams("arrivals"))
    work = Requests.draw(arrival_s, streams, size_cv=size_cv, jitter_s=jitter_s)
    found = metrics(work, pull(work, pool, contention=contention), pool, idle_w=0.0, skip=1000)
    served = np.bincount(np.repeat(np.arange(len(counts)), counts), weights=found.served, minlength=len(counts))
    return found.p95_s, served / found.requests


CASES = [
    ([2, 2], [0.2, 0.2], [0.03, 0.06], 5.0, 0.1),
    ([4], [0.0], [0.3], 6.0, 0.0),
    ([2, 2, 6], [0.1, 0.1, 0.1], [0.02, 0.1, 0.3], 9.0, 0.05),
    ([14], [0.2], [0.1], 5.0, 0.1),
    ([2], [0.2], [0.1], 4.0, 0.0),
    ([2, 2], [0.05, 0.05], [0.02, 0.4], 3.0, 0.0),
]


@pytest.mark.parametrize(("counts", "host_s", "gpu_s", "rate_rps", "contention"), CASES)
def test_latency_and_shares_are_near_the_simulated_ones(counts, host_s, gpu_s, rate_rps, contention):
    closed = predicted(counts, host_s, gpu_s, rate_rps, contention=contention)
    p95_s, share = simulated(counts, host_s, gpu_s, rate_rps, contention=contention)
    assert float(closed.latency_s) == pytest.approx(p95_s, rel=0.10)
    assert closed.share == pytest.approx(share, abs=0.025)


def test_shares_are_equal_when_idle_ones_are_at_hand_and_by_speed_when_none_is():
    counts, gpu_s = [1, 1], [0.1, 0.3]
    assert predicted(counts, [0, 0], gpu_s, 0.01).share == pytest.approx([0.5, 0.5], abs=0.01)
    assert predicted(counts, [0, 0], gpu_s, 13.2).share == pytest.approx([0.75, 0.25], abs=0.01)


def test_beyond_capacity_there_is_no_latency():
    closed = predicted([2], [0.0], [0.5], 4.5)
    assert closed.latency_s == math.inf
    assert closed.utilisation == pytest.approx(4.5 / 4)


def test_a_lone_request_takes_its_service_time():
    closed = predicted([1, 1], [0.1, 0.1], [0.1, 0.4], 1e-4, jitter_s=1e-4, size_cv=1e-4)
    assert closed.latency_s == pytest.approx(0.5, rel=0.01), "half of the requests take 0.5 s"
    closed = predicted([39, 1], [0.1, 0.1], [0.1, 0.4], 1e-4, jitter_s=1e-4, size_cv=1e-4)
    assert closed.latency_s == pytest.approx(0.2, rel=0.01), "one in forty does not reach the 95th percentile"


def test_waits_can_be_set_longer():
    short, long = (predicted([2], [0.0], [0.4], 4.0, wait_ratio=ratio).latency_s for ratio in (1.0, 2.0))
    assert long > short + 0.3


RATES = st.floats(0.1, 20.0)
POOLS = st.lists(
    st.tuples(st.integers(0, 6), st.floats(0.0, 0.5), st.floats(0.01, 0.5)), min_size=1, max_size=5
).filter(lambda edges: any(count for count, _, _ in edges))


@given(POOLS, RATES, st.floats(0.0, 0.3))
def test_shares_sum_to_one_and_more_demand_uses_more(edges, rate_rps, contention):
    counts, host_s, gpu_s = (list(column) for column in zip(*edges, strict=True))
    less = predicted(counts, host_s, gpu_s, rate_rps, contention=contention)
    more = predicted(counts, host_s, gpu_s, 1.3 * rate_rps, contention=contention)
    assert less.share.sum() == pytest.approx(1.0)
    assert np.all(less.share[np.array(counts) == 0] == 0.0)
    assert more.utilisation > less.utilisation


@given(st.integers(1, 6), st.floats(0.0, 0.5), st.floats(0.01, 0.5), RATES)
def test_more_demand_never_helps_a_pool_of_one_kind(count, host_s, gpu_s, rate_rps):
    less, more = (predicted([count], [host_s], [gpu_s], rate).latency_s for rate in (rate_rps, 1.3 * rate_rps))
    assert more >= less * (1 - 1e-6)


@given(POOLS, RATES)
def test_the_more_demand_the_less_of_it_the_slowest_answer(edges, rate_rps):
    counts, host_s, gpu_s = (list(column) for column in zip(*edges, strict=True))
    slowest = max((host + gpu, at) for at, (count, host, gpu) in enumerate(edges) if count)[1]
    less, more = (predicted(counts, host_s, gpu_s, rate).share[slowest] for rate in (rate_rps, 1.3 * rate_rps))
    assert more <= less + 1e-6


@given(POOLS, RATES)
def test_the_rates_of_the_instances_add_up_to_the_demand(edges, rate_rps):
    counts, host_s, gpu_s = (one(column) for column in zip(*edges, strict=True))
    service_s, rate = host_s + gpu_s, one([rate_rps])
    wait_s = float(_idle_wait(counts, service_s, rate)[0])
    if rate_rps < float((counts / service_s).sum()):
        assert float((counts / (wait_s + service_s)).sum()) == pytest.approx(rate_rps, rel=1e-9)
    else:
        assert wait_s == 0.0, "beyond the capacity nothing waits for work"


def test_in_a_mixed_pool_more_demand_may_bring_the_95th_percentile_forward():
    """Below one in twenty the slow instance's requests are beyond it: so the simulation says, too."""
    pool = [1, 8], [0.0, 0.0], [1.0, 0.1]
    for rate_rps, about_s in ((9.0, 0.95), (16.9, 0.11)):
        assert predicted(*pool, rate_rps).latency_s == pytest.approx(about_s, rel=0.03)
        assert simulated(*pool, rate_rps)[0] == pytest.approx(about_s, rel=0.03)


def test_layers_and_rows_are_predicted_alike():
    """Sets of parameters in front, configurations behind: the same numbers as one at a time."""
    counts = np.array([[2.0, 0.0], [1.0, 1.0], [0.0, 3.0]])
    hosts, gpus = np.array([[0.1, 0.2], [0.2, 0.1]]), np.array([[0.05, 0.3], [0.1, 0.2]])
    many = predict(
        counts, hosts[:, None], gpus[:, None], one([[0.1], [0.0]]), one([[0.01], [0.02]]), one([[0.1], [0.3]]), 2.0
    )
    assert many.latency_s.shape == (2, 3)
    for layer in range(2):
        for row in range(3):
            single = predicted(
                counts[row],
                hosts[layer],
                gpus[layer],
                2.0,
                contention=(0.1, 0.0)[layer],
                jitter_s=(0.01, 0.02)[layer],
                size_cv=(0.1, 0.3)[layer],
            )
            assert many.latency_s[layer, row] == pytest.approx(float(single.latency_s))
            assert many.share[layer, row] == pytest.approx(single.share)
