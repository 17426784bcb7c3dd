"""Plans on trial: made by a policy, judged under the same seeds."""

from dataclasses import replace

import pytest

from joulery.domain.errors import ConfigError
from joulery.domain.gpu.provisioning import Arrivals, Workload
from joulery.domain.serving.service import Slo
from joulery.perf.catalog import profile
from joulery.policies.placement.provisioning.rules import Rules
from joulery.sim.core.arrivals import poisson
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
    plans = {"best": plan, "igniter": make_plan("igniter", TWELVE, profile("v100"), Rules())}
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
