"""Warm re-planning: SLOs kept at today's rates, moves within their limit and counted, close to a plan afresh."""

import math
from collections import Counter
from dataclasses import replace

import pytest

from joulery.domain.errors import InfeasibleError
from joulery.domain.gpu.plan_moves import moves_between
from joulery.policies.placement.joint.following.warm import replan
from joulery.policies.placement.joint.planner import plan_joint
from joulery.policies.placement.joint.slice_options import part_scv
from joulery.policies.placement.provisioning.difference import difference, running_of
from joulery.policies.placement.provisioning.options import RequestStream, limit_ms
from tests.policies.placement.joint.brute_force import fleet, random_request
from tests.policies.placement.joint.test_planner import twelve


def scaled(request, ratio):
    """The request with all rates times a ratio."""
    services = tuple(
        replace(each, workload=replace(each.workload, rate_rps=each.workload.rate_rps * ratio))
        for each in request.services
    )
    return replace(request, services=services)


def check(request, before, found, max_moves=None):
    """Everything served, every instance within its SLO at the rate it gets, floors kept, moves as counted."""
    workloads = {each.workload.id: each for each in request.services}
    served = Counter()
    right = Counter()
    profile = request.fleet[0].gpu_type.profile
    for gpu in found.plan.gpus:
        assert gpu.share_ratio <= 1 + 1e-9
        for each in gpu.instances:
            served[each.workload] += each.rate_rps
            right[each.workload] += each.rate_rps * each.accuracy_ratio
            assert each.latency_s <= each.limit_s * (1 + 1e-9), each.workload
            assert each.rate_rps <= each.provided_rps * (1 + 1e-9)
            # By the queue, afresh: the rate it gets, with the variation of that part of the stream.
            service = workloads[each.workload]
            part = each.rate_rps / service.workload.rate_rps
            if part > 1e-9:
                stream = RequestStream(each.rate_rps, part_scv(service.workload.arrivals.scv, min(1.0, part)))
                workload = replace(service.workload, model=each.model)
                model = profile.models[each.model]
                may_ms = limit_ms(request.rules, profile.gpu, model, workload, stream, each.batch, shared=True)
                took_ms = 1e3 * each.parts.gpu_s * (1 + service.margin_ratio)
                assert took_ms <= may_ms * (1 + 2e-3), (each.workload, part)
    assert dict(served) == pytest.approx({name: each.workload.rate_rps for name, each in workloads.items()})
    for name, each in workloads.items():
        if each.floor_ratio:
            assert right[name] / served[name] >= each.floor_ratio - 1e-9
    again = moves_between(before.gpus, found.plan.gpus)
    assert again.moves == found.moves.moves
    change = difference(running_of(before.gpus), running_of(found.plan.gpus))
    assert change.count("move") == 0, "what goes on keeps its GPU and its number"
    if all(len(each.variants) == 1 for each in request.services):
        assert len(change.changes) == found.moves.moves, "as the engine would count them"
    if max_moves is not None:
        assert found.moves.moves <= max_moves
    names = Counter((each.workload, each.replica) for gpu in found.plan.gpus for each in gpu.instances)
    assert max(names.values()) == 1


@pytest.mark.parametrize("ratio", [0.6, 1.5])
@pytest.mark.parametrize("seed", [0, 5, 9])
def test_where_a_plan_afresh_exists_a_warm_one_does(seed, ratio):
    request = random_request(seed)
    before, today = plan_joint(request), scaled(request, ratio)
    afresh = plan_joint(today)
    found = replan(today, before)
    check(today, before, found)
    assert found.plan.certificate.value >= afresh.certificate.bound * (1 - 1e-9)
    enough = moves_between(before.gpus, afresh.gpus).moves
    check(today, before, replan(today, before, enough), enough)


@pytest.fixture(scope="module")
def before12():
    return plan_joint(twelve())


@pytest.mark.parametrize("ratio", [0.8, 1.2])
def test_twelve_services_within_one_percent_of_a_plan_afresh(before12, ratio):
    today = scaled(twelve(), ratio)
    afresh = {0.8: 1069.324302, 1.2: 1474.907491}[ratio]
    found = replan(today, before12)
    check(today, before12, found)
    assert not found.fresh
    assert found.plan.certificate.value <= 1.01 * afresh
    few = replan(today, before12, 8)
    check(today, before12, few, 8)
    none = replan(today, before12, 0)
    check(today, before12, none, 0)
    assert none.moves.reclocked > 0 or ratio < 1, "clocks alone"
    assert found.plan.certificate.value <= few.plan.certificate.value <= none.plan.certificate.value * (1 + 0.002)


def test_a_second_step_starts_from_the_first(before12):
    first = replan(scaled(twelve(), 1.15), before12, 10)
    today = scaled(twelve(), 0.9)
    check(today, first.plan, replan(today, first.plan, 10), 10)


def test_too_few_moves_are_said():
    request = random_request(0)
    before = plan_joint(request)
    with pytest.raises(InfeasibleError) as caught:
        replan(scaled(request, 6.0), before, 1)
    assert caught.value.binding == "moves"
    assert caught.value.nearest["moves"] > 1


def test_pools_and_caps_hold(before12):
    today = scaled(twelve(), 1.2)
    pooled = replace(today, fleet=(fleet(4, available=12),))
    assert len(replan(pooled, before12).plan.gpus) <= 12
    capped = replace(today, power_cap_w=1600.0)
    found = replan(capped, before12, 12)
    assert math.fsum(gpu.power_w for gpu in found.plan.gpus) <= 1600.0
    assert all(gpu.clock_bounds_mhz[0] == gpu.clock_bounds_mhz[1] for gpu in found.plan.gpus)


def test_a_corrected_service_gets_more(before12):
    today = twelve()
    services = tuple(replace(each, margin_ratio=0.2) if each.workload.id == "W5" else each for each in today.services)
    corrected = replace(today, services=services)
    check(corrected, before12, replan(corrected, before12))
    check(corrected, before12, replan(corrected, before12, 6), 6)
