"""Jobs that need different numbers of GPUs, some of them many: the oldest goes first, and no GPU idles for it."""

import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from joulery.policies.training.green import Green, ServiceOrder
from joulery.policies.training.service_order import oldest_gpus
from tests.policies.training.test_green import view

crowds = st.tuples(st.lists(st.sampled_from([1, 2, 4, 8, 16]), min_size=2, max_size=25), st.integers(0, 2**32 - 1))


@given(crowds, st.sampled_from([16, 24, 64]), st.sampled_from(["service", "first-come"]))
def test_the_oldest_job_runs_and_no_job_waits_that_would_fit(
    crowd: tuple[list[int], int], gpus: int, order: ServiceOrder
) -> None:
    widths, seed = np.array(crowd[0]), crowd[1]
    assume(widths.min() < widths.max() and 2 * widths.max() > gpus // 4)
    rng = np.random.default_rng(seed)
    running = np.zeros(len(widths), int)
    for at in rng.permutation(len(widths)):
        if running.sum() + widths[at] <= gpus and rng.random() < 0.7:
            running[at] = widths[at]
    policy = Green(order=order)
    state = policy.initial()
    for turn in range(6):
        seen = view(
            1e5 + 1800.0 * turn, running.tolist(), [1.0] * len(widths), gpus=gpus, min_gpus=widths, max_gpus=widths,
            requested=widths, footprint_kg=widths * rng.uniform(0, 9, len(widths)),
            attained_gpu_s=widths * rng.uniform(0, 9e4, len(widths)), gpu_w=rng.uniform(50, 300, len(widths)),
        )  # fmt: skip
        step = policy.step(state, seen)
        state, run = step.state, step.decisions[0].value.run
        assert 0 in run
        assert all(run[job] == widths[job] for job in run)
        free = gpus - sum(run.values())
        assert free >= 0 and all(widths[job] > free for job in range(len(widths)) if job not in run)
        running = np.array([run.get(job, 0) for job in range(len(widths))])


def test_of_jobs_that_came_at_once_none_takes_the_gpus_of_the_one_before_it() -> None:
    widths = np.array([4, 8, 1, 1])
    seen = view(
        1e5, [4, 0, 1, 1], [1.0, math.nan, 1.0, 1.0], gpus=8, min_gpus=widths, max_gpus=widths, requested=widths,
        submit_s=np.zeros(4), footprint_kg=np.array([9.0, 0.0, 1.0, 1.0]),
    )  # fmt: skip
    for order in ("service", "first-come"):
        policy = Green(order=order)
        assert set(policy.step(policy.initial(), seen).decisions[0].value.run) == {0, 2, 3}


@pytest.mark.parametrize(
    ("gpus", "least", "expected"),
    [
        (64, [], (16, False)),
        (64, [1] * 9, (16, False)),
        (64, [32] * 9, (16, False)),  # all alike: none overtakes another for its width
        (64, [1, 8, 8], (16, False)),  # the share holds two of the widest
        (64, [1, 1, 1, 16], (19, True)),  # four average jobs
        (64, [1] * 30 + [33], (16, True)),  # the share is more
        (64, [16, 32, 64], (64, True)),
        (3, [1, 2], (3, True)),
    ],
)
def test_gpus_of_the_oldest_by_hand(gpus: int, least: list[int], expected: tuple[int, bool]) -> None:
    assert oldest_gpus(0.25, gpus, least) == expected
    assert oldest_gpus(0.0, gpus, least) == (0, False), "no share, no exception"
