"""From what is meant to what is done next."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from joulery.domain.cluster import ClusterAction, ClusterJob, ClusterSnapshot, Hold, JobState, Release, Start, Stop
from joulery.runtime.schedule.decisions import next_actions, orphaned_holds

W, R, S = JobState.WAITING, JobState.RUNNING, JobState.STOPPING


def job(number: int, state: JobState = W, slots: int = 0, *, shape: int = 1, held: bool = False, **more: object):
    made = ClusterJob(number, "job", "ada", 0.0, state, slots=slots, shape=shape, max_slots=8, held_by_us=held)
    return replace(made, **more)  # type: ignore[arg-type]


def todo(slots: int, jobs: list[ClusterJob], target: dict[int, int], waiting=(), passive: bool = True):
    found = next_actions(ClusterSnapshot(slots, tuple(jobs)), target, waiting, passive=passive)
    return [entry.action for entry in found]


def test_a_running_job_of_another_size_is_stopped_and_one_of_its_size_is_left() -> None:
    jobs = [job(1, R, 1), job(2, R, 2), job(3, R, 1), job(4, S, 1)]
    assert todo(8, jobs, {1: 2, 2: 2, 3: 0, 4: 2}) == [Stop(1), Stop(3)]


def test_a_job_held_while_it_runs_is_released_unless_it_is_stopped_anyway() -> None:
    jobs = [job(1, R, 1, held=True), job(2, R, 1, held=True), job(3, S, 1, held=True)]
    assert todo(8, jobs, {1: 1, 2: 2, 3: 1}) == [Stop(2), Release(1)]


def test_a_stopped_job_starts_at_its_new_size_when_it_fits() -> None:
    assert todo(2, [job(1, held=True)], {1: 2}) == [Start(1, 2)]
    assert todo(2, [job(1, held=True), job(2, S, 1)], {1: 2, 2: 0}) == []


def test_what_is_promised_is_not_given_to_the_waiting() -> None:
    jobs = [job(1, held=True), job(2, S, 1), job(3, held=True)]
    assert todo(2, jobs, {1: 2, 2: 0, 3: 0}, [(3, 1)]) == []


def test_a_job_on_its_way_is_not_started_again_and_keeps_its_place() -> None:
    assert todo(2, [job(1, shape=2), job(2, held=True)], {1: 2, 2: 0}, [(2, 1)]) == []


def test_a_job_on_its_way_with_the_wrong_shape_is_resized() -> None:
    assert todo(2, [job(1, shape=1)], {1: 2}) == [Start(1, 2)]


def test_the_waiting_start_in_order_as_far_as_they_fit() -> None:
    jobs = [job(n, held=True) for n in (1, 2, 3)]
    assert todo(3, jobs, {}, [(3, 2), (1, 2), (2, 1)]) == [Start(3, 2), Start(2, 1)]
    assert todo(3, jobs, {}, [(3, 2)], passive=False) == []


def test_the_waiting_are_kept_within_what_they_may_use() -> None:
    assert todo(8, [job(1, held=True, min_slots=2, max_slots=2)], {}, [(1, 1)]) == [Start(1, 2)]
    assert todo(8, [], {}, [(1, 1)]) == []


def test_whoever_else_waits_is_held_once() -> None:
    assert todo(1, [job(1, R, 1), job(2), job(3, held=True)], {1: 1}) == [Hold(2)]


def test_a_promised_job_that_does_not_fit_yet_is_held() -> None:
    assert todo(2, [job(1, R, 2), job(2, shape=1)], {1: 2, 2: 2}) == [Hold(2)]


def test_exempt_and_ended_jobs_are_not_touched() -> None:
    jobs = [job(1, exempt="an array"), job(2, R, 1, exempt="an array"), job(3, JobState.DONE)]
    assert todo(4, jobs, {1: 1, 2: 0, 3: 1}) == []


def test_strays_are_held_in_our_name_and_unknown() -> None:
    seen = ClusterSnapshot(4, (job(1, held=True), job(2, held=True), job(3)))

    assert [entry.action for entry in orphaned_holds(seen, frozenset({2}))] == [Release(1)]
    assert orphaned_holds(replace(seen, self_starting=False), frozenset()) == []


@given(
    st.integers(1, 8),
    st.lists(st.tuples(st.sampled_from([W, R, S]), st.integers(1, 4), st.booleans(), st.integers(0, 4)), max_size=10),
)
def test_slots_that_are_not_free_are_never_given(slots: int, drawn: list[tuple[JobState, int, bool, int]]) -> None:
    jobs, used = [], 0
    for number, (state, size, held, _) in enumerate(drawn, 1):
        takes = size if state is not W and used + size <= slots else 0
        used += takes
        jobs.append(job(number, state if takes else W, takes, shape=size, held=held and not takes))
    target = {number: want for number, (_, _, _, want) in enumerate(drawn, 1)}
    given_out = [a.slots for a in todo(slots, jobs, target, [(j.id, j.shape) for j in jobs]) if isinstance(a, Start)]

    assert sum(given_out) <= slots - used


@given(st.permutations([1, 2, 3]))
def test_asked_twice_it_says_the_same(order: list[int]) -> None:
    jobs = [job(1, R, 1), job(2), job(3, held=True)]
    once: list[ClusterAction] = todo(3, jobs, {1: 2, 2: 0, 3: 1}, [(n, 1) for n in order])
    assert todo(3, jobs, {1: 2, 2: 0, 3: 1}, [(n, 1) for n in order]) == once
