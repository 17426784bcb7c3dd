"""A plan in force: which core stands for which GPU, which processes run, what is observed of them."""

import math
from dataclasses import replace

import numpy as np
import pytest

from joulery.domain.errors import CapabilityError
from joulery.domain.gpu.provisioning import LatencyParts, PlannedGpu, PlannedInstance
from joulery.domain.serving.engine import ModelKind, ModelRef, Outcome, RequestRecord
from joulery.domain.serving.service import Slice, SliceKind, Slo
from joulery.policies.placement.standby import REFUSED_S, watched_instances
from joulery.runtime.serving.plans.plan_in_force import (
    PlanInForce,
    PlannedReplica,
    cores_for,
    delay_s,
    devices_for,
    planned_replicas,
    tail_of,
)

MODEL = ModelRef(ModelKind.PYTHON, "shop:double")
PARTS = LatencyParts(0.0, 0.0, 0.01, 0.0, 0.0)


def models(names):
    return {(name, "m"): MODEL for name in names}


def instance(workload: str, share: float, *, batch: int = 4, delay: float = 0.0, replica: int = 0) -> PlannedInstance:
    return PlannedInstance(workload, "m", replica, 1, 30.0, share, batch, delay, 0.1, PARTS, 0.02, 100.0, 0.04)


def gpu(*instances: PlannedInstance, kind: str = "core") -> PlannedGpu:
    return PlannedGpu(kind, 1.0, 1.0, 1.0, 1.0, 1.0, instances)


def replicas(*gpus: PlannedGpu, cores=((0,), (1,))) -> tuple[PlannedReplica, ...]:
    names = {each.workload for one in gpus for each in one.instances}
    watched = watched_instances(gpus, dict.fromkeys(names, Slo(0.04, 0.99)))
    return planned_replicas(gpus, cores[: len(gpus)], models(names), watched)


def test_an_instance_becomes_a_process_and_its_standby_on_the_same_core():
    one, two = replicas(gpu(instance("a", 0.6), instance("b", 0.35)), gpu())
    assert one.original.slice == Slice(SliceKind.CPU, cores=1, share_ratio=0.6) and one.original.cores == (0,)
    assert one.original.batch == 4 and one.standby.slice.share_ratio == 0.65, "five per cent were left"
    assert [spec.standby for spec in one.processes(set())] == [False, True]
    assert one.processes({"a/0"}) == [one.standby] and not one.standby.standby
    assert one.answering(set()) == one.original and one.answering({"a/0"}) == one.standby
    assert two.processes({"a/0"})[0] == two.original


def test_a_full_gpu_has_no_standbys():
    (one,) = replicas(gpu(instance("a", 1.0)))
    assert one.standby is None and one.processes({"a/0"}) == [one.original] == [one.answering({"a/0"})]
    assert one.original.slice == Slice(SliceKind.CPU, cores=1)


def test_a_batch_waits_as_long_as_planned_and_never_forever():
    assert delay_s(instance("a", 0.5, delay=0.25)) == 0.25
    assert delay_s(instance("a", 0.5, delay=float("inf"))) == pytest.approx(3 / 30.0)
    assert delay_s(instance("a", 0.5, batch=1, delay=float("inf"))) == 0.0


def test_each_gpu_gets_its_cores_and_those_that_go_on_keep_theirs():
    three = [gpu(kind="core"), gpu(kind="pair"), gpu(kind="core")]
    assert cores_for(three, range(5), {"pair": 2}) == ((0,), (1, 2), (3,))
    assert cores_for(three, range(5), {"pair": 2}, kept={2: (1,)}) == ((0,), (2, 3), (1,))


def test_a_plan_with_more_gpus_than_cores_is_refused():
    with pytest.raises(CapabilityError, match=r"2 GPUs, .* 1 CPU cores") as caught:
        cores_for([gpu(), gpu()], (3,), {})
    assert "fleet.gpus" in caught.value.hint
    assert cores_for([gpu(), gpu()], (3, 5), {}) == ((3,), (5,))


def test_two_replicas_alike_are_two_processes():
    pair = gpu(instance("a", 0.3), replace(instance("a", 0.3), replica=1))
    one, two = replicas(pair)
    assert one.original == two.original and one.watched.key != two.watched.key


def test_on_shared_gpus_an_instance_is_a_process_with_a_share_of_its_own_gpu():
    plan = [gpu(instance("a", 0.6), instance("b", 0.35)), gpu(instance("c", 1.0))]
    names = {"a", "b", "c"}
    watched = watched_instances(plan, dict.fromkeys(names, Slo(0.04, 0.99)))
    found = planned_replicas(plan, ((1,), (0,)), models(names), watched, ("gpu:7", "gpu:3"))
    assert [(str(one.original.slice), one.original.device) for one in found] == [
        ("mps:0.6", "gpu:7"),
        ("mps:0.35", "gpu:7"),
        ("mps:1", "gpu:3"),
    ]
    assert found[0].original.cores == ()
    assert (found[0].standby.slice.share_ratio, found[0].standby.device, found[0].original.batch) == (0.65, "gpu:7", 4)
    with pytest.raises(CapabilityError, match="takes 1 GPUs more"):
        devices_for(plan, ("gpu:3",), ())


def plan() -> PlanInForce:
    gpus = (gpu(instance("a", 0.5), instance("b", 0.25)), gpu(instance("c", 0.9, batch=2)))
    names = ("a", "b", "c")
    return PlanInForce.of(gpus, ((0,), (1,)), models(names), dict.fromkeys(names, Slo(0.04, 0.9)))


def record(latency_s: float, *, replica: str = "r1", arrival_s: float = 10.0, outcome: Outcome = Outcome.OK):
    return RequestRecord(
        "a", "m", replica, arrival_s, arrival_s, arrival_s + latency_s, outcome, latency_s, 0.01, 1, None
    )


def test_a_tail_is_of_the_instances_own_requests():
    one = plan().replicas[0]
    mine = [record(0.001 * k) for k in range(1, 11)]
    others = [record(9.0, replica="r2") for _ in range(50)]
    tail = tail_of(one, [*mine, *others], {"r1"}, {})
    assert (tail.key, tail.requests) == ("a/0", 10)
    assert tail.latency_s == pytest.approx(float(np.quantile([0.001 * k for k in range(1, 11)], 0.9)))
    assert math.isnan(tail_of(one, others, {"r1"}, {}).latency_s)


def test_requests_that_came_before_the_standby_became_active_do_not_count_against_it():
    one = plan().replicas[0]
    records = [record(5.0, arrival_s=9.0), record(0.01, arrival_s=12.0)]
    assert tail_of(one, records, {"r1"}, {"a/0": 11.0}).latency_s == pytest.approx(0.01)


def test_refused_requests_are_later_than_any_slo_and_bad_ones_do_not_count():
    one = plan().replicas[0]
    refused = [record(0.0, replica="", outcome=Outcome.DEADLINE)] * 9
    assert tail_of(one, [*refused, record(0.01)], {"r1"}, {}).latency_s == pytest.approx(REFUSED_S)
    wrong = [record(0.0, replica="", outcome=Outcome.INVALID)] * 9
    assert tail_of(one, [*wrong, record(0.01)], {"r1"}, {}) == ("a/0", pytest.approx(0.01), 1)


def test_what_runs_has_the_standbys_share_where_it_is_active():
    one = plan()
    assert [[p.share_percent for p in g.processes] for g in one.running] == [[50.0, 25.0], [90.0]]
    one.switched_s["a/0"] = 11.0
    assert [[p.share_percent for p in g.processes] for g in one.running] == [[60.0, 25.0], [90.0]]
    assert one.summary() == "a 50 % x4 + b 25 % x4 | c 90 % x2"


def test_the_policy_watches_every_instance():
    one = plan()
    assert [watched.key for watched in one.policy.instances] == ["a/0", "b/0", "c/0"]
    assert [watched.standby_percent for watched in one.policy.instances] == [60.0, 35.0, 100.0]


def test_a_new_plan_keeps_what_a_standby_corrected_where_it_changes_nothing_else():
    before, after = plan(), plan()
    before.switched_s.update({"a/0": 11.0, "c/0": 12.0})
    before.renewed.add("a/0")
    after.keep_corrections(before)
    assert after.switched_s == {"a/0": 11.0, "c/0": 12.0} and after.renewed == {"a/0"}
    assert after.policy.initial().active == {"a/0": 11.0, "c/0": 12.0}
    resized = PlanInForce.of(
        (gpu(instance("a", 0.55), instance("b", 0.25)),),
        ((0,),),
        models("ab"),
        {n: Slo(0.04, 0.9) for n in "ab"},
    )
    resized.keep_corrections(before)
    assert resized.switched_s == {}, "the plan gives it another share: that is the new correction"


def test_corrections_that_no_longer_fit_together_are_not_kept():
    names = ("a", "b")
    gpus = (gpu(instance("a", 0.5), instance("b", 0.45)),)
    before, after = (
        PlanInForce.of(gpus, ((0,),), models(names), dict.fromkeys(names, Slo(0.04, 0.9))) for _ in range(2)
    )
    before.switched_s.update({"a/0": 1.0, "b/0": 2.0})
    after.keep_corrections(before)
    assert after.switched_s == {"a/0": 1.0}


def test_after_a_switch_a_new_standby_is_beside_the_one_that_answers():
    one = plan().replicas[0]
    assert one.processes({"a/0"}) == [one.standby]
    answering, beside = one.processes({"a/0"}, {"a/0"})
    assert answering == one.standby and beside == replace(one.standby, standby=True)
