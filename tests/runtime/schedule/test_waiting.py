"""Jobs with a deadline on a cluster in memory: they wait for cleaner hours, are suspended, and end in time."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from joulery.accounting.training_jobs import MeasureRules
from joulery.adapters.carbon.file import SeriesSource
from joulery.domain.cluster import JobState, Stop
from joulery.domain.energy.carbon import CarbonSeries
from joulery.policies.training.green import Green
from joulery.runtime.schedule.intensity_tracker import IntensityTracker
from joulery.runtime.schedule.rounds import SchedulerTiming
from joulery.runtime.schedule.scheduler import Scheduler
from joulery.store.journal import Journal
from tests.runtime.schedule.fake_cluster import FakeCluster
from tests.runtime.schedule.test_scheduler import T0_S, World

HOUR_S = 3600.0
FIRST_S = math.floor(T0_S / HOUR_S) * HOUR_S


class GridWorld(World):
    """A world whose grid has the given intensity by the hour, known in advance."""

    def __init__(self, folder: Path, cluster: FakeCluster, hourly: list[float]) -> None:
        self.hourly = hourly
        super().__init__(folder, cluster, policy=Green(theta=1.0, cap=4, delay_ratio=0.1), quantum_s=600.0)
        self.now_s = FIRST_S

    def begin(self) -> None:
        self.journal = Journal(self.file)
        hourly = [self.hourly[0]] * 48 + self.hourly * 3
        edges_s = FIRST_S + HOUR_S * (np.arange(len(hourly) + 1) - 48.0)
        series = CarbonSeries("X", edges_s, np.array(hourly, float), source="test")
        grid = IntensityTracker(SeriesSource(series, series), 24 * HOUR_S, lambda _: None)
        self.scheduler = Scheduler(
            self.cluster, self.policy, self.journal, self.cluster, grid,
            lambda kind, fields: self.log.append((kind, fields)), mode=self.mode,
            timing=SchedulerTiming(self.quantum_s, 60.0, MeasureRules(120.0, 2)),
        )  # fmt: skip

    def hours(self, hours: float) -> None:
        self.run(hours * HOUR_S, 60.0)


CLEAN_THIRD = [400.0, 400.0, 100.0, 100.0, *[400.0] * 20]


def test_a_job_waits_for_a_cleaner_hour_also_through_a_crash_and_ends_in_time(tmp_path: Path) -> None:
    world = GridWorld(tmp_path, FakeCluster(rate=1 / 3000), CLEAN_THIRD)
    deadline_s = FIRST_S + 6 * HOUR_S
    world.cluster.submit(1, deadline_s=deadline_s, limit_s=HOUR_S, submit_s=FIRST_S)
    world.cluster.submit(2, limit_s=HOUR_S, submit_s=FIRST_S)
    world.hours(0.5)
    assert set(world.cluster.running()) == {2}, "the job without a deadline starts at once"
    assert world.scheduler.state.patient == {1} and world.cluster.held() == {1}
    world.crash()
    assert world.scheduler.state.patient == {1}
    world.hours(1.3)
    assert not world.cluster.running()
    world.hours(0.5)
    assert 1 in world.cluster.running()
    world.hours(1)
    assert world.cluster.jobs[1].state is JobState.DONE and world.now_s < deadline_s
    assert "wait for a cleaner hour" in world.said("round")[0]["text"]


@pytest.mark.parametrize(
    "more",
    [{"deadline_s": FIRST_S + 1.05 * HOUR_S, "limit_s": HOUR_S}, {"deadline_s": FIRST_S + 6 * HOUR_S}],
    ids=["no time to lose", "of unknown length"],
)
def test_a_job_that_cannot_wait_safely_starts_at_once(more: dict[str, float], tmp_path: Path) -> None:
    world = GridWorld(tmp_path, FakeCluster(rate=1 / 3000), CLEAN_THIRD)
    world.cluster.submit(1, submit_s=FIRST_S, **more)
    world.hours(0.1)
    assert set(world.cluster.running()) == {1}


def test_a_job_that_comes_between_rounds_waits_for_the_next_one_in_a_dirty_hour(tmp_path: Path) -> None:
    world = GridWorld(tmp_path, FakeCluster(rate=1 / 3000), CLEAN_THIRD)
    deadline = {"deadline_s": FIRST_S + 8 * HOUR_S, "limit_s": HOUR_S}
    world.cluster.submit(1, submit_s=FIRST_S, **deadline)
    world.run(120, 60.0)
    world.cluster.submit(2, submit_s=world.now_s, **deadline)
    world.cluster.submit(3, submit_s=world.now_s, deadline_s=world.now_s + 1.1 * HOUR_S, limit_s=HOUR_S)
    world.run(240, 60.0)
    assert set(world.cluster.running()) == {3} and world.scheduler.state.patient == {1, 2}
    assert len(world.said("round")) == 1
    world.crash()
    assert world.scheduler.state.patient == {1, 2}
    world.hours(4)
    assert {job.state for job in world.cluster.jobs.values()} == {JobState.DONE}


@pytest.mark.parametrize("pool", ["a", "b"])
def test_the_first_job_of_a_pool_waits_too(pool: str, tmp_path: Path) -> None:
    layout = {"n1": ("a", 2), "n2": ("b", 2)}
    world = GridWorld(tmp_path, FakeCluster(rate=1 / 3000, layout=layout), CLEAN_THIRD)
    world.run(60, 60.0)
    world.cluster.submit(
        1, submit_s=world.now_s, deadline_s=FIRST_S + 8 * HOUR_S, limit_s=HOUR_S, pool=pool
    )  # fmt: skip
    world.hours(1)
    assert not world.cluster.running() and world.scheduler.state.patient == {1}


def test_a_job_that_reports_progress_is_suspended_in_dirty_hours_and_another_is_not(tmp_path: Path) -> None:
    hourly = [20.0, 300.0, 500.0, 100.0, 200.0, *[500.0] * 19]
    for rate, suspended in ((1 / 6000, True), (0.0, False)):
        folder = tmp_path / str(suspended)
        folder.mkdir()
        world = GridWorld(folder, FakeCluster(rate=rate), hourly)
        deadline_s = FIRST_S + 9 * HOUR_S
        world.cluster.submit(1, deadline_s=deadline_s, limit_s=2 * HOUR_S, submit_s=FIRST_S)
        world.hours(0.9)
        assert set(world.cluster.running()) == {1}
        world.hours(1)
        stops = [action for action in world.cluster.actions if isinstance(action, Stop)]
        assert bool(stops) == suspended
        if suspended:
            assert not world.cluster.running()
            reasons = [fields["reason"] for fields in world.said("action") if fields["do"] == "stop"]
            assert all("suspended" in reason for reason in reasons)
            world.hours(3)
            assert world.cluster.jobs[1].state is JobState.DONE and len(stops) == 1
