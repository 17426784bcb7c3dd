"""Plans on trial: made by a policy, judged under the same seeds."""

from dataclasses import replace

import numpy as np
import pytest

from joulery.domain.errors import ConfigError
from joulery.domain.gpu.provisioning import Arrivals, Workload
from joulery.domain.serving.service import Slo
from joulery.perf.catalog import profile
from joulery.perf.queues.arrival_fit import fit_arrivals
from joulery.policies.placement.provisioning.options import Rules
from joulery.sim.core.arrivals import RateSeries, Recorded, Renewal, poisson
from joulery.sim.placement.batched_serving import Service, Trial
from joulery.sim.placement.gpu import InterferenceTruth
from joulery.sim.placement.plan_trials import PlacedService, make_plan, trials
from tests.sim.placement.test_batched_serving import PUBLISHED, WORKLOADS

TWELVE = [Workload(name, model, Slo(slo / 1e3, 0.99), rate) for name, (model, slo, rate) in WORKLOADS.items()]


def test_igniter_makes_the_published_plan():
    plan = make_plan("igniter", TWELVE, profile("v100"), Rules())
    assert [{each.service: (100 * each.share_ratio, each.batch) for each in gpu} for gpu in plan] == PUBLISHED


def test_batches_of_a_plan_wait_as_the_plan_means_them_to():
    """Random requests are served as they gather; a policy that knows of none means its batches to be full."""
    random = [replace(TWELVE[3], arrivals=Arrivals.poisson())]
    for policy, workloads, delay_s in (
        ("best", random, 0.0),
        ("best", TWELVE[3:4], float("inf")),
        ("igniter", random, float("inf")),
    ):
        ((one,),) = make_plan(policy, workloads, profile("v100"), Rules(max_replicas=1))
        assert one.max_delay_s == delay_s


def test_replicas_carry_the_part_of_the_demand_that_is_routed_to_them():
    plan = make_plan("igniter", [Workload("big", "vgg19", Slo(0.06, 0.99), 1500.0)], profile("v100"), Rules())
    weights = [each.weight for gpu in plan for each in gpu]
    assert len(weights) > 1
    assert sum(weights) == pytest.approx(1500.0)


def test_an_unknown_policy_lists_the_known():
    with pytest.raises(ConfigError, match="no such provisioning policy") as caught:
        make_plan("magic", TWELVE, profile("v100"), Rules())
    assert "igniter" in (caught.value.expected or "")


@pytest.mark.slow
def test_a_plan_made_for_poisson_arrivals_keeps_them_on_a_truth_it_does_not_know():
    """The published plan breaks twelve of twelve; eight GPUs planned for a queue break none, with noise and without."""
    expected = [replace(each, arrivals=Arrivals.poisson()) for each in TWELVE]
    plan = make_plan("best", expected, profile("v100-calibrated"), Rules(margin_ratio=0.05))
    assert len(plan) == 8
    services = [Service(each.id, poisson(each.rate_rps), each.slo) for each in TWELVE]
    models = {each.id: each.model for each in TWELVE}
    truth = InterferenceTruth(profile("v100-refit"))
    by_default = Rules(random_margins=profile("v100-calibrated").bands)
    default = make_plan("best", expected, profile("v100-calibrated"), by_default)
    assert len(default) == 8
    plans = {"best": plan, "default": default, "igniter": make_plan("igniter", TWELVE, profile("v100"), Rules())}
    for noise_cv in (0.0, 0.05):
        trial = Trial(2.0, 32.0, noise_cv)
        for name, _, verdict in trials(services, models, plans, truth, trial, range(3)):
            assert len(verdict.violations) == 12 if name == "igniter" else verdict.violations == ()


def test_plans_face_the_same_requests_under_a_seed_and_others_under_another():
    services = [Service("s", poisson(100.0), Slo(0.05, 0.99))]
    plans = {
        "one": ((PlacedService("s", 0.5, 4),),),
        "two": ((PlacedService("s", 0.3, 2), PlacedService("s", 0.3, 2)),),
    }
    truth = InterferenceTruth(profile("v100"))
    found = list(trials(services, {"s": "resnet50"}, plans, truth, Trial(0.0, 5.0), [3, 8], max_delay_s=0.0))
    assert [(name, seed) for name, seed, _ in found] == [("one", 3), ("two", 3), ("one", 8), ("two", 8)]
    requests = [verdict.services[0].requests for _, _, verdict in found]
    assert requests[0] == requests[1] != requests[2] == requests[3]
    assert [len(verdict.gpus[0].instances) for _, _, verdict in found] == [1, 2, 1, 2]
    assert all(verdict.services[0].unanswered == 0 for _, _, verdict in found)
    waiting = list(trials(services, {"s": "resnet50"}, plans, truth, Trial(0.0, 5.0), [3]))
    assert waiting[0][2].gpus[0].instances[0].mean_batch == 4.0
    assert found[0][2].gpus[0].instances[0].mean_batch < 4.0


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_a_plan_fitted_to_the_first_half_of_a_log_keeps_the_second(seed):
    """Bursts (cv 2): a plan for Poisson requests of the same rate is late, one for the fitted process is not."""
    wanted = [TWELVE[1], TWELVE[3], TWELVE[5]]
    length_s = 240.0
    logs = {
        each.id: Renewal(RateSeries.constant(each.rate_rps / 2), 2.0).times_s(
            2 * length_s, np.random.default_rng([seed, index])
        )
        for index, each in enumerate(wanted)
    }
    slos = {each.id: replace(each.slo, latency_s=3 * each.slo.latency_s) for each in wanted}
    fits = {name: fit_arrivals(times[times < length_s], slos[name].latency_s) for name, times in logs.items()}
    planned = {
        "fitted": [
            replace(
                each,
                slo=slos[each.id],
                rate_rps=fits[each.id].rate_rps,
                arrivals=Arrivals.general(fits[each.id].scv_high),
            )
            for each in wanted
        ],
        "poisson": [
            replace(each, slo=slos[each.id], rate_rps=fits[each.id].mean_rps, arrivals=Arrivals.poisson())
            for each in wanted
        ],
    }
    plans = {name: make_plan("best", workloads, profile("v100"), Rules()) for name, workloads in planned.items()}
    second = [Service(name, Recorded(times[times >= length_s] - length_s), slos[name]) for name, times in logs.items()]
    models = {each.id: each.model for each in wanted}
    trial = Trial(warmup_s=5.0, end_s=length_s - 1)
    late = dict.fromkeys(plans, 0)
    for name, _, verdict in trials(second, models, plans, InterferenceTruth(profile("v100")), trial, [seed]):
        late[name] += len(verdict.violations)
    assert late["fitted"] == 0
    assert late["poisson"] > 0
