"""Co-located instances event by event: equal to the closed form alone, slowed exactly as much as the truth says."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from joulery.sim.placement.colocation import GpuSimulation, Tenant, serve_together
from joulery.sim.placement.gpu import Conditions, Effect
from joulery.sim.queues.batching import BatchRule, serve_timed


class Sharing:
    """A truth simple enough to work by hand: ``n`` executing processes each take ``1 + slow * (n - 1)`` times as long.

    A model is named ``load,fixed,each``: loading time, fixed and per-request execution time.
    """

    idle_w = 10.0

    def __init__(self, slow=1.0):
        self.slow = slow

    def conditions(self, executing):
        stretch = 1 + self.slow * (len(executing) - 1)
        effects = []
        for process in executing:
            load_s, fixed_s, each_s = map(float, process.model.split(","))
            effects.append(Effect(load_s, stretch * (fixed_s + each_s * process.batch), 100.0 / stretch))
        return Conditions(tuple(effects), 1000.0 / stretch)


def tenant(arrival_s, rule, model="0,1,0", noise=None):
    arrivals = np.array(arrival_s, float)
    return Tenant(model, 0.5, rule, arrivals, np.ones(len(arrivals)) if noise is None else noise)


ARRIVALS = st.lists(st.floats(0.0, 2.0), max_size=25).map(lambda gaps: np.cumsum(np.array(gaps, float)))
RULES = st.builds(BatchRule, st.integers(1, 4), st.sampled_from([0.0, 0.7, math.inf]))


@given(ARRIVALS, RULES, st.floats(0.0, 1.0), st.floats(0.01, 2.0), st.floats(0.0, 0.5), st.integers(0, 9))
@settings(max_examples=150)
def test_a_tenant_alone_is_the_closed_form(arrival_s, rule, load_s, fixed_s, each_s, seed):
    noise = np.random.default_rng(seed).uniform(0.5, 1.5, len(arrival_s))
    run = serve_together(Sharing(), [tenant(arrival_s, rule, f"{load_s},{fixed_s},{each_s}", noise)], 0.0, 50.0)
    busy_s = [fixed_s + each_s * size for size in range(1, rule.batch + 1)]
    expected = serve_timed(arrival_s, rule, [load_s] * rule.batch, busy_s, noise)
    assert run.batches[0].size.tolist() == expected.size.tolist()
    assert np.allclose(run.batches[0].start_s, expected.start_s, rtol=0, atol=1e-9)
    assert np.allclose(run.batches[0].finish_s, expected.finish_s, rtol=0, atol=1e-9)


@given(st.lists(st.tuples(ARRIVALS, RULES), min_size=2, max_size=3))
@settings(max_examples=60)
def test_tenants_that_do_not_disturb_one_another_are_each_alone(specs):
    together = serve_together(Sharing(slow=0.0), [tenant(a, rule) for a, rule in specs], 0.0, 50.0)
    for (arrival_s, rule), batches in zip(specs, together.batches, strict=True):
        alone = serve_together(Sharing(), [tenant(arrival_s, rule)], 0.0, 50.0).batches[0]
        assert np.allclose(batches.finish_s, alone.finish_s, rtol=0, atol=1e-9)


def test_overlap_slows_both_for_as_long_as_it_lasts():
    """A runs 0-4 alone until 2; then B joins, both at half speed; A's 2 s left take 4; B, half done at 6, ends at 8."""
    run = serve_together(
        Sharing(), [tenant([0.0], BatchRule(1), "0,4,0"), tenant([2.0], BatchRule(1), "0,4,0")], 0.0, 10.0
    )
    assert run.batches[0].finish_s.tolist() == [6.0]
    assert run.batches[1].finish_s.tolist() == [8.0]
    assert run.busy_s == pytest.approx((6.0, 6.0))
    assert run.dynamic_j == pytest.approx((2 * 100 + 4 * 50, 4 * 50 + 2 * 100))
    assert run.idle_j == pytest.approx(100.0)
    assert run.clock_mhz == pytest.approx((2 * 1000 + 4 * 500 + 2 * 1000) / 8)


def test_a_neighbour_that_comes_and_goes_costs_the_time_it_shared():
    """A alone until 1; with B, which needs 1 s, at half speed until 3; A's 2 s left then take 2."""
    run = serve_together(
        Sharing(), [tenant([0.0], BatchRule(1), "0,4,0"), tenant([1.0], BatchRule(1), "0,1,0")], 0.0, 10.0
    )
    assert run.batches[0].finish_s.tolist() == [5.0]
    assert run.batches[1].finish_s.tolist() == [3.0]
    assert run.busy_s == pytest.approx((5.0, 2.0))


def test_events_are_those_of_batches_not_of_requests():
    arrivals = np.linspace(0.0, 10.0, 5001)
    gpu = GpuSimulation(Sharing(), [tenant(arrivals, BatchRule(100), "0,1,0") for _ in range(2)], 0.0, 10.0)
    handled = []
    run = gpu.kernel.run
    gpu.kernel = type("Counted", (), {"now_s": 0.0, "at": gpu.kernel.at, "run": lambda self: handled.append(run())})()
    batches = sum(len(each.size) for each in gpu.run().batches)
    assert batches == 100
    assert handled[0] <= 8 * batches


def test_only_the_window_is_counted():
    tenants = [tenant([0.0], BatchRule(1), "0,4,0"), tenant([2.0], BatchRule(1), "0,4,0")]
    run = serve_together(Sharing(), tenants, 3.0, 7.0)
    assert run.busy_s == pytest.approx((3.0, 4.0))
    assert run.dynamic_j == pytest.approx((3 * 50, 3 * 50 + 100))
    assert run.idle_j == pytest.approx(40.0)


def test_loading_neither_slows_others_nor_is_slowed_in_this_truth():
    run = serve_together(
        Sharing(), [tenant([0.0], BatchRule(1), "0,3,0"), tenant([0.0], BatchRule(1), "2,1,0")], 0.0, 9.0
    )
    assert run.batches[1].start_s.tolist() == [2.0]
    assert run.batches[0].finish_s.tolist() == [4.0]


def test_no_process_and_no_reading():
    run = serve_together(Sharing(), [], 0.0, 5.0)
    assert (run.batches, run.idle_j) == ((), 50.0)
    assert math.isnan(run.clock_mhz)
    run = serve_together(Sharing(), [tenant([], BatchRule(2))], 0.0, 5.0)
    assert run.batches[0].served == 0


@given(st.lists(st.tuples(ARRIVALS, RULES), min_size=1, max_size=3), st.floats(0.0, 2.0))
@settings(max_examples=60)
def test_work_is_conserved_and_noise_is_paired_with_its_batch(specs, slow):
    """Energy of this truth is 100 W times the solo time of the work, however it was stretched."""
    run = serve_together(Sharing(slow), [tenant(a, rule) for a, rule in specs], -1.0, 1e4)
    for (arrival_s, rule), batches, dynamic_j in zip(specs, run.batches, run.dynamic_j, strict=True):
        whole = len(arrival_s) // rule.batch * rule.batch
        assert batches.served == (whole if rule.max_delay_s == math.inf else len(arrival_s))
        assert dynamic_j == pytest.approx(100.0 * len(batches.size), abs=1e-6)
        assert np.all(batches.start_s[1:] >= batches.finish_s[:-1] - 1e-9)
