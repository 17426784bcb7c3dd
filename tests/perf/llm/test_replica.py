"""A replica under random requests: laws, limits, and the simulation as a second opinion."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from joulery.perf.llm.replica import (
    ReplicaCurve,
    answer_time_s,
    first_token_s,
    steady_state,
    token_latency_s,
    tokens_within,
)
from joulery.sim.core.arrivals import poisson
from joulery.sim.core.streams import Streams
from joulery.sim.queues.continuous_batching import BatchedReplica, closed_trial, open_trial


def curve(limit=32, answer=100.0, stall=0.0):
    """A token every 10 ms alone, every 20 ms with 40 others."""
    loads = np.arange(1, limit + 1)
    step = 0.01 * (1 + loads / 40)
    return ReplicaCurve(step, 300.0 + 5 * loads, step, 1.3 * step, 100.0, stall, answer)


def test_one_request_at_a_time_is_the_queue_of_one_server():
    """With a limit of one it is M/M/1: P(wait) = rho, and the wait beyond drains at mu - lambda."""
    one = curve(1)
    mu = float(one.ends_rps[0])
    state = steady_state(one, 0.6 * mu)
    assert state.wait_ratio == pytest.approx(0.6)
    assert state.in_flight == pytest.approx(0.6)
    assert state.drain_rps == pytest.approx(0.4 * mu)
    assert state.power_w == pytest.approx(0.4 * 100 + 0.6 * 305)


def test_equal_speeds_are_the_queue_of_many_servers():
    """Where company costs nothing it is M/M/c: Erlang's C formula."""
    servers, load = 8, 6.0
    flat = ReplicaCurve(*(np.full(servers, 0.01) for _ in range(4)), 0.0, 0.0, 100.0)
    state = steady_state(flat, load / (0.01 * 100))
    below = sum(load**n / math.factorial(n) for n in range(servers))
    top = load**servers / math.factorial(servers) / (1 - load / servers)
    assert state.wait_ratio == pytest.approx(top / (below + top))


@given(st.floats(0.01, 0.99), st.integers(1, 200))
def test_laws_of_the_steady_state(share, limit):
    one = curve(limit)
    rate = share * float(one.ends_rps[-1])
    state = steady_state(one, rate)
    assert state.shares.sum() == pytest.approx(1)
    assert 0 <= state.in_flight <= limit
    # What ends a second is what arrives.
    assert state.shares[1:] @ one.ends_rps == pytest.approx(rate)
    assert 100.0 <= state.power_w <= 300 + 5 * limit + 1e-9
    assert answer_time_s(one, state) >= float(one.token_time_s[0]) * one.answer_tokens * (1 - 1e-9)


def test_a_rate_beyond_capacity_has_no_steady_state():
    one = curve()
    assert steady_state(one, float(one.ends_rps[-1])) is None


def test_the_quantile_of_tokens_is_where_their_share_is_reached():
    one = curve()
    state = steady_state(one, 10.0)
    at = token_latency_s(one, state, 0.99)
    assert tokens_within(one, state, at) == pytest.approx(0.99, abs=1e-6)
    assert tokens_within(one, state, 0.9 * at) < 0.99


def test_latencies_grow_with_the_rate():
    one = curve(stall=0.004)
    states = [steady_state(one, rate) for rate in (1.0, 5.0, 10.0, 15.0)]
    for quantile in (token_latency_s, first_token_s):
        values = [quantile(one, state, 0.95) for state in states]
        assert values == sorted(values)


@pytest.mark.parametrize("rate", [3.0, 8.0, 12.0])
def test_the_simulation_agrees_on_requests_in_flight_and_latencies(rate):
    one = curve()
    state = steady_state(one, rate)
    truth = BatchedReplica(one.token_time_s, 0.0, one.answer_tokens, 0.1)
    trial = open_trial(truth, poisson(rate).times_s(1500.0, Streams(3)("arrivals")), 1500.0, 100.0, 3)
    assert trial.in_flight == pytest.approx(state.in_flight, rel=0.08)
    assert trial.throughput_tps == pytest.approx(rate * one.answer_tokens, rel=0.06)
    # The plan's quantile of tokens is the careful one: it takes the wider of two spreads.
    assert trial.token_quantile_s(0.99) <= token_latency_s(one, state, 0.99) * 1.02


def test_a_closed_loop_keeps_its_clients_in_flight():
    one = curve(16)
    trial = closed_trial(BatchedReplica(one.token_time_s, 0.0, 100.0, 0.0), 16, 60.0, 10.0, 1)
    assert trial.in_flight == pytest.approx(16)
    assert trial.throughput_tps == pytest.approx(16 / float(one.token_time_s[-1]), rel=1e-2)
    assert trial.token_quantile_s(0.5) == pytest.approx(float(one.token_time_s[-1]))


def test_equal_seeds_give_equal_trials_and_slower_truths_are_slower():
    times = poisson(5.0).times_s(200.0, Streams(1)("arrivals"))
    trials = [
        open_trial(BatchedReplica(curve().token_time_s, 0.01, 100.0, 0.1, slower), times, 200.0, 20.0, 7)
        for slower in (0.0, 0.0, 0.2)
    ]
    assert np.array_equal(trials[0].token_s, trials[1].token_s)
    assert trials[2].token_quantile_s(0.99) > trials[0].token_quantile_s(0.99)
    assert trials[2].first_token_quantile_s(0.5) > trials[0].first_token_quantile_s(0.5)
