import dataclasses

import numpy as np
import pytest

from joulery.perf.power.training_power import RTX3090_CLASSES, JobClass, NodePower, power_table
from joulery.policies.training.baselines import Fifo
from joulery.policies.training.pollux import Pollux, PolluxState, goodput
from tests.policies.training.test_green import view

TABLE = power_table(RTX3090_CLASSES, NodePower())
LINEAR = power_table((JobClass("x", 300.0, np.ones(8)),), NodePower())


def shared(policy: Pollux, seen: object) -> dict[int, int]:
    return dict(policy.step(policy.initial(), seen).decisions[0].value.run)  # type: ignore[arg-type]


def test_goodput_is_throughput_times_the_progress_of_a_larger_batch() -> None:
    made = goodput(LINEAR, {"x": 7.0})
    assert made[0] == pytest.approx(
        [0, 1, 2 * 8 / 9, 3 * 8 / 10, 4 * 8 / 11, 5 * 8 / 12, 6 * 8 / 13, 7 * 8 / 14, 8 * 8 / 15]
    )
    assert goodput(LINEAR, {})[0] == pytest.approx(np.arange(9))
    assert bool(np.all(goodput(TABLE) <= TABLE.speedup)) and bool(np.any(goodput(TABLE)[:, 8] < TABLE.speedup[:, 8]))


def test_the_published_tolerances_give_the_iterations_of_full_trainings() -> None:
    """CIFAR-10: 39,062 steps of 128 samples or 5,722 of 1,024; ImageNet: 576,525 of 200 or 78,453 of 1,600."""
    efficiency = goodput(TABLE)[:, 8] / TABLE.speedup[:, 8]
    names = [job.name for job in RTX3090_CLASSES]
    assert efficiency[names.index("resnet18-cifar")] == pytest.approx(39_062 / (5_722 * 8), abs=0.005)
    assert efficiency[names.index("resnet50-imagenet")] == pytest.approx(576_525 / (78_453 * 8), abs=0.005)


def test_the_share_is_the_best_of_all_shares() -> None:
    """Against every way to hand out the GPUs of a small cluster: the weighted sum of 1 / speed-up is least."""
    policy = Pollux(goodput(TABLE))
    kinds, attained = np.array([0, 4, 5]), np.array([0.0, 1e5, 2e4])
    seen = view(1e5, [0] * 3, [np.nan] * 3, gpus=7, kind=kinds, attained_gpu_s=attained)
    speed = goodput(TABLE)[kinds] / goodput(TABLE)[kinds, 1][:, None]
    weight = np.minimum(1, 14400 / np.maximum(attained, 1)) ** 0.5
    shares = [(a, b, c) for a in range(1, 6) for b in range(1, 6) for c in range(1, 6) if a + b + c <= 7]
    least = min(sum(weight[r] / speed[r, n] for r, n in enumerate(share)) for share in shares)
    got = shared(policy, seen)
    assert sum(weight[r] / speed[r, got[r]] for r in range(3)) == pytest.approx(least)


def test_with_fewer_gpus_than_jobs_those_that_had_least_go_first() -> None:
    attained = np.array([9e5, 100.0, 5e5, 0.0])
    assert set(shared(Pollux(goodput(TABLE)), view(1e6, [0] * 4, [np.nan] * 4, gpus=2, attained_gpu_s=attained))) == {
        1,
        3,
    }
    near = np.array([20_000.0, 19_000.0])
    seen = view(1e6, [1, 0], [np.nan] * 2, gpus=1, attained_gpu_s=near)
    assert shared(Pollux(goodput(TABLE)), seen) == {0: 1}, "who runs is not replaced for next to nothing"
    assert shared(Pollux(goodput(TABLE), inertia=0.0), seen) == {1: 1}


def test_a_job_moves_only_when_its_life_is_long_enough_to_pay_for_it() -> None:
    policy = Pollux(goodput(LINEAR, {}), cap=2)
    for age_s, expected in ((60.0, 1), (1e5, 2)):
        seen = view(age_s, [1], [np.nan], gpus=2, kind=np.zeros(1, int), submit_s=np.zeros(1))
        assert shared(policy, seen) == {0: expected}
    often = PolluxState({0: 500})
    seen = view(1e5, [1], [np.nan], gpus=2, kind=np.zeros(1, int), submit_s=np.zeros(1))
    step = policy.step(often, seen)
    assert step.decisions[0].value.run == {0: 1}, "500 moves have eaten its life"
    assert policy.step(policy.initial(), seen).state.moved == {0: 1}
    assert policy.step(policy.initial(), dataclasses.replace(seen, running=np.zeros(1, int))).state.moved == {0: 0}


def test_unneeded_gpus_are_not_taken_from_a_job() -> None:
    fixed = Pollux(goodput(LINEAR, {}), cap=1)
    seen = view(1e5, [4], [np.nan], gpus=8, kind=np.zeros(1, int), submit_s=np.zeros(1))
    assert shared(fixed, seen) == {0: 4}
    assert shared(Pollux(goodput(LINEAR, {})), view(0.0, [], [])) == {}
    assert Fifo().step(None, seen).decisions[0].value.run == {0: 4}
