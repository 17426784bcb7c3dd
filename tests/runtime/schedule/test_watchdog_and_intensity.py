"""The lock, the watchdog, the intensity, and a policy that is written down."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
from pathlib import Path

import numpy as np
import pytest

from joulery.domain.energy.carbon import CarbonSeries
from joulery.domain.errors import CapabilityError, ConfigError, DataError
from joulery.policies.training.allocation import ClusterView
from joulery.policies.training.green import Green
from joulery.runtime.schedule.intensity_tracker import IntensityTracker
from joulery.runtime.schedule.watchdog import SchedulerLock, take_over, watch_lock
from tests.runtime.schedule.fake_cluster import FakeCluster


def test_one_holder_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("joulery.runtime.schedule.watchdog._LOCK_PATIENCE_S", 0.1)
    (tmp_path / "scheduler.lock").write_text("4000000000 and more")
    with SchedulerLock(tmp_path), pytest.raises(ConfigError, match=f"scheduled by process {os.getpid()} already"):
        SchedulerLock(tmp_path).take()
    with SchedulerLock(tmp_path):
        pass


def _hold(folder: str, ready: object, over: object) -> None:
    SchedulerLock(Path(folder)).take()
    ready.set()  # type: ignore[attr-defined]
    over.wait(30)  # type: ignore[attr-defined]


def test_a_holder_that_dies_lets_go(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ready, over = context.Event(), context.Event()
    holder = context.Process(target=_hold, args=(str(tmp_path), ready, over))
    holder.start()
    try:
        assert ready.wait(30)
        assert not SchedulerLock(tmp_path).try_take()
    finally:
        holder.kill()
        holder.join()
    with SchedulerLock(tmp_path):
        pass
    holder.close()


class Dog:
    """A watchdog in made-up time, beside a scheduler that comes and goes."""

    def __init__(self, folder: Path, cluster: FakeCluster, alive: dict[float, bool]) -> None:
        self.folder, self.cluster, self.alive = folder, cluster, alive
        self.now_s, self.said = 0.0, []
        self.relieved_s = math.inf
        self.scheduler = SchedulerLock(folder)
        self.scheduler.take()

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        for at_s, alive in list(self.alive.items()):
            if self.now_s >= at_s:
                del self.alive[at_s]
                self.scheduler.take() if alive else self.scheduler.close()

    def watch(self, patience_s: float) -> int:
        return watch_lock(
            SchedulerLock(self.folder), patience_s, self.find, self.said.append,
            relieved=lambda: self.now_s >= self.relieved_s, sleep=self.sleep, clock_s=lambda: self.now_s,
        )  # fmt: skip

    def find(self) -> FakeCluster:
        self.cluster.snapshot()
        return self.cluster


def held() -> FakeCluster:
    cluster = FakeCluster()
    cluster.submit(1, held_by_us=True)
    cluster.submit(2)
    return cluster


def test_the_watchdog_waits_while_the_scheduler_lives_and_releases_when_it_stays_dead(tmp_path: Path) -> None:
    dog = Dog(tmp_path, held(), {50.0: False})

    assert dog.watch(10.0) == 1
    assert 60.0 <= dog.now_s <= 62.0
    assert dog.cluster.held() == set()


def test_a_scheduler_that_comes_back_in_time_keeps_its_holds(tmp_path: Path) -> None:
    dog = Dog(tmp_path, held(), {5.0: False, 12.0: True, 100.0: False})

    assert dog.watch(10.0) == 1
    assert dog.now_s >= 110.0, "the first death was no reason"


def test_a_cluster_that_does_not_answer_is_asked_again(tmp_path: Path) -> None:
    cluster = held()
    cluster.away = True
    dog = Dog(tmp_path, cluster, {0.0: False})
    sleep = dog.sleep

    def wake(seconds: float) -> None:
        sleep(seconds)
        probe = SchedulerLock(tmp_path)
        assert probe.try_take(), "a scheduler may come back meanwhile"
        probe.close()
        cluster.away = dog.now_s < 4000.0

    dog.sleep = wake  # type: ignore[method-assign]
    assert dog.watch(1.0) == 1 and dog.now_s >= 4000.0
    assert any("does not answer" in text for text in dog.said)


def test_a_watchdog_that_another_relieves_ends_and_releases_nothing(tmp_path: Path) -> None:
    dog = Dog(tmp_path, held(), {50.0: False})
    dog.relieved_s = 30.0
    assert dog.watch(10.0) == 0 and dog.now_s < 32.0
    assert dog.cluster.held() == {1}


def test_the_last_watchdog_that_comes_is_on_duty(tmp_path: Path) -> None:
    first = take_over(tmp_path / "watchdog.pid", 10)
    assert first()
    second = take_over(tmp_path / "watchdog.pid", 11)
    assert second() and not first()
    (tmp_path / "watchdog.pid").unlink()
    assert second(), "no other scheduler took over"


class Source:
    """Intensity of each hour, or refusals."""

    def __init__(self, history: object, forecast: object) -> None:
        self.answers = {"history": history, "forecast": forecast}
        self.asked = 0

    def _answer(self, what: str, t0_s: float, t1_s: float) -> CarbonSeries:
        self.asked += 1
        answer = self.answers[what]
        if isinstance(answer, Exception):
            raise answer
        return CarbonSeries("X", [t0_s - 7200.0, t1_s + 7200.0], [answer], source="test", signal="marginal")  # type: ignore[arg-type,list-item]

    def history(self, t0_s: float, t1_s: float) -> CarbonSeries:
        return self._answer("history", t0_s, t1_s)

    def forecast(self, t0_s: float, t1_s: float) -> CarbonSeries:
        return self._answer("forecast", t0_s, t1_s)


def intensity(source: Source | None) -> tuple[IntensityTracker, list[str]]:
    said: list[str] = []
    return IntensityTracker(source, 86_400.0, said.append), said


def test_now_and_the_mean_ahead() -> None:
    made, said = intensity(Source(100.0, 150.0))
    grid = made.grid(1e9)

    assert (grid.g_per_kwh, grid.mean_g_per_kwh, grid.basis, grid.known) == (100.0, 150.0, "forecast", True)
    assert grid.ahead_g_per_kwh is not None and grid.ahead_g_per_kwh.tolist() == [150.0] * 24
    assert grid.expected_g_per_kwh == 150.0, "what the forecast says of now, not what is"
    assert said == []


@pytest.mark.parametrize("refusal", [DataError("none"), CapabilityError("this source does not forecast"), math.nan])
def test_without_a_forecast_the_past_is_used(refusal: object) -> None:
    grid = intensity(Source(100.0, refusal))[0].grid(1e9)

    assert (grid.mean_g_per_kwh, grid.basis, grid.ahead_g_per_kwh) == (100.0, "history", None)


@pytest.mark.parametrize("value", [0.0, -50.0])
def test_zero_and_negative_intensities_are_values_like_others(value: float) -> None:
    grid = intensity(Source(value, 10.0))[0].grid(1e9)

    assert (grid.g_per_kwh, grid.known) == (value, True)


def test_a_source_that_fails_is_unknown_is_said_once_and_asked_again() -> None:
    source = Source(DataError("the service is down"), 100.0)
    made, said = intensity(source)
    for now_s in (1e9, 1e9 + 10, 1e9 + 400, 1e9 + 800):
        assert not made.grid(now_s).known
        assert made.history(now_s) is None
    assert source.asked == 3
    assert len(said) == 1
    source.answers["history"] = 100.0
    assert made.grid(1e9 + 1200).known
    source.answers["history"] = DataError("the service is down")
    assert not made.grid(1e9 + 1600).known
    assert len(said) == 2, "again, after it had been back"


def test_a_clock_that_is_set_back_does_not_leave_the_source_unasked() -> None:
    source = Source(100.0, 150.0)
    made, _ = intensity(source)
    made.grid(1e9)
    asked = source.asked
    made.grid(1e9 - 10.0)
    assert source.asked > asked


def test_without_a_source_nothing_is_known() -> None:
    made, said = intensity(None)
    assert (made.grid(0.0).known, made.history(0.0), said) == (False, None, [])


def view(running: list[int], degradation: list[float], least: list[int]) -> ClusterView:
    n = len(running)
    return ClusterView(
        0.0, 16, 300.0, 200.0, 60.0, np.arange(1, n + 1), np.arange(n) * 1.0, np.array(running), np.full(n, 8),
        np.ones(n, int), np.zeros(n, int), np.full(n, 100.0), np.full(n, 100.0), np.full(n, 1e4), np.full(n, 0.1),
        np.array(degradation), np.full(n, 200.0), np.array(least),
    )  # fmt: skip


def test_a_policy_written_down_as_json_decides_the_same() -> None:
    policy = Green(theta=1.0, cap=8)
    first = policy.step(policy.initial(), view([1, 2, 0], [1.0, 0.95, math.nan], [1, 1, 1]))
    again = policy.recall(json.loads(json.dumps(policy.remember(first.state))))
    later = view([2, 3, 1], [0.8, 0.92, 1.0], [1, 1, 1])

    assert again == first.state
    assert policy.step(again, later).decisions[0].value == policy.step(first.state, later).decisions[0].value


@pytest.mark.parametrize("document", [{}, {"jobs": {"a": []}, "profile": {}}, {"jobs": {}, "profile": {"1": 3}}])
def test_something_else_is_no_memory(document: dict) -> None:
    with pytest.raises(DataError, match="not the memory"):
        Green().recall(document)


def test_no_job_runs_on_less_than_its_least() -> None:
    policy = Green(theta=1.0, cap=4)
    state = policy.initial()
    for degradation in (1.0, 0.5, 0.5):
        step = policy.step(state, view([2, 6], [degradation, 1.0], [2, 6]))
        state = step.state
        run = step.decisions[0].value.run
        assert run[1] >= 2
        assert run.get(2, 6) == 6, "its least is more than the cap: it has just that"
