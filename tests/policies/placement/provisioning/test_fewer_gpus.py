"""Plans with fewer GPUs by chains of exchanges: none is worse, all are served once, every GPU is within its SLOs."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.provision import rows, workloads
from joulery.policies.placement.provisioning import igniter
from joulery.policies.placement.provisioning.gpu_shares import Placed, predict, violations_of
from joulery.policies.placement.provisioning.many_kinds import in_batches
from joulery.policies.placement.provisioning.many_kinds import planner as many_kinds
from joulery.policies.placement.provisioning.many_kinds.fewer_gpus import with_fewer_gpus
from joulery.policies.placement.provisioning.options import BatchLimits, Rules
from joulery.policies.placement.provisioning.packing import problem_of
from joulery.policies.placement.provisioning.planner import placed, provision
from tests.policies.placement.provisioning.published import V100, random_services, t4
from tests.policies.placement.provisioning.test_many_kinds import relaxed, servable


def least_values(problem):
    """What one more service of each kind costs at least, by the relaxation."""
    relaxation = relaxed(problem)
    relaxation.raise_bound(math.inf, 2)
    return relaxation.certificate().values


def served(gpus):
    """Each replica on each GPU, in order."""
    return sorted((share.part.workload, share.part.replica) for gpu in gpus for share in gpu.shares)


def violations(gpus, services, types, rules):
    """By the paper's predictor, not by the search's own reckoning."""
    return violations_of(predict(gpus, services, types, BatchLimits(services, types, rules)))


def one_each(problem):
    """A plan with every replica on a GPU of its own, services cut as little as they can be."""
    gpus = []
    for at, item in enumerate(problem.items):
        first = at == 0 or problem.items[at - 1].kind != item.kind
        if first:
            index = next(index for index, packing in enumerate(problem.packings) if packing.fit((at,)) is not None)
            gpus += [(index, (at,))] * (item.replicas * problem.demand[item.kind])
    return placed(problem, gpus)


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 12), st.integers(0, 3_000), st.booleans())
def test_no_plan_gets_worse(seed, count, work, mixed):
    """Whenever the search ends, from one GPU a service: all are served once, within their SLOs, for no more money."""
    types = [V100, t4()] if mixed else [V100]
    problem = servable(seed, count, 4, types)
    before, services = one_each(problem), problem.workloads
    after = with_fewer_gpus(problem, before, least_values(problem), 0.0, work)
    assert served(after) == served(before)
    assert violations(after, services, types, Rules()) == ()
    assert sum(types[gpu.type_index].usd_per_hour for gpu in after) <= sum(
        types[gpu.type_index].usd_per_hour for gpu in before
    )
    again = servable(seed, count, 4, types)
    assert with_fewer_gpus(again, one_each(again), least_values(again), 0.0, work) == after


def test_room_that_is_spread_over_gpus_adds_up():
    """The paper's algorithm takes 5 GPUs for 14 services. Chains find 4, the fewest there can be."""
    services = workloads(rows(14, varied=True))
    problem = problem_of(services, [V100], Rules())
    before = tuple(Placed(0, shares) for shares in igniter.plan(services, V100.profile) if shares)
    after = with_fewer_gpus(problem, before, least_values(problem), 0.0)
    assert (len(before), len(after)) == (5, 4)
    assert served(after) == served(before)
    assert violations(after, services, [V100], Rules()) == ()


@pytest.mark.slow
def test_plans_of_batches_give_up_gpus(monkeypatch):
    """Batches take 8 GPUs for 23 services, and the relaxation proves 7."""
    monkeypatch.setattr(many_kinds, "TOGETHER_KINDS", 12)
    monkeypatch.setattr(in_batches, "BATCH", 6)
    services = workloads(rows(23, varied=True))
    plan = provision("best", services, [V100])
    monkeypatch.setattr(many_kinds, "with_fewer_gpus", lambda problem, gpus, *_: gpus)
    before = provision("best", services, [V100])
    assert (len(before.gpus), len(plan.gpus), plan.bound.gpus) == (8, 7, 7)
    assert not plan.violations


def test_a_plan_that_is_cheap_enough_stays_as_it_is():
    problem = problem_of(random_services(2, 12), [V100], Rules())
    before = one_each(problem)
    assert with_fewer_gpus(problem, before, least_values(problem), 12 * V100.usd_per_hour) == before
    assert len(with_fewer_gpus(problem, before, least_values(problem), 8 * V100.usd_per_hour)) == 8


def test_services_that_are_cut_or_alike_stay_where_they_are():
    services = [*random_services(4, 8), *random_services(4, 2)]
    services = [replace(service, id=f"w{at}") for at, service in enumerate(services)]
    problem = problem_of(services, [V100], Rules())
    before = one_each(problem)
    alike = {member for kind in problem.kinds if len(kind.members) > 1 for member in kind.members}
    assert len(alike) == 4
    after = with_fewer_gpus(problem, before, least_values(problem), 0.0)
    assert len(after) < len(before)
    stay = [gpu for gpu in before if gpu.shares[0].part.workload in alike]
    assert [gpu for gpu in after if {share.part.workload for share in gpu.shares} & alike] == stay
