"""Many services that all differ: planned in batches, none lost, none served twice."""

import random

import pytest

from joulery.domain.gpu.provisioning import Workload
from joulery.domain.serving.service import Slo
from joulery.policies.placement.provisioning.gpu_shares import Placed, ReplicaLoad, Share
from joulery.policies.placement.provisioning.many_kinds import in_batches
from joulery.policies.placement.provisioning.many_kinds import planner as many_kinds
from joulery.policies.placement.provisioning.many_kinds.in_batches import BATCH, plan_in_batches
from joulery.policies.placement.provisioning.options import Rules
from joulery.policies.placement.provisioning.planner import provision
from tests.policies.placement.provisioning.published import V100


def varied(n, seed=3):
    rng = random.Random(seed)
    return [
        Workload(
            f"w{i}",
            rng.choice(("alexnet", "resnet50", "vgg19")),
            Slo(rng.uniform(0.04, 0.1), 0.99),
            rng.uniform(50, 250),
        )
        for i in range(n)
    ]


def models(n):
    return [each.model for each in varied(n)]


def one_each(percent):
    """A planner that gives every service a GPU of its own, this full."""

    def planner(services):
        assert len(services) <= BATCH
        return tuple(Placed(0, (Share(ReplicaLoad(at, 0, 1, 10.0), percent, 1),)) for at in range(len(services)))

    return planner


@pytest.mark.parametrize("percent", [40.0, 100.0])
@pytest.mark.parametrize("n", [1, BATCH, BATCH + 1, 50])
def test_everybody_is_served_once(n, percent):
    gpus = plan_in_batches(models(n), one_each(percent))
    assert sorted(share.part.workload for gpu in gpus for share in gpu.shares) == list(range(n))


def test_replicas_on_two_gpus_are_kept_together():
    def planner(services):
        halves = [Share(ReplicaLoad(0, replica, 2, 10.0), 100.0 - 90 * replica, 1) for replica in (0, 1)]
        rest = tuple(Share(ReplicaLoad(at, 0, 1, 1.0), 1.0, 1) for at in range(1, len(services)))
        return (Placed(0, (halves[0],)), Placed(0, (halves[1], *rest)))

    gpus = plan_in_batches(models(40), planner)
    replicas = [(share.part.workload, share.part.replica) for gpu in gpus for share in gpu.shares]
    assert len(set(replicas)) == len(replicas)
    assert {workload for workload, _ in replicas} == set(range(40))


@pytest.mark.parametrize("rules", [Rules(max_replicas=1), Rules()], ids=["whole", "cut where it helps"])
def test_more_kinds_than_are_planned_at_once(monkeypatch, rules):
    """Two full batches and a rest."""
    monkeypatch.setattr(many_kinds, "TOGETHER_KINDS", 20)
    monkeypatch.setattr(in_batches, "BATCH", 12)
    workloads = varied(26)
    result = provision("best", workloads, [V100], rules)
    assert result.violations == ()
    assert {each.workload for gpu in result.gpus for each in gpu.instances} == {each.id for each in workloads}
    assert result.bound.usd_per_hour <= result.usd_per_hour
    assert len(result.gpus) <= len(provision("igniter", workloads, [V100]).gpus)
    assert provision("best", workloads, [V100], rules) == result
