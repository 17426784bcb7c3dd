"""Cut GPUs in simulation: slices do not feel one another, processes of one slice do, and watts follow the kernels."""

import pytest

from joulery.domain.gpu.optimum import objective_of
from joulery.policies.placement.joint.planner import plan_joint
from joulery.policies.placement.joint.problem import JointRequest
from joulery.policies.placement.provisioning.options import Rules
from joulery.sim.placement import plan_judge
from joulery.sim.placement.batched_serving import Gpu
from joulery.sim.placement.gpu import SimulatedProcess, SlicedTruth
from joulery.sim.placement.plan_judge import judge_plan, sliced_truth, tenant_name
from tests.policies.placement.joint.brute_force_mig import fleet, service

SERVICES = (service("a", "large", 700, 60, "small", floor=0.77), service("b", "other", 500, 80))
KIND = fleet(2)


@pytest.fixture(scope="module")
def plan():
    return plan_joint(JointRequest(SERVICES, (KIND,), Rules(max_batch=16, margin_ratio=0.05), objective_of("energy")))


def judged(plan, **more):
    workloads = [each.workload for each in SERVICES]
    return judge_plan(plan.gpus, workloads, {}, length_s=20.0, seeds=2, sliced={"A30-24GB": KIND.sliced}, **more)


def shared(plan):
    return next(gpu for gpu in plan.gpus if gpu.mode == "mig")


@pytest.mark.slow
def test_a_plan_keeps_its_slos_and_its_watts(plan):
    verdict = judged(plan)
    assert verdict.violated == ()
    assert verdict.power_w == pytest.approx(plan.certificate.power_w, rel=0.03)
    assert verdict.truth == "A30-24GB (three numbers a curve of a made-up table)"
    assert verdict == judged(plan)


def test_other_slices_change_nothing_and_another_process_of_the_slice_does(plan):
    gpu = shared(plan)
    truth = sliced_truth(gpu, KIND.sliced)
    names = [tenant_name(each.workload, each.replica) for each in gpu.instances]
    assert len(names) > 1
    one, other = (SimulatedProcess(name, 0.25, 16) for name in names[:2])
    alone = truth.conditions([one]).effects[0]
    beside = truth.conditions([one, other]).effects[0]
    together = truth.conditions([one, one]).effects[0]
    assert beside == alone
    assert together.busy_s > 1.5 * alone.busy_s


def test_a_slice_draws_no_more_than_its_part_of_the_board(plan):
    for gpu in plan.gpus:
        truth = sliced_truth(gpu, KIND.sliced)
        executing = [
            SimulatedProcess(tenant_name(each.workload, each.replica), each.share_ratio, each.batch)
            for each in gpu.instances
            for _ in range(each.processes)
        ]
        drawn_w = sum(effect.dynamic_w for effect in truth.conditions(executing).effects)
        assert truth.idle_w + drawn_w <= 165.0 * (1 + 1e-9)
        assert truth.conditions([]).effects == ()


def test_slices_are_simulated_by_themselves(plan, monkeypatch):
    """As all of them at once, with a fraction of the companies: those of a slice, not of every slice at a time."""
    looked = []
    conditions = SlicedTruth.conditions
    monkeypatch.setattr(
        SlicedTruth, "conditions", lambda self, executing: looked.append(executing) or conditions(self, executing)
    )
    apart = judged(plan)
    count = len(looked)
    monkeypatch.setattr(plan_judge, "Gpu", lambda truth, processes, parts=(): Gpu(truth, processes))
    together = judged(plan)
    assert together.power_w == pytest.approx(apart.power_w, rel=1e-9)
    assert together.tail_ratio == pytest.approx(apart.tail_ratio, rel=1e-6)
    assert count < (len(looked) - count) / 2
