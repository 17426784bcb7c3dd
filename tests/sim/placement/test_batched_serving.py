"""Judging plans: the published check on a truth that is not the planner's model, pairing, conservation."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from joulery.domain.errors import ConfigError
from joulery.domain.serving.service import Slo
from joulery.perf.catalog import profile
from joulery.sim.core.arrivals import Recorded, constant, gamma, poisson
from joulery.sim.core.streams import Streams
from joulery.sim.placement.batched_serving import Gpu, Neighbours, Service, ServingProcess, Trial, judge, spread
from joulery.sim.placement.gpu import InterferenceTruth, SimulatedProcess
from joulery.sim.queues.batching import BatchRule
from tests.data_folder import data_folder

WORKLOADS = {  # Table 3 of the paper: model, SLO in ms, requests a second
    "W1": ("alexnet", 10, 1200),
    "W2": ("alexnet", 15, 400),
    "W3": ("alexnet", 20, 800),
    "W4": ("resnet50", 20, 400),
    "W5": ("resnet50", 30, 600),
    "W6": ("resnet50", 40, 200),
    "W7": ("vgg19", 20, 300),
    "W8": ("vgg19", 30, 400),
    "W9": ("vgg19", 40, 200),
    "W10": ("ssd", 25, 150),
    "W11": ("ssd", 40, 50),
    "W12": ("ssd", 55, 300),
}
PUBLISHED = [  # share in percent and batch of each service on each of six GPUs (Fig. 14)
    {"W12": (92.5, 8)},
    {"W8": (75, 6), "W6": (15, 4)},
    {"W7": (60, 3), "W4": (32.5, 4)},
    {"W10": (60, 2), "W9": (37.5, 4)},
    {"W5": (45, 9), "W1": (20, 6), "W11": (15, 1)},
    {"W3": (12.5, 8), "W2": (7.5, 3)},
]
FIRST_FIT = [  # first fit by the lower bounds alone, interference ignored (FFD+): five GPUs
    {"W12": (92.5, 8), "W2": (7.5, 3)},
    {"W8": (72.5, 6), "W1": (20, 6)},
    {"W7": (60, 3), "W9": (37.5, 4)},
    {"W10": (57.5, 2), "W5": (42.5, 9)},
    {"W4": (30, 4), "W6": (15, 4), "W11": (15, 1), "W3": (12.5, 8)},
]


def services(process=constant):
    return [Service(name, process(rate), Slo(slo / 1e3, 0.99)) for name, (_, slo, rate) in WORKLOADS.items()]


def gpus(plan, truth=None, delay_s=math.inf):
    truth = truth or InterferenceTruth(profile("v100-refit"))
    return [
        Gpu(
            truth,
            tuple(
                ServingProcess(name, WORKLOADS[name][0], share / 100, BatchRule(batch, delay_s))
                for name, (share, batch) in gpu.items()
            ),
        )
        for gpu in plan
    ]


@pytest.mark.slow
@pytest.mark.parametrize("neighbours", Neighbours)
@pytest.mark.parametrize(("noise_cv", "first_fit"), [(0.0, 4), (0.02, 5), (0.05, 7)])
def test_published_plan_meets_every_slo_and_first_fit_does_not(neighbours, noise_cv, first_fit):
    """Constant arrivals, waiting for full batches, refitted model as truth: 0/0/0 and 4/5/7 SLO violations."""
    trial = Trial(2.0, 12.0 if neighbours is Neighbours.BUSY else 32.0, noise_cv, neighbours)
    assert judge(services(), gpus(PUBLISHED), trial, Streams(0)).violations == ()
    assert len(judge(services(), gpus(FIRST_FIT), trial, Streams(0)).violations) == first_fit


def test_poisson_arrivals_violate_every_slo_of_the_published_plan():
    verdicts = [judge(services(poisson), gpus(PUBLISHED), Trial(2.0, 32.0), Streams(seed)) for seed in range(5)]
    for verdict in verdicts:
        assert len(verdict.violations) == 12
    tail_ms = {
        name: [1e3 * outcome.tail_s for verdict in verdicts for outcome in verdict.services if outcome.name == name]
        for name in ("W1", "W11")
    }
    assert 19.5 < min(tail_ms["W1"]) < max(tail_ms["W1"]) < 30, "19.9 ms in one run, SLO 10"
    assert 250 < min(tail_ms["W11"]) < 290 < max(tail_ms["W11"]) < 900, "270 ms in one run, SLO 40"
    utilisation = [each.utilisation_ratio for gpu in verdicts[0].gpus for each in gpu.instances]
    assert 0.77 < min(utilisation) < 0.80 < 0.96 < max(utilisation) < 0.99


def test_planned_throughput_is_delivered_and_energy_adds_up():
    verdict = judge(services(), gpus(PUBLISHED), Trial(2.0, 32.0), Streams(1))
    for outcome in verdict.services:
        rate = WORKLOADS[outcome.name][2]
        assert outcome.offered_rps == pytest.approx(rate, rel=0.001)
        assert outcome.throughput_rps == pytest.approx(rate, rel=0.02)
        assert outcome.unanswered == 0
        assert outcome.p50_s < outcome.tail_s
    for gpu in verdict.gpus:
        assert gpu.idle_j == pytest.approx(53.5 * 30.0)
        assert gpu.energy_j == gpu.idle_j + sum(each.dynamic_j for each in gpu.instances)
        assert gpu.energy_j <= 300.0 * 30.0 * (1 + 1e-9)
        assert 1400 < gpu.clock_mhz <= 1530
    assert verdict.energy_j == pytest.approx(sum(gpu.energy_j for gpu in verdict.gpus))
    assert verdict.power_w == pytest.approx(verdict.energy_j / 30.0)


def test_both_readings_of_interference_agree_on_power_when_everyone_is_busy():
    readings = [
        judge(services(), gpus(PUBLISHED), Trial(2.0, 7.0, neighbours=reading), Streams(0)) for reading in Neighbours
    ]
    assert readings[0].power_w == pytest.approx(readings[1].power_w, rel=0.01)
    for always, busy in zip(readings[0].services, readings[1].services, strict=True):
        assert busy.tail_s <= always.tail_s * 1.02, "neighbours who pause can only help"


def test_a_lower_clock_slows_and_saves():
    fast = judge(services(), gpus(PUBLISHED), Trial(2.0, 7.0), Streams(0))
    held = InterferenceTruth(profile("v100-refit"), clock_limit_mhz=1300.0)
    slow = judge(services(), gpus(PUBLISHED, held), Trial(2.0, 7.0), Streams(0))
    assert all(gpu.clock_mhz == 1300.0 for gpu in slow.gpus)
    assert len(slow.violations) > len(fast.violations)
    assert slow.energy_j < fast.energy_j


def test_greedy_batching_never_waits_for_company():
    trial = Trial(1.0, 6.0)
    lightly = [Service("W11", poisson(5.0), Slo(0.04, 0.99))]
    pool = [Gpu(InterferenceTruth(profile("v100-refit")), (ServingProcess("W11", "ssd", 0.5, BatchRule(8, 0.0)),))]
    waiting = [Gpu(pool[0].truth, (ServingProcess("W11", "ssd", 0.5, BatchRule(8)),))]
    assert judge(lightly, pool, trial, Streams(0)).services[0].tail_s < 0.05
    assert judge(lightly, waiting, trial, Streams(0)).services[0].tail_s > 0.5


def two_replicas(weights=(1.0, 1.0), delay_s=0.0):
    truth = InterferenceTruth(profile("v100"))
    return [
        Gpu(
            truth,
            (
                ServingProcess("s", "vgg19", 0.6, BatchRule(2, delay_s), weight),
                ServingProcess("t", "alexnet", 0.2, RULE),
            ),
        )
        for weight in weights
    ]


RULE = BatchRule(4, 0.0)
PAIR = [Service("s", poisson(150.0), Slo(0.05, 0.99)), Service("t", gamma(200.0, 2.0), Slo(0.05, 0.99))]


def test_replicas_share_a_service_by_weight():
    verdict = judge(PAIR, two_replicas((3.0, 1.0)), Trial(0.0, 20.0), Streams(0))
    first, second = (gpu.instances[0].requests for gpu in verdict.gpus)
    assert first / second == pytest.approx(3.0, rel=0.01)
    assert first + second >= verdict.services[0].requests
    assert verdict.services[0].requests == pytest.approx(3000, rel=0.1)


def test_the_same_seed_gives_the_same_verdict_and_another_seed_another():
    trial = Trial(1.0, 6.0, noise_cv=0.05)
    assert judge(PAIR, two_replicas(), trial, Streams(3)) == judge(PAIR, two_replicas(), trial, Streams(3))
    assert judge(PAIR, two_replicas(), trial, Streams(3)) != judge(PAIR, two_replicas(), trial, Streams(4))


@pytest.mark.parametrize("neighbours", Neighbours)
def test_changing_the_plan_never_changes_the_workload(neighbours):
    """Paired comparison: other shares, batches, replicas and GPUs, but the same requests."""
    trial = Trial(1.0, 4.0, noise_cv=0.1, neighbours=neighbours)
    plans = [two_replicas(), two_replicas((5.0, 1.0), 0.01), [Gpu(g.truth, g.instances[::-1]) for g in two_replicas()]]
    seen = [
        [(outcome.requests, outcome.offered_rps) for outcome in judge(PAIR, plan, trial, Streams(9)).services]
        for plan in plans
    ]
    assert seen[0] == seen[1] == seen[2]


def test_noise_belongs_to_the_instance_and_has_the_variation_asked_for():
    truth = InterferenceTruth(profile("v100"))
    alone = [Service("s", constant(10.0), Slo(1.0, 0.99))]
    plan = [Gpu(truth, (ServingProcess("s", "vgg19", 0.5, BatchRule(1)),))]
    spreads = []
    for noise_cv in (0.0, 0.2):
        verdict = judge(alone, plan, Trial(0.0, 400.0, noise_cv), Streams(0))
        spreads.append((verdict.gpus[0].instances[0].utilisation_ratio, verdict.services[0]))
    assert spreads[1][0] == pytest.approx(spreads[0][0], rel=0.02), "noise has mean 1"
    service = truth.conditions([SimulatedProcess("vgg19", 0.5, 1)]).effects[0]
    quiet, noisy = spreads[0][1].tail_s - service.load_s, spreads[1][1].tail_s - service.load_s
    assert noisy / quiet == pytest.approx(math.exp(2.326 * 0.198 - 0.198**2 / 2), rel=0.04)


def test_recorded_arrivals_that_never_fill_a_batch_count_as_unanswered():
    truth = InterferenceTruth(profile("v100"))
    log = [Service("s", Recorded(np.arange(0.0, 10.0, 0.1)), Slo(5.0, 0.99))]
    plan = [Gpu(truth, (ServingProcess("s", "alexnet", 0.5, BatchRule(64)),))]
    outcome = judge(log, plan, Trial(0.0, 10.0), Streams(0)).services[0]
    assert (outcome.requests, outcome.unanswered) == (100, 36)
    assert outcome.tail_s == math.inf
    assert outcome.violated


def test_a_service_without_requests_meets_its_slo():
    truth = InterferenceTruth(profile("v100"))
    verdict = judge(
        [Service("s", poisson(0.0), Slo(0.01))],
        [Gpu(truth, (ServingProcess("s", "alexnet", 0.5, RULE),)), Gpu(truth, ())],
        Trial(),
        Streams(0),
    )
    assert verdict.services[0].requests == 0
    assert not verdict.services[0].violated
    assert verdict.gpus[0].instances[0].mean_batch == 0.0
    assert verdict.energy_j == pytest.approx(2 * 53.5 * 30.0)


@given(st.integers(0, 200), st.lists(st.integers(1, 9).map(float), min_size=1, max_size=5))
def test_spread_is_proportional_at_every_moment(count, weights):
    owner = spread(count, weights)
    assert len(owner) == count
    for index, weight in enumerate(weights):
        taken = np.cumsum(owner == index)
        ideal = np.arange(1, count + 1) * weight / sum(weights)
        assert np.all(np.abs(taken - ideal) <= len(weights)), "no model falls behind"


def test_equal_replicas_take_turns():
    assert spread(6, [1.0, 1.0, 1.0]).tolist() == [0, 1, 2, 0, 1, 2]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda s, g: ([*s, s[0]], g), "distinct names"),
        (lambda s, g: (s[:1], g), "no service 't'"),
        (lambda s, g: ([*s, replace(s[0], name="u")], g), "'u' has no instance"),
        (lambda s, g: (s, two_replicas((1.0, 0.0))), "positive weight"),
        (lambda s, g: (s, two_replicas((1.0, math.nan))), "positive weight"),
        (lambda s, g: (s, [Gpu(g[0].truth, (replace(g[0].instances[0], model="gpt"), *g[0].instances[1:]))]), "gpt"),
    ],
)
def test_plans_that_do_not_fit_their_services_are_refused(change, text):
    with pytest.raises(ConfigError, match=text):
        judge(*change(PAIR, two_replicas()), Trial(1.0, 2.0), Streams(0))


@pytest.mark.parametrize("fields", [(2.0, 2.0, 0.0), (-1.0, 2.0, 0.0), (0.0, math.inf, 0.0), (0.0, 1.0, -0.1)])
def test_impossible_trials_are_refused(fields):
    with pytest.raises(ConfigError):
        Trial(*fields)


def test_the_plans_above_are_the_published_ones():
    case = json.loads((data_folder("igniter") / "plan_cases_example.json").read_text())["sets"][0]
    assert [[[n, r, b] for n, (r, b) in gpu.items()] for gpu in PUBLISHED] == case["plan"]
    assert {w["id"]: (w["model"], w["slo_ms"], w["rate_rps"]) for w in case["workloads"]} == WORKLOADS
