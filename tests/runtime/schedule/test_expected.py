"""Expected starts of waiting jobs."""

import math

from joulery.accounting.training_jobs import Tally
from joulery.domain.cluster import ClusterJob, ClusterNode, ClusterSnapshot, JobState
from joulery.runtime.schedule.expected import expected_starts
from joulery.runtime.schedule.state import SchedulerState

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


def test_pools_do_not_wait_for_each_other_and_a_blocked_job_holds_up_nobody() -> None:
    nodes = (ClusterNode("a", 1, 0, "a"), ClusterNode("b", 1, 1, "b"))
    jobs = (
        job(1, JobState.RUNNING, pool="a"), job(2, pool="a"), job(3, pool="b", blocked="Licenses"),
        job(4, pool="b", eligible_s=1200.0),
    )  # fmt: skip
    snapshot = ClusterSnapshot(2, jobs, nodes=nodes)
    assert expected_starts(snapshot, SchedulerState(), jobs[1:], NOW_S) == {4: 1200.0}
    assert math.isinf(job(1).deadline_s)
