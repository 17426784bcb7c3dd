"""Jobs that learn their power limit while they run: what the cluster accounts for them."""

from __future__ import annotations

import numpy as np
import pytest

from joulery.perf.power.training_power import RTX3090_CLASSES, limited, power_table
from joulery.policies.training.baselines import Fifo, Tiresias
from joulery.policies.training.green import Green
from joulery.sim.core.hourly_intensity import Intensity
from joulery.sim.core.streams import Streams
from joulery.sim.training.cluster import TrainingRun, run_training_cluster
from joulery.sim.training.plant import Cluster, Jobs
from joulery.sim.training.study import SCHEMES, Setting, jobs_from_trace, run_scheme, scheme, synthetic_trace
from tests.sim.training.test_cluster import DAY, NODE, TABLE, cluster, workload

SLOW = power_table(limited(RTX3090_CLASSES, 0.667), NODE)
LEARNING_S = (np.full(8, 600.0), np.full(8, 300.0))


def learning(**changes: object) -> Cluster:
    return cluster(**{"table": SLOW, "full_table": TABLE, "learning_s": LEARNING_S, **changes})  # type: ignore[arg-type]


def one(work_s: float) -> TrainingRun:
    job = Jobs(np.array([0.0]), np.array([work_s]), np.array([5]), np.array([1]), np.array([8]))
    return run_training_cluster(learning(nodes=1), job, Fifo())


def test_a_job_runs_at_full_power_until_its_limit_is_learned() -> None:
    limited_s = (7200.0 - 600.0) * 1.13
    assert one(7200.0).jct_s == pytest.approx([600.0 + limited_s])
    energy_j = TABLE.job_w[5, 1] * 600.0 + SLOW.job_w[5, 1] * limited_s
    assert one(7200.0).job_j == pytest.approx([energy_j], rel=1e-12)


def test_a_job_that_ends_before_its_limit_is_learned_is_never_limited() -> None:
    assert one(600.0).jct_s == pytest.approx([600.0])
    assert one(600.0).job_j == pytest.approx([TABLE.job_w[5, 1] * 600.0], rel=1e-12)


def test_the_next_job_of_a_kind_on_as_many_gpus_is_limited_sooner() -> None:
    columns = (np.array([0.0, 9000.0, 20_000.0]), np.full(3, 7200.0), np.full(3, 5), np.array([1, 1, 2]), np.full(3, 2))
    run = run_training_cluster(learning(nodes=1), Jobs(*columns), Fifo())
    assert run.jct_s[:2] == pytest.approx([600.0 + 6600.0 * 1.13, 300.0 + 6900.0 * 1.13])
    speed = TABLE.speedup[5, 2]
    assert run.jct_s[2] == pytest.approx(600.0 + (7200.0 / speed - 600.0) * 1.13), "two GPUs are another kind"


def test_a_kind_without_a_limit_never_waits_for_one() -> None:
    none = (np.full(8, np.inf), np.full(8, np.inf))
    free = cluster(full_table=TABLE, learning_s=none)
    jobs = workload(60)
    first = run_training_cluster(free, jobs, Tiresias())
    assert first.job_j.tobytes() == run_training_cluster(cluster(), jobs, Tiresias()).job_j.tobytes()


def test_a_job_that_goes_on_learns_again_in_less_time() -> None:
    jobs = Jobs(np.array([0.0, 7200.0]), np.array([3e4, 3600.0]), np.array([4, 4]), np.array([2, 2]), np.array([2, 2]))
    sooner = run_training_cluster(learning(nodes=1), jobs, Tiresias(threshold_gpu_s=7200.0))
    as_long = (LEARNING_S[0], LEARNING_S[0])
    later = run_training_cluster(learning(nodes=1, learning_s=as_long), jobs, Tiresias(threshold_gpu_s=7200.0))
    assert sooner.preemptions == later.preemptions == 1
    full_w, slow_w = TABLE.job_w[4, 2], SLOW.job_w[4, 2]
    slowdown = TABLE.speedup[4, 2] / SLOW.speedup[4, 2]
    assert later.job_j[0] - sooner.job_j[0] == pytest.approx(300.0 * (full_w - slowdown * slow_w))


@pytest.mark.parametrize("sleep_after_s", [float("inf"), 600.0])
def test_energy_is_the_integral_of_the_power_that_is_reported(sleep_after_s: float) -> None:
    c = learning(sleep_after_s=sleep_after_s, carbon=Intensity(np.array([1000.0])))
    run = run_training_cluster(c, workload(120), Green(), watch=lambda *_: None)
    at_s, power_w = run.power_timeline.T
    assert at_s[-1] <= run.makespan_s
    energy_j = float(power_w @ np.diff(np.append(at_s, run.makespan_s)))
    assert float(run.job_j.sum()) + run.idle_j == pytest.approx(energy_j, rel=1e-9)
    assert run.cluster_kg == pytest.approx(run.cluster_kwh, rel=1e-9)
    assert run.digest == run_training_cluster(c, workload(120), Green(), watch=lambda *_: None).digest


@pytest.mark.slow
@pytest.mark.parametrize("name", ["swift", "lean", "frugal"])
def test_the_schemes_that_learn_save_and_say_how_they_are_run(name: str) -> None:
    streams = Streams(3)
    jobs = jobs_from_trace(*synthetic_trace(4, 300, "year", streams), streams)
    grid, setting = Intensity(DAY), Setting(nodes=16)
    base, learned = (run_scheme(each, setting, jobs, grid) for each in ("tiresias", name))
    at_once = run_scheme(f"green-{name}", setting, jobs, grid)
    assert at_once.cluster_kg < base.cluster_kg
    assert learned.cluster_kg < 0.95 * base.cluster_kg
    assert f"jobs.policy.kind: {name}" in scheme(name).runs_as
    assert scheme(f"{name}:limit=0.75").tuner is None
    assert scheme(f"{name}:limit=0.75").runs_as == ""


def test_only_schemes_that_learn_their_limits_claim_to_run_with_limits() -> None:
    for name, made in SCHEMES.items():
        limits = made.classes(RTX3090_CLASSES) != RTX3090_CLASSES
        assert (made.tuner is not None) == (limits and bool(made.runs_as)), name
