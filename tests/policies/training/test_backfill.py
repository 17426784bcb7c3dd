"""EASY backfill: no later job delays the first one that waits."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from joulery.policies.training.baselines import Backfill, Fifo
from joulery.sim.training.cluster import run_training_cluster
from joulery.sim.training.plant import Jobs
from tests.sim.training.test_cluster import TABLE, cluster


def jobs_of(rows: list[tuple[float, float, int]]) -> tuple[Jobs, np.ndarray]:
    """Jobs of one kind by submission, length and GPUs."""
    submit_s, length_s, gpus = (np.array(column) for column in zip(*sorted(rows), strict=True))
    kind = np.zeros(len(rows), int)
    return Jobs(submit_s, length_s * TABLE.speedup[kind, gpus], kind, gpus, gpus), length_s


def test_by_hand() -> None:
    # Four GPUs. The second job waits for the first, until 100; the third ends by then, the fourth would not, and takes
    # the GPU that the second leaves; the fifth finds no GPU that is free for so long.
    jobs, length_s = jobs_of([(0, 100, 2), (1, 50, 3), (2, 90, 1), (3, 500, 1), (4, 500, 1)])
    run = run_training_cluster(cluster(2), jobs, Backfill(length_s), period_s=None)
    assert (run.finish_s - length_s).tolist() == pytest.approx([0.0, 100.0, 2.0, 3.0, 150.0])
    assert run.preemptions == 0


rows = st.lists(
    st.tuples(st.floats(0, 2e4), st.floats(60, 2e4), st.sampled_from([1, 2, 4, 8])), min_size=1, max_size=30
)


@given(rows)
def test_no_job_starts_before_its_submission_and_each_runs_once(found: list[tuple[float, float, int]]) -> None:
    jobs, length_s = jobs_of(found)
    run = run_training_cluster(cluster(4), jobs, Backfill(length_s), period_s=None)
    assert np.all(run.finish_s >= jobs.submit_s + length_s - 1e-6)
    assert run.most_gpus <= 8 and run.preemptions == run.rescales == 0


@given(rows)
def test_the_first_job_that_waits_starts_as_soon_as_without_all_later_ones(
    found: list[tuple[float, float, int]],
) -> None:
    jobs, length_s = jobs_of(found)
    start_s = run_training_cluster(cluster(4), jobs, Backfill(length_s), period_s=None).finish_s - length_s
    fifo_s = run_training_cluster(cluster(4), jobs, Fifo(), period_s=None).finish_s - length_s
    waits = np.flatnonzero(start_s > jobs.submit_s + 1e-6)
    if not len(waits):
        assert start_s == pytest.approx(fifo_s)
        return
    first = int(waits[0])
    alone = Jobs(*(column[: first + 1] for column in (jobs.submit_s, jobs.work_s, jobs.kind, jobs.requested)),
                 jobs.max_gpus[: first + 1])  # fmt: skip
    ahead = run_training_cluster(cluster(4), alone, Backfill(length_s), period_s=None)
    assert start_s[first] == pytest.approx(ahead.finish_s[first] - length_s[first], abs=1e-3)
