"""More services that differ than one plan can hold: planned in batches, a bound for all, pools and caps shared."""

import math
from collections import Counter
from dataclasses import replace

import pytest

from joulery.domain.errors import ConfigError, InfeasibleError
from joulery.policies.placement.joint.generation import JointEffort
from joulery.policies.placement.joint.planner import plan_joint
from joulery.policies.placement.joint.problem import problem_of
from tests.policies.placement.joint.brute_force import bound_of, every_pattern, fleet, optimum, random_request, worth
from tests.policies.placement.joint.test_alike import check, copies
from tests.policies.placement.joint.test_planner import twelve

SINGLY = JointEffort(together=1, alike_from=10**6)


def differing(seed, count):
    """Services that all differ in their rates."""
    request = copies(random_request(seed), count)
    services = tuple(
        replace(each, workload=replace(each.workload, rate_rps=each.workload.rate_rps * (1 - 0.04 * at)))
        for at, each in enumerate(request.services)
    )
    return replace(request, services=services)


@pytest.mark.parametrize("seed", range(4))
def test_the_bound_holds_for_all_batches_together(seed):
    request = differing(seed, 2)
    best, plan = optimum(problem_of(request)), plan_joint(request, SINGLY)
    check(request, plan)
    assert "batches of 1 services" in plan.certificate.method
    assert 0 < plan.certificate.bound <= best * (1 + 1e-9)
    assert best <= plan.certificate.value * (1 + 1e-9)
    assert not plan.certificate.optimal


def test_an_independent_pricer_proves_it_over_patterns_of_several_batches():
    request = differing(0, 2)
    problem, certificate = problem_of(request), plan_joint(request, SINGLY).certificate
    assert bound_of(certificate) == pytest.approx(certificate.bound, rel=1e-9)
    for machine, one in enumerate(problem.machines):
        for pattern in every_pattern(problem, machine):
            instances = Counter()
            for item in (problem.items[at] for at in pattern):
                kind = problem.services[item.service]
                instances[kind.workload.id, kind.variants[item.variant].model, item.rate_rps] += 1
            watts = problem.standing_w[machine] + sum(problem.overhead_w[machine, at] for at in pattern)
            cost = certificate.objective.per_w * watts
            assert worth(certificate, one.gpu_type.name, one.clocked.clock_mhz, instances) <= cost * (1 + 1e-9)


def test_twelve_services_in_three_batches():
    request = twelve(levels=2)
    plan = plan_joint(request, JointEffort(together=4))
    check(request, plan)
    whole = plan_joint(request)
    assert plan.certificate.bound <= whole.certificate.bound * (1 + 1e-9)
    assert whole.certificate.value <= plan.certificate.value <= 1.2 * whole.certificate.value
    assert plan.certificate.gap_ratio < 0.2


def test_kinds_are_planned_in_batches_too():
    request = copies(differing(9, 2), 8)
    plan = plan_joint(request, JointEffort(together=2, alike_from=1))
    check(request, plan)
    assert sorted({len(names) for names in plan.certificate.alike}) == [8]


def test_batches_share_the_pool_and_the_power_cap():
    request = twelve(levels=1)
    free = plan_joint(request, JointEffort(together=4))
    gpus, watts = len(free.gpus), free.certificate.power_w
    pooled = replace(request, fleet=(fleet(1, available=gpus),), power_cap_w=watts * 1.001)
    plan = plan_joint(pooled, JointEffort(together=4))
    assert len(plan.gpus) <= gpus
    assert math.fsum(gpu.power_w for gpu in plan.gpus) <= watts * 1.001 + 1e-6
    for tight in (replace(request, fleet=(fleet(1, available=4),)), replace(request, power_cap_w=600.0)):
        with pytest.raises(InfeasibleError, match="planned in batches of 4"):
            plan_joint(tight, JointEffort(together=4))


def test_the_same_name_in_two_batches_is_refused():
    request = twelve()
    with pytest.raises(ConfigError, match="the same name"):
        plan_joint(replace(request, services=(*request.services, request.services[0])), JointEffort(together=4))
