"""On a cluster with too few GPUs: jobs of about equal length fare no worse than first come, first served."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from joulery.policies.training.baselines import Fifo
from joulery.policies.training.green import Green
from joulery.sim.training.cluster import run_training_cluster
from joulery.sim.training.plant import Jobs
from tests.sim.training.test_cluster import cluster

ONE_EACH = Fifo(dict.fromkeys(range(8), 1))


def crowd(seed: int, spread: float, load: float, jobs: int = 300, gpus: int = 8) -> Jobs:
    """Jobs of four hours, give or take, on one GPU each."""
    rng = np.random.default_rng(seed)
    work_s = 4 * 3600.0 * rng.uniform(1 - spread, 1 + spread, jobs)
    submit_s = np.sort(rng.uniform(0, work_s.sum() / gpus / load, jobs))
    one = np.ones(jobs, int)
    return Jobs(submit_s, work_s, rng.integers(0, 8, jobs), one, one)


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10_000), st.floats(0, 0.9), st.floats(0.3, 3.0))
def test_in_the_order_of_submission_every_job_ends_when_it_does_first_come_first_served(
    seed: int, spread: float, load: float
) -> None:
    jobs = crowd(seed, spread, load, 80)
    fifo = run_training_cluster(cluster(4), jobs, ONE_EACH)
    for mu in (1.0, 3.0):
        run = run_training_cluster(cluster(4), jobs, Green(order="first-come", mu=mu))
        assert run.finish_s.tolist() == fifo.finish_s.tolist()
        assert run.preemptions == 0


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("spread", [0.0, 0.5, 0.9])
def test_lengths_that_are_observed_to_be_alike_lead_to_the_order_of_submission(seed: int, spread: float) -> None:
    jobs = crowd(seed, spread, 1.3)
    fifo, observed, service = (
        run_training_cluster(cluster(4), jobs, policy) for policy in (ONE_EACH, Green(), Green(order="service"))
    )
    assert observed.jct_s.mean() <= 1.01 * fifo.jct_s.mean()
    assert np.quantile(observed.jct_s, 0.99) <= 1.02 * np.quantile(fifo.jct_s, 0.99)
    assert np.quantile(service.jct_s, 0.99) > 1.2 * np.quantile(fifo.jct_s, 0.99), "the order by service is worse"
