"""Where a plan with slices runs: which GPU stands for which, which processes, and where the next plan goes on."""

from dataclasses import replace

import pytest

from joulery.domain.errors import CapabilityError
from joulery.domain.gpu.provisioning import LatencyParts, PlannedGpu, PlannedInstance
from joulery.domain.serving.engine import ModelKind, ModelRef
from joulery.domain.serving.mix import OWN
from joulery.domain.serving.service import Slice, SliceKind, Slo
from joulery.runtime.serving.plans.plan_in_force import PlanInForce, devices_for, held_places, mix_of, variant_shares

PARTS = LatencyParts(0.0, 0.0, 0.01, 0.0, 0.0)
DEVICES = ("gpu:0", "gpu:1", "gpu:2")


def instance(workload, share, slice_="", *, model="m", processes=1, replica=0, rate=30.0):
    return PlannedInstance(
        workload,
        model,
        replica,
        1,
        rate,
        share,
        4,
        0.0,
        0.1,
        PARTS,
        0.02,
        100.0,
        0.04,
        slice=slice_,
        processes=processes,
    )


def gpu(*instances):
    return PlannedGpu("A100", 1.0, 1.0, 1.0, 1.0, 1.0, instances)


CUT = gpu(instance("a", 3 / 7, "3g.20gb", processes=2), instance("b", 2 / 7, "2g.10gb", model="lean"))
WHOLE = gpu(instance("b", 1.0, "7g.40gb", replica=1, rate=90.0))
SHARED = gpu(instance("c", 0.5), instance("d", 0.4))


def in_force(gpus, cores, cut=frozenset({"gpu:1", "gpu:2"})):
    models = {
        (each.workload, each.model): ModelRef(ModelKind.PYTHON, f"shop:{each.model}")
        for one in gpus
        for each in one.instances
    }
    return PlanInForce.of(gpus, cores, models, dict.fromkeys("abcd", Slo(0.04, 0.9)), DEVICES, cut)


def test_slices_take_gpus_that_may_be_cut_and_shares_those_that_may_not():
    assert devices_for((CUT, SHARED, WHOLE), DEVICES, {"gpu:1", "gpu:2"}) == ((1,), (0,), (2,))
    assert devices_for((WHOLE, CUT), DEVICES, {"gpu:2"}) == ((0,), (2,)), "a whole GPU leaves the cut one to others"
    assert devices_for((CUT, CUT), DEVICES, {"gpu:1", "gpu:2"}, {1: (1,)}) == ((2,), (1,))
    with pytest.raises(CapabilityError, match="partition into MIG slices") as caught:
        devices_for((CUT, CUT), DEVICES, {"gpu:1"})
    assert "mode: mig" in caught.value.hint
    with pytest.raises(CapabilityError, match="share under MPS"):
        devices_for((SHARED, SHARED), DEVICES, {"gpu:1", "gpu:2"})


def test_an_instance_on_a_slice_is_its_processes_without_a_standby():
    plan = in_force((CUT, WHOLE, SHARED), ((1,), (2,), (0,)))
    one, two, whole, share, _ = plan.replicas
    assert one.processes({}) == [one.original] * 2 and one.original.together == "a/0"
    assert one.original.slice == Slice(SliceKind.MIG, profile="3g.20gb", share_ratio=0.5)
    assert (one.original.device, two.original.device, whole.original.device) == ("gpu:1", "gpu:1", "gpu:2")
    assert str(two.original.slice) == "2g.10gb" and two.original.model.location == "shop:lean"
    assert (one.standby, two.standby, whole.standby) == (None, None, None), "a slice does not grow"
    assert str(share.original.slice) == "mps:0.5" and share.standby is not None
    assert plan.summary() == (
        "a m on 3g.20gb x4 by 2 processes + b lean on 2g.10gb x4 | b m on 7g.40gb x4 | c 50 % x4 + d 40 % x4"
        "; requests of b: lean 25 %, m 75 %"
    )


def test_the_flows_of_a_plan_are_the_shares_of_its_variants():
    assert variant_shares((CUT, WHOLE))["b"] == pytest.approx({"lean": 0.25, "m": 0.75})
    assert in_force((CUT, WHOLE), ((1,), (2,))).mixes["a"] == OWN
    assert dict(mix_of({"lean": 0.25, "m": 0.75}).weights(9, 1.0)) == {"lean": 0.25, "m": 0.75}
    idle = gpu(instance("b", 1 / 7, "1g.5gb", rate=0.0), instance("b", 1 / 7, "1g.5gb", rate=0.0, model="lean"))
    assert variant_shares((idle,))["b"] == {"m": 0.5, "lean": 0.5}, "without a flow anyone answers"


def test_a_gpu_in_use_is_never_cut_anew():
    plan = in_force((CUT, SHARED), ((1,), (0,)))
    fewer = gpu(CUT.instances[0])
    other = gpu(replace(CUT.instances[1], workload="a"))
    larger = gpu(instance("a", 4 / 7, "4g.20gb"))
    assert held_places(plan, (fewer, SHARED), (0, 1)) == {0: (1,), 1: (0,)}, "its slices are there"
    assert held_places(plan, (other,), (None,)) == {0: (1,)}, "another service's slice does as well"
    assert held_places(plan, (larger,), (0,)) == {}, "it needs another GPU"
    assert devices_for((larger,), DEVICES, {"gpu:1", "gpu:2"}, running=(0, 1)) == ((2,),)
    with pytest.raises(CapabilityError, match="none in use"):
        devices_for((larger,), DEVICES, {"gpu:1"}, running=(0, 1))
    assert devices_for((SHARED,), DEVICES, {"gpu:1"}, running=(0, 1)) == ((0,),), "shares are changed in place"
