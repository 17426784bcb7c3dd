"""Judging a joint plan: clocks and hosts count, an overloaded plan is caught, equal seeds give equal verdicts."""

from dataclasses import replace

import pytest

from joulery.domain.gpu.optimum import objective_of
from joulery.perf import catalog
from joulery.policies.placement.joint.planner import plan_joint
from joulery.policies.placement.joint.problem import JointRequest
from joulery.policies.placement.provisioning.options import Rules
from joulery.sim.placement.plan_judge import judge_plan, truth_at
from tests.policies.placement.joint.brute_force import fleet, service

SERVICES = (service("a", "resnet50", 300, 30), service("b", "ssd", 100, 45))
TRUTHS = {"V100": catalog.profile("v100-refit")}


@pytest.fixture(scope="module")
def plan():
    return plan_joint(JointRequest(SERVICES, (fleet(3),), Rules(margin_ratio=0.05), objective_of("energy")))


def judged(gpus, workloads=None, **more):
    return judge_plan(gpus, workloads or [each.workload for each in SERVICES], TRUTHS, length_s=20.0, seeds=2, **more)


def test_a_plan_keeps_its_slos_and_its_watts(plan):
    verdict = judged(plan.gpus)
    assert verdict.violated == ()
    assert verdict.power_w == pytest.approx(plan.certificate.power_w, rel=0.03)
    assert verdict.truth == "V100 (refit)"


def test_equal_seeds_give_equal_verdicts(plan):
    assert judged(plan.gpus) == judged(plan.gpus)


def test_hosts_add_their_watts(plan):
    hosted = [replace(gpu, host_w=60.0) for gpu in plan.gpus]
    assert judged(hosted).power_w == pytest.approx(judged(plan.gpus).power_w + 60 * len(hosted))


def test_more_requests_than_planned_are_caught(plan):
    workloads = [replace(each.workload, rate_rps=2 * each.workload.rate_rps) for each in SERVICES]
    assert judged(plan.gpus, workloads).violated


def test_a_gpu_held_lower_idles_lower():
    profile = TRUTHS["V100"]
    assert truth_at(profile, None).idle_w == profile.gpu.idle_w == truth_at(profile, 1530.0).idle_w
    assert truth_at(profile, 1113.0).idle_w < profile.gpu.idle_w
