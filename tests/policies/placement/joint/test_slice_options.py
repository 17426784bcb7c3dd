"""Preset joint on cut GPUs: bounds that others can check, brute force, floors, locks, tables that mean nothing."""

import math
from collections import Counter, defaultdict
from dataclasses import replace

import pytest

from joulery.domain.errors import ConfigError, InfeasibleError
from joulery.domain.gpu.mig import A30_24GB
from joulery.domain.gpu.optimum import objective_of
from joulery.perf.slice_table import BatchCurve, SlicedGpu, SliceTable
from joulery.policies.placement.joint.compare import KNOBS, comparisons, locked
from joulery.policies.placement.joint.planner import plan_joint
from joulery.policies.placement.joint.problem import JointRequest, problem_of
from joulery.policies.placement.provisioning.options import Rules
from tests.policies.placement.joint import brute_force
from tests.policies.placement.joint.brute_force_mig import (
    fleet,
    most_worth,
    optimum,
    random_request,
    service,
    table,
)

RULES = Rules(max_batch=16, margin_ratio=0.05)
ENERGY = objective_of("energy")
SERVICES = (
    service("a", "large", 900, 60, "small", floor=0.77),
    service("b", "other", 700, 80),
)


def asked(services=SERVICES, kinds=None, objective=ENERGY, **more):
    return JointRequest(services, kinds or (fleet(2),), RULES, objective, **more)


@pytest.fixture(scope="module")
def plan():
    return plan_joint(asked())


@pytest.mark.parametrize("seed", range(12))
def test_bound_optimum_and_plan_stand_in_order_and_prices_prove_theirs_again(seed):
    request = random_request(seed)
    best, certificate = optimum(problem_of(request)), plan_joint(request).certificate
    assert certificate.bound <= best * (1 + 1e-9)
    assert best <= certificate.value * (1 + 1e-9)
    if certificate.optimal:
        assert certificate.value == pytest.approx(best, rel=1e-5)
    assert most_worth(certificate) <= 1 + 1e-7
    if request.objective.per_usd == 0:  # dollars are rounded up to whole GPUs
        assert brute_force.bound_of(certificate) == pytest.approx(certificate.relaxed, rel=1e-6)
    assert certificate.relaxed <= certificate.bound * (1 + 1e-9)


def test_slices_in_use_are_those_of_a_cut_on_the_menu(plan):
    partitions = [Counter(partition) for partition in A30_24GB.partitions]
    assert {gpu.mode for gpu in plan.gpus} <= {"mig", "mps", "whole"}
    assert "mig" in {gpu.mode for gpu in plan.gpus}
    for gpu in plan.gpus:
        used = Counter(each.slice for each in gpu.instances)
        assert any(not used - partition for partition in partitions), used
        assert gpu.share_ratio <= 1 + 1e-9
    planned = sum(partition.planned for partition in plan.certificate.partitions)
    assert planned == len(plan.gpus)


def test_every_request_is_served_within_capacity_and_parts_of_power_add_up(plan):
    served, numbers = defaultdict(float), defaultdict(list)
    for gpu in plan.gpus:
        parts = gpu.idle_w + gpu.host_w + math.fsum(e.overhead_w + e.requests_w for e in gpu.instances)
        assert parts == pytest.approx(gpu.power_w, rel=1e-9)
        for each in gpu.instances:
            assert each.rate_rps <= each.provided_rps * (1 + 1e-9)
            assert each.latency_s <= each.limit_s <= each.slo_s
            served[each.workload] += each.rate_rps
            numbers[each.workload].append((each.replica, each.replicas))
    assert served == pytest.approx({"a": 900, "b": 700})
    for some in numbers.values():
        assert sorted(some) == [(at, len(some)) for at in range(len(some))]


def test_floors_hold_flow_weighted_and_watts_never_rise_with_the_allowed_loss():
    before = math.inf
    for loss in (0.0, 0.005, 0.01, 0.02, 0.03):
        floor = 0.80 * (1 - loss)
        made = plan_joint(asked((service("a", "large", 900, 60, "small", floor=floor),)))
        answers = [each for gpu in made.gpus for each in gpu.instances]
        accuracy = math.fsum(each.rate_rps * each.accuracy_ratio for each in answers) / 900
        assert accuracy >= floor - 1e-9
        assert made.certificate.value <= before * (1 + 1e-9)
        before = made.certificate.value
    assert before < 0.95 * plan_joint(asked((service("a", "large", 900, 60, "small", floor=0.8),))).certificate.value


@pytest.mark.parametrize("knob", KNOBS)
def test_a_locked_knob_never_helps(plan, knob):
    held = plan_joint(locked(asked(), [knob]))
    assert plan.certificate.value <= held.certificate.value * (1 + 1e-9)
    answers = [each for gpu in held.gpus for each in gpu.instances]
    if knob == "share":
        assert {gpu.mode for gpu in held.gpus} == {"whole"}
    elif knob == "variant":
        assert {each.model for each in answers} == {"large", "other"}
    elif knob == "batch":
        assert {each.batch for each in answers} == {1}
    elif knob == "clock":
        assert {gpu.clock_set_mhz for gpu in held.gpus} == {1440.0}


def test_single_knobs_and_one_planner_after_the_other_are_never_below(plan):
    others = {each.policy: each.certificate.value for each in comparisons(asked())}
    assert set(others) == {
        *("dedicated GPUs", "only variants chosen", "only shares chosen", "only clocks chosen"),
        "one after the other",
    }
    assert plan.certificate.value <= min(others.values()) * (1 + 1e-9)
    assert others["one after the other"] <= others["dedicated GPUs"]


def test_shares_and_slices_are_chosen_together():
    both = replace(brute_force.fleet(1), sliced=SlicedGpu(_table("vgg19"), A30_24GB, 53.5, 300.0))
    services = (brute_force.service("a", "vgg19", 200, 40), brute_force.service("b", "alexnet", 300, 20))
    made = plan_joint(JointRequest(services, (both,), RULES, ENERGY))
    shares = plan_joint(JointRequest(services, (brute_force.fleet(1),), RULES, ENERGY))
    assert made.certificate.value <= shares.certificate.value * (1 + 1e-9)
    assert {each.workload for gpu in made.gpus for each in gpu.instances} == {"a", "b"}
    assert made.certificate.bound <= made.certificate.value * (1 + 1e-9)


def _table(model):
    return SliceTable(
        "one model", {(model, size): curves for (name, size), curves in table().curves.items() if name == "small"}
    )


def test_too_few_gpus_and_a_cap_name_themselves():
    with pytest.raises(InfeasibleError) as caught:
        plan_joint(asked(kinds=(fleet(1, available=1),)))
    assert caught.value.binding == "number of GPUs: 1 A30-24GB"
    assert caught.value.nearest["unserved_rps"]
    with pytest.raises(InfeasibleError) as caught:
        plan_joint(asked(power_cap_w=60.0))
    assert caught.value.binding == "power cap of 60 W"


def test_a_power_cap_is_kept_where_dollars_would_not_keep_it(plan):
    dollars = objective_of("cost")
    free = plan_joint(asked(objective=dollars)).certificate
    cap_w = (free.power_w + plan.certificate.power_w) / 2
    capped = plan_joint(asked(objective=dollars, power_cap_w=cap_w)).certificate
    assert capped.power_w <= cap_w * (1 + 1e-9)
    assert capped.value >= free.value


@pytest.mark.parametrize(
    ("curves", "said"),
    [
        ({("large", "9g"): (BatchCurve(1, (1, 2), (0.01, 0.02)),)}, "cannot be partitioned into"),
        ({("large", "1g"): (BatchCurve(1, (4,), (0.01,)),)}, "a single measurement of large"),
        ({("vast", "1g"): (BatchCurve(1, (1, 2), (0.01, 0.02)),)}, "no GPU type of the fleet"),
    ],
)
def test_a_table_that_cannot_be_meant_is_refused(curves, said):
    kind = replace(fleet(1), sliced=SlicedGpu(SliceTable("a table", curves), A30_24GB, 30.0, 165.0))
    with pytest.raises(ConfigError, match=said):
        plan_joint(asked((service("a", "large", 100, 60),), (kind,)))


def test_an_slo_that_no_slice_keeps_names_the_service_and_what_it_takes():
    with pytest.raises(InfeasibleError, match="service a") as caught:
        plan_joint(asked((service("a", "large", 10, 2.0),)))
    best_s = caught.value.nearest["best_latency_s"]
    curves = [curve for curve in fleet(2).sliced.table.curves.items() if curve[0][0] == "large"]
    assert best_s == pytest.approx(1.05 * min(curve.time_s(1) for _, some in curves for curve in some))
