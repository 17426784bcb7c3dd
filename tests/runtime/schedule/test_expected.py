"""Expected starts of waiting jobs."""

import math
from pathlib import Path

import orjson
import pytest

from joulery.accounting.forecasts import ForecastScore, coverage
from joulery.accounting.training_jobs import Tally
from joulery.domain.cluster import ClusterJob, ClusterNode, ClusterSnapshot, JobState
from joulery.runtime.schedule.expected import expected_starts, job_forecasts, outcomes
from joulery.runtime.schedule.state import SchedulerState, apply_event, compacted, forecast_event, replay_events
from tests.runtime.schedule.fake_cluster import FakeCluster
from tests.runtime.schedule.test_scheduler import World, as_json

NOW_S = 1000.0


def job(number: int, state: JobState = JobState.WAITING, **more: object) -> ClusterJob:
    slots = {"slots": 1, "start_s": 900.0} if state is JobState.RUNNING else {}
    return ClusterJob(number, "job", "ada", 0.0, state, **{**slots, **more})  # type: ignore[arg-type]


def starts(slots: int, *jobs: ClusterJob, state: SchedulerState | None = None) -> dict[int, float]:
    line = [each for each in jobs if each.state is JobState.WAITING]
    return expected_starts(ClusterSnapshot(slots, jobs), state or SchedulerState(), line, NOW_S)


def test_each_starts_at_its_turn_when_those_before_it_have_ended() -> None:
    running = job(1, JobState.RUNNING, limit_s=400.0), job(2, JobState.RUNNING, limit_s=1000.0)
    waiting = job(3, limit_s=100.0), job(4, limit_s=50.0), job(5, shape=2, min_slots=2, max_slots=2, limit_s=9.0)
    assert starts(2, *running, *waiting) == {3: 1300.0, 4: 1400.0, 5: 1900.0}
    assert starts(3, *running, job(3)) == {3: NOW_S}, "there is a free slot"


def test_progress_is_better_than_a_time_limit_and_without_either_no_start_is_known() -> None:
    half_done = SchedulerState(tallies={1: Tally(progress_ratio=0.5, rate_per_slot_s=0.01)})
    assert starts(1, job(1, JobState.RUNNING, limit_s=9e9), job(2), state=half_done) == {2: 1050.0}
    assert starts(1, job(1, JobState.RUNNING), job(2)) == {}
    assert starts(1, job(1, JobState.STOPPING, slots=1), job(2), job(3)) == {2: NOW_S}, "how long 2 takes is unknown"


def test_pools_do_not_wait_for_each_other_and_a_blocked_job_holds_up_no_other() -> None:
    nodes = (ClusterNode("a", 1, 0, "a"), ClusterNode("b", 1, 1, "b"))
    jobs = (
        job(1, JobState.RUNNING, pool="a"), job(2, pool="a"), job(3, pool="b", blocked="Licenses"),
        job(4, pool="b", eligible_s=1200.0),
    )  # fmt: skip
    snapshot = ClusterSnapshot(2, jobs, nodes=nodes)
    assert expected_starts(snapshot, SchedulerState(), jobs[1:], NOW_S) == {4: 1200.0}
    assert math.isinf(job(1).deadline_s)


def test_forecasts_of_start_end_and_grams_and_what_became_of_them() -> None:
    tally = Tally(progress_ratio=0.5, rate_per_slot_s=0.01, executed_s=50.0, slot_s=50.0, energy_j=5000.0, carbon_g=0.5)
    state = SchedulerState(tallies={1: tally}, waiting=((2, 1),))
    running, waiting = job(1, JobState.RUNNING), job(2)
    made = job_forecasts(ClusterSnapshot(1, (running, waiting)), state, 3.6e6 / 1e3, NOW_S)
    assert [(one.kind, one.amount) for one in made[1]] == [("end", 50.0), ("grams", 50.0 * 100.0 * 3600.0 / 3.6e6)]
    assert [(one.kind, one.amount) for one in made[2]] == [("start", 50.0)]
    for number, forecasts in made.items():
        for forecast in forecasts:
            state = apply_event(state, orjson.loads(orjson.dumps(forecast_event(number, forecast))))
    assert list(outcomes(ClusterSnapshot(1, (running, waiting)), state, NOW_S + 10.0)) == []
    ended = ClusterSnapshot(1, (job(1, JobState.DONE), job(2, JobState.RUNNING, start_s=NOW_S + 60.0)))
    state = SchedulerState(**{**{name: getattr(state, name) for name in state.__slots__}, "tallies": {
        1: Tally(carbon_g=6.5)}})  # fmt: skip
    known = list(outcomes(ended, state, NOW_S + 70.0))
    assert [(one.forecast.kind, one.outcome) for one in known] == [("end", 70.0), ("grams", 6.0), ("start", 60.0)]
    assert known[0].score == ForecastScore("end", 20.0 / 350.0, None)
    failed = ClusterSnapshot(1, (job(1, JobState.FAILED), job(2, JobState.CANCELLED)))
    assert list(outcomes(failed, state, NOW_S + 70.0)) == [], "a job that failed did not take its time"


@pytest.mark.slow
def test_the_scheduler_checks_its_forecasts_and_keeps_what_it_learned(tmp_path: Path) -> None:
    world = World(tmp_path, FakeCluster(slots=2, rate=0.004))
    for number in range(1, 31):
        world.cluster.submit(number)
    world.run(900, 3.0)
    before = world.scheduler.state
    assert before.forecasts and before.scores
    world.crash()
    assert as_json(before.scores) == as_json(world.scheduler.state.scores)
    assert as_json(before.forecasts) == as_json(world.scheduler.state.forecasts)
    short, unread = replay_events(orjson.loads(orjson.dumps(compacted(before))))
    assert unread == 0 and as_json(short.scores) == as_json(before.scores)
    assert as_json(short.forecasts) == as_json(before.forecasts)
    world.run(4200, 3.0)
    world.journal.close()
    by_kind = {row.kind: row for row in coverage(world.scheduler.state.scores)}
    assert by_kind["start"].checked >= 15 and by_kind["end"].checked >= 25 and by_kind["grams"].checked >= 25
    assert by_kind["end"].with_interval >= 5 and by_kind["end"].median_error == pytest.approx(0.0, abs=0.1)
    logged = world.said("forecast")
    assert len(logged) == sum(row.checked for row in by_kind.values())
    assert all(entry["outcome"] >= 0 and entry["of"] in by_kind for entry in logged)
    assert world.scheduler.state.forecasts == {}, "nothing is kept of jobs that ended"
