"""Preset joint keeps what best keeps: GPU memory, spot GPUs, failure domains, minimum replicas, the balancer."""

import math
import random
from collections import Counter, defaultdict
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from joulery.domain.errors import InfeasibleError
from joulery.domain.gpu.optimum import objective_of
from joulery.policies.placement.joint.following.warm import replan
from joulery.policies.placement.joint.planner import plan_joint
from joulery.policies.placement.joint.problem import JointRequest, problem_of
from joulery.policies.placement.joint.spread import coloured
from joulery.policies.placement.provisioning.options import Balancer, FailureDomain, Rules
from joulery.policies.placement.provisioning.planner import provision
from tests.policies.placement.joint import brute_force, brute_force_mig
from tests.policies.placement.joint.brute_force import bound_of, fleet, optimum, service

RULES = Rules(max_batch=4, max_replicas=2, margin_ratio=0.05)
APART = replace(RULES, domain=FailureDomain.GPU)
ENERGY = objective_of("energy")
GB = 1e9


def with_(one, **more):
    """A service whose workload has some fields changed."""
    return replace(one, workload=replace(one.workload, **more))


def of_memory(kind, gigabytes, **more):
    return replace(kind, gpu_type=replace(kind.gpu_type, memory_bytes=gigabytes * GB, **more))


def request(*services, kinds=None, rules=RULES, objective=ENERGY):
    return JointRequest(tuple(services), kinds or (fleet(1),), rules, objective)


def random_limits(seed):
    """A small problem with several of the limits at once."""
    rng = random.Random(seed)
    asked = brute_force.random_request(seed)
    services = []
    for each in asked.services:
        memory = rng.choice([None, 2 * GB, 4 * GB])
        services.append(with_(each, memory_bytes=memory, replicas_min=rng.choice([1, 2])))
    kinds = tuple(of_memory(each, rng.choice([9, 17])) for each in asked.fleet)
    rules = replace(asked.rules, domain=rng.choice(list(FailureDomain)), balancer=rng.choice(list(Balancer)))
    return replace(asked, services=tuple(services), fleet=kinds, rules=rules)


def kept(asked, plan):
    """Every limit that a request states, held against a plan."""
    rules, kinds = asked.rules, {each.gpu_type.name: each.gpu_type for each in asked.fleet}
    known = {each.workload.id: each.workload for each in asked.services}
    instances = Counter(each.workload for gpu in plan.gpus for each in gpu.instances)
    hosts = defaultdict(Counter)
    for at, gpu in enumerate(plan.gpus):
        memory = sum((1 if e.slice else 2) * e.processes * (known[e.workload].memory_bytes or 0) for e in gpu.instances)
        assert memory <= (kinds[gpu.type].memory_bytes or math.inf)
        assert not kinds[gpu.type].spot or all(known[e.workload].spot for e in gpu.instances)
        hosts[at if rules.domain is FailureDomain.GPU else gpu.host].update(e.workload for e in gpu.instances)
    assert all(instances[name] >= each.replicas_min for name, each in known.items())
    if rules.apart:
        assert all(n == 1 for there in hosts.values() for n in there.values())
        assert plan.violations == ()


@pytest.mark.parametrize("seed", range(8))
def test_bound_optimum_and_plan_stand_in_order_under_every_limit(seed):
    asked = random_limits(seed)
    best, plan = optimum(problem_of(asked)), plan_joint(asked)
    certificate = plan.certificate
    kept(asked, plan)
    assert certificate.bound <= best * (1 + 1e-9)
    assert best <= certificate.value * (1 + 1e-9)
    assert bound_of(certificate) == pytest.approx(certificate.bound, rel=1e-9)
    free = replace(asked, rules=replace(RULES, domain=FailureDomain.NONE, balancer=asked.rules.balancer))
    free = replace(free, services=tuple(with_(e, memory_bytes=None, replicas_min=1) for e in asked.services))
    assert optimum(problem_of(free)) <= best * (1 + 1e-9), "a limit never helps"


def test_memory_decides_how_many_share_a_gpu():
    services = [with_(service(f"s{at}", "alexnet", 60 + at, 40), memory_bytes=3 * GB) for at in range(6)]
    plan = plan_joint(request(*services, kinds=(of_memory(fleet(1), 16),)))
    assert sorted(len(gpu.instances) for gpu in plan.gpus) == [2, 2, 2]
    assert all(gpu.memory_bytes == 12 * GB <= gpu.memory_limit_bytes for gpu in plan.gpus)


def test_a_variant_that_fits_is_chosen_where_another_does_not():
    one = service("a", "vgg19", 100, 40, "resnet50")
    large = replace(one, variants=(one.variants[0]._replace(memory_bytes=20 * GB), one.variants[1]))
    plan = plan_joint(request(with_(large, memory_bytes=1 * GB), kinds=(of_memory(fleet(1), 16),)))
    assert {each.model for gpu in plan.gpus for each in gpu.instances} == {"resnet50"}


@pytest.mark.parametrize(
    ("more", "kind", "binding"),
    [
        ({"memory_bytes": 9 * GB}, of_memory(fleet(1), 16), "memory of a"),
        ({}, of_memory(fleet(1), 16, spot=True), "market of a"),
        ({"memory_bytes": 30 * GB}, brute_force_mig.fleet(), "memory of a"),
    ],
)
def test_a_service_that_fits_nowhere_is_named_with_the_reason(more, kind, binding):
    model = "large" if kind.sliced is not None else "resnet50"
    with pytest.raises(InfeasibleError) as caught:
        plan_joint(request(with_(brute_force_mig.service("a", model, 50, 60), **more), kinds=(kind,)))
    assert caught.value.binding == binding


def test_spot_gpus_are_for_services_that_may_be_on_them():
    cheap = replace(fleet(1), gpu_type=replace(fleet(1).gpu_type, name="V100-spot", usd_per_hour=0.9, spot=True))
    services = (service("a", "vgg19", 300, 30), with_(service("b", "vgg19", 300, 30), spot=True))
    asked = request(*services, kinds=(fleet(1), cheap), objective=objective_of({"cost": 1.0, "energy": 0.1}))
    plan = plan_joint(asked)
    kept(asked, plan)
    assert "V100-spot" in {gpu.type for gpu in plan.gpus for each in gpu.instances if each.workload == "b"}


def test_in_dollars_with_every_limit_it_is_no_dearer_than_preset_best():
    services = [with_(service(f"s{at}", "resnet50", 60, 30), memory_bytes=3 * GB, replicas_min=2) for at in range(2)]
    kinds = (of_memory(fleet(1), 16),)
    best = provision("best", [each.workload for each in services], [kinds[0].gpu_type], APART)
    plan = plan_joint(request(*services, kinds=kinds, rules=APART, objective=objective_of("cost")))
    assert best.violations == () and len(plan.gpus) <= len(best.gpus)
    assert plan.certificate.bound <= len(best.gpus) * 3.06 * (1 + 1e-9)


def test_hosts_that_are_not_there_are_a_violation_as_for_best():
    kind = replace(fleet(1), gpu_type=replace(fleet(1).gpu_type, per_host=8, available=8))
    services = [with_(service(f"s{at}", "alexnet", 60, 40), replicas_min=2) for at in range(2)]
    plan = plan_joint(request(*services, kinds=(kind,), rules=replace(RULES, domain=FailureDomain.HOST)))
    assert [(each.what, each.predicted, each.allowed) for each in plan.violations] == [("host", 2.0, 1)]


@pytest.mark.parametrize("limit", ["memory", "apart", "spot"])
def test_a_warm_plan_keeps_a_limit_that_the_running_one_did_not_have(limit):
    services = [with_(service(f"s{at}", "resnet50", 120, 30), replicas_min=2) for at in range(2)]
    asked = request(*services, kinds=(of_memory(fleet(1), 16),))
    running = plan_joint(asked)
    if limit == "memory":
        asked = replace(asked, services=tuple(with_(each, memory_bytes=4 * GB) for each in services))
    elif limit == "apart":
        asked = replace(asked, rules=APART)
    else:
        lasting = replace(fleet(1), gpu_type=replace(fleet(1).gpu_type, name="V100-lasting"))
        asked = replace(asked, fleet=(of_memory(fleet(1), 16, spot=True), lasting))
    plan = replan(asked, running, 20).plan
    kept(asked, plan)


def sliced_request(seed):
    rng = random.Random(seed)
    asked = brute_force_mig.random_request(seed)
    services = tuple(with_(e, replicas_min=rng.choice([1, 2, 3]), memory_bytes=5 * GB) for e in asked.services)
    return replace(asked, services=services, rules=replace(asked.rules, domain=FailureDomain.GPU))


@pytest.mark.parametrize("seed", range(8))
def test_replicas_on_slices_stay_apart_and_fit_into_their_slices(seed):
    asked = sliced_request(seed)
    best, plan = brute_force_mig.optimum(problem_of(asked)), plan_joint(asked)
    menu = asked.fleet[0].sliced.menu
    kept(asked, plan)
    for gpu in plan.gpus:
        assert any(not Counter(e.slice for e in gpu.instances) - Counter(cut) for cut in menu.partitions)
        assert all(each.processes * 5 * GB <= menu[each.slice].memory_bytes for each in gpu.instances)
    assert plan.certificate.bound <= best * (1 + 1e-9)
    assert best <= plan.certificate.value * (1 + 1e-9)
    if plan.certificate.optimal:
        assert plan.certificate.value == pytest.approx(best, rel=1e-5)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 4)), max_size=40))
def test_edges_at_one_vertex_never_have_one_colour(edges):
    most = max((*Counter(left for left, _ in edges).values(), *Counter(right for _, right in edges).values(), 1))
    colours = coloured(edges, most)
    assert all(0 <= each < most for each in colours)
    for side in (0, 1):
        seen = [(edge[side], colour) for edge, colour in zip(edges, colours, strict=True)]
        assert len(set(seen)) == len(seen)


def test_a_random_balancer_never_takes_fewer_watts():
    services = (service("a", "resnet50", 500, 30), service("b", "ssd", 200, 45))
    turns, thrown = (plan_joint(request(*services, rules=replace(RULES, balancer=each))) for each in Balancer)
    assert turns.certificate.value <= thrown.certificate.value * (1 + 1e-9)
