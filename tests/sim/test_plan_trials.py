"""Plans on trial: made by a policy, judged under the same seeds."""

import pytest

from joulery.domain.errors import ConfigError
from joulery.domain.provision import Workload
from joulery.domain.serving import Slo
from joulery.perf.catalog import profile
from joulery.sim.arrivals import poisson
from joulery.sim.batched_serving import Service, Trial
from joulery.sim.gpu import InterferenceTruth
from joulery.sim.plan_trials import PLANNERS, Placed, make_plan, trials
from tests.sim.test_batched_serving import PUBLISHED, WORKLOADS

TWELVE = [Workload(name, model, Slo(slo / 1e3, 0.99), rate) for name, (model, slo, rate) in WORKLOADS.items()]


def test_igniter_makes_the_published_plan():
    plan = make_plan("igniter", TWELVE, profile("v100"))
    assert [{each.service: (100 * each.share_ratio, each.batch) for each in gpu} for gpu in plan] == PUBLISHED


def test_replicas_carry_the_part_of_the_demand_that_is_routed_to_them():
    plan = make_plan("igniter", [Workload("big", "vgg19", Slo(0.06, 0.99), 1500.0)], profile("v100"))
    weights = [each.weight for gpu in plan for each in gpu]
    assert len(weights) > 1
    assert sum(weights) == pytest.approx(1500.0)


def test_an_unknown_policy_lists_the_known():
    with pytest.raises(ConfigError, match="makes plans") as caught:
        make_plan("magic", TWELVE, profile("v100"))
    assert "igniter" in (caught.value.expected or "")
    assert set(PLANNERS) >= {"igniter"}


def test_plans_face_the_same_requests_under_a_seed_and_others_under_another():
    services = [Service("s", poisson(100.0), Slo(0.05, 0.99))]
    plans = {"one": ((Placed("s", 0.5, 4),),), "two": ((Placed("s", 0.3, 2), Placed("s", 0.3, 2)),)}
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
