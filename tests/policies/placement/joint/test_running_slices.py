"""Warm re-planning on MIG slices: served within capacity, no GPU in use cut anew, moves counted, close to afresh."""

import itertools
import math
from collections import Counter
from dataclasses import replace

import pytest

from joulery.domain.errors import InfeasibleError
from joulery.domain.gpu.optimum import objective_of
from joulery.domain.gpu.plan_moves import moves_between
from joulery.policies.placement.joint.following.running_slices import sliced_problem
from joulery.policies.placement.joint.following.warm import NO_BOUND, replan
from joulery.policies.placement.joint.planner import plan_joint
from joulery.policies.placement.joint.problem import JointRequest, problem_of
from joulery.policies.placement.provisioning.options import Rules
from tests.policies.placement.joint.brute_force_mig import fleet, service
from tests.policies.placement.joint.test_warm import scaled

RULES = Rules(max_batch=16, margin_ratio=0.05)
SERVICES = (service("a", "large", 900, 60, "small", floor=0.77), service("b", "other", 700, 80))


def asked(available=None, services=SERVICES):
    return JointRequest(services, (fleet(2, available=available),), RULES, objective_of("energy"))


@pytest.fixture(scope="module")
def running():
    return plan_joint(asked())


def goes_on(old, new):
    return not Counter(e.slice for e in new.instances) - Counter(e.slice for e in old.instances)


def check(request, before, found):
    """Everything is served, floors are kept, and what is cut otherwise stands on GPUs that are free."""
    served, right = Counter(), Counter()
    for gpu in found.plan.gpus:
        for each in gpu.instances:
            served[each.workload] += each.rate_rps
            right[each.workload] += each.rate_rps * each.accuracy_ratio
            assert each.rate_rps <= each.provided_rps * (1 + 1e-9)
    rates = {each.workload.id: each.workload.rate_rps for each in request.services}
    assert dict(served) == pytest.approx(rates)
    assert right["a"] / served["a"] >= 0.77 - 1e-9
    assert moves_between(before.gpus, found.plan.gpus).moves == found.moves.moves
    there = list(before.gpus)
    fresh = 0
    for gpu in sorted(found.plan.gpus, key=lambda each: -len(each.instances)):
        old = next((each for each in there if goes_on(each, gpu)), None)
        if old is None:
            fresh += 1
        else:
            there.remove(old)
    available = request.fleet[0].gpu_type.available
    assert available is None or fresh <= available - len(before.gpus)


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8, 1.0, 1.2, 1.6])
@pytest.mark.parametrize("available", [None, 12])
def test_the_next_plan_serves_todays_rates_on_cuts_that_are_there(running, load, available):
    today = scaled(asked(available), load)
    found = replan(today, running)
    check(today, running, found)
    assert not found.fresh and found.plan.certificate.method == NO_BOUND
    cold = plan_joint(today).certificate
    assert cold.bound <= found.plan.certificate.value * (1 + 1e-9)
    # At equal rates nothing changes; otherwise cuts that are there may cost a GPU more than others would.
    most = 1.002 if load == 1.0 else 1.2
    assert found.plan.certificate.value <= most * cold.value + (30.0 if load < 1 else 0.0)


def test_the_same_rates_are_no_reason_to_move(running):
    found = replan(asked(), running)
    assert found.moves.moves == 0
    assert found.plan.certificate.value == pytest.approx(running.certificate.value, rel=0.01)


@pytest.mark.parametrize("most", [0, 2, 6])
def test_moves_stay_within_their_limit(running, most):
    today = scaled(asked(), 0.9)
    found = replan(today, running, most)
    check(today, running, found)
    assert found.moves.moves <= most


@pytest.fixture(scope="module")
def many():
    """A plan with several slices of one choice: more than serve a fraction of the rate."""
    return plan_joint(scaled(asked(), 4.0))


@pytest.mark.parametrize("load", [0.2, 1.2, 2.0, 4.0])
def test_standing_still_is_always_a_choice_at_less_load(many, load):
    today = scaled(asked(), load)
    found = replan(today, many, 0)
    check(today, many, found)
    assert found.moves.moves == 0
    assert found.plan.certificate.value <= many.certificate.value * (1 + 1e-9)


def test_fewer_moves_never_take_fewer_watts(running):
    today = scaled(asked(), 0.9)
    values = [replan(today, running, most).plan.certificate.value for most in (0, 2, 6, None)]
    assert all(a >= b * (1 - 0.005) for a, b in itertools.pairwise(values))


def test_choices_in_use_and_the_best_others_alone_are_worked_out_again(running):
    today = scaled(asked(), 0.9)
    narrowed, whole = sliced_problem(today, running), problem_of(today)
    assert 0 < len(narrowed.slices) <= len(whole.slices)
    used = {(e.workload, e.model, e.slice, e.processes) for gpu in running.gpus for e in gpu.instances}
    menu = today.fleet[0].sliced.menu
    kept = {
        (
            narrowed.services[one.service].workload.id,
            narrowed.services[one.service].variants[one.variant].model,
            menu.profiles[one.profile].name,
            one.processes,
        )
        for one in narrowed.slices
    }
    assert used <= kept


def test_a_plan_can_be_followed_again_and_again(running):
    before = running
    for load in (0.8, 1.1, 0.5, 1.0):
        today = scaled(asked(), load)
        found = replan(today, before)
        check(today, before, found)
        assert not found.fresh
        before = found.plan


def test_more_than_the_gpus_there_are_can_serve_is_infeasible(running):
    with pytest.raises(InfeasibleError):
        replan(scaled(asked(len(running.gpus)), 4.0), running)


def test_a_service_that_is_new_is_planned_afresh(running):
    more = (*SERVICES, service("c", "small", 200, 80))
    found = replan(asked(services=more), running)
    assert {each.workload for gpu in found.plan.gpus for each in gpu.instances} == {"a", "b", "c"}
    assert math.isfinite(found.plan.certificate.value)
    gone = replan(replace(asked(), services=SERVICES[:1]), running)
    assert {each.workload for gpu in gone.plan.gpus for each in gpu.instances} == {"a"}
