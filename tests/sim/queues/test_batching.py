"""One batching instance: the rule's two ends, closed form against loop, conservation."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from joulery.domain.errors import ConfigError
from joulery.sim.queues.batching import BatchRule, serve_timed

ARRIVALS = st.lists(st.floats(0.0, 3.0), max_size=40).map(lambda gaps: np.cumsum(np.array(gaps, float)))
BATCHES = st.integers(1, 6)
DELAYS = st.sampled_from([0.0, 0.5, 2.0, 1e9])
TIMES = st.floats(0.0, 2.0)


def times(per_request, fixed, batch):
    return [fixed + per_request * size for size in range(1, batch + 1)]


def serve(arrival_s, rule, load_s=(0.0,), busy_s=(1.0,), noise=None):
    arrivals = np.array(arrival_s, float)
    load = list(load_s) * (rule.batch if len(load_s) == 1 else 1)
    busy = list(busy_s) * (rule.batch if len(busy_s) == 1 else 1)
    return serve_timed(arrivals, rule, load, busy, np.ones(len(arrivals)) if noise is None else noise)


def test_full_batches_wait_and_load_while_the_one_before_executes():
    served = serve([0, 1, 2, 3, 4, 5, 9], BatchRule(2), load_s=[0.5], busy_s=[3.0])
    assert served.size.tolist() == [2, 2, 2]
    assert served.start_s.tolist() == [1.5, 4.5, 7.5]
    assert served.finish_s.tolist() == [4.5, 7.5, 10.5]
    assert served.served == 6
    assert served.answered_s().tolist() == [4.5, 4.5, 7.5, 7.5, 10.5, 10.5]


def test_a_batch_loads_only_once_the_one_before_it_executes():
    """Loading slower than executing: the loader sets the pace."""
    served = serve([0, 0, 0], BatchRule(1), load_s=[2.0], busy_s=[1.0])
    assert served.start_s.tolist() == [2.0, 4.0, 6.0]


def test_greedy_takes_what_waits_when_the_instance_is_free():
    served = serve([0, 1, 1.5, 3.1, 20], BatchRule(4, 0.0), load_s=[0.5], busy_s=[2.0])
    assert served.size.tolist() == [1, 2, 1, 1]
    assert served.start_s.tolist() == [0.5, 3.0, 5.5, 20.5]


def test_greedy_takes_a_request_that_arrives_as_the_instance_becomes_free():
    assert serve([0, 1, 2], BatchRule(2, 0.0), busy_s=[2.0]).size.tolist() == [1, 2]


def test_a_full_batch_does_not_wait_for_the_instance_to_load():
    served = serve([0, 0.1, 0.2], BatchRule(2, 0.0), load_s=[1.0], busy_s=[5.0])
    assert served.start_s.tolist() == [1.0, 6.0], "the pair loads during the first execution"


def test_delay_waits_for_company_but_not_for_ever():
    served = serve([0, 1, 10, 13], BatchRule(2, 2.0), busy_s=[1.0])
    assert served.size.tolist() == [2, 1, 1]
    assert served.start_s.tolist() == [1.0, 12.0, 15.0]


@given(ARRIVALS, BATCHES, TIMES, TIMES, st.integers(0, 5))
def test_closed_form_equals_the_loop_with_endless_patience(arrival_s, batch, load_s, busy_s, seed):
    noise = np.random.default_rng(seed).uniform(0.5, 1.5, len(arrival_s))
    whole = len(arrival_s) // batch * batch
    closed = serve(arrival_s[:whole], BatchRule(batch), [load_s], [busy_s], noise)
    looped = serve(arrival_s[:whole], BatchRule(batch, 1e12), [load_s], [busy_s], noise)
    assert closed.size.tolist() == looped.size.tolist()
    assert np.allclose(closed.start_s, looped.start_s, rtol=0, atol=1e-9)
    assert np.allclose(closed.finish_s, looped.finish_s, rtol=0, atol=1e-9)


@given(ARRIVALS, BATCHES, DELAYS, TIMES, TIMES, TIMES)
def test_every_request_is_served_once_and_in_order(arrival_s, batch, delay_s, load, fixed, each):
    rule = BatchRule(batch, delay_s)
    load_s, busy_s = times(0.1, load, batch), times(each, fixed, batch)
    served = serve(arrival_s, rule, load_s, busy_s)
    assert served.served == len(arrival_s)
    assert np.all((served.size >= 1) & (served.size <= batch))
    assert np.all(served.start_s[1:] >= served.finish_s[:-1])
    first = np.cumsum(served.size) - served.size
    loads, last = np.array(load_s)[served.size - 1], np.cumsum(served.size) - 1
    assert np.all(served.start_s >= arrival_s[last] + loads - 1e-9), "no request executes before it came and loaded"
    partial = served.size < batch
    waited = served.start_s - loads - arrival_s[first]
    assert np.all(waited[partial] >= delay_s * (1 - 1e-9) - 1e-9), "a partial batch only after the delay"


@given(ARRIVALS, BATCHES)
def test_waiting_for_full_batches_leaves_only_the_rest_unserved(arrival_s, batch):
    served = serve(arrival_s, BatchRule(batch))
    assert served.served == len(arrival_s) // batch * batch


@given(ARRIVALS)
def test_batches_of_one_are_a_plain_queue(arrival_s):
    delayed, full = serve(arrival_s, BatchRule(1, 0.0), busy_s=[0.7]), serve(arrival_s, BatchRule(1), busy_s=[0.7])
    assert np.allclose(delayed.finish_s, full.finish_s, rtol=0, atol=1e-9)


def test_nonsense_rules_are_refused():
    with pytest.raises(ConfigError, match="one request or more"):
        BatchRule(0)
    for delay_s in (-1.0, math.nan):
        with pytest.raises(ConfigError, match="delay"):
            BatchRule(1, delay_s)
