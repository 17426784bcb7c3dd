"""A plan in force: what is seen of its instances, and what runs of it."""

import math

import numpy as np
import pytest

from joulery.domain.serving.engine import Outcome, RequestRecord
from joulery.domain.serving.service import Slo
from joulery.policies.placement.provisioning.standby import REFUSED_S
from joulery.runtime.serving.provisioned import PlanInForce, tail_of
from tests.runtime.serving.test_slice_assignment import MODEL, gpu, instance


def plan() -> PlanInForce:
    gpus = (gpu(instance("a", 0.5), instance("b", 0.25)), gpu(instance("c", 0.9, batch=2)))
    names = ("a", "b", "c")
    return PlanInForce.of(gpus, ((0,), (1,)), dict.fromkeys(names, MODEL), dict.fromkeys(names, Slo(0.04, 0.9)))


def record(latency_s: float, *, replica: str = "r1", arrival_s: float = 10.0, outcome: Outcome = Outcome.OK):
    return RequestRecord(
        "a", "m", replica, arrival_s, arrival_s, arrival_s + latency_s, outcome, latency_s, 0.01, 1, None
    )


def test_a_tail_is_of_the_instances_own_requests():
    seat = plan().seats[0]
    mine = [record(0.001 * k) for k in range(1, 11)]
    others = [record(9.0, replica="r2") for _ in range(50)]
    tail = tail_of(seat, [*mine, *others], "r1", {})
    assert (tail.key, tail.requests) == ("a/0", 10)
    assert tail.latency_s == pytest.approx(float(np.quantile([0.001 * k for k in range(1, 11)], 0.9)))
    assert math.isnan(tail_of(seat, others, "r1", {}).latency_s)


def test_requests_that_came_before_the_shadow_took_over_do_not_count_against_it():
    seat = plan().seats[0]
    records = [record(5.0, arrival_s=9.0), record(0.01, arrival_s=12.0)]
    assert tail_of(seat, records, "r1", {"a/0": 11.0}).latency_s == pytest.approx(0.01)


def test_refused_requests_are_later_than_any_promise_and_bad_ones_do_not_count():
    seat = plan().seats[0]
    refused = [record(0.0, replica="", outcome=Outcome.DEADLINE)] * 9
    assert tail_of(seat, [*refused, record(0.01)], "r1", {}).latency_s == pytest.approx(REFUSED_S)
    wrong = [record(0.0, replica="", outcome=Outcome.INVALID)] * 9
    assert tail_of(seat, [*wrong, record(0.01)], "r1", {}) == ("a/0", pytest.approx(0.01), 1)


def test_what_runs_has_the_shadows_share_where_it_took_over():
    one = plan()
    assert [[p.share_percent for p in g.processes] for g in one.running] == [[50.0, 25.0], [90.0]]
    one.switched_s["a/0"] = 11.0
    assert [[p.share_percent for p in g.processes] for g in one.running] == [[60.0, 25.0], [90.0]]
    assert one.words() == "a 50 % x4 + b 25 % x4 | c 90 % x2"


def test_the_policy_watches_every_instance():
    one = plan()
    assert [watched.key for watched in one.policy.instances] == ["a/0", "b/0", "c/0"]
    assert [watched.shadow_percent for watched in one.policy.instances] == [60.0, 35.0, 100.0]
