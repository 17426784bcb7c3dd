"""Preset ``best``: the numbers of the specification, each with its proof, and plans within the SLOs."""

import math
import random
from dataclasses import replace

import pytest

from benchmarks.provision import rows, workloads
from joulery.domain.errors import ConfigError, InfeasibleError
from joulery.policies.placement.provisioning import planner
from joulery.policies.placement.provisioning.column_generation import attainable
from joulery.policies.placement.provisioning.gpu_shares import GpuType
from joulery.policies.placement.provisioning.many_kinds import planner as many_kinds
from joulery.policies.placement.provisioning.options import Accounting, Rules
from joulery.policies.placement.provisioning.packing import problem_of
from joulery.policies.placement.provisioning.planner import best_plan as plan
from joulery.policies.placement.provisioning.planner import provision
from tests.policies.placement.provisioning.published import (
    CALIBRATED,
    V100,
    app12,
    copies,
    t4,
    workload,
)

WHOLE = Rules(max_replicas=1)
FULL = Accounting.FULL_SLO


def kept(result, workloads):
    """Every SLO, every GPU, every service, checked from what the plan says."""
    assert result.violations == ()
    served = {}
    for gpu in result.gpus:
        assert gpu.share_ratio <= 1 + 1e-9
        for each in gpu.instances:
            assert each.share_ratio > 0
            assert each.latency_s <= each.limit_s * (1 + 1e-9)
            assert each.throughput_rps >= each.rate_rps * (1 - 1e-9)
            served.setdefault(each.workload, []).append(each)
    for each in workloads:
        replicas = served[each.id]
        assert sum(one.rate_rps for one in replicas) == pytest.approx(each.rate_rps)
        assert sorted(one.replica for one in replicas) == list(range(len(replicas)))
        assert {one.replicas for one in replicas} == {len(replicas)}
    assert result.bound.usd_per_hour <= result.usd_per_hour * (1 + 1e-9)
    return True


def shares(result):
    return 100 * math.fsum(gpu.share_ratio for gpu in result.gpus)


def test_without_replicas_six_gpus_are_optimal():
    result = provision("best", app12(), [V100], WHOLE)
    assert kept(result, app12())
    assert (len(result.gpus), result.usd_per_hour) == (6, pytest.approx(18.36))
    assert result.optimal
    assert result.bound.gpus == 6
    assert result.bound.relaxed_usd_per_hour / 3.06 >= 5.16
    assert shares(result) <= 465 + 1e-6


def test_with_replicas_five_gpus_keep_the_papers_constraints():
    result = provision("best", app12(), [V100], Rules())
    assert kept(result, app12())
    assert (len(result.gpus), result.usd_per_hour) == (5, pytest.approx(15.30))
    assert result.optimal


def test_the_full_slo_needs_five_gpus_without_replicas():
    result = provision("best", app12(), [V100], Rules(FULL, max_replicas=1))
    assert kept(result, app12())
    assert (len(result.gpus), result.optimal) == (5, True)
    assert shares(result) <= 470 + 1e-6


def test_the_calibrated_model_needs_five_gpus_without_replicas():
    result = provision("best", app12(), [CALIBRATED], WHOLE)
    assert kept(result, app12())
    assert (len(result.gpus), result.optimal) == (5, True)
    assert shares(result) <= 475 + 1e-6


@pytest.mark.slow
def test_the_calibrated_model_with_a_margin_and_noise_needs_five_gpus():
    rules = Rules(FULL, margin_ratio=0.05, noise_cv=0.05)
    result = provision("best", app12(), [CALIBRATED], rules)
    assert kept(result, app12())
    assert (len(result.gpus), result.optimal) == (5, True)
    for gpu in result.gpus:
        for each in gpu.instances:
            assert each.throughput_rps >= 1.05 * each.rate_rps * (1 - 1e-9)
            assert each.latency_s * 1.05 * 1.12 <= each.limit_s * (1 + 1e-9)


def test_the_synthetic_t4():
    result = provision("best", app12(), [t4()], Rules())
    assert kept(result, app12())
    assert (len(result.gpus), result.usd_per_hour) == (13, pytest.approx(6.838))
    assert result.optimal


def test_the_papers_logic_on_the_synthetic_t4():
    result = provision("igniter", app12(), [t4()])
    assert (len(result.gpus), result.usd_per_hour) == (15, pytest.approx(7.89))
    assert result.violations == ()
    cut = {each.workload for gpu in result.gpus for each in gpu.instances if each.replicas > 1}
    assert cut == {"W5", "W7", "W8", "W10", "W12"}


@pytest.mark.slow
def test_a_mixed_fleet_where_one_type_cannot():
    slowdown, fleet, usd = 3.0, (1, 17), 12.002
    with pytest.raises(InfeasibleError, match="W10"):
        provision("best", app12(), [t4(slowdown)], Rules())
    with pytest.raises(InfeasibleError, match="W10"):
        provision("igniter", app12(), [t4(slowdown)])
    result = provision("best", app12(), [V100, t4(slowdown)], Rules())
    assert kept(result, app12())
    kinds = [gpu.type for gpu in result.gpus]
    assert (kinds.count("V100"), kinds.count("T4")) == fleet
    assert result.usd_per_hour == pytest.approx(usd)
    assert result.optimal


@pytest.mark.slow
def test_a_dear_type_is_left_out_where_a_cheap_one_does():
    result = provision("best", app12(), [V100, t4()], Rules())
    assert {gpu.type for gpu in result.gpus} == {"T4"}
    assert result.usd_per_hour == pytest.approx(6.838)
    assert result.optimal


@pytest.mark.slow
@pytest.mark.parametrize(("replicas", "gpus"), [(1, 422), (2, 408), (4, 406)])
def test_a_thousand_copies(replicas, gpus):
    result = provision("best", copies(1000), [V100], Rules(max_replicas=replicas))
    assert kept(result, copies(1000))
    assert len(result.gpus) <= gpus
    assert result.gap_ratio <= 0.02


def test_a_thousand_copies_with_the_full_slo():
    result = provision("best", copies(1000), [V100], Rules(FULL, max_replicas=1))
    assert kept(result, copies(1000))
    assert len(result.gpus) <= 410


def test_throttling_counts_on_every_gpu():
    """vgg19:16:400 needs all of a GPU and then throttles it: 8.152 ms, more than the 8 ms allowed."""
    alone = [workload("hot", "vgg19", 16, 400)]
    faithful = provision("igniter", alone, [V100])
    assert [(v.workload, v.what) for v in faithful.violations] == [("hot", "latency")]
    assert faithful.violations[0].predicted == pytest.approx(8.152e-3, abs=1e-6)
    better = provision("best", alone, [V100], Rules())
    assert kept(better, alone)
    assert [each.batch for gpu in better.gpus for each in gpu.instances] == [3]


def test_limited_gpus_are_respected():
    few = GpuType("V100", V100.profile, 3.06, available=3)
    many = GpuType("T4", t4().profile, 0.526, available=6)
    result = provision("best", app12(), [few, many], Rules())
    kinds = [gpu.type for gpu in result.gpus]
    assert kept(result, app12())
    assert kinds.count("V100") <= 3
    assert kinds.count("T4") <= 6


def test_too_few_gpus_are_infeasible_only_with_a_proof():
    few = GpuType("V100", V100.profile, 3.06, available=4)
    with pytest.raises(InfeasibleError, match="4 V100") as caught:
        provision("best", app12(), [few], Rules())
    assert caught.value.nearest["unserved"]
    assert caught.value.nearest["gpus"] == 5


def different(count):
    """Services that all differ."""
    rng, models = random.Random(1), {"alexnet": (300, 10), "resnet50": (120, 20), "ssd": (40, 25), "vgg19": (80, 20)}
    names = list(models)
    return [
        workload(
            f"S{index}",
            names[index % 4],
            models[names[index % 4]][1] * rng.uniform(1, 2),
            models[names[index % 4]][0] * rng.uniform(0.5, 2),
        )
        for index in range(count)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("count", [planner.PROVEN_KINDS - 1, planner.PROVEN_KINDS + 1, 20])
def test_a_limit_on_gpus_that_is_met_anyway_changes_nothing(count):
    services = different(count)
    free = provision("best", services, [V100], Rules())
    limited = provision("best", services, [replace(V100, available=len(free.gpus))], Rules())
    assert kept(free, services) and kept(limited, services)
    assert len(limited.gpus) == len(free.gpus)


@pytest.mark.slow
def test_a_limit_between_bound_and_plan_is_reported_open_with_the_best_plan_found(monkeypatch):
    monkeypatch.setattr(many_kinds, "_SEARCHED_KINDS", 0)
    services = workloads(rows(15, varied=True))
    free = provision("best", services, [V100], Rules())
    assert free.bound.gpus < len(free.gpus), "the case is one in which the bound leaves the question open"
    tight = provision("best", services, [replace(V100, available=free.bound.gpus)], Rules())
    assert {each.workload for gpu in tight.gpus for each in gpu.instances} == {each.id for each in services}
    if len(tight.gpus) > free.bound.gpus:
        assert [each.what for each in tight.violations] == ["available"]
    with pytest.raises(InfeasibleError) as caught:
        provision("best", services, [replace(V100, available=free.bound.gpus - 1)], Rules())
    assert caught.value.nearest["gpus"] == free.bound.gpus


@pytest.mark.slow
def test_the_cost_of_more_services_is_one_smooth_curve(monkeypatch):
    """On both sides of every change of method the cost of a service stays the same, up to one GPU."""
    monkeypatch.setattr(many_kinds, "TOGETHER_KINDS", planner.PROVEN_KINDS + 2)
    for most in (planner.PROVEN_KINDS, many_kinds.TOGETHER_KINDS):
        fewer, more = (len(provision("best", different(most + extra), [V100], Rules()).gpus) for extra in (0, 1))
        assert fewer <= more <= fewer + 1, most


def test_a_large_service_is_cut_into_as_many_replicas_as_it_takes():
    big = [workload("big", "resnet50", 40, 20_000)]
    result = provision("best", big, [V100], Rules())
    assert kept(result, big)
    assert len({each.rate_rps for gpu in result.gpus for each in gpu.instances}) == 1


def test_a_large_service_that_may_not_be_cut_says_how_many_replicas_would_do():
    with pytest.raises(InfeasibleError, match="no GPU type serves 900") as caught:
        provision("best", [workload("big", "vgg19", 60, 900)], [V100], WHOLE)
    assert caught.value.nearest["replicas"] == 2


def test_what_cannot_be_fast_enough_says_the_best_it_can_get():
    with pytest.raises(InfeasibleError, match=r"slow: ssd .* 6\.155 ms") as caught:
        provision("best", [workload("slow", "ssd", 7, 50)], [V100], Rules())
    assert caught.value.nearest["best_latency_s"] == pytest.approx(6.155e-3, abs=1e-6)


def test_absurd_rates_are_refused():
    with pytest.raises(InfeasibleError, match="more than 10000 replicas"):
        provision("best", [workload("mad", "ssd", 100, 1e9)], [V100], Rules())
    with pytest.raises(InfeasibleError, match="more than 10000"):
        provision("igniter", [workload("mad", "ssd", 100, 1e9)], [V100])


@pytest.mark.parametrize("policy", ["best", "igniter", "ffd", "ffd++", "gslice", "gpulets"])
def test_bad_input_is_one_clear_error(policy):
    with pytest.raises(ConfigError, match="no GPU type"):
        provision(policy, app12(), [])
    with pytest.raises(ConfigError, match="same name"):
        provision(policy, [workload("W", "ssd", 50, 10)] * 2, [V100])
    with pytest.raises(ConfigError, match="no coefficients for model 'yolo'"):
        provision(policy, [workload("W", "yolo", 50, 10)], [V100])


def test_an_unknown_policy_is_named_with_those_there_are():
    with pytest.raises(ConfigError, match="no such provisioning policy") as caught:
        provision("magic", app12(), [V100])
    assert "best, igniter, ffd" in caught.value.expected
    with pytest.raises(ConfigError, match="no such provisioning policy") as caught:
        provision("gpulet", app12(), [V100])
    assert "gpulets" in caught.value.hint


def test_nothing_to_serve_costs_nothing():
    result = plan([], [V100], Rules())
    assert result.gpus == ()
    assert result.bound.usd_per_hour == 0


@pytest.mark.parametrize(
    ("types", "usd", "least"),
    [
        ([V100], 15.81, 18.36),
        ([V100], 15.30, 15.30),
        ([t4()], 6.478, 6.838),
        ([V100, t4()], 6.478, 6.646),
        ([V100, t4()], 9.19, 9.276),
    ],
)
def test_whole_gpus_cost_at_least(types, usd, least):
    problem = problem_of(app12()[:1], types, Rules())
    assert attainable(problem, usd, problem.ranges) == pytest.approx(least)
