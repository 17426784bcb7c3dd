"""Jobs that wait for cleaner hours within their slack: what must hold on any workload."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from joulery.perf.power.training_power import RTX3090_CLASSES, NodePower, limited, power_table
from joulery.policies.training.green import Green
from joulery.sim.core.hourly_intensity import Intensity
from joulery.sim.core.streams import Streams
from joulery.sim.training.cluster import run_training_cluster
from joulery.sim.training.plant import Cluster
from joulery.sim.training.study import Setting, jobs_from_trace, run_scheme, synthetic_trace, with_slack
from tests.sim.training.test_cluster import NODE, TABLE, workload

SWING = 300.0 + 250.0 * np.sin(np.arange(24) / 24 * 2 * np.pi)
SLOW = power_table(limited(RTX3090_CLASSES, 0.583), NodePower())


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 10_000),
    st.integers(1, 4),
    st.integers(4, 70),
    st.sampled_from([2.0, 6.0, 24.0]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([0.0, 0.5]),
)
def test_no_job_is_late_because_it_waited(
    seed: int, nodes: int, count: int, slack_h: float, sleeps: bool, slow: bool, ratio: float
) -> None:
    """Every job that was ever made to wait ends by its deadline, in a crowd, with restarts, sleep and power limits."""
    rng = np.random.default_rng(seed)
    grid = Intensity(np.maximum(SWING + rng.normal(0, 80, 24), 1.0))
    cluster = Cluster(
        nodes, NODE, SLOW if slow else TABLE, grid, sleep_after_s=600.0 if sleeps else float("inf"), wake_s=300.0
    )  # fmt: skip
    jobs = with_slack(workload(count, seed, hours=18.0, mean_h=3.0), slack_h * 3600.0)
    reserved: set[int] = set()

    def watch(_now_s: float, _view: object, step: object) -> None:
        reserved.update(job for job, known in step.state.jobs.items() if known.reserved)  # type: ignore[attr-defined]

    run = run_training_cluster(cluster, jobs, Green(delay_ratio=ratio), watch=watch)
    assert jobs.deadline_s is not None
    late = [job for job in sorted(reserved) if run.finish_s[job] > jobs.deadline_s[job] + 1e-6]
    assert not late
    assert run.most_gpus <= cluster.gpus


@pytest.mark.parametrize("scheme", ["green", "green-lean", "tiresias"])
def test_without_slack_every_decision_is_as_before(scheme: str) -> None:
    jobs = jobs_from_trace(*synthetic_trace(2, 120, "year", Streams(3)), Streams(3))
    free = dataclasses.replace(jobs, deadline_s=np.full(len(jobs), np.inf))
    carbon, setting = Intensity(SWING), Setting(nodes=8)
    digests = {run_scheme(scheme, setting, each, carbon).digest for each in (jobs, with_slack(jobs, 0.0), free)}
    assert len(digests) == 1
    if scheme == "green":
        patient = with_slack(jobs, 86_400.0)
        assert run_scheme("green:delay_ratio=none", setting, patient, carbon).digest in digests
        assert run_scheme("green", setting, patient, carbon).digest not in digests


@pytest.mark.slow
def test_more_slack_means_fewer_grams_in_expectation() -> None:
    carbon, setting = Intensity(SWING), Setting(nodes=6)
    grams = []
    for slack_h in (0.0, 3.0, 12.0, 24.0):
        runs = []
        for seed in range(6):
            jobs = jobs_from_trace(*synthetic_trace(3, 40, "year", Streams(seed)), Streams(seed))
            run = run_scheme("green-sleep:delay_ratio=0.1", setting, with_slack(jobs, slack_h * 3600.0), carbon)
            runs.append(run.cluster_kg)
        grams.append(float(np.mean(runs)))
    assert grams == sorted(grams, reverse=True)
    assert grams[-1] < 0.8 * grams[0]


def test_only_jobs_over_the_threshold_have_a_deadline() -> None:
    jobs = workload(50)
    slack = with_slack(jobs, 7200.0, over_s=5400.0)
    assert slack.deadline_s is not None
    long = jobs.work_s > 5400.0
    assert slack.deadline_s[long] == pytest.approx((jobs.submit_s + jobs.work_s + 7200.0)[long])
    assert bool(np.all(np.isinf(slack.deadline_s[~long]))) and with_slack(jobs, 0.0) is jobs
