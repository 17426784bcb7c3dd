"""Jobs on nodes: what fits by count need not fit by node."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from joulery.perf.power.training_power import RTX3090_CLASSES, NodePower, power_table
from joulery.policies.training.baselines import Fifo
from joulery.sim.core.hourly_intensity import Intensity
from joulery.sim.training.cluster import TrainingRun, run_training_cluster
from joulery.sim.training.placement import NodePool
from joulery.sim.training.plant import Cluster, Jobs
from tests.sim.training.test_cluster import DAY, POLICIES, workload

DAYS = Intensity(DAY)


def cluster(nodes: int, gpus: int = 2, *, placed: bool = True, **changes: object) -> Cluster:
    node = NodePower(gpus=gpus)
    made = Cluster(nodes, node, power_table(RTX3090_CLASSES, node), DAYS, placed=placed)
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


def jobs(*rows: tuple[float, float, int]) -> Jobs:
    """Submission, seconds on its GPUs, GPUs; of the kind that loses least on two GPUs."""
    table = power_table(RTX3090_CLASSES, NodePower())
    submit_s, seconds, gpus = (np.array(column) for column in zip(*rows, strict=True))
    kind = np.zeros(len(rows), np.int64)
    work_s = seconds * table.speedup[kind, gpus]
    return Jobs(submit_s.astype(float), work_s, kind, gpus.astype(np.int64), gpus.astype(np.int64))


def test_free_gpus_on_two_nodes_hold_no_job_of_two() -> None:
    """Two jobs fill each node; the first of each ends. The fifth needs both GPUs of one node and waits for it."""
    load = jobs((0, 100, 1), (0, 1000, 1), (0, 100, 1), (0, 2000, 1), (50, 500, 2))
    placed = run_training_cluster(cluster(2), load, Fifo(), period_s=None)
    counted = run_training_cluster(cluster(2, placed=False), load, Fifo(), period_s=None)
    assert counted.finish_s[4] == pytest.approx(600.0) and counted.fragmented_gpu_s == 0.0
    assert placed.finish_s[4] == pytest.approx(1500.0), "when the second job ends, its node is empty"
    assert placed.fragmented_gpu_s == pytest.approx(2 * 900.0)


def test_a_job_wider_than_a_node_gets_whole_nodes_and_the_rest_of_one() -> None:
    pool = NodePool(3, 4)
    assert pool.take(1, 6) is False and sorted(pool.free) == [0, 2, 4]
    assert not pool.fits(8) and pool.fits(4) and pool.fits(6)
    pool.take(2, 2)
    assert sorted(pool.free) == [0, 0, 4], "the least room that holds it"
    assert pool.give(1, 10.0) == 1 and sorted(pool.free) == [2, 4, 4]


def test_nodes_that_idled_longest_sleep_and_wake_last() -> None:
    pool = NodePool(2, 2)
    pool.take(1, 2)
    assert pool.sleep(600.0, 600.0) == 1 and pool.awake == 1
    pool.give(1, 50.0)
    assert pool.take(2, 1) is False, "the awake node first"
    assert pool.take(3, 2) is True and pool.awake == 2
    assert pool.sleep(1e9, 600.0) == 0, "no node with a job sleeps"


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 1000), st.sampled_from(sorted(POLICIES)), st.booleans())
def test_with_one_gpu_a_node_placing_is_counting(seed: int, name: str, sleeping: bool) -> None:
    policy, period_s = POLICIES[name]
    load, after_s = workload(12, seed), 600.0 if sleeping else float("inf")
    runs = [
        run_training_cluster(cluster(8, 1, placed=placed, sleep_after_s=after_s), load, policy, period_s=period_s)
        for placed in (False, True)
    ]
    assert runs[0].digest == runs[1].digest
    assert runs[0].cluster_kwh == pytest.approx(runs[1].cluster_kwh, rel=1e-9)
    assert runs[1].fragmented_gpu_s == 0.0


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 1000), st.sampled_from(sorted(POLICIES)), st.sampled_from([2, 4]))
def test_every_job_ends_and_every_joule_is_a_jobs_or_idle(seed: int, name: str, gpus: int) -> None:
    policy, period_s = POLICIES[name]
    load = workload(14, seed)
    run: TrainingRun = run_training_cluster(
        cluster(8 // gpus, gpus, sleep_after_s=600.0), load, policy, period_s=period_s,
        watch=lambda now_s, view, step: None,
    )  # fmt: skip
    assert np.isfinite(run.finish_s).all() and run.most_gpus <= 8
    edges_s, watts = run.power_timeline[:, 0], run.power_timeline[:, 1]
    ends_s = np.append(edges_s[1:], run.makespan_s)
    joules = float(np.sum(watts * np.clip(np.minimum(ends_s, run.makespan_s) - edges_s, 0.0, None)))
    assert joules == pytest.approx(run.cluster_kwh * 3.6e6, rel=1e-9)
    assert 0.0 <= run.fragmented_gpu_s <= 8 * run.makespan_s
