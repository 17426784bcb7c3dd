"""A plan on CPU cores: which core plays which GPU, which processes each instance has."""

from dataclasses import replace

import pytest

from joulery.domain.errors import CapabilityError
from joulery.domain.gpu.provisioning import LatencyParts, PlannedGpu, PlannedInstance
from joulery.domain.serving.engine import ModelKind, ModelRef
from joulery.domain.serving.service import Slice, SliceKind, Slo
from joulery.policies.placement.provisioning.standby import watched_of
from joulery.runtime.serving.slice_assignment import PlannedReplica, cores_for, delay_s, seats_of

MODEL = ModelRef(ModelKind.PYTHON, "shop:double")
PARTS = LatencyParts(0.0, 0.0, 0.01, 0.0, 0.0)


def instance(workload: str, share: float, *, batch: int = 4, delay: float = 0.0, replica: int = 0) -> PlannedInstance:
    return PlannedInstance(workload, "m", replica, 1, 30.0, share, batch, delay, 0.1, PARTS, 0.02, 100.0, 0.04)


def gpu(*instances: PlannedInstance, kind: str = "core") -> PlannedGpu:
    return PlannedGpu(kind, 1.0, 1.0, 1.0, 1.0, 1.0, instances)


def seats(*gpus: PlannedGpu, cores=((0,), (1,))) -> tuple[PlannedReplica, ...]:
    names = {each.workload for one in gpus for each in one.instances}
    watched = watched_of(gpus, dict.fromkeys(names, Slo(0.04, 0.99)))
    return seats_of(gpus, cores[: len(gpus)], dict.fromkeys(names, MODEL), watched)


def test_an_instance_becomes_a_process_and_its_shadow_on_the_same_core():
    one, two = seats(gpu(instance("a", 0.6), instance("b", 0.35)), gpu())
    assert one.original.slice == Slice(SliceKind.CPU, cores=1, share_ratio=0.6) and one.original.cores == (0,)
    assert one.original.batch == 4 and one.shadow.slice.share_ratio == 0.65, "five per cent were left"
    assert [spec.standby for spec in one.processes(set())] == [False, True]
    assert one.processes({"a/0"}) == [one.shadow] and not one.shadow.standby
    assert one.answering(set()) == one.original and one.answering({"a/0"}) == one.shadow
    assert two.processes({"a/0"})[0] == two.original


def test_a_full_gpu_has_no_shadows():
    (one,) = seats(gpu(instance("a", 1.0)))
    assert one.shadow is None and one.processes({"a/0"}) == [one.original] == [one.answering({"a/0"})]
    assert one.original.slice == Slice(SliceKind.CPU, cores=1)


def test_a_batch_waits_as_long_as_planned_and_never_for_ever():
    assert delay_s(instance("a", 0.5, delay=0.25)) == 0.25
    assert delay_s(instance("a", 0.5, delay=float("inf"))) == pytest.approx(3 / 30.0)
    assert delay_s(instance("a", 0.5, batch=1, delay=float("inf"))) == 0.0


def test_each_gpu_gets_its_cores_and_those_that_go_on_keep_theirs():
    three = [gpu(kind="core"), gpu(kind="pair"), gpu(kind="core")]
    assert cores_for(three, range(5), {"pair": 2}) == ((0,), (1, 2), (3,))
    assert cores_for(three, range(5), {"pair": 2}, kept={2: (1,)}) == ((0,), (2, 3), (1,))


def test_a_plan_with_more_gpus_than_cores_is_refused():
    with pytest.raises(CapabilityError, match="2 GPUs, which takes 1 CPU cores more") as caught:
        cores_for([gpu(), gpu()], (3,), {})
    assert "fleet.gpus" in caught.value.hint
    assert cores_for([gpu(), gpu()], (3, 5), {}) == ((3,), (5,))


def test_two_replicas_alike_are_two_processes():
    pair = gpu(instance("a", 0.3), replace(instance("a", 0.3), replica=1))
    one, two = seats(pair)
    assert one.original == two.original and one.watched.key != two.watched.key


def test_on_shared_gpus_an_instance_is_a_process_with_a_share_of_its_own_gpu():
    plan = [gpu(instance("a", 0.6), instance("b", 0.35)), gpu(instance("c", 1.0))]
    names = {"a", "b", "c"}
    watched = watched_of(plan, dict.fromkeys(names, Slo(0.04, 0.99)))
    found = seats_of(plan, ((1,), (0,)), dict.fromkeys(names, MODEL), watched, ("gpu:3", "gpu:7"))
    assert [(str(seat.original.slice), seat.original.device) for seat in found] == [
        ("mps:0.6", "gpu:7"),
        ("mps:0.35", "gpu:7"),
        ("mps:1", "gpu:3"),
    ]
    assert found[0].original.cores == ()
    assert (found[0].shadow.slice.share_ratio, found[0].shadow.device, found[0].original.batch) == (0.65, "gpu:7", 4)
    with pytest.raises(CapabilityError, match="takes 1 GPUs more"):
        cores_for(plan, (0,), {}, noun="GPUs")
