"""Jobs that keep their GPUs, some of them as wide as the cluster: none is worse off than under FIFO or backfill."""

import numpy as np
import pytest

from joulery.perf.power.training_power import RTX3090_CLASSES, power_table, widened
from joulery.policies.training.baselines import Backfill, Fifo
from joulery.policies.training.green import Green
from joulery.sim.core.hourly_intensity import Intensity
from joulery.sim.training.cluster import TrainingRun, run_training_cluster
from joulery.sim.training.plant import Cluster, Jobs
from tests.sim.training.test_cluster import DAY, NODE

GPUS = 128
TABLE = power_table(widened(RTX3090_CLASSES, GPUS), NODE)
CLUSTER = Cluster(GPUS // NODE.gpus, NODE, TABLE, Intensity(DAY), silent=True)
WIDTHS = {
    "8 to 128": (8, 16, 32, 64, 128),
    "8 to 64": (8, 16, 32, 64),
    "1 to 128": (1, 2, 4, 8, 16, 32, 64, 128),
    "capability": (64, 96, 128),
    "one of 64 beside 31 of one": (*(1,) * 31, 64),
}
LENGTHS = ("equal", "exponential", "log-normal")


def wide_jobs(widths: str, lengths: str, seed: int, load: float = 0.7, count: int = 250) -> tuple[Jobs, np.ndarray]:
    """Jobs of two hours on average, and how long each runs on its GPUs."""
    rng = np.random.default_rng(seed)
    gpus = rng.choice(WIDTHS[widths], count)
    length_s = {
        "equal": np.full(count, 7200.0),
        "exponential": rng.exponential(7200.0, count) + 60.0,
        "log-normal": rng.lognormal(np.log(7200.0) - 1.5**2 / 2, 1.5, count) + 60.0,
    }[lengths]
    kind = rng.integers(0, 8, count)
    submit_s = np.sort(rng.uniform(0, float(length_s @ gpus) / GPUS / load, count))
    return Jobs(submit_s, length_s * TABLE.speedup[kind, gpus], kind, gpus, gpus, min_gpus=gpus), length_s


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
    runs = [played(*wide_jobs(widths, lengths, seed)) for seed in range(3)]
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
