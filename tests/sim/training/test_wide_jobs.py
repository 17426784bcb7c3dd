"""Jobs that keep their GPUs, some of them as wide as the cluster: none is worse off than under FIFO or backfill."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from benchmarks._wide_jobs import CLUSTER, GPUS, LENGTHS, WIDTHS, wide_jobs
from joulery.domain.decisions import Step
from joulery.policies.training.allocation import ClusterView
from joulery.policies.training.baselines import Backfill, Fifo
from joulery.policies.training.green import Green, GreenState
from joulery.policies.training.queues import LEAST_RESTART_SHARE, RESTART_SHARE
from joulery.sim.training.cluster import TrainingRun, run_training_cluster
from joulery.sim.training.plant import Jobs


def played(jobs: Jobs, length_s: np.ndarray) -> tuple[TrainingRun, TrainingRun, TrainingRun]:
    """Under the default policy, under FIFO and under EASY backfill."""
    return (
        run_training_cluster(CLUSTER, jobs, Green()),
        run_training_cluster(CLUSTER, jobs, Fifo()),
        run_training_cluster(CLUSTER, jobs, Backfill(length_s), period_s=None),
    )


def p99(run: TrainingRun) -> float:
    return float(np.quantile(run.jct_s, 0.99))


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("widths", WIDTHS)
def test_wide_jobs_end_no_later_on_average_than_first_come_first_served(widths: str, lengths: str) -> None:
    runs = [played(*wide_jobs(widths, lengths, seed, count=150)) for seed in range(3)]
    means = [[run.jct_s.mean() / fifo.jct_s.mean() for run in (green, easy)] for green, fifo, easy in runs]
    green, easy = np.mean(means, axis=0)
    assert green <= 1.05 and green <= 1.05 * easy, means
    for other in (1, 2):
        tails = [p99(run[0]) / p99(run[other]) for run in runs]
        assert np.mean(tails) <= 1.05, tails


@pytest.mark.parametrize("seed", range(4))
def test_no_gpu_idles_for_a_wide_job_that_does_not_fit(seed: int) -> None:
    jobs, length_s = wide_jobs("8 to 128", "exponential", seed, load=1.5, count=150)
    green, fifo, _ = played(jobs, length_s)
    assert green.makespan_s <= 1.02 * fifo.makespan_s, "as busy, restarts included"


@pytest.mark.parametrize("lengths", LENGTHS)
def test_restarts_of_ten_minutes_do_not_cost_more_than_the_order_is_worth(lengths: str) -> None:
    cluster = replace(CLUSTER, restart_s=600.0)
    changes = []
    for seed in range(3):
        jobs, _ = wide_jobs("8 to 64", lengths, seed, load=0.9)
        green, fifo = (run_training_cluster(cluster, jobs, policy) for policy in (Green(), Fifo()))
        changes.append((green.jct_s.mean() / fifo.jct_s.mean(), p99(green) / p99(fifo)))
    mean, tail = np.mean(changes, axis=0)
    assert mean <= 1.05 and tail <= 1.05, changes


class Watched:
    """Green, and what its stops cost of what it sees idle, while some jobs are wider than others."""

    def __init__(self) -> None:
        self.policy, self.idle_gpu_s, self.all_gpu_s, self.lost_gpu_s, self.seen_s = Green(), 0.0, 0.0, 0.0, np.nan
        self.name = self.policy.name

    def initial(self) -> GreenState:
        return self.policy.initial()

    def step(self, state: GreenState, view: ClusterView, /) -> Step[GreenState]:
        past_s = 0.0 if np.isnan(self.seen_s) else view.now_s - self.seen_s
        self.idle_gpu_s += past_s * (view.gpus - int(view.running.sum()))
        self.all_gpu_s += past_s * view.gpus
        self.seen_s = view.now_s
        step = self.policy.step(state, view)
        run: Any = step.decisions[0].value.run
        if "some jobs are wide" not in step.decisions[0].reason:
            return step
        stopped = [held for job, held in zip(view.job, view.running, strict=True) if held and int(job) not in run]
        self.lost_gpu_s += view.restart_s * float(sum(stopped))
        return step


@pytest.mark.parametrize("restart_s", [120.0, 600.0, 3600.0])
@pytest.mark.parametrize("load", [0.7, 0.9, 1.3])
def test_restarts_take_no_more_than_a_share_of_what_idles(load: float, restart_s: float) -> None:
    jobs, _ = wide_jobs("8 to 128", "exponential", 1, load, 150)
    watched = Watched()
    run = run_training_cluster(replace(CLUSTER, restart_s=restart_s), jobs, watched)
    saved = RESTART_SHARE * watched.idle_gpu_s + LEAST_RESTART_SHARE * watched.all_gpu_s
    assert 0 < watched.lost_gpu_s <= max(1800.0, restart_s) * GPUS + saved
    assert watched.lost_gpu_s <= restart_s * GPUS * run.preemptions
