"""What iGniter is compared with, on the same predictor."""

import pytest

from joulery.policies.placement.provisioning.baselines import BASELINES
from joulery.policies.placement.provisioning.planner import provision
from tests.policies.placement.provisioning.published import V100, app12, workload


def layout(result):
    return [
        [(each.workload, round(100 * each.share_ratio, 6), each.batch) for each in gpu.instances] for gpu in result.gpus
    ]


def test_ffd_plus_takes_five_gpus_and_violates_nine_slos():
    result = provision("ffd", app12(), [V100])
    assert (len(result.gpus), result.usd_per_hour) == (5, pytest.approx(15.30))
    assert len({each.workload for each in result.violations}) == 9
    assert {each.what for each in result.violations} == {"latency"}
    lower = {who: share for gpu in layout(result) for who, share, _ in gpu}
    assert lower == {
        "W1": 20,
        "W2": 7.5,
        "W3": 12.5,
        "W4": 30,
        "W5": 42.5,
        "W6": 15,
        "W7": 60,
        "W8": 72.5,
        "W9": 37.5,
        "W10": 57.5,
        "W11": 15,
        "W12": 92.5,
    }


def test_ffd_plus_plus_leaves_w2_alone_on_the_sixth():
    result = provision("ffd++", app12(), [V100])
    assert len(result.gpus) == 6
    assert result.violations == ()
    assert layout(result)[5] == [("W2", 7.5, 3)]


def test_gpulets_knows_five_shares_and_puts_two_on_a_gpu():
    result = provision("gpulets", app12(), [V100])
    assert all(len(gpu) <= 2 for gpu in layout(result))
    assert {share for gpu in layout(result) for _, share, _ in gpu} <= {20, 40, 50, 60, 80, 100}
    assert len(result.gpus) >= 8


def test_gslice_keeps_ingiters_placement_and_tunes_towards_the_edge():
    placed = [[who for who, _, _ in gpu] for gpu in layout(provision("igniter", app12(), [V100]))]
    tuned = provision("gslice", app12(), [V100])
    assert [[who for who, _, _ in gpu] for gpu in layout(tuned)] == placed
    for gpu in tuned.gpus:
        for each in gpu.instances:
            assert each.latency_s <= each.limit_s or each.share_ratio == 1 or tuned.violations


@pytest.mark.parametrize("name", sorted(BASELINES))
def test_every_service_is_served_in_full(name):
    workloads = [*app12(), workload("big", "vgg19", 60, 900)]
    result = provision(name, workloads, [V100])
    for each in workloads:
        rates = [one.rate_rps for gpu in result.gpus for one in gpu.instances if one.workload == each.id]
        assert sum(rates) == pytest.approx(each.rate_rps), each.id
