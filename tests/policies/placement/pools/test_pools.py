"""The column optimiser: bounds below everything, pools that can be placed, separate and shared GPUs, clocks."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from joulery.domain.errors import ConfigError, InfeasibleError
from joulery.domain.gpu.mig import A30_24GB, A100_40GB, H100_80GB
from joulery.perf.catalog.clock_models import clock_model
from joulery.perf.catalog.clover_services import CLOVER_SERVICES
from joulery.policies.placement.pools.local_search import Changes
from joulery.policies.placement.pools.master import Box, PoolMaster, full_box
from joulery.policies.placement.pools.pool import Pools, cost_w, gpus_of, idle_shares_w, predicted
from joulery.policies.placement.pools.problem import (
    Machine,
    PoolProblem,
    PoolService,
    at_clocks,
    edges_of,
    nearby_ratio,
    prices,
    slowdown,
)
from joulery.policies.placement.pools.search import PoolEffort, plan_pool
from joulery.policies.serving.objective import Objective
from joulery.policies.serving.search.annealing import TrialMetrics
from joulery.sim.core.streams import Streams
from joulery.sim.placement.pool_trial import hosts, judge

FEW = replace(A100_40GB, partitions=(("7g.40gb",), ("3g.20gb", "4g.20gb"), ("3g.20gb", "2g.10gb", "2g.10gb")))
A100 = Machine("A100-40GB", FEW, 37.6, 4)
QUICK = PoolEffort(boxes=20, polished=2, judged=3, rounds=2)


def service(name="albert", *, rate_rps=12.5, limit_s=0.16, least=0.0, price_j=0.0, best=None):
    costs = CLOVER_SERVICES[name]
    top = max(variant.accuracy_ratio for variant in costs.variants)
    return PoolService(best or name, costs, rate_rps, limit_s, top, least, price_j)


def trusting(problem):
    """A judge that believes the closed form."""
    edges = [edges_of(each, problem.machines) for each in problem.services]

    def tried(number, used, idle_w):
        mine = edges[number]
        keys = list(zip(mine.machine, mine.profile, mine.variant, strict=True))
        counts = np.array([[used.count(key) for key in keys]])
        return predicted(problem.services[number], mine, counts, np.array([idle_w]), [round(idle_w / 37.6)])[0]

    return tried


def every_pool(problem):
    """Every pool of at most two GPUs by brute force over whole layouts, the columns themselves."""
    (one,) = problem.services
    edges = edges_of(one, problem.machines)
    keys = list(zip(edges.profile, edges.variant, strict=True))
    columns = set()
    for partition in problem.machines[0].menu.multisets:
        for names in product([variant.name for variant in one.costs.variants], repeat=len(partition)):
            if all((piece, name) in keys for piece, name in zip(partition, names, strict=True)):
                columns.add(tuple(sorted(zip(partition, names, strict=True))))
    columns = sorted(columns)
    pools = [(column,) for column in columns]
    pools += [(a, b) for i, a in enumerate(columns) for b in columns[i:]]
    counts = np.array([[sum(column.count(key) for column in pool) for key in keys] for pool in pools])
    idle = np.array([37.6 * len(pool) for pool in pools])
    return predicted(one, edges, counts, idle, [len(pool) for pool in pools])


@pytest.mark.parametrize(("least", "price_j"), [(0.86, 0.0), (0.0, 300.0), (0.0, 3000.0)])
def test_no_pool_of_whole_layouts_is_below_the_bound_nor_better_than_the_plan(least, price_j):
    """Counting cuts and instances says the same as counting layouts: brute force over the columns agrees."""
    problem = PoolProblem((replace(A100, available=2),), (service(least=least, price_j=price_j),))
    made = plan_pool(problem, trusting(problem), PoolEffort(boxes=150))
    found = [
        cost_w(problem, [metrics])
        for metrics in every_pool(problem)
        if metrics.latency_s <= 0.16 and metrics.accuracy_ratio >= least
    ]
    assert made.bound_w <= min(found) * (1 + 1e-9)
    assert made.pool.cost_w == pytest.approx(min(found), rel=0.01)
    assert made.pool.cost_w >= min(found) * (1 - 1e-9)
    assert 0 <= made.corrected_gap_ratio <= made.gap_ratio + 1e-12


@pytest.mark.parametrize("box", [Box((0.0, 0.4), (0.0, 3.0)), Box((0.1, 0.4), (0.5, 3.0))])
def test_a_relaxation_is_below_every_pool_in_its_box(box):
    problem = PoolProblem((replace(A100, available=2),), (service(least=0.85),))
    edges = edges_of(problem.services[0], problem.machines)
    relaxed = PoolMaster(problem, [edges]).solve([box], [1.0])
    assert relaxed is not None
    anywhere = PoolMaster(problem, [edges]).solve([full_box(problem, problem.services[0], edges)], [1.0])
    assert anywhere is not None
    assert anywhere.cost_w <= relaxed.cost_w * (1 + 1e-3)


def test_plans_can_be_placed_and_keep_what_was_asked():
    problem = PoolProblem((A100,), (service(least=0.86),))
    made = plan_pool(problem, judge(problem.services, problem.machines, Streams(0)), QUICK)
    metrics = made.pool.metrics[0]
    assert metrics.latency_s <= 0.16
    assert metrics.accuracy_ratio >= 0.86
    slices = sorted(profile for _, profile, _ in made.pool.used[0])
    cut = [profile for (_, _, at), n in made.pool.partitions.items() for profile in FEW.multisets[at] * n]
    assert slices == sorted(cut)
    assert made.by_gpus[made.pool.gpus] is made.pool
    assert all(pool.cost_w >= made.pool.cost_w for pool in made.by_gpus.values())
    again = plan_pool(problem, judge(problem.services, problem.machines, Streams(0)), QUICK)
    assert again.pool.used == made.pool.used, "the same input gives the same plan"


def test_what_does_not_fit_is_never_placed():
    edges = edges_of(service("yolo", rate_rps=5.0, limit_s=0.43), (A100,))
    assert ("1g.5gb", "yolov5x6") not in set(zip(edges.profile, edges.variant, strict=True))
    assert len(edges) == 14


def test_more_accuracy_costs_more_and_what_cannot_be_had_is_said():
    costs = []
    for least in (0.84, 0.86, 0.88):
        problem = PoolProblem((A100,), (service(least=least),))
        costs.append(plan_pool(problem, trusting(problem), QUICK).pool.cost_w)
    assert costs == sorted(costs)
    problem = PoolProblem((replace(A100, available=1),), (service(least=0.89),))
    with pytest.raises(InfeasibleError, match=r"of the 89\.00% asked for") as raised:
        plan_pool(problem, trusting(problem), QUICK)
    assert 0.84 < raised.value.nearest["albert"]["accuracy_ratio"] < 0.89
    problem = PoolProblem((A100,), (service(limit_s=0.01),))
    with pytest.raises(InfeasibleError, match="keeps the latency limits"):
        plan_pool(problem, trusting(problem), QUICK)


def test_a_pool_that_keeps_its_limit_by_a_hair_is_not_taken_where_there_is_another():
    """A trial is one draw: planned within 1 per mille of the limit, every second other draw is late."""
    first = PoolProblem((A100,), (service(least=0.86),))
    made = plan_pool(first, judge(first.services, first.machines, Streams(0)), QUICK)
    hair_s = 1.001 * made.pool.metrics[0].latency_s
    problem = PoolProblem((A100,), (service(limit_s=hair_s, least=0.86),))
    again = plan_pool(problem, judge(problem.services, problem.machines, Streams(0)), QUICK)
    assert again.pool.metrics[0].latency_s <= 0.98 * hair_s
    assert again.bound_w <= again.pool.cost_w
    others = [judge(problem.services, problem.machines, Streams(seed)) for seed in (1, 2, 3)]
    idle_w = 37.6 * again.pool.gpus
    assert all(trial(0, again.pool.used[0], idle_w).latency_s <= hair_s for trial in others)


def test_where_every_pool_keeps_its_limit_by_a_hair_one_of_them_is_taken():
    problem = PoolProblem((A100,), (service(least=0.84),))
    made = plan_pool(problem, lambda number, used, idle_w: TrialMetrics(0.85, 0.99 * 0.16, 10.0), QUICK)
    assert made.pool.metrics[0].latency_s == 0.99 * 0.16


def test_a_judge_that_finds_everything_late_is_believed():
    problem = PoolProblem((A100,), (service(least=0.84),))
    with pytest.raises(InfeasibleError, match="nearest: albert 500 ms of 160"):
        plan_pool(problem, lambda number, used, idle_w: TrialMetrics(0.85, 0.5, 10.0), QUICK)


def test_sharing_gpus_costs_no_more_than_gpu_groups():
    """At a tenth of the demand, one GPU group each leaves slices idle that the other could use."""
    services = (service(rate_rps=1.25, least=0.83), service(rate_rps=1.25, least=0.83, best="again"))
    separate = PoolProblem((A100,), services)
    apart = plan_pool(separate, trusting(separate), QUICK)
    together = replace(separate, colocate=True)
    shared = plan_pool(together, trusting(together), QUICK)
    assert apart.pool.gpus == 2
    assert shared.pool.gpus == 1
    assert shared.pool.cost_w < apart.pool.cost_w
    assert sum(idle_shares_w(together, shared.pool.partitions, shared.pool.used)) == pytest.approx(37.6)


def test_gpus_that_are_not_there_are_not_planned():
    """Each of two services alone would take two GPUs; there are three."""
    services = (service(least=0.86), service(least=0.86, best="again"))
    scarce = PoolProblem((replace(A100, available=3),), services)
    with pytest.raises(InfeasibleError):
        plan_pool(scarce, trusting(scarce), replace(QUICK, boxes=3, polished=0, judged=1, rounds=1))


def test_the_cheaper_of_two_types_is_taken():
    cuts = tuple(H100_80GB.multisets[at] for at in (0, 1))
    frugal = Machine("H100-80GB", replace(H100_80GB, partitions=cuts), 20.0, 4, time_ratio=0.5)
    problem = PoolProblem((A100, frugal), (service(least=0.86),))
    made = plan_pool(problem, trusting(problem), QUICK)
    assert {problem.machines[at].gpu for _, at, _ in made.pool.partitions} == {"H100-80GB"}


def test_slices_of_other_gpus_slow_down_as_the_same_part_does():
    variant = CLOVER_SERVICES["yolo"].variants[-1]
    assert slowdown(variant, H100_80GB, "3g.40gb") == pytest.approx(variant.slowdown["3g.20gb"])
    assert slowdown(variant, A30_24GB, "4g.24gb") == pytest.approx(1.0)
    half = slowdown(variant, A30_24GB, "2g.12gb")
    assert variant.slowdown["4g.20gb"] < half < variant.slowdown["3g.20gb"]
    assert slowdown(variant, A30_24GB, "1g.6gb") is None, "smaller a part than any it is known to fit"


def test_a_lower_clock_is_one_more_choice():
    machines = at_clocks(A100, clock_model("a100"), 2)
    assert [machine.gpu for machine in machines] == ["A100-40GB"] * 2
    assert machines[0].time_ratio == machines[0].energy_ratio == pytest.approx(1.0)
    assert machines[-1].time_ratio > 1.3
    assert machines[-1].energy_ratio < 0.75
    assert machines[-1].idle_w < machines[0].idle_w
    assert at_clocks(A100, clock_model("a100"), 1) == (A100,)
    full = PoolProblem((A100,), (service(least=0.86, limit_s=0.3),))
    free = PoolProblem(machines, (service(least=0.86, limit_s=0.3),))
    assert free.available == {"A100-40GB": 4}
    slow = plan_pool(free, trusting(free), QUICK)
    fast = plan_pool(full, trusting(full), QUICK)
    assert slow.pool.cost_w < fast.pool.cost_w, "below the limit there is time to spend"
    assert slow.bound_w <= slow.pool.cost_w


def test_the_prices_order_pools_as_equation_3_does():
    objective = Objective(0.1, 0.85, 115.0, 250.0, 1.5, 1.5)
    for g_per_kwh in (20.0, 100.0, 368.0):
        weight, price_j = prices(objective, g_per_kwh)
        rng = np.random.default_rng(0)
        pairs = [
            (float(a), float(e)) for a, e in zip(rng.uniform(0.7, 0.85, 50), rng.uniform(10, 120, 50), strict=True)
        ]
        scores = [objective.score(a, e, g_per_kwh) for a, e in pairs]
        costs = [weight * e + price_j * (0.85 - a) for a, e in pairs]
        assert np.argsort(scores).tolist() == np.argsort(np.negative(costs)).tolist()
    assert prices(objective, 0.0)[0] > 0, "of two equal in accuracy the one with fewer joules"


def test_small_changes_keep_pools_whole():
    """Every change leaves as many instances on each kind of slice as the cuts have."""
    problem = PoolProblem((A100,), (service(),))
    edges = edges_of(problem.services[0], problem.machines)
    counts = np.zeros(len(edges), np.int64)
    counts[edges.profile.index("7g.40gb")] = 1
    start = ({(0, 0, 0): 1}, (counts,))
    near = list(Changes(problem, [edges]).of(start))
    assert len(near) >= 3 + 2 * 4
    for cuts, (after,) in near:
        slices = [p for (_, _, cut), n in cuts.items() for p in FEW.multisets[cut] * n]
        placed = [edges.profile[at] for at, n in enumerate(after.tolist()) for _ in range(n)]
        assert sorted(slices) == sorted(placed)
        assert min(after.tolist()) >= 0
    pools = Pools(problem, [edges], [1.0])
    pools.add(start)
    before = pools.best
    pools.polish(1)
    assert pools.best <= before


def test_a_pool_needs_gpus_services_and_names():
    with pytest.raises(ConfigError, match="at least one GPU type"):
        PoolProblem((), (service(),))
    with pytest.raises(ConfigError, match="names of services"):
        PoolProblem((A100,), (service(), service()))


@pytest.mark.parametrize(
    ("gpus", "instances", "host_gpus", "ratio"),
    [
        (1, 7, 2, 1.0),
        (2, 5, 2, 1.0),
        (4, 4, 2, 1 / 3),  # one of three others is on the same host
        (3, 3, 2, 1 / 3),  # two have one of two others near, one has none
        (4, 8, 2, 3 / 7),
        (10, 10, 2, 1 / 9),
        (4, 1, 2, 1.0),
    ],
)
def test_neighbours_on_the_same_host(gpus, instances, host_gpus, ratio):
    assert nearby_ratio(gpus, instances, host_gpus) == pytest.approx(ratio)


def test_busy_instances_of_other_hosts_slow_none():
    """Four whole GPUs in hosts of two answer sooner than in one host, in closed form and request by request."""
    one = service("yolo", rate_rps=2.5, limit_s=0.46)
    edges = edges_of(one, [A100])
    keys = list(zip(edges.profile, edges.variant, strict=True))
    whole = ("7g.40gb", one.costs.variants[-1].name)
    used = tuple((0, *whole) for _ in range(4))
    counts = np.array([[4 * (key == whole) for key in keys]])
    together = replace(one, costs=replace(one.costs, gpus=4))
    apart_s, together_s = (
        predicted(each, edges, counts, np.array([0.0]), [4])[0].latency_s for each in (one, together)
    )
    assert apart_s < 0.97 * together_s
    tried = [judge([each], [A100], Streams(0))(0, used, 0.0).latency_s for each in (one, together)]
    assert tried[0] < 0.97 * tried[1]
    assert tried[0] == pytest.approx(apart_s, rel=0.06)


def test_instances_fill_gpus_and_gpus_fill_hosts():
    one = service()
    name = one.costs.variants[0].name
    used = tuple((0, piece, name) for piece in ("3g.20gb", "7g.40gb", "4g.20gb", "7g.40gb", "2g.10gb", "2g.10gb"))
    on = hosts(one, [A100], used)
    assert on[1] == on[3], "two whole GPUs are the first host"
    assert len({on[0], on[2], on[4], on[5]}) == 1 and on[0] != on[1], "4g and 3g, then 2g and 2g are the second"
    two_types = hosts(one, [A100, A100], ((0, "7g.40gb", name), (1, "7g.40gb", name)))
    assert two_types[0] != two_types[1]
    shared = PoolProblem((A100,), (one, service("yolo")), colocate=True)
    separate = replace(shared, colocate=False)
    assert gpus_of(shared, {(0, 0, 0): 1, (0, 0, 1): 2}) == (3, 3)
    assert gpus_of(separate, {(0, 0, 0): 1, (1, 0, 1): 2}) == (1, 2)
