"""The standby policy in virtual time, on a GPU that is slower than the plan thought."""

import math
from dataclasses import replace

import numpy as np
import pytest

from joulery.domain.errors import ConfigError
from joulery.perf.catalog.v100 import V100
from joulery.policies.placement.standby import (
    ACTIVATE_STANDBY,
    SLO_VIOLATED,
    StandbyPolicy,
    WatchedInstance,
)
from joulery.sim.placement.colocation import Tenant, serve_together
from joulery.sim.placement.gpu import InterferenceTruth
from joulery.sim.queues.batching import BatchRule
from tests.sim.placement.standby_world import serve_watched

END_S = 12.0
# GPU5 of the paper's plan for its twelve services: W5, W1 and W11 (Fig. 14), and their SLOs.
PLAN = (
    ("W5", "resnet50", 45.0, 9, 600, 0.030),
    ("W1", "alexnet", 20.0, 6, 1200, 0.010),
    ("W11", "ssd", 15.0, 1, 50, 0.040),
)
POLICY = StandbyPolicy(
    tuple(WatchedInstance(w, 0, 0, r, r + 10.0, slo, 0.99) for w, _, r, _, _, slo in PLAN), min_requests=20
)


def tenants() -> list[Tenant]:
    found = []
    for _, model, share, batch, rate, _ in PLAN:
        arrivals = np.arange(1, round(rate * END_S)) / rate
        found.append(Tenant(model, share / 100, BatchRule(batch), arrivals, np.ones(len(arrivals))))
    return found


def truth(slower: float) -> InterferenceTruth:
    """The published GPU, on which alexnet executes slower than profiled."""
    alexnet = V100.models["alexnet"]
    wrong = replace(alexnet, k1=slower * alexnet.k1, k2=slower * alexnet.k2, k3=slower * alexnet.k3)
    return InterferenceTruth(replace(V100, models={**V100.models, "alexnet": wrong}))


def tail_ms(run, index: int, since_s: float) -> float:
    arrivals, batches = tenants()[index].arrival_s, run.batches[index]
    latency = batches.answered_s() - arrivals[: batches.served]
    return 1e3 * float(np.quantile(latency[arrivals[: batches.served] >= since_s], 0.99))


def test_where_the_prediction_holds_nothing_happens():
    watched = serve_watched(truth(1.0), tenants(), POLICY, 0.0, END_S)
    assert watched.decisions == () and all(math.isinf(at_s) for at_s in watched.switched_s)
    plain = serve_together(truth(1.0), tenants(), 0.0, END_S)
    for mine, theirs in zip(watched.run.batches, plain.batches, strict=True):
        assert mine.finish_s.tolist() == theirs.finish_s.tolist()


def test_the_standby_restores_the_slo_within_two_seconds_as_in_figure_17():
    slow = truth(1.25)
    without = serve_together(slow, tenants(), 0.0, END_S)
    assert tail_ms(without, 1, 4.0) > 10.0, "without a standby the SLO stays violated"
    watched = serve_watched(slow, tenants(), POLICY, 0.0, END_S)
    ((at_s, decision),) = watched.decisions
    assert (decision.kind, decision.target) == (ACTIVATE_STANDBY, "W1/0") and at_s <= 2.0
    assert watched.switched_s[1] == at_s
    assert tail_ms(watched.run, 1, 4.0) <= 10.0
    assert tail_ms(watched.run, 0, 4.0) <= 30.0 and tail_ms(watched.run, 2, 4.0) <= 40.0, "its neighbours keep theirs"


def test_an_error_beyond_ten_per_cent_of_the_gpu_is_said_and_not_hidden():
    watched = serve_watched(truth(3.0), tenants(), POLICY, 0.0, END_S)
    assert [decision.kind for _, decision in watched.decisions] == [ACTIVATE_STANDBY, SLO_VIOLATED]


def test_every_request_is_served():
    watched = serve_watched(truth(1.3), tenants(), POLICY, 0.0, END_S)
    for tenant, batches in zip(tenants(), watched.run.batches, strict=True):
        assert batches.served >= len(tenant.arrival_s) - tenant.rule.batch
        assert np.all(np.diff(batches.finish_s) > 0)


def test_a_policy_for_another_plan_is_refused():
    with pytest.raises(ConfigError, match="1 tenants and 3 watched instances"):
        serve_watched(truth(1.0), tenants()[:1], POLICY, 0.0, END_S)
