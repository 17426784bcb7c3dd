import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from joulery.domain.serving.profile import SliceProfile, Timings
from joulery.domain.serving.service import Slice, SliceKind
from joulery.perf.queues.pull_queue import capacity_rps, poisson_arrivals, replay, uniform_draws
from joulery.sim.queues.fifo_pull import PullInstance, Requests, pull
from tests.perf.queues import fifo_oracle

CORE = Slice(SliceKind.CPU, cores=1)


def instance(service_s, loaded_s=None, cpu_s=None, variant="v") -> SliceProfile:
    alone = Timings(service_s, service_s if cpu_s is None else cpu_s)
    return SliceProfile(variant, CORE, alone, alone if loaded_s is None else Timings(loaded_s, loaded_s), 10.0)


def exponential(mean_s: float, n: int = 4000) -> SliceProfile:
    return instance(-mean_s * np.log1p(-(np.arange(n) + 0.5) / n))


def erlang_c(servers: int, load: float) -> float:
    """Probability that an arrival waits in M/M/c."""
    terms = [load**k / math.factorial(k) for k in range(servers)]
    last = load**servers / math.factorial(servers) / (1 - load / servers)
    return last / (sum(terms) + last)


@pytest.mark.parametrize("rho", [0.3, 0.6, 0.8])
def test_mm1_latency_is_exponential(rho):
    n, mean_s = 200_000, 0.01
    played = replay(poisson_arrivals(rho / mean_s, n, 1), uniform_draws(n, 1), [(-math.inf, [exponential(mean_s)])])
    latency = played.latency_s[n // 10 :]
    expected_s = mean_s / (1 - rho)
    assert np.mean(latency) == pytest.approx(expected_s, rel=0.04)
    assert np.quantile(latency, 0.95) == pytest.approx(-math.log(0.05) * expected_s, rel=0.05)


@pytest.mark.parametrize("servers", [2, 3])
def test_mmc_waiting_follows_erlang_c(servers):
    n, mean_s, rho = 150_000, 0.01, 0.7
    pool = [exponential(mean_s) for _ in range(servers)]
    played = replay(poisson_arrivals(servers * rho / mean_s, n, 2), uniform_draws(n, 2), [(-math.inf, pool)])
    waited = (played.start_s - played.arrival_s)[n // 10 :]
    waits = erlang_c(servers, servers * rho)
    assert np.mean(waited > 0) == pytest.approx(waits, rel=0.03)
    assert np.mean(waited) == pytest.approx(waits * mean_s / (servers * (1 - rho)), rel=0.06)


def test_md1_mean_wait_follows_pollaczek_khinchine():
    n, mean_s, rho = 200_000, 0.01, 0.6
    played = replay(poisson_arrivals(rho / mean_s, n, 3), uniform_draws(n, 3), [(-math.inf, [instance([mean_s])])])
    waited = (played.start_s - played.arrival_s)[n // 10 :]
    assert np.mean(waited) == pytest.approx(rho * mean_s / (2 * (1 - rho)), rel=0.03)


def test_below_saturation_unequal_instances_answer_nearly_equal_counts():
    """Clover's observation: the longest idle is next, so speed hardly matters at light load."""
    n = 50_000
    pool = [instance([0.004]), instance([0.009])]
    played = replay(poisson_arrivals(20.0, n, 4), uniform_draws(n, 4), [(-math.inf, pool)])
    assert np.mean(played.server == 0) == pytest.approx(0.5, abs=0.03)


def test_the_longest_idle_instance_is_next():
    played = replay(
        np.array([0.0, 0.1, 1.0, 1.05, 2.0]), np.zeros(5), [(-math.inf, [instance([0.5]), instance([0.2])])]
    )
    # 0 -> first; 1 -> second (first busy); at 1.0 the second became idle at 0.3, the first at 0.5: second; then first.
    assert played.server.tolist() == [0, 1, 1, 0, 1]


def test_busy_neighbours_slow_an_instance_down():
    pool = [instance([1.0], loaded_s=[2.0]) for _ in range(3)]
    played = replay(np.array([0.0, 0.1, 0.2]), np.zeros(3), [(-math.inf, pool)])
    assert played.service_s.tolist() == [1.0, 1.5, 2.0], "none, one of two, both neighbours busy"
    assert played.cpu_s.tolist() == [1.0, 1.5, 2.0]


def test_a_new_layout_answers_from_its_time_on_and_starts_idle():
    slow, fast = instance([1.0]), instance([0.1], cpu_s=[0.3])
    played = replay(np.array([0.0, 0.1, 5.0, 5.01]), np.zeros(4), [(-math.inf, [slow]), (5.0, [fast, fast])])
    assert played.epoch.tolist() == [0, 0, 1, 1]
    assert played.start_s.tolist() == [0.0, 1.0, 5.0, 5.01]
    assert played.end_s.tolist() == pytest.approx([1.0, 2.0, 5.1, 5.11])
    assert played.cpu_s.tolist() == [1.0, 1.0, 0.3, 0.3]


def test_layouts_without_measurements_are_skipped():
    a, b, c = instance([1.0]), instance([2.0]), instance([3.0])
    played = replay(np.array([10.0]), np.zeros(1), [(-math.inf, [a]), (1.0, [b]), (2.0, [c])])
    assert played.epoch.tolist() == [2] and played.service_s.tolist() == [3.0]


def test_draws_pick_by_rank():
    pool = [instance([3.0, 1.0, 2.0], cpu_s=[30.0, 10.0, 20.0])]
    played = replay(np.array([0.0, 10.0, 20.0]), np.array([0.0, 0.5, 0.999]), [(-math.inf, pool)])
    assert played.service_s.tolist() == [1.0, 2.0, 3.0]
    assert played.cpu_s.tolist() == [10.0, 20.0, 30.0], "time and CPU time of one request stay together"


def test_capacity_counts_every_instance_under_load():
    assert capacity_rps([instance([0.01], loaded_s=[0.02]), instance([0.005])]) == pytest.approx(250.0)


def test_arrivals_and_draws_are_reproducible_and_independent():
    first, again = poisson_arrivals(10.0, 1000, 7), poisson_arrivals(10.0, 1000, 7)
    np.testing.assert_array_equal(first, again)
    np.testing.assert_allclose(poisson_arrivals(20.0, 1000, 7), first / 2)
    assert not np.array_equal(poisson_arrivals(10.0, 1000, 8), first)
    gaps = np.diff(first, prepend=0.0)
    assert abs(np.corrcoef(gaps, uniform_draws(1000, 7))[0, 1]) < 0.1
    assert np.mean(gaps) == pytest.approx(0.1, rel=0.1)


@given(
    st.lists(st.floats(0.0, 5.0), min_size=1, max_size=60),
    st.lists(st.lists(st.floats(0.01, 2.0), min_size=1, max_size=4), min_size=1, max_size=4),
    st.integers(0, 100),
)
def test_laws_of_the_queue(gaps, pools, seed):
    arrivals = np.cumsum(np.array(gaps))
    played = replay(arrivals, uniform_draws(len(gaps), seed), [(-math.inf, [instance(pool) for pool in pools])])
    assert np.all(played.start_s >= arrivals), "nothing starts before it came"
    assert np.all(np.diff(played.start_s) >= 0), "first in, first out"
    for index, pool in enumerate(pools):
        mine = played.server == index
        assert np.all(played.start_s[mine][1:] >= played.end_s[mine][:-1] - 1e-12), "one request at a time"
        assert set(played.service_s[mine]) <= set(pool)
    for k in np.flatnonzero(played.start_s > arrivals):
        busy = (played.start_s[:k] <= arrivals[k]) & (played.end_s[:k] > arrivals[k])
        assert busy.sum() >= 1, "no request waits while every instance is idle"


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.floats(0.0, 2.0), min_size=1, max_size=80),
    st.lists(st.lists(st.floats(0.01, 2.0), min_size=1, max_size=4), min_size=1, max_size=5),
    st.floats(1.0, 3.0),
    st.floats(0.0, 60.0),
    st.integers(0, 100),
)
def test_the_pool_agrees_with_its_oracle_request_by_request(gaps, pools, slower, change_s, seed):
    """Neighbours that slow one another down, and a layout that changes under way."""
    arrivals, picks = np.cumsum(np.array(gaps)), uniform_draws(len(gaps), seed)
    first = [instance(pool, [slower * each for each in pool]) for pool in pools]
    layouts = [(-math.inf, first), (change_s, first[:1])]
    mine, oracle = replay(arrivals, picks, layouts), fifo_oracle.replay(arrivals, picks, layouts)
    for name in ("server", "epoch"):
        np.testing.assert_array_equal(getattr(mine, name), getattr(oracle, name))
    for name in ("start_s", "service_s", "cpu_s"):
        np.testing.assert_allclose(getattr(mine, name), getattr(oracle, name), rtol=1e-9, atol=1e-9)


def test_the_simulators_requests_and_the_profiles_meet_in_one_pool():
    pool_s = [0.004, 0.009, 0.006]
    arrivals = poisson_arrivals(300.0, 5000, 5)
    oracle = fifo_oracle.replay(arrivals, uniform_draws(5000, 5), [(-math.inf, [instance([s]) for s in pool_s])])
    pulled = pull(
        Requests(arrivals, np.ones(5000), np.zeros(5000)), [PullInstance("", 0.0, s, 0.0, 0.0, 0.5) for s in pool_s]
    )
    np.testing.assert_allclose(oracle.start_s, pulled.start_s, rtol=0, atol=1e-9)
    np.testing.assert_array_equal(oracle.server, pulled.instance)
