import numpy as np
import pytest

from joulery.domain.errors import ConfigError, DataError
from joulery.perf.power.training_power import RTX3090_CLASSES, NodePower, power_table, widened
from joulery.policies.training.allocation import ClusterView
from joulery.sim.core.hourly_intensity import Intensity
from joulery.sim.core.streams import Streams
from joulery.sim.training import savings as training_savings
from joulery.sim.training.plant import Jobs
from joulery.sim.training.savings import _sampled_jobs, most_at_once, savings
from joulery.sim.training.site_machines import SiteMachines
from joulery.sim.training.study import Setting, run_scheme

DAY = Intensity(200.0 + 150.0 * np.sin(np.arange(24) / 24 * 2 * np.pi))


def past(count: int = 60) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    return np.sort(rng.uniform(0, 86_400, count)), rng.uniform(600, 20_000, count), rng.choice([1, 2, 4], count)


def test_the_same_scheduler_saves_exactly_nothing() -> None:
    found = savings(*past(), DAY, "fifo", 32, samples=3)
    for spread in (found.cluster_carbon, found.cluster_energy, found.job_carbon, found.mean_jct, found.p99_jct):
        assert (spread.mean, spread.low, spread.high) == (0.0, 0.0, 0.0)


def test_sleeping_and_limits_save_and_the_interval_holds_the_mean() -> None:
    found = savings(*past(), DAY, "green-lean", 32, samples=6)
    assert found.cluster_carbon.low < found.cluster_carbon.mean < found.cluster_carbon.high < 0
    assert found.cluster_energy.mean < 0 and (found.jobs, found.gpus, found.samples) == (60, 32, 6)
    assert savings(*past(), DAY, "green-lean", 32, samples=6) == found


def test_the_interval_leaves_one_draw_in_ten_out_and_restarts_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    restarts: list[float] = []
    silent: list[bool] = []
    run = training_savings.run_scheme

    def seen(policy: str, setting: Setting, *more: object) -> object:
        restarts.append(setting.restart_s)
        silent.append(setting.silent)
        return run(policy, setting, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(training_savings, "run_scheme", seen)
    change = savings(*past(20), DAY, "green-lean", 32, samples=8).job_carbon
    monkeypatch.undo()
    each = [savings(*past(20), DAY, "green-lean", 32, samples=n).job_carbon.mean * n for n in range(1, 9)]
    each_sample = np.diff([0.0, *each])
    assert (change.low, change.high) == pytest.approx(tuple(np.quantile(each_sample, (0.05, 0.95))))
    assert restarts[::2] == restarts[1::2], "both schedulers in the same world"
    assert all(silent), "no log contains progress"
    assert len(set(restarts[::2])) == 8 and 30.0 <= min(restarts) < max(restarts) <= 300.0


def test_elapsed_time_comes_back_on_the_gpus_a_job_had() -> None:
    submit_s, elapsed_s, gpus = past()
    jobs, classes = _sampled_jobs(submit_s, elapsed_s, gpus, Streams(0)("x"), SiteMachines())
    assert [job.name for job in classes] == [job.name for job in RTX3090_CLASSES]
    table = power_table(classes, NodePower())
    assert jobs.work_s / table.speedup[jobs.kind, gpus] == pytest.approx(elapsed_s)


def test_jobs_wider_than_any_measurement_are_as_busy_as_the_widest_measured() -> None:
    table = power_table(widened(RTX3090_CLASSES, 16), NodePower())
    assert table.speedup.shape == (8, 17)
    assert table.speedup[:, 16] == pytest.approx(2 * table.speedup[:, 8])
    assert widened(RTX3090_CLASSES, 4) == RTX3090_CLASSES
    wide = savings(np.zeros(3), np.full(3, 3600.0), np.array([16, 1, 2]), DAY, "green-lean", 32, samples=2)
    assert wide.jobs == 3


def test_the_most_gpus_held_at_once() -> None:
    start_s, elapsed_s = np.array([0.0, 10.0, 20.0]), np.array([10.0, 15.0, 5.0])
    assert most_at_once(start_s, elapsed_s, np.array([4, 2, 1])) == 4
    assert most_at_once(start_s, elapsed_s, np.array([1, 2, 1])) == 3
    assert most_at_once(np.zeros(0), np.zeros(0), np.zeros(0, int)) == 0


def test_what_cannot_be_answered_is_said() -> None:
    with pytest.raises(DataError, match="no job held a GPU"):
        savings(np.zeros(0), np.zeros(0), np.zeros(0, int), DAY, "green", 2)
    with pytest.raises(ConfigError, match="no such training policy"):
        savings(*past(), DAY, "greener", 32, samples=2)
    with pytest.raises(DataError, match="8 GPUs, the cluster has 4"):
        savings(np.zeros(1), np.ones(1), np.array([8]), DAY, "green", 4, samples=2)


@pytest.mark.parametrize("name", ["green", "green-paper", "lean", "frugal"])
def test_jobs_that_keep_their_gpus_run_on_no_other_number(name: str) -> None:
    rng = np.random.default_rng(3)
    gpus = rng.choice([1, 2, 4, 16], 40)
    jobs = Jobs(np.sort(rng.uniform(0, 40_000, 40)), rng.uniform(600, 9000, 40) * gpus, rng.integers(0, 8, 40), gpus,
                gpus, min_gpus=gpus)  # fmt: skip
    seen: list[tuple[int, int]] = []

    def watch(now_s: float, view: ClusterView, step: object) -> None:
        seen.extend(zip(view.running.tolist(), gpus[view.job].tolist(), strict=True))

    run = run_scheme(name, Setting(nodes=16), jobs, DAY, watch)
    assert len(run.jct_s) == 40 and {running for running, _ in seen} > {0}
    assert all(running in (0, had) for running, had in seen)


def test_savings_where_jobs_keep_their_gpus() -> None:
    kept = SiteMachines(keeps_gpus=True)
    found = savings(*past(), DAY, "lean", 32, samples=3, machines=kept)
    assert found.keeps_gpus and found.cluster_energy.mean < 0.0
    assert found.mean_jct.mean != savings(*past(), DAY, "lean", 32, samples=3).mean_jct.mean
    with pytest.raises(ConfigError, match="chooses the GPUs"):
        savings(*past(), DAY, "pollux", 32, samples=3, machines=kept)
