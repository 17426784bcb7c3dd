"""Many services alike, planned as one kind: the same optimum, each service with instances of its own, a valid bound."""

import math
from collections import Counter
from dataclasses import replace

import pytest

from joulery.domain.gpu.optimum import objective_of
from joulery.policies.placement.joint.divisions import best_gain, divisions_of, grouped
from joulery.policies.placement.joint.following.warm import replan
from joulery.policies.placement.joint.generation import JointEffort
from joulery.policies.placement.joint.planner import plan_joint
from joulery.policies.placement.joint.problem import JointRequest, problem_of
from joulery.policies.placement.provisioning.options import Rules
from joulery.sim.placement.plan_judge import judge_layouts, judge_plan
from tests.policies.placement.joint.brute_force import (
    PROFILE,
    bound_of,
    every_pattern,
    fleet,
    optimum,
    random_request,
    service,
    worth,
)

AS_KINDS, EACH = JointEffort(alike_from=1), JointEffort(alike_from=10**6)


def copies(request, count):
    """The request with each service so many times."""
    services = tuple(
        replace(each, workload=replace(each.workload, id=f"{each.workload.id}.{copy}"))
        for copy in range(count)
        for each in request.services
    )
    return replace(request, services=services)


def check(request, plan):
    """Every service served by name, within its floor, no instance above its limits."""
    served, right = Counter(), Counter()
    numbers = {}
    for gpu in plan.gpus:
        assert gpu.share_ratio <= 1 + 1e-9
        for each in gpu.instances:
            assert each.latency_s <= each.limit_s * (1 + 1e-9)
            assert each.rate_rps <= each.provided_rps * (1 + 1e-9)
            served[each.workload] += each.rate_rps
            right[each.workload] += each.rate_rps * each.accuracy_ratio
            numbers.setdefault(each.workload, []).append((each.replica, each.replicas))
    assert dict(served) == pytest.approx({each.workload.id: each.workload.rate_rps for each in request.services})
    for name, mine in numbers.items():
        assert sorted(mine) == [(at, len(mine)) for at in range(len(mine))], name
    for each in request.services:
        if each.floor_ratio > 0:
            assert right[each.workload.id] / served[each.workload.id] >= each.floor_ratio - 1e-9
    power_w = math.fsum(gpu.power_w for gpu in plan.gpus)
    assert power_w == pytest.approx(plan.certificate.power_w)


@pytest.mark.parametrize("seed", range(6))
def test_bound_optimum_and_plan_stand_in_order(seed):
    request = copies(random_request(seed), 2)
    best, plan = optimum(problem_of(request)), plan_joint(request, AS_KINDS)
    check(request, plan)
    certificate = plan.certificate
    assert certificate.alike
    assert certificate.bound <= best * (1 + 1e-9)
    assert best <= certificate.value * (1 + 1e-9)
    if certificate.optimal:
        assert certificate.value == pytest.approx(best, rel=1e-5)


@pytest.mark.parametrize("seed", [1, 4])
def test_an_independent_pricer_proves_the_bound_for_every_single_service(seed):
    request = copies(random_request(seed), 2)
    certificate = plan_joint(request, AS_KINDS).certificate
    assert bound_of(certificate) == pytest.approx(certificate.bound, rel=1e-9)
    first = {name: names[0] for names in certificate.alike for name in names}
    problem = problem_of(request)  # every service by itself, not the kinds
    per_w = certificate.objective.per_w + certificate.power_price
    for machine, one in enumerate(problem.machines):
        for pattern in every_pattern(problem, machine):
            instances = Counter()
            for item in (problem.items[at] for at in pattern):
                kind = problem.services[item.service]
                assert certificate.demand_price[kind.workload.id] == certificate.demand_price[first[kind.workload.id]]
                instances[first[kind.workload.id], kind.variants[item.variant].model, item.rate_rps] += 1
            watts = problem.standing_w[machine] + sum(problem.overhead_w[machine, at] for at in pattern)
            cost = per_w * watts + certificate.pool_price[one.gpu_type.name]
            assert worth(certificate, one.gpu_type.name, one.clocked.clock_mhz, instances) <= cost * (1 + 1e-9)


@pytest.mark.parametrize("seed", [2, 6])
def test_the_same_value_as_with_every_service_by_itself(seed):
    request = copies(random_request(seed), 3)
    kinds, each = plan_joint(request, AS_KINDS), plan_joint(request, EACH)
    check(request, kinds)
    assert not each.certificate.alike
    if kinds.certificate.optimal and each.certificate.optimal:
        assert kinds.certificate.value == pytest.approx(each.certificate.value, rel=1e-5)
    assert kinds.certificate.bound <= each.certificate.value * (1 + 1e-9)


def test_a_hundred_services_with_floors_and_a_few_of_their_own():
    kinds = JointRequest(
        (
            service("a", "resnet50", 260, 35, "alexnet", floor=0.74),
            service("b", "vgg19", 180, 40),
            service("c", "ssd", 90, 50),
        ),
        (fleet(2),),
        Rules(max_batch=4, max_replicas=2, margin_ratio=0.05),
        objective_of("energy"),
    )
    request = copies(kinds, 40)
    request = replace(request, services=(*request.services, service("d", "ssd", 120, 45)))
    plan = plan_joint(request)
    check(request, plan)
    assert plan.certificate.gap_ratio <= 0.02
    assert sorted(len(names) for names in plan.certificate.alike) == [40, 40, 40]
    workloads = [each.workload for each in request.services]
    verdict = judge_layouts(plan.gpus, workloads, {"V100": PROFILE}, seeds=1, length_s=5.0)
    assert 0 < verdict.layouts < len(plan.gpus)
    assert set(verdict.tail_ratio) == {each.id for each in workloads}
    assert verdict.power_w == pytest.approx(plan.certificate.power_w, rel=0.05)


@pytest.mark.slow
def test_layouts_once_are_what_every_gpu_by_itself_is():
    request = copies(random_request(0), 3)
    plan = plan_joint(request, AS_KINDS)
    workloads = [each.workload for each in request.services]
    once = judge_layouts(plan.gpus, workloads, {"V100": PROFILE}, seeds=2, length_s=30.0)
    all_ = judge_plan(plan.gpus, workloads, {"V100": PROFILE}, seeds=2, length_s=30.0)
    assert once.power_w == pytest.approx(all_.power_w, rel=0.02)
    assert max(once.tail_ratio.values()) == pytest.approx(max(all_.tail_ratio.values()), rel=0.15)


def test_services_that_differ_in_anything_are_no_kind():
    one = service("a", "resnet50", 100, 30, "alexnet", floor=0.7)
    others = (
        service("b", "resnet50", 101, 30, "alexnet", floor=0.7),
        service("c", "resnet50", 100, 31, "alexnet", floor=0.7),
        service("d", "resnet50", 100, 30, "alexnet", floor=0.71),
        service("e", "resnet50", 100, 30, floor=0.7),
        replace(service("f", "resnet50", 100, 30, "alexnet", floor=0.7), margin_ratio=0.1),
    )
    request = JointRequest((one, *others), (fleet(),), Rules(), objective_of("energy"))
    assert grouped(request, 1) is request
    again = replace(request, services=(*request.services, service("g", "resnet50", 100, 30, "alexnet", floor=0.7)))
    assert [each.names for each in grouped(again, 1).services] == [("a", "g"), (), (), (), (), ()]
    assert grouped(again, 8) is again, "few services are planned by themselves"


def test_divisions_serve_a_service_and_none_has_an_instance_too_many():
    rules = Rules(max_batch=4, max_replicas=4, margin_ratio=0.05)
    request = JointRequest(
        (service("a", "resnet50", 300, 40, "alexnet", floor=0.7),), (fleet(1),), rules, objective_of("energy")
    )
    problem = problem_of(grouped(copies(request, 2), 1))
    divisions, complete = divisions_of(problem)
    assert complete
    assert len(divisions) > 20

    def serves(items):
        offers = [(problem.gain(problem.items[at]), problem.items[at].part) for at in items]
        return sum(part for _, part in offers) >= 1 - 1e-9 and best_gain(offers) >= -1e-12

    for each in divisions:
        assert serves(each.items)
        rest = [each.items[:at] + each.items[at + 1 :] for at in range(len(each.items))]
        assert not any(serves(some) for some in rest), each


def test_a_warm_plan_follows_one_of_kinds():
    request = copies(random_request(4), 3)
    before = plan_joint(request, AS_KINDS)
    rates = tuple(
        replace(each, workload=replace(each.workload, rate_rps=0.9 * each.workload.rate_rps))
        for each in request.services
    )
    today = replace(request, services=rates)
    found = replan(today, before)
    check(today, found.plan)
    assert found.plan.certificate.value <= 1.05 * plan_joint(today, EACH).certificate.value
