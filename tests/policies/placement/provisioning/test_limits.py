"""What plans keep beside latency: GPU memory with standbys, failure domains, the balancer, published errors."""

import math
from collections import Counter
from dataclasses import replace

import pytest

from joulery.domain.errors import InfeasibleError
from joulery.domain.gpu.provisioning import Arrivals
from joulery.perf import catalog
from joulery.policies.placement.provisioning.difference import running_of
from joulery.policies.placement.provisioning.options import (
    Balancer,
    FailureDomain,
    RequestStream,
    Rules,
    limit_ms,
    split_scv,
    stream_of,
)
from joulery.policies.placement.provisioning.planner import POLICIES, followed, provision
from tests.policies.placement.provisioning.published import V100, workload

GB = 1e9


def small(count=6, memory_bytes=None, arrivals=None):
    """Services that latency alone lets share one GPU."""
    rows = [workload(f"S{i}", "alexnet", 40 + i, 60 + i, arrivals) for i in range(count)]
    return [replace(each, memory_bytes=memory_bytes) for each in rows]


def of_memory(gpu_bytes, **more):
    return replace(V100, memory_bytes=gpu_bytes, **more)


def test_without_memory_stated_nothing_changes_and_nothing_is_claimed():
    (gpu,) = provision("best", small(), [of_memory(1.0 * GB)]).gpus
    assert math.isnan(gpu.memory_bytes)
    assert gpu.memory_limit_bytes == 1.0 * GB


@pytest.mark.parametrize("count", [6, 14])
def test_every_process_and_its_standby_fit_into_the_memory(count):
    """3 GB twice: two services a GPU of 16 GB, where shares alone would allow all on one."""
    services = small(count, 3 * GB)
    plan = provision("best", services, [of_memory(16 * GB)])
    assert [len(gpu.instances) for gpu in plan.gpus] == [2] * (count // 2)
    assert all(gpu.memory_bytes == 12 * GB for gpu in plan.gpus)
    assert plan.violations == ()
    assert plan.bound.gpus <= len(plan.gpus)


def test_a_model_too_large_for_every_gpu_is_infeasible_by_name():
    with pytest.raises(InfeasibleError) as caught:
        provision("best", small(2, 9 * GB), [of_memory(16 * GB)])
    assert caught.value.binding == "memory of S0"
    assert caught.value.nearest["memory_bytes"] == 18 * GB


def test_a_type_with_enough_memory_is_taken_although_it_is_dearer():
    large = replace(of_memory(80 * GB), name="large", usd_per_hour=9.0)
    plan = provision("best", small(2, 9 * GB), [of_memory(16 * GB), large])
    assert [gpu.type for gpu in plan.gpus] == ["large"]


@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "best"])
def test_policies_that_ignore_memory_report_what_does_not_fit(policy):
    plan = provision(policy, small(6, 5 * GB), [of_memory(16 * GB)])
    crowded = [index for index, gpu in enumerate(plan.gpus) if gpu.memory_bytes > 16 * GB]
    assert crowded
    assert {each.gpu for each in plan.violations if each.what == "memory"} == set(crowded)


def test_following_a_plan_moves_what_no_longer_fits():
    before = provision("best", small(4), [V100])
    assert len(before.gpus) == 1
    plan = followed(running_of(before.gpus), small(4, 3 * GB), [of_memory(16 * GB)])
    assert [len(gpu.instances) for gpu in plan.gpus] == [2, 2]
    assert plan.violations == ()


def three_twice():
    return [replace(workload(f"S{i}", "alexnet", 40, 100 + i), replicas_min=2) for i in range(3)]


def test_minimum_replicas_are_kept():
    plan = provision("best", three_twice(), [V100])
    assert Counter(each.workload for gpu in plan.gpus for each in gpu.instances) == {"S0": 2, "S1": 2, "S2": 2}
    assert len(plan.gpus) == 1, "without a failure domain replicas may share a GPU"


def test_no_two_replicas_share_a_gpu():
    plan = provision("best", three_twice(), [V100], Rules(domain=FailureDomain.GPU))
    assert len(plan.gpus) == 2
    for gpu in plan.gpus:
        assert max(Counter(each.workload for each in gpu.instances).values()) == 1
    assert plan.violations == ()


def test_no_two_replicas_share_a_host():
    """Six services of two replicas each that fill GPUs: hosts of two GPUs never hold both replicas of one."""
    services = [replace(workload(f"S{i}", "vgg19", 40 + i, 180), replicas_min=2) for i in range(6)]
    plan = provision("best", services, [replace(V100, per_host=2)], Rules(domain=FailureDomain.HOST, max_replicas=2))
    by_host = {}
    for gpu in plan.gpus:
        by_host.setdefault(gpu.host, []).extend(each.workload for each in gpu.instances)
    assert all(max(Counter(names).values()) == 1 for names in by_host.values())
    assert all(sum(gpu.host == host for gpu in plan.gpus) <= 2 for host in by_host)
    assert plan.violations == ()


def test_hosts_that_are_not_there_are_a_violation():
    kind = replace(V100, per_host=8, available=8)
    plan = provision("best", three_twice(), [kind], Rules(domain=FailureDomain.HOST))
    assert [(each.what, each.predicted, each.allowed) for each in plan.violations] == [("host", 2.0, 1)]


def test_the_published_policies_report_replicas_on_one_gpu():
    """A service that igniter cuts may end with two parts on a GPU; whether it does, the report agrees with the plan."""
    services = [workload("big", "vgg19", 60, 1500), *small(3)]
    for policy in POLICIES:
        plan = provision(policy, services, [V100], Rules(domain=FailureDomain.GPU))
        twice = {
            (name, index)
            for index, gpu in enumerate(plan.gpus)
            for name, n in Counter(each.workload for each in gpu.instances).items()
            if n > 1
        }
        assert {(each.workload, each.gpu) for each in plan.violations if each.what == "gpu"} == twice
        assert policy != "best" or not twice


def test_a_stream_dealt_out_at_random_is_as_random_as_thinning_makes_it():
    assert [split_scv(1.0, n, Balancer.RANDOM) for n in (1, 2, 4)] == [1.0, 1.0, 1.0]
    assert split_scv(0.0, 4, Balancer.RANDOM) == 0.75
    assert split_scv(4.0, 2, Balancer.RANDOM) == 2.5
    assert [split_scv(1.0, n, Balancer.TURNS) for n in (1, 2, 4)] == [1.0, 0.5, 0.25]


def test_a_random_balancer_takes_larger_shares():
    services = [workload("W12", "ssd", 55, 600, Arrivals.poisson())]
    plans = {each: provision("best", services, [V100], Rules(balancer=each)) for each in Balancer}
    shares = {each: sum(gpu.share_ratio for gpu in plan.gpus) for each, plan in plans.items()}
    assert shares[Balancer.RANDOM] > shares[Balancer.TURNS]
    for gpu in plans[Balancer.RANDOM].gpus:
        for each in gpu.instances:
            assert each.replicas > 1
    assert plans[Balancer.RANDOM].violations == ()


def test_evenly_spaced_requests_are_random_once_they_are_dealt_out_at_random():
    plan = provision("best", [workload("W8", "vgg19", 30, 900)], [V100], Rules(balancer=Balancer.RANDOM))
    assert {each.max_delay_s for gpu in plan.gpus for each in gpu.instances if each.replicas > 1} == {0.0}


def test_published_errors_count_for_random_requests_alone():
    profile = catalog.profile("v100")
    model = profile["alexnet"]
    bands = Rules(random_margins=profile.bands)
    for arrivals, factor in ((Arrivals.poisson(), 1 + profile.bands["alexnet"]), (Arrivals(), 1.0)):
        one = workload("W1", "alexnet", 20, 300, arrivals)
        stream = stream_of(one, 1)
        plain, careful = (
            limit_ms(rules, profile.gpu, model, one, stream, 4, shared=True) for rules in (Rules(), bands)
        )
        assert careful == pytest.approx(plain / factor)
    assert stream == RequestStream(300.0, 0.0)
