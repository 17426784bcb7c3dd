"""Many different services: the knapsacks' bound is valid, and plan and bound lie close together."""

import math

import numpy as np
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from benchmarks.provision import rows, workloads
from joulery.domain.errors import InfeasibleError
from joulery.policies.placement.provisioning.column_generation import Effort, volume
from joulery.policies.placement.provisioning.exact import cheapest
from joulery.policies.placement.provisioning.many_kinds.box_search import BoxSearch
from joulery.policies.placement.provisioning.many_kinds.generation import QUICK, BoxGenerator
from joulery.policies.placement.provisioning.many_kinds.neighbourhoods import Knapsacks
from joulery.policies.placement.provisioning.options import Rules
from joulery.policies.placement.provisioning.packing import problem_of
from joulery.policies.placement.provisioning.planner import provision
from tests.policies.placement.provisioning.published import V100, app12, random_services, t4


def servable(seed, count, replicas):
    """The problem of such services; another example where one of them needs more replicas than are allowed."""
    try:
        return problem_of(random_services(seed, count), [V100], Rules(max_replicas=replicas))
    except InfeasibleError:
        return reject()


def fitting_patterns(packing, items, most):
    """Every pattern of two items and more that fits on one GPU, by trying all."""
    level, found = [(item,) for item in range(items) if packing.alone[item] <= packing.capacity], []
    for _ in range(most - 1):
        level = [(*one, item) for one in level for item in range(one[-1], items)]
        level = [one for one in level if packing.fit(one) is not None]
        found += level
    return found


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 4), st.integers(1, 2))
def test_no_pattern_is_worth_more_than_the_knapsacks_say(seed, count, replicas):
    problem = servable(seed, count, replicas)
    packing = problem.packings[0]
    rng = np.random.default_rng(seed)
    values = rng.uniform(0.02, 0.6, len(problem.items))
    search = BoxSearch(Knapsacks(packing, problem.items, problem.demand, 0), lambda pattern, values: 0.0)
    proof = search.prove(values, 0.05, 400)
    limit = [item.replicas * problem.demand[item.kind] for item in problem.items]
    for pattern in fitting_patterns(packing, len(problem.items), 4):
        # More of a service than there is of it, in replicas of different sizes, is in no plan.
        part = {}
        for item in pattern:
            part[problem.items[item].kind] = part.get(problem.items[item].kind, 0) + 1 / problem.items[item].replicas
        mixed = {(problem.items[item].kind, problem.items[item].replicas) for item in pattern}
        if any(pattern.count(item) > limit[item] for item in pattern) or len(mixed) > len(part):
            continue
        assert float(values[list(pattern)].sum()) <= proof.most * (1 + 1e-9), pattern


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 6))
def test_bound_optimum_and_plan_are_in_order(seed, count):
    """Against the optimum by trying every set of whole services."""
    problem = servable(seed, count, 1)
    if any(item.replicas > 1 for item in problem.items):
        return
    chosen = cheapest(problem.packings, count)
    optimum = len(chosen) * V100.usd_per_hour
    generator = BoxGenerator(problem, Effort(branchings=200))
    relaxation = generator.generate(generator.master.relax())
    proven, _ = generator.bound(relaxation, 0.002, 800)
    plan = generator.dive(QUICK)
    assert proven <= optimum * (1 + 1e-9) <= plan.usd_per_hour * (1 + 2e-9)
    assert plan.complete


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 4), st.floats(0.0, 0.01), st.floats(0.0, 0.05))
def test_a_box_bounds_its_patterns_at_any_price(seed, count, per_w, per_percent):
    """Also at prices so high that every process is a loss."""
    problem = servable(seed, count, 1)
    packing, items = problem.packings[0], problem.items
    values = np.random.default_rng(seed).uniform(0.02, 0.6, len(items))
    knapsacks = Knapsacks(packing, items, problem.demand, 0)
    boxes = knapsacks.boxes()
    prices = (
        np.where(np.isfinite(boxes.power_high_w), per_w, 0),
        np.where(np.isfinite(boxes.cache_high), per_percent, 0),
    )
    most = knapsacks.solve(boxes, knapsacks.table(boxes), values, *prices, 0.05).most
    for pattern in fitting_patterns(packing, len(items), 4):
        if any(pattern.count(item) > items[item].replicas * problem.demand[items[item].kind] for item in pattern):
            continue
        layout = packing.fit(pattern)
        figures = [
            option.process.figures(units * packing.gpu.unit_percent)
            for option, units in zip(layout.options, layout.units, strict=True)
        ]
        power_w, cache = sum(one[1] for one in figures), sum(one[2] for one in figures)
        home = (boxes.processes == len(pattern)) & (boxes.power_low_w <= power_w) & (power_w <= boxes.power_high_w)
        home &= (boxes.cache_low <= cache) & (cache <= boxes.cache_high)
        assert home.any()
        assert float(values[list(pattern)].sum()) <= most[home].min() * (1 + 1e-9), pattern


@pytest.mark.slow
def test_services_whole_at_first_and_cut_later():
    problem = problem_of(random_services(2, 40), [V100], Rules())
    generator = BoxGenerator(problem, Effort(branchings=50))
    generator.allow_cuts(False)
    whole = generator.generate(generator.master.relax())
    fewest = {item.kind: min(i.replicas for i in problem.items if i.kind == item.kind) for item in problem.items}
    added = [pattern.layout.pattern for pattern in generator.master.patterns if len(pattern.layout.pattern) > 1]
    items = {problem.items[item] for pattern in added for item in pattern}
    assert added and all(item.replicas == fewest[item.kind] for item in items)
    generator.allow_cuts(True)
    assert generator.generate(generator.master.relax()).usd_per_hour <= whole.usd_per_hour * (1 + 1e-9)
    assert generator.dive(QUICK).complete


def test_the_published_twelve_need_what_the_tree_of_patterns_proves():
    problem = problem_of(app12(), [V100], Rules(max_replicas=1))
    generator = BoxGenerator(problem, Effort(branchings=200))
    relaxation = generator.generate(generator.master.relax())
    proven = 0.0
    for _ in range(4):
        proven = max(proven, generator.bound(relaxation, 0.005, 1500)[0])
        relaxation = generator.generate(generator.master.relax())
    assert relaxation.usd_per_hour / 3.06 == pytest.approx(5.17, abs=0.01)
    # Until bounds held at any price of power this said more than 4.6 GPUs: no proof. What is proven still takes five.
    assert 4.57 < proven / 3.06 <= 5.18 and math.ceil(proven / 3.06) == 5
    assert generator.dive(QUICK).usd_per_hour == pytest.approx(6 * 3.06)


@pytest.mark.slow
def test_a_mixed_fleet_has_a_valid_bound():
    types = [V100, t4()]
    found = random_services(1, 18)
    result = provision("best", found, types, Rules(max_replicas=2))
    assert result.violations == ()
    assert 0 < result.bound.usd_per_hour <= result.usd_per_hour
    least = volume(problem_of(found, types, Rules(max_replicas=2)))
    assert result.bound.usd_per_hour >= least - 1e-9


@pytest.mark.slow
def test_plan_and_bound_are_a_gpu_apart_at_most():
    for count in (16, 30, 48):
        result = provision("best", random_services(count, count), [V100], Rules())
        assert result.violations == ()
        assert len(result.gpus) - result.bound.gpus <= 1
        assert "no layout" in result.bound.method or result.optimal


@pytest.mark.slow
def test_settled_gpus_and_divisions_are_undone_after_a_dive():
    problem = problem_of(random_services(5, 60), [V100], Rules())
    generator = BoxGenerator(problem, Effort(branchings=50))
    relaxation = generator.generate(generator.master.relax())
    plan = generator.dive(QUICK)
    again = generator.master.relax()
    assert plan.complete and plan.usd_per_hour >= again.usd_per_hour
    assert again.usd_per_hour <= relaxation.usd_per_hour * (1 + 1e-9), "the dive only added patterns"
    kinds = {problem.items[item].kind for _, pattern in plan.gpus for item in pattern}
    assert len(kinds) == 60 and math.isfinite(plan.usd_per_hour)


@pytest.mark.slow
def test_a_coarse_proof_raises_the_bound_of_many_services():
    """61 different services: the sum of the shares needed alone says 18 GPUs, the knapsacks prove the plan's 19."""
    many = workloads(rows(61, varied=True))
    plan = provision("best", many, [V100])
    least = volume(problem_of(many, [V100], Rules()))
    assert math.ceil(least / V100.usd_per_hour) == 18
    assert plan.bound.gpus > 18
    assert plan.gap_ratio <= 0.06
    assert not plan.violations
