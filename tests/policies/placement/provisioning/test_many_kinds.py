"""Many different services: the bound is valid, and plan and bound lie close together."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from benchmarks.provision import rows, workloads
from joulery.domain.errors import InfeasibleError
from joulery.domain.gpu.provisioning import Arrivals
from joulery.policies.placement import master
from joulery.policies.placement.provisioning.column_generation import Effort, volume
from joulery.policies.placement.provisioning.exact import cheapest
from joulery.policies.placement.provisioning.many_kinds import planner as many_kinds
from joulery.policies.placement.provisioning.many_kinds.exchanges import Exchangeable
from joulery.policies.placement.provisioning.many_kinds.generation import QUICK, BoxGenerator
from joulery.policies.placement.provisioning.many_kinds.in_batches import replan_worst
from joulery.policies.placement.provisioning.many_kinds.neighbourhoods import PROCESSES_MAX, Knapsacks
from joulery.policies.placement.provisioning.many_kinds.planner import _MANY_EFFORT, _planned_batch, _Proof
from joulery.policies.placement.provisioning.many_kinds.relaxation import BoxRelaxation
from joulery.policies.placement.provisioning.options import Rules
from joulery.policies.placement.provisioning.packing import NEVER, part_of, problem_of
from joulery.policies.placement.provisioning.planner import provision
from tests.policies.placement.provisioning.published import V100, app12, random_services, t4


def servable(seed, count, replicas, types=(V100,)):
    """The problem of such services; another example where one of them needs more replicas than are allowed."""
    try:
        return problem_of(random_services(seed, count), types, Rules(max_replicas=replicas))
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


def relaxed(problem, kinds=100):
    """The relaxation of a problem, before anything is solved."""
    each = enumerate(problem.packings)
    knapsacks = [Knapsacks(packing, problem.items, problem.demand, index) for index, packing in each]
    return BoxRelaxation(problem.packings, problem.items, problem.demand, knapsacks, kinds)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 4), st.integers(1, 2))
def test_no_pattern_is_worth_more_than_its_gpu_at_the_values_of_a_certificate(seed, count, replicas):
    """Held against every pattern that fits, found by trying all; the optimum over them (scipy) is no lower."""
    problem = servable(seed, count, replicas)
    relaxation = relaxed(problem)
    relaxation.raise_bound(math.inf, 3)
    certificate = relaxation.certificate()
    assert certificate.usd_per_hour == pytest.approx(float(np.dot(problem.demand, certificate.values)))
    items, packing = problem.items, problem.packings[0]
    patterns = [(item,) for item in range(len(items)) if packing.alone[item] <= packing.capacity]
    patterns += fitting_patterns(packing, len(items), 4)
    part = np.zeros((len(problem.kinds), len(patterns)))
    for at, pattern in enumerate(patterns):
        for item in pattern:
            part[items[item].kind, at] += 1 / items[item].replicas
    worth = certificate.values @ part
    assert (worth <= packing.gpu_type.usd_per_hour * (1 + 1e-9)).all(), patterns[int(np.argmax(worth))]
    optimum = linprog(np.full(len(patterns), packing.gpu_type.usd_per_hour), A_ub=-part, b_ub=-np.array(problem.demand))
    most = [pattern for pattern in patterns if len(pattern) == 4]
    # Larger patterns are not in the optimum: only where there are none is it that of all.
    if all(packing.fit((*pattern, item)) is None for pattern in most for item in range(pattern[-1], len(items))):
        assert certificate.usd_per_hour <= optimum.fun * (1 + 1e-9)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 6))
def test_bound_optimum_and_plan_are_in_order(seed, count):
    """Against the optimum by trying every set of whole services."""
    problem = servable(seed, count, 1)
    if any(item.replicas > 1 for item in problem.items):
        return
    optimum = len(cheapest(problem.packings, count)) * V100.usd_per_hour
    generator = BoxGenerator(problem, Effort(branchings=200))
    generator.generate(generator.master.relax())
    relaxation = relaxed(problem)
    relaxation.raise_bound(math.inf, 3)
    plan = generator.dive(QUICK)
    assert relaxation.certificate().usd_per_hour <= optimum * (1 + 1e-9) <= plan.usd_per_hour * (1 + 2e-9)
    assert plan.complete


def test_the_prices_of_a_certificate_prove_it_again():
    """Each service costs no less than its value in any box, each box no more than its GPU: checked in plain Python."""
    problem = problem_of(random_services(3, 14), [V100, t4()], Rules(max_replicas=2))
    relaxation = relaxed(problem)
    relaxation.raise_bound(math.inf, 4)
    certificate = relaxation.certificate()
    for prices in certificate.prices:
        packing, boxes = problem.packings[prices.type_index], prices.boxes
        assert (prices.prices >= 0).all()
        table = Knapsacks(packing, problem.items, problem.demand, prices.type_index)
        sizes = table.table(boxes)
        for box, (unit, process, watt, percent, memory) in enumerate(prices.prices.tolist()):
            rent = unit * packing.capacity + memory
            for price, limit in (
                (process, boxes.processes[box] if boxes.processes[box] < PROCESSES_MAX else math.inf),
                (watt, boxes.power_high_w[box]),
                (percent, boxes.cache_high[box]),
            ):
                rent += price * limit if price else 0.0
            assert rent <= packing.gpu_type.usd_per_hour * (1 + 1e-9)
            for at, item in enumerate(problem.items):
                slope, offset_w, cache_slope, cache_offset, _ = table.per_item[:, at].tolist()
                for size in range(3):
                    units, ability = int(sizes.units[box, at, size]), float(sizes.ability[box, at, size])
                    if units < NEVER:
                        cost = unit * units + process + watt * (slope * ability + offset_w)
                        cost += percent * (cache_slope * ability + cache_offset)
                        assert certificate.values[item.kind] <= cost * item.replicas * (1 + 1e-9) + 1e-9
    alone = [
        min(
            item.replicas * packing.gpu_type.usd_per_hour
            for packing in problem.packings
            for at, item in enumerate(problem.items)
            if item.kind == kind and packing.alone[at] <= packing.capacity
        )
        for kind in range(len(problem.kinds))
    ]
    assert (certificate.values <= np.array(alone) * (1 + 1e-9)).all()


def test_prices_found_for_some_services_bound_all():
    problem = problem_of(random_services(4, 40), [V100], Rules(max_replicas=2))
    part, whole = relaxed(problem, 12), relaxed(problem)
    for each in (part, whole):
        each.raise_bound(math.inf, 4)
    least = volume(problem)
    assert not part.complete and whole.complete
    assert part.certificate().usd_per_hour <= whole.value * (1 + 1e-9)
    assert part.certificate().usd_per_hour > 0.97 * least
    assert whole.certificate().usd_per_hour > least
    again = whole.certified(whole.certificate().prices)
    assert again.usd_per_hour == pytest.approx(whole.certificate().usd_per_hour)


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 10_000), st.integers(10, 20))
def test_the_bound_of_some_services_is_raised_by_all(seed, count):
    """From the boxes of a sample to all services: no plan is cheaper, and the prices alone prove it."""
    problem = servable(seed, count, 2)
    part = relaxed(problem, 8)
    part.raise_bound(math.inf, 3)
    before = part.certificate()
    every = part.for_all()
    assert not part.complete and not every.complete
    assert every.certificate().usd_per_hour == pytest.approx(before.usd_per_hour)
    every.raise_bound(math.inf, 2)
    after = every.certificate()
    plan = _planned_batch(problem, range(len(problem.workloads)))
    assert before.usd_per_hour * (1 - 1e-9) <= after.usd_per_hour <= len(plan) * V100.usd_per_hour
    assert relaxed(problem).certified(after.prices).usd_per_hour == pytest.approx(after.usd_per_hour)
    assert part.certificate().usd_per_hour == before.usd_per_hour, "the sample is left as it was"


def test_services_in_batches_have_the_bound_of_all_where_they_are_not_too_many(monkeypatch):
    monkeypatch.setattr(many_kinds, "TOGETHER_KINDS", 20)
    monkeypatch.setattr(many_kinds, "_SAMPLE_KINDS", 10)
    monkeypatch.setattr(many_kinds, "_GAP_ENOUGH", 0.0)
    problem = problem_of(workloads(rows(24, varied=True)), [V100], Rules())
    plan, bounds = _planned_batch(problem, range(len(problem.workloads))), []
    for kinds in (23, 24):
        monkeypatch.setattr(many_kinds, "_ALL_KINDS", kinds)
        proof = _Proof(problem)
        proof.raise_for((len(plan) + 1) * V100.usd_per_hour)
        bounds.append(proof.relaxed)
    assert volume(problem) < bounds[0] < bounds[1] <= len(plan) * V100.usd_per_hour


def test_cutting_boxes_never_lowers_the_bound():
    relaxation, bounds = relaxed(problem_of(random_services(8, 20), [V100], Rules(max_replicas=2))), []
    for _ in range(4):
        relaxation.solve()
        bounds.append(relaxation.certificate().usd_per_hour)
        relaxation.refine()
    assert bounds == sorted(bounds) and bounds[-1] > bounds[0] * 1.005


def test_memory_counts_in_the_bound():
    """Latency alone lets all share a GPU; 6 GB each with a standby leave room for one on 16 GB."""
    services = [replace(each, memory_bytes=6e9) for each in random_services(5, 14)]
    problem = problem_of(services, [replace(V100, memory_bytes=16e9)], Rules(max_replicas=1))
    relaxation = relaxed(problem)
    relaxation.solve()
    assert relaxation.certificate().usd_per_hour >= 0.75 * 14 * V100.usd_per_hour * (1 - 1e-3)


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
    generator.allow_divided(False)
    whole = generator.generate(generator.master.relax())
    fewest = {item.kind: min(i.replicas for i in problem.items if i.kind == item.kind) for item in problem.items}
    added = [priced.pattern for priced in generator.master.patterns if len(priced.pattern) > 1]
    items = {problem.items[item] for pattern in added for item in pattern}
    assert added and all(item.replicas == fewest[item.kind] for item in items)
    generator.allow_divided(True)
    assert generator.generate(generator.master.relax()).usd_per_hour <= whole.usd_per_hour * (1 + 1e-9)
    assert generator.dive(QUICK).complete


def test_the_published_twelve_need_what_the_tree_of_patterns_proves():
    problem = problem_of(app12(), [V100], Rules(max_replicas=1))
    generator = BoxGenerator(problem, Effort(branchings=200))
    relaxation = generator.generate(generator.master.relax())
    assert relaxation.usd_per_hour / 3.06 == pytest.approx(5.17, abs=0.01)
    bound = relaxed(problem)
    bound.raise_bound(math.inf, 12)
    assert 4.7 < bound.certificate().usd_per_hour / 3.06 <= 5.17
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
    problem = problem_of(random_services(5, 45), [V100], Rules())
    generator = BoxGenerator(problem, Effort(branchings=50))
    relaxation = generator.generate(generator.master.relax())
    plan = generator.dive(QUICK)
    again = generator.master.relax()
    assert plan.complete and plan.usd_per_hour >= again.usd_per_hour
    assert again.usd_per_hour <= relaxation.usd_per_hour * (1 + 1e-9), "the dive only added patterns"
    kinds = {problem.items[item].kind for _, pattern in plan.gpus for item in pattern}
    assert len(kinds) == 45 and math.isfinite(plan.usd_per_hour)


@pytest.mark.slow
def test_the_bound_of_many_services_meets_the_plan():
    """61 different services: the sum of the shares needed alone says 18 GPUs, the relaxation proves the plan's 19."""
    many = workloads(rows(61, varied=True))
    plan = provision("best", many, [V100])
    least = volume(problem_of(many, [V100], Rules()))
    assert math.ceil(least / V100.usd_per_hour) == 18
    assert plan.optimal and plan.bound.gpus == 19
    assert not plan.violations


def test_gpus_planned_again_serve_the_same_services():
    problem = problem_of(random_services(6, 24), [V100], Rules(max_replicas=1))
    gpus = _planned_batch(problem, range(len(problem.workloads)))
    asked = []

    def planner(some):
        asked.append(len(some))
        return _planned_batch(problem, some)

    after = replan_worst(problem, gpus, np.ones(len(problem.kinds)), planner, 4)
    assert len(after) <= len(gpus) and 0 < asked[0] < 24
    served = sorted((share.part.workload, share.part.replica) for gpu in after for share in gpu.shares)
    assert served == sorted((share.part.workload, share.part.replica) for gpu in gpus for share in gpu.shares)
    assert replan_worst(problem, gpus, np.ones(len(problem.kinds)), lambda some: planner(some)[:1] * 9, 4) == gpus
    # Cheaper because it leaves services out, as where the solver reached a limit.
    assert replan_worst(problem, gpus, np.ones(len(problem.kinds)), lambda some: planner(some)[:1], 4) == gpus


@given(st.lists(st.integers(0, 11), min_size=1, unique=True))
def test_a_part_of_a_problem_is_the_problem_of_its_services(services):
    """Alike ones are one kind, in the order in which the part names them."""
    fleet, every = (
        [V100, t4()],
        [*random_services(6, 8), *(replace(one, id=f"{one.id}b") for one in random_services(6, 4))],
    )
    part = part_of(problem_of(every, fleet, Rules()), services)
    alone = problem_of([every[service] for service in services], fleet, Rules())
    assert (part.kinds, part.items, part.types) == (alone.kinds, alone.items, alone.types)
    assert list(part.workloads) == list(alone.workloads)


def test_a_batch_has_no_more_gpus_on_a_busy_machine(monkeypatch):
    """The solver's seconds are those of the clock: ended by five of them, ninety services had 35 GPUs, not 28."""
    problem, made = problem_of(workloads(rows(90, varied=True)), [V100], Rules()), master.new_model

    def busy(*, seconds=None, **limits):
        return made(seconds=None if seconds is None else seconds / 20, **limits)

    monkeypatch.setattr(master, "new_model", busy)
    assert len(_planned_batch(problem, range(90))) <= 28


def test_all_patterns_are_searched_where_that_proves_more():
    """Random requests fill a GPU with two or three services; boxes prove 7.83 GPUs for these 20 and no more."""
    random = [replace(one, arrivals=Arrivals.poisson()) for one in workloads(rows(20, varied=True))]
    problem = problem_of(random, [V100], Rules())
    generator, proof = BoxGenerator(problem, _MANY_EFFORT), _Proof(problem)
    proof.search_for(9 * V100.usd_per_hour, generator)
    assert proof.bound == pytest.approx(9 * V100.usd_per_hour)
    plan = generator.dive(QUICK)
    assert plan.complete
    assert plan.usd_per_hour == pytest.approx(proof.bound)


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 5))
def test_patterns_settled_together_fit_as_one_by_one(seed, count):
    """Every pattern of two to four items: none is lost, none is let in that does not keep its limits."""
    problem = servable(seed, count, 1)
    one_by_one, packing = problem.packings[0], servable(seed, count, 1).packings[0]
    fitting = fitting_patterns(one_by_one, len(problem.items), 4)
    tried = [pattern for pattern in one_by_one._fits if len(pattern) > 1]
    packing.screen(tried)
    assert [pattern for pattern in tried if packing.fit(pattern) is not None] == [
        one for one in tried if one in fitting
    ]
    for pattern in fitting:
        assert sum(packing.fit(pattern).units) <= packing.capacity


def exchangeable(problem, copies=None):
    """The items of a problem, each worth the part of a GPU that it needs alone."""
    packing = problem.packings[0]
    kind = np.array([item.kind for item in problem.items])
    most = np.array([item.replicas for item in problem.items]) if copies is None else copies
    return Exchangeable(packing, kind, most, packing.alone / packing.capacity)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10_000), st.integers(3, 8))
def test_neighbours_of_a_pattern_differ_by_one_item(seed, count):
    """By their definition, item by item: one exchanged or one more, worth enough, copies and divisions as allowed."""
    problem = servable(seed, count, 2)
    items = exchangeable(problem)
    packing, kind = items.packing, items.kind.tolist()
    known = [each for each in fitting_patterns(packing, len(kind), 3) if len(each) == 2][:6]
    expected = set()
    for pattern in known:
        for rest in [*(tuple(np.delete(pattern, place)) for place in range(len(pattern))), pattern]:
            for item in range(len(kind)):
                made = tuple(sorted((*rest, item)))
                mixed = any(kind[one] == kind[item] and one != item for one in rest)
                room = packing.alone[list(made)].sum() <= packing.capacity
                if room and not mixed and rest.count(item) < items.copies[item] and 0.3126 < items.worth(made) < 1.0126:
                    expected.add(made)
    assert set(items.neighbours(known, 0.3126, 1.0126)) == expected - set(known)


def test_items_worth_nothing_join_no_pattern():
    problem = servable(3, 6, 2)
    items = exchangeable(problem)
    barred = items._replace(values=np.where(np.arange(len(items.kind)) == 0, 0.0, items.values))
    known = [(1, 2), (3, 4)]
    assert any(0 in pattern for pattern in items.neighbours(known, 0.0, 2.0))
    assert not any(0 in pattern for pattern in barred.neighbours(known, 0.0, 2.0))


def test_exchanges_lower_the_relaxation_where_knapsacks_end():
    problem = problem_of(workloads(rows(50, varied=True)), [V100], Rules())
    generator = BoxGenerator(problem, _MANY_EFFORT)
    generator.allow_divided(False)
    ended = generator.generate(generator.master.relax())
    known = len(generator.master.patterns)
    exchanged = generator.exchange(ended)
    assert exchanged.usd_per_hour < ended.usd_per_hour * (1 - 5e-4)
    added = generator.master.patterns[known:]
    assert added
    assert all(problem.packings[0].fit(each.pattern) is not None for each in added)
    whole = generator.at_once(exchanged)
    assert whole.complete
    assert whole.usd_per_hour >= exchanged.usd_per_hour * (1 - 1e-9)


@pytest.mark.slow
def test_fifty_services_need_no_gpu_more_than_the_bound():
    """One in fifteen too many before items were exchanged."""
    plan = provision("best", workloads(rows(50, varied=True)), [V100], Rules())
    assert plan.optimal
    assert len(plan.gpus) == 15
    assert not plan.violations
