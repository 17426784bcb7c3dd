"""What holds of every plan, whatever the input: ten thousand made-up ones, the published code's crashes among them."""

import random

import pytest

from joulery.domain.errors import InfeasibleError
from joulery.domain.gpu.provisioning import Arrivals, Workload
from joulery.domain.serving.service import Slo
from joulery.perf.catalog import profile
from joulery.perf.catalog.synthetic_t4 import synthetic_t4
from joulery.policies.placement.provisioning.difference import difference, running_of
from joulery.policies.placement.provisioning.gpu_shares import GpuType, predict, violations_of
from joulery.policies.placement.provisioning.options import Accounting, BatchLimits, Rules
from joulery.policies.placement.provisioning.planner import provision
from joulery.policies.placement.provisioning.replan import follow

V100 = GpuType("V100", profile("v100"), 3.06)
TYPES = ([V100], [GpuType("V100", profile("v100-calibrated"), 3.06)], [GpuType("T4", synthetic_t4(2.06), 0.526)])
MODELS = ("alexnet", "resnet50", "vgg19", "ssd")


def some_workloads(rng, most):
    """Anything: SLOs from absurdly tight to lax, demands from a trickle to a flood."""
    return [
        Workload(
            f"w{index}",
            rng.choice(MODELS),
            Slo(10 ** rng.uniform(-4, 0.5), 0.99),
            10 ** rng.uniform(-3, 4.5),
        )
        for index in range(rng.randint(1, most))
    ]


def sound(plan, workloads):
    """Never a share of 0 or less, never more than a GPU unless it says so, never an SLO violation that is not named."""
    said = {(each.gpu, each.workload) for each in plan.violations}
    served = dict.fromkeys((each.id for each in workloads), 0.0)
    for index, gpu in enumerate(plan.gpus):
        assert gpu.instances
        assert gpu.share_ratio <= 1 + 1e-9 or any(
            each.what == "share" and each.gpu == index for each in plan.violations
        )
        assert 0 <= gpu.clock_mhz <= gpu.clock_max_mhz
        for each in gpu.instances:
            assert 0 < each.share_ratio <= 1
            assert each.batch >= 1
            served[each.workload] += each.rate_rps
            kept = 0 < each.latency_s <= each.limit_s * (1 + 1e-9)
            kept = kept and each.throughput_rps >= each.rate_rps * (1 - 1e-9)
            assert kept or (index, each.workload) in said
    for each in workloads:
        assert served[each.id] == pytest.approx(each.rate_rps)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(10))
def test_ten_thousand_inputs_of_any_kind(chunk):
    rng = random.Random(chunk)
    outcomes = {"planned": 0, "infeasible": 0}
    for _ in range(1000):
        workloads, types = some_workloads(rng, 6), rng.choice(TYPES)
        try:
            plan = provision("igniter", workloads, types)
        except InfeasibleError as error:
            assert any(f"service {each.id}:" in error.message for each in workloads)
            assert error.binding
            assert error.nearest
            outcomes["infeasible"] += 1
            continue
        sound(plan, workloads)
        outcomes["planned"] += 1
    assert min(outcomes.values()) > 100


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_best_meets_every_slo_and_its_bound_is_below_every_plan(seed):
    rng = random.Random(100 + seed)
    planned = 0
    for _ in range(12):
        workloads, types = some_workloads(rng, 4), rng.choice(TYPES)
        rules = Rules(rng.choice(list(Accounting)), max_replicas=rng.choice((1, 2)), margin_ratio=rng.choice((0, 0.05)))
        try:
            plan = provision("best", workloads, types, rules)
        except InfeasibleError as error:
            assert error.binding
            continue
        planned += 1
        sound(plan, workloads)
        assert plan.violations == ()
        assert plan.bound.usd_per_hour <= plan.usd_per_hour * (1 + 1e-9)
        try:
            faithful = provision("igniter", workloads, types)
        except InfeasibleError:
            continue
        cut = any(each.replicas > rules.max_replicas for gpu in faithful.gpus for each in gpu.instances)
        small = all(each.batch <= rules.max_batch for gpu in faithful.gpus for each in gpu.instances)
        paper = rules.accounting is Accounting.HALF_SLO and rules.margin_ratio == 0
        if paper and small and not cut and not faithful.violations:
            assert plan.bound.usd_per_hour <= faithful.usd_per_hour * (1 + 1e-9)
    assert planned > 2


@pytest.mark.parametrize("seed", range(6))
def test_following_a_change_of_services_meets_slos_and_moves_little(seed):
    rng = random.Random(seed)

    def moderate(name):
        return Workload(name, rng.choice(MODELS), Slo(rng.uniform(0.04, 0.12), 0.99), rng.uniform(20, 120), Arrivals())

    before = [moderate(f"w{index}") for index in range(8)]
    running = running_of(provision("igniter", before, [V100]).gpus)
    after = [each for each in before if rng.random() > 0.3] + [moderate(f"n{index}") for index in range(3)]
    gpus = predict(follow(running, after, [V100], Rules()), after, [V100], BatchLimits(after, [V100], Rules()))
    assert violations_of(gpus) == ()
    changed = difference(running, running_of(gpus))
    stayed = {each.id for each in before} & {each.id for each in after}
    assert {c.workload for c in changed.changes if c.what == "start"} == {e.id for e in after} - {e.id for e in before}
    assert {c.workload for c in changed.changes if c.what == "stop"} == {e.id for e in before} - {e.id for e in after}
    assert changed.migrations <= len(stayed) // 2
    assert difference(running, running).changes == ()
