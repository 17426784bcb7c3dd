"""Plans at the greatest load that their layouts serve: the same GPUs, no dearer, within every limit, and no further."""

import math
from dataclasses import replace

import pytest

from joulery.domain.errors import InfeasibleError
from joulery.domain.gpu.plan_envelope import EnvelopePlan
from joulery.policies.placement.joint import stretched as module
from joulery.policies.placement.joint.day import with_rates
from joulery.policies.placement.joint.planner import plan_joint
from joulery.policies.placement.joint.problem import problem_of
from joulery.policies.placement.joint.stretched import COARSE_RATIO, FINE_RATIO, stretched
from tests.policies.placement.joint.brute_force import random_request
from tests.policies.placement.joint.test_frontier import check_plan


def at(request, load):
    return with_rates(request, {each.workload.id: load * each.workload.rate_rps for each in request.services})


def planned(request, load):
    plan = plan_joint(at(request, load))
    return EnvelopePlan("", load, 1.0, plan.certificate.bound, plan.gpus)


@pytest.mark.parametrize("seed", range(8))
def test_the_same_gpus_serve_more_for_watts_in_proportion(seed):
    request = random_request(seed)
    plan = planned(request, 0.8)
    more = stretched(request, plan)
    assert plan.load <= more.load <= 0.8 * 1.04 * (1 + 1e-9)
    assert more.made_load in (0.0, 0.8)
    assert len(more.gpus) == len(plan.gpus)
    assert more.power_at_w(0.8) == pytest.approx(plan.power_w, rel=1e-6)
    for load in (0.8, more.load):
        check_plan(at(request, load), more.at(load))


def test_some_plan_serves_more_and_none_beyond_what_is_asked_for():
    plans = [(random_request(seed), planned(random_request(seed), 0.8)) for seed in range(4)]
    assert any(stretched(request, plan).load > 0.8 * 1.003 for request, plan in plans)
    assert all(stretched(request, plan, 0.803).load <= 0.803 * (1 + 1e-6) for request, plan in plans)


@pytest.mark.parametrize("seed", range(4))
def test_sought_finely_it_serves_a_little_more_and_nothing_beyond(seed):
    request = random_request(seed)
    plan = planned(request, 0.8)
    coarse = stretched(request, plan)
    while coarse.load > plan.load * 1.038:  # it has ended by what is tried at most, not by its layouts
        plan, coarse = coarse, stretched(request, coarse)
    fine = stretched(request, coarse, coarse.load * (1 + COARSE_RATIO), finest_ratio=FINE_RATIO)
    assert coarse.load <= fine.load < coarse.load * (1 + COARSE_RATIO)
    assert fine.made_load in (0.0, 0.8)
    check_plan(at(request, fine.load), fine.gpus)
    further = stretched(request, fine, fine.load * (1 + COARSE_RATIO), finest_ratio=FINE_RATIO / 8)
    assert further.load <= fine.load * (1 + FINE_RATIO) * (1 + 1e-9)


def test_a_power_cap_limits_it():
    request, plan = next(
        (request, plan)
        for seed in range(12)
        for request in (random_request(seed),)
        for plan in (planned(request, 0.8),)
        if stretched(request, plan).load > 0.8 * 1.003
    )
    capped = replace(request, power_cap_w=plan.power_w * (1 + 1e-12))
    assert stretched(capped, plan).load == plan.load
    assert math.isclose(stretched(capped, plan).power_w, plan.power_w)


def test_a_load_at_which_the_batches_keep_no_slo_is_too_high(monkeypatch):
    found = []
    for seed in range(6):
        request = random_request(seed)
        plan = planned(request, 0.8)
        monkeypatch.setattr(module, "_MOST_RATIO", 8.0)
        more = stretched(request, plan)
        check_plan(at(request, more.load), more.at(more.load))
        try:
            problem_of(module._narrowed(request, plan, 0.8 * 9.0))
        except InfeasibleError:
            found.append(seed)
    assert found, "or the case is not tried here"
