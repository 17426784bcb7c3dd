import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from joulery.domain.errors import DataError
from joulery.perf.power.training_power import RTX3090_CLASSES, NodePower, limited, power_table
from joulery.policies.training.allocation import ClusterView
from joulery.policies.training.baselines import CarbonTime, Fifo, Tiresias
from joulery.policies.training.green import Green, green_paper
from joulery.policies.training.pollux import Pollux, goodput
from joulery.policies.training.service_order import ShiftRule
from joulery.sim.core.hourly_intensity import Intensity
from joulery.sim.training.cluster import TrainingRun, run_training_cluster
from joulery.sim.training.plant import Cluster, Jobs

NODE = NodePower()
TABLE = power_table(RTX3090_CLASSES, NODE)
PRESET = {kind: max(n for n in range(1, 5) if TABLE.degradation[kind, n] >= 0.9) for kind in range(8)}
DAY = 200.0 + 100.0 * np.sin(np.arange(24) / 24 * 2 * np.pi)


def cluster(nodes: int = 4, hourly: np.ndarray = DAY, **changes: object) -> Cluster:
    return dataclasses.replace(Cluster(nodes, NODE, TABLE, Intensity(hourly)), **changes)


def workload(n: int, seed: int = 0, hours: float = 12.0, mean_h: float = 1.5) -> Jobs:
    rng = np.random.default_rng(seed)
    submit_s = np.sort(rng.uniform(0, hours * 3600, n))
    work_s = rng.exponential(mean_h * 3600, n) + 60.0
    return Jobs(submit_s, work_s, rng.integers(0, 8, n), rng.choice([1, 2, 4], n), np.full(n, 8))


POLICIES = {
    "green": (Green(), 1800.0),
    "paper": (green_paper(), 1800.0),
    "tiresias": (Tiresias(PRESET), 1800.0),
    "requested": (Tiresias(), 1800.0),
    "fifo": (Fifo(), 1800.0),
    "clean hours": (Fifo(PRESET, 180.0), 3600.0),
    "goodput": (Pollux(goodput(TABLE)), 300.0),
}


def test_one_job_by_hand() -> None:
    job = Jobs(np.array([1000.0]), np.array([7200.0]), np.array([5]), np.array([1]), np.array([8]))
    run = run_training_cluster(cluster(1), job, Fifo())
    power_w = 0.891 * 350 + 60 + 60
    assert run.jct_s == pytest.approx([7200.0])
    assert run.job_j == pytest.approx([power_w * 7200.0])
    grams = power_w * (2600.0 * DAY[0] + 3600.0 * DAY[1] + 1000.0 * DAY[2]) / 3.6e6
    assert run.job_kg == pytest.approx([grams / 1000.0], rel=1e-12)
    assert run.idle_j == pytest.approx(85.0 * (2 * 1000.0 + 7200.0))
    assert run.peak_w == pytest.approx(power_w + 85.0)


def test_a_preempted_job_pays_for_its_restart_and_loses_no_work() -> None:
    # One GPU pair; the second job, submitted later, goes first once the first has used up its share of service.
    jobs = Jobs(np.array([0.0, 7200.0]), np.array([3e4, 3600.0]), np.array([4, 4]), np.array([2, 2]), np.array([2, 2]))
    run = run_training_cluster(cluster(1), jobs, Tiresias(threshold_gpu_s=7200.0))
    alone_s = jobs.work_s / TABLE.speedup[4, 2]
    assert run.preemptions == 1
    assert run.jct_s[1] == pytest.approx(alone_s[1])
    gap_s = run.jct_s[0] - alone_s[0] - alone_s[1]
    assert gap_s + 1e-6 >= 120.0


def test_a_job_that_starts_while_another_has_waited_too_long_starts_without_its_power_limit() -> None:
    slow = power_table(limited(RTX3090_CLASSES, 0.667), NODE)
    three = np.ones(3, np.int64)
    jobs = Jobs(np.zeros(3), np.array([7200.0, 9000.0, 3600.0]), 5 * three, three, three)
    policy = Green(fixed_gpus=1, preempt_after_s=1e9, lift_after_s=1700.0)
    run = run_training_cluster(cluster(1, table=slow, full_table=TABLE), jobs, policy)
    assert run.preemptions == run.rescales == 0
    assert run.jct_s == pytest.approx([7200.0 * 1.13, 9000.0 * 1.13, 7200.0 * 1.13 + 3600.0])
    limited_w, full_w = slow.job_w[5, 1], TABLE.job_w[5, 1]
    assert run.job_j == pytest.approx([limited_w * 7200.0 * 1.13, limited_w * 9000.0 * 1.13, full_w * 3600.0])
    kept = run_training_cluster(cluster(1, table=slow), jobs, policy)
    assert kept.job_j[2] == pytest.approx(limited_w * 3600.0 * 1.13)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("sleep_after_s", [float("inf"), 600.0])
def test_every_job_ends_energy_is_conserved_and_no_gpu_is_given_twice(name: str, sleep_after_s: float) -> None:
    policy, period_s = POLICIES[name]
    c, jobs = cluster(sleep_after_s=sleep_after_s), workload(120)
    run = run_training_cluster(c, jobs, policy, period_s=period_s)
    assert bool(np.all(np.isfinite(run.finish_s))) and run.most_gpus <= c.gpus
    assert bool(np.all(run.jct_s >= jobs.work_s / TABLE.speedup.max(axis=1)[jobs.kind] - 1e-6))
    flat = run_training_cluster(dataclasses.replace(c, carbon=Intensity(np.array([1000.0]))), jobs, Fifo())
    assert flat.cluster_kg == pytest.approx(flat.cluster_kwh, rel=1e-9)
    again = run_training_cluster(c, jobs, policy, period_s=period_s)
    assert again.digest == run.digest and again.job_kg.tobytes() == run.job_kg.tobytes()


def test_cluster_energy_is_the_integral_of_its_power() -> None:
    """Independent account: rebuild power over time from start and stop of each job under a policy without moves."""
    c, jobs = cluster(2), workload(30)
    run = run_training_cluster(c, jobs, Fifo())
    gpus = np.minimum(jobs.requested, 8)
    start_s = run.finish_s - jobs.work_s / TABLE.speedup[jobs.kind, gpus]
    marks = np.unique(np.concatenate(([0.0], start_s, run.finish_s)))
    middle = (marks[:-1] + marks[1:]) / 2
    on = (start_s[:, None] <= middle) & (middle < run.finish_s[:, None])
    power_w = TABLE.job_w[jobs.kind, gpus] @ on + (c.gpus - gpus @ on) * NODE.idle_share_w
    assert run.cluster_kwh == pytest.approx(float(power_w @ np.diff(marks)) / 3.6e6, rel=1e-9)
    assert run.peak_w == pytest.approx(float(power_w.max()))


def test_without_shifting_the_grid_does_not_matter() -> None:
    jobs = workload(150, seed=4)
    runs = [
        run_training_cluster(cluster(hourly=hourly), jobs, Green(mu=1.0, las=True))
        for hourly in (DAY, DAY[::-1], DAY * 0 + 1)
    ]
    assert len({run.digest for run in runs}) == 1
    rules = [run_training_cluster(cluster(), jobs, Green(mu=1.0, shift=rule)) for rule in ShiftRule]
    assert rules[0].digest == rules[1].digest


def backlog(seed: int, jobs: int = 120) -> Jobs:
    """Two classes of very different power, one GPU each, far more work than the cluster can take at once. Their lengths
    are alike: only in the order by service does the hour decide which goes first."""
    rng = np.random.default_rng(seed)
    submit_s = np.sort(rng.uniform(0, 24 * 3600, jobs))
    kind = rng.choice([4, 5], jobs)
    return Jobs(submit_s, rng.uniform(4, 12, jobs) * 3600, kind, np.ones(jobs, int), np.ones(jobs, int))


def test_shifting_lowers_the_carbon_of_a_backlog() -> None:
    saving = []
    for seed in range(3):
        carbon = [
            float(np.sum(run_training_cluster(cluster(8), backlog(seed), Green(mu=mu, order="service")).job_kg))
            for mu in (1.0, 2.0)
        ]
        saving.append(1 - carbon[1] / carbon[0])
    assert min(saving) > 0.01


def test_sleeping_nodes_save_energy_and_cost_little_time() -> None:
    jobs = workload(40, hours=48.0)
    awake = run_training_cluster(cluster(8), jobs, Tiresias(PRESET))
    asleep = run_training_cluster(cluster(8, sleep_after_s=600.0), jobs, Tiresias(PRESET))
    assert asleep.cluster_kwh < 0.85 * awake.cluster_kwh
    assert float(np.mean(asleep.jct_s)) < 1.05 * float(np.mean(awake.jct_s))
    floor_j = 8 * NODE.asleep_w * asleep.makespan_s
    assert asleep.idle_j > 0.5 * floor_j


def test_carbon_time_waits_for_the_valley() -> None:
    hours = np.concatenate((np.full(6, 500.0), np.full(6, 50.0), np.full(12, 500.0)))
    carbon = Intensity(hours)
    rule = CarbonTime(carbon.integral, short_s=3600.0, long_s=4 * 3600.0)
    assert rule.start_s(0.0, 600.0) == 6 * 3600.0
    assert rule.start_s(6 * 3600.0, 600.0) == 6 * 3600.0
    job = Jobs(np.array([0.0]), np.array([3600.0]), np.array([0]), np.array([1]), np.array([8]))
    run = run_training_cluster(cluster(hourly=hours), job, Fifo(), period_s=None, start_s=rule.start_s)
    assert run.jct_s == pytest.approx([7 * 3600.0])


@given(
    st.lists(st.tuples(st.integers(0, 7), st.sampled_from([0, 1, 2, 4]), st.floats(0, 9), st.booleans()), max_size=30),
    st.floats(0, 600),
    st.sampled_from([1, 2, 8, 16]),
)
@settings(max_examples=60)
def test_a_round_never_gives_out_more_than_there_is(
    rows: list[tuple[int, int, float, bool]], g_per_kwh: float, gpus: int
) -> None:
    n = len(rows)
    kind = np.array([row[0] for row in rows], np.int64)
    running = np.array([row[1] for row in rows], np.int64)
    measured = np.array([row[3] for row in rows], bool) & (running > 0)
    view = ClusterView(
        now_s=1e5,
        gpus=gpus,
        g_per_kwh=g_per_kwh,
        mean_g_per_kwh=300.0,
        restart_s=120.0,
        job=np.arange(n),
        submit_s=np.arange(n, dtype=float),
        running=running,
        max_gpus=np.full(n, 8),
        requested=np.ones(n, np.int64),
        kind=kind,
        executed_s=np.full(n, 100.0),
        attained_gpu_s=np.full(n, 100.0),
        remaining_s=np.full(n, 1e5),
        footprint_kg=np.array([row[2] for row in rows]),
        degradation=np.where(measured, TABLE.degradation[kind, running], np.nan),
        gpu_w=np.where(measured, TABLE.gpu_w[kind, running], np.nan),
    )
    for policy in (Green(), green_paper(), Green(theta=1.0), Tiresias(PRESET), Pollux(goodput(TABLE))):
        state = policy.initial()
        for _ in range(4):
            step = policy.step(state, view)
            state = step.state
            allocation = step.decisions[0].value
            assert sum(allocation.run.values()) <= gpus
            assert all(1 <= want <= 8 for want in allocation.run.values())
            waiting = [job for job, _ in allocation.waiting]
            assert sorted([*allocation.run, *waiting]) == list(range(n))


def test_bad_workloads_and_series_are_refused() -> None:
    one = np.array([1])
    with pytest.raises(DataError, match="order of submission"):
        Jobs(np.array([2.0, 1.0]), np.ones(2), np.zeros(2, int), np.ones(2, int), np.ones(2, int))
    with pytest.raises(DataError, match=r"job 0 .*duration of 0\.0 s"):
        Jobs(np.zeros(1), np.zeros(1), one, one, one)
    for bad in ([], [np.nan], [-1.0]):
        with pytest.raises(DataError, match="hour 0"):
            Intensity(np.array(bad))


def test_a_job_that_can_never_start_is_an_error_not_a_hang() -> None:
    job = Jobs(np.zeros(1), np.ones(1), np.zeros(1, int), np.array([4]), np.array([8]))
    with pytest.raises(DataError, match="never start"):
        run_training_cluster(cluster(1), job, Fifo())


def test_runs_sum_up() -> None:
    run = run_training_cluster(cluster(), workload(10), Fifo())
    assert isinstance(run, TrainingRun)
    assert run.cluster_kg == pytest.approx(float(run.job_kg.sum()) + run.idle_kg)


@pytest.mark.parametrize("name", POLICIES)
def test_idle_energy_of_sleeping_nodes_ends_with_the_last_job(name: str) -> None:
    policy, period_s = POLICIES[name]
    c = cluster(sleep_after_s=600.0)
    run = run_training_cluster(c, workload(40), policy, period_s=period_s, watch=lambda *_: None)
    t_s, power_w = run.power_timeline[:, 0], run.power_timeline[:, 1]

    assert t_s[-1] <= run.makespan_s
    lasting_s = np.diff(np.append(t_s, run.makespan_s))
    assert run.cluster_kwh == pytest.approx(float(power_w @ lasting_s) / 3.6e6, rel=1e-9)
