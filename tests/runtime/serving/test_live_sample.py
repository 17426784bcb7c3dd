import math
from dataclasses import replace

import pytest

from joulery.domain.gpu.layout import Instance, Layout
from joulery.domain.quality import Quality
from joulery.domain.serving.engine import (
    EnergyShare,
    ModelKind,
    ModelRef,
    Outcome,
    ReplicaSpec,
    ReplicaState,
    ReplicaView,
)
from joulery.domain.serving.service import Slice, SliceKind, Slo, SloScope
from joulery.policies.serving.observation import Sample
from joulery.runtime.serving.live_sample import MOST_REQUESTS, LiveSample
from tests.runtime.serving.test_controller import record

ONE = Slice(SliceKind.CPU, cores=1)
SPEC = ReplicaSpec("photos", "lite2", ONE, ModelRef(ModelKind.ONNX, "m.onnx"))
LAYOUT, OTHER = Layout([Instance("lite2", ONE)]), Layout([Instance("lite0", ONE)])
SLO = Slo(0.1)


def view(restarts: int = 0, state: ReplicaState = ReplicaState.READY, name: str = "r0") -> ReplicaView:
    return ReplicaView(name, SPEC, state, restarts=restarts)


def answered(end_s: float, latency_s: float = 0.01, joules: float = 2.0, **changes):
    return record(end_s, latency_s, energy=EnergyShare(joules, None, Quality.MODELLED), **changes)


def begun() -> LiveSample:
    sample = LiveSample("photos", 0.95, warm_up_s=1.0)
    sample.watch(LAYOUT, [view()], 10.0)
    return sample


def test_only_requests_that_arrived_after_the_take_over_and_its_warm_up_count():
    sample = LiveSample("photos", 0.95, 1.0)
    sample.add(answered(5.0))
    assert sample.sample(SLO) is None, "nothing runs"
    sample.watch(LAYOUT, [view()], 10.0)
    sample.add(answered(11.005, 0.01))
    sample.add(answered(11.02, 0.01))
    sample.add(answered(11.05, service="other"))
    seen = sample.sample(SLO)
    assert (seen.layout, seen.since_s, seen.requests) == (LAYOUT, 11.0, 1)
    sample.watch(OTHER, [view()], 20.0)
    assert sample.sample(SLO).requests == 0 and sample.sample(SLO).since_s == 21.0
    assert math.isnan(sample.sample(SLO).latency_s)


def test_what_the_service_owed_and_did_not_give_is_infinitely_late():
    sample = begun()
    for k in range(90):
        sample.add(answered(12.0 + k / 100))
    for k, outcome in enumerate(("deadline", "overloaded", "failed", "crashed", "unavailable") * 6):
        sample.add(answered(13.0 + k / 100, outcome=Outcome(outcome), variant=""))
    for outcome in ("cancelled", "invalid", "unknown"):
        sample.add(answered(14.0, outcome=Outcome(outcome)))
    seen = sample.sample(SLO)
    assert (seen.requests, seen.failed, seen.served) == (120, 30, {"lite2": 90})
    assert seen.latency_s == math.inf and seen.latency_low_s == math.inf
    assert seen.energy_j == 2.0, "the mean is over answers"
    assert Sample.from_dict(seen.as_dict()) == seen


def test_joules_and_latency_come_with_intervals():
    sample = begun()
    for k in range(200):
        sample.add(answered(12.0 + k / 100, 0.01 + 0.0001 * (k % 10), 1.0 + 0.1 * (k % 3)))
    seen = sample.sample(SLO)
    assert seen.latency_low_s <= seen.latency_s <= seen.latency_high_s <= 0.0109 + 1e-9
    assert seen.energy_j == pytest.approx(1.1, abs=0.01) and 0 < seen.energy_band_j < 0.05
    inside = sample.sample(replace(SLO, scope=SloScope.SERVICE))
    assert inside.latency_s == 0.009, "execution alone"


def test_a_replica_that_died_begins_the_sample_anew_and_is_counted():
    sample = begun()
    for k in range(50):
        sample.add(answered(12.0 + k / 100))
    sample.watch(LAYOUT, [view(state=ReplicaState.RESTARTING)], 13.0)
    sample.watch(LAYOUT, [view(restarts=1)], 14.0)
    seen = sample.sample(SLO)
    assert (seen.requests, seen.deaths, seen.since_s) == (0, 1, 15.0)
    sample.watch(LAYOUT, [view(restarts=1)], 15.0)
    assert sample.sample(SLO).deaths == 1 and sample.sample(SLO).since_s == 15.0
    sample.watch(LAYOUT, [view(restarts=3)], 16.0)
    assert sample.sample(SLO).deaths == 3
    sample.watch(OTHER, [view(restarts=3)], 17.0)
    assert sample.sample(SLO).deaths == 0, "the next layout is not to blame"


def test_old_requests_are_forgotten():
    sample = begun()
    for k in range(MOST_REQUESTS + 10):
        sample.add(answered(12.0 + k / 100, 5.0 if k < 10 else 0.01))
    assert sample.sample(SLO).requests == MOST_REQUESTS
    assert sample.sample(Slo(0.1, 0.99)).latency_high_s < 1.0


def test_a_full_sample_is_summed_up_when_there_is_news():
    sample = begun()
    for k in range(100):
        sample.add(answered(12.0 + k / 100))
    first = sample.sample(SLO)
    for k in range(5):
        sample.add(answered(13.0 + k / 100))
    assert sample.sample(SLO) is first
    sample.add(answered(13.5))
    assert sample.sample(SLO).requests == 106
    assert sample.sample(Slo(0.2)) is not sample.sample(SLO), "another SLO has its own sample"


def served(arrivals, service_s, free_s=0.0):
    """Records of one replica that serves in order of arrival."""
    found = []
    for arrival_s in arrivals:
        start_s = max(arrival_s, free_s)
        free_s = start_s + service_s
        made = answered(free_s, free_s - arrival_s)
        found.append(made._replace(arrival_s=arrival_s, start_s=start_s, end_s=free_s, service_s=service_s))
    return found


def test_a_trial_does_not_inherit_the_queue_of_the_layout_before():
    """2000 requests queue when a layout of 2 ms takes over: seen from an empty queue its p95 is 2 ms, not seconds."""
    sample = begun()
    arrivals = [9.0 + k / 1000 for k in range(2000)] + [11.0 + k / 100 for k in range(1500)]
    for made in served(arrivals, 0.002, free_s=10.0):
        sample.add(made)
    seen = sample.sample(SLO)
    assert seen.requests == 1500 and seen.latency_high_s < 0.003
    late = [made.latency_s for made in served(arrivals, 0.002, free_s=10.0)][2000:]
    assert max(late) > 1.0, "what really was waited, else this tests nothing"


def test_requests_of_a_batch_keep_a_replica_for_their_part_of_it():
    """500 requests/s in batches of 4 that take 4 ms: in time, though each alone would be too slow for one replica."""
    sample, free_s = begun(), 10.0
    arrivals = [9.0 + k / 1000 for k in range(2000)] + [11.0 + k / 500 for k in range(2000)]
    for first in range(0, 4000, 4):
        start_s = max(arrivals[first + 3], free_s)
        free_s = start_s + 0.004
        for arrival_s in arrivals[first : first + 4]:
            made = answered(free_s, free_s - arrival_s)
            sample.add(made._replace(arrival_s=arrival_s, start_s=start_s, end_s=free_s, service_s=0.004, batch=4))
    assert sample.sample(SLO).latency_high_s < 0.02


def test_a_layout_that_is_too_slow_is_late_from_an_empty_queue_too():
    sample = begun()
    arrivals = [9.0 + k / 1000 for k in range(500)] + [11.0 + k / 100 for k in range(1000)]
    for made in served(arrivals, 0.015, free_s=10.0):
        sample.add(made)
    assert sample.sample(SLO).latency_low_s > 0.1


def test_requests_refused_while_an_inherited_queue_drains_say_nothing():
    sample = begun()
    arrivals = [9.0 + k / 1000 for k in range(2000)] + [11.0 + k / 100 for k in range(1500)]
    for made in served(arrivals, 0.002, free_s=10.0):
        sample.add(made)
    refused = answered(11.5)._replace(arrival_s=11.5, start_s=math.nan, outcome=Outcome.OVERLOADED)
    sample.add(refused)
    assert sample.sample(SLO).failed == 0
    sample.add(refused._replace(arrival_s=20.0, end_s=20.0))
    for made in served([30.0 + k / 100 for k in range(200)], 0.002):
        sample.add(made)
    assert sample.sample(SLO).failed == 1
