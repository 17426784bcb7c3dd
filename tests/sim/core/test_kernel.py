"""The kernel: order, determinism, refusal of nonsense."""

import doctest
import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from joulery.domain.errors import DataError
from joulery.sim.core import kernel as kernel_module
from joulery.sim.core.kernel import Kernel, Rank

KINDS = {"completion": Rank.COMPLETION, "arrival": Rank.ARRIVAL, "telemetry": Rank.TELEMETRY, "policy": Rank.POLICY}


def recording_kernel() -> tuple[Kernel, list[tuple[float, str, object]]]:
    kernel, seen = Kernel(), []
    for kind, rank in KINDS.items():
        kernel.on(kind, rank, lambda t_s, payload, kind=kind: seen.append((t_s, kind, payload)))
    return kernel, seen


def test_docstring_example_prints_what_it_says():
    assert doctest.testmod(kernel_module).failed == 0
    assert doctest.testmod(kernel_module).attempted > 0


def test_ranks_are_the_documented_order():
    assert [rank.name for rank in sorted(Rank)] == ["COMPLETION", "ARRIVAL", "TELEMETRY", "POLICY"]


def test_one_instant_runs_completions_then_arrivals_then_telemetry_then_policies():
    kernel, seen = recording_kernel()
    for kind in ("policy", "telemetry", "arrival", "completion"):
        kernel.at(5.0, kind)
    assert kernel.run() == 4
    assert [kind for _, kind, _ in seen] == ["completion", "arrival", "telemetry", "policy"]


def test_same_instant_and_rank_run_in_order_of_scheduling():
    kernel, seen = recording_kernel()
    for payload in (3, 1, 2):
        kernel.at(1.0, "arrival", payload)
    kernel.run()
    assert [payload for _, _, payload in seen] == [3, 1, 2]


def test_payloads_are_never_compared():
    kernel, seen = recording_kernel()
    first, second = object(), object()
    kernel.at(1.0, "arrival", first)
    kernel.at(1.0, "arrival", second)
    kernel.run()
    assert [payload for _, _, payload in seen] == [first, second]


def test_event_scheduled_for_this_instant_runs_within_it():
    kernel, seen = Kernel(), []
    kernel.on("policy", Rank.POLICY, lambda t_s, _: (seen.append("policy"), kernel.at(t_s, "completion")))
    kernel.on("completion", Rank.COMPLETION, lambda t_s, _: seen.append("completion"))
    kernel.at(2.0, "policy")
    kernel.at(2.0, "policy")
    kernel.run()
    assert seen == ["policy", "completion", "policy", "completion"]


def test_run_stops_before_until_and_goes_on_from_there():
    kernel, seen = recording_kernel()
    for t_s in (1.0, 2.0, 3.0):
        kernel.at(t_s, "arrival")
    assert kernel.run(2.0) == 1
    assert kernel.now_s == 2.0
    assert kernel.next_s == 2.0
    assert kernel.run(2.5) == 1
    assert kernel.now_s == 2.5
    assert kernel.run() == 1
    assert kernel.now_s == 3.0
    assert kernel.next_s == math.inf
    assert [t_s for t_s, _, _ in seen] == [1.0, 2.0, 3.0]


def test_run_never_turns_time_back():
    kernel = Kernel(start_s=10.0)
    assert kernel.run(5.0) == 0
    assert kernel.now_s == 10.0


@pytest.mark.parametrize("t_s", [0.999, -1.0, math.nan])
def test_past_and_nan_are_refused(t_s):
    kernel, _ = recording_kernel()
    kernel.run(1.0)
    with pytest.raises(ValueError, match="it is already 1"):
        kernel.at(t_s, "arrival")
    kernel.at(1.0, "arrival")


def test_undeclared_and_twice_declared_kinds_are_refused():
    kernel, _ = recording_kernel()
    with pytest.raises(KeyError, match="departure"):
        kernel.at(1.0, "departure")
    with pytest.raises(ValueError, match="'arrival' is already declared"):
        kernel.on("arrival", Rank.ARRIVAL, lambda t_s, _: None)


def test_feed_delivers_each_time_once_with_its_index_and_rank():
    kernel, seen = recording_kernel()
    kernel.feed([1.0, 2.0, 2.0, 4.0], "arrival")
    kernel.feed([], "arrival")
    kernel.at(2.0, "completion", "c")
    kernel.at(2.0, "policy", "p")
    kernel.run()
    assert seen == [
        (1.0, "arrival", 0),
        (2.0, "completion", "c"),
        (2.0, "arrival", 1),
        (2.0, "arrival", 2),
        (2.0, "policy", "p"),
        (4.0, "arrival", 3),
    ]


def test_feeds_of_one_kind_are_merged():
    kernel, seen = recording_kernel()
    kernel.feed([1.0, 3.0], "arrival")
    kernel.feed([2.0, 4.0], "arrival")
    kernel.run()
    assert [(t_s, index) for t_s, _, index in seen] == [(1.0, 0), (2.0, 0), (3.0, 1), (4.0, 1)]


@pytest.mark.parametrize("times", [[2.0, 1.0], [0.5, 2.0], [1.0, math.nan, 2.0], [math.nan]])
def test_feed_refuses_disorder(times):
    kernel, _ = recording_kernel()
    kernel.run(1.0)
    with pytest.raises(DataError, match="'arrival'"):
        kernel.feed(times, "arrival")


EVENTS = st.lists(st.tuples(st.sampled_from([0.0, 1.0, 1.5, 7.0]), st.sampled_from(sorted(KINDS))), max_size=40)


@given(EVENTS)
def test_any_schedule_runs_completely_in_time_rank_and_scheduling_order(events):
    kernel, seen = recording_kernel()
    for number, (t_s, kind) in enumerate(events):
        kernel.at(t_s, kind, number)
    assert kernel.run() == len(events)
    keys = [(t_s, KINDS[kind], number) for t_s, kind, number in seen]
    assert all(a < b for a, b in pairwise(keys))
    assert {number for _, _, number in keys} == set(range(len(events)))


@given(EVENTS, st.sampled_from([0.0, 1.0, 1.2, 7.0, 9.0]))
def test_a_run_in_two_parts_is_the_run_in_one(events, cut_s):
    runs = []
    for cuts in ((), (cut_s,)):
        kernel, seen = recording_kernel()
        for number, (t_s, kind) in enumerate(events):
            kernel.at(t_s, kind, number)
        for cut in cuts:
            kernel.run(cut)
        kernel.run()
        runs.append(seen)
    assert runs[0] == runs[1]


@given(st.lists(st.floats(0, 1e6), max_size=60).map(sorted))
def test_feed_equals_scheduling_one_by_one(times):
    fed, seen_fed = recording_kernel()
    fed.feed(np.array(times), "arrival")
    fed.run()
    one_by_one, seen_single = recording_kernel()
    for index, t_s in enumerate(times):
        one_by_one.at(t_s, "arrival", index)
    one_by_one.run()
    assert seen_fed == seen_single
