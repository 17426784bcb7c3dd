"""What a longer SLO saves is the difference of two plans, and the first step that saves anything."""

import math
from dataclasses import replace

import pytest

from joulery.domain.errors import ConfigError
from joulery.policies.placement.joint.looser_slos import looser_slos
from joulery.policies.placement.joint.planner import plan_joint
from joulery.policies.placement.joint.problem import problem_of
from tests.policies.placement.joint.brute_force import optimum, random_request


def with_slo(request, name, slo_s):
    services = tuple(
        replace(each, workload=replace(each.workload, slo=replace(each.workload.slo, latency_s=slo_s)))
        if each.workload.id == name
        else each
        for each in request.services
    )
    return replace(request, services=services)


@pytest.mark.parametrize(
    ("seed", "ratio", "saves"),
    [(2, 0.35, True), (2, 0.25, True), (5, 0.25, True), (6, 0.25, True), (3, 0.25, False), (0, 0.5, False)],
)
def test_what_is_saved_is_what_the_optimum_saves_and_no_smaller_step_saves_anything(seed, ratio, saves):
    drawn = random_request(seed)
    held = drawn.services[0].workload
    request = with_slo(drawn, held.id, held.slo.latency_s * ratio)
    plan, steps = plan_joint(request), (0.2, 1.0)
    (found,) = looser_slos(request, plan, [held.id], steps)
    now = optimum(problem_of(request))
    looser = optimum(problem_of(with_slo(request, held.id, found.looser_s)))
    assert plan.certificate.optimal
    assert found.saved == pytest.approx(now - looser, abs=2e-5 * now)
    assert (found.saved > 0) is saves
    assert math.isnan(found.saved_w) is not saves
    if saves and found.looser_s > found.slo_s * (1 + steps[0]) * (1 + 1e-9):
        before = optimum(problem_of(with_slo(request, held.id, found.slo_s * (1 + steps[0]))))
        assert before == pytest.approx(now, rel=1e-5)


def test_unknown_services_and_plans_without_a_bound_are_refused():
    request = random_request(0)
    plan = plan_joint(request)
    with pytest.raises(ConfigError, match="no such service"):
        looser_slos(request, plan, ["nothing"])
    with pytest.raises(ConfigError, match="no bound"):
        looser_slos(request, replace(plan, certificate=None))
