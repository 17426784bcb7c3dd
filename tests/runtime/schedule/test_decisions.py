"""From what is meant to what is done next."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from joulery.domain.cluster import (
    ClusterAction,
    ClusterJob,
    ClusterNode,
    ClusterSnapshot,
    Hold,
    JobState,
    Release,
    Start,
    Stop,
)
from joulery.runtime.schedule.decisions import StopRules, next_actions, orphaned_holds

W, R, S = JobState.WAITING, JobState.RUNNING, JobState.STOPPING


def job(number: int, state: JobState = W, slots: int = 0, *, shape: int = 1, held: bool = False, **more: object):
    made = ClusterJob(number, "job", "ada", 0.0, state, slots=slots, shape=shape, max_slots=8, held_by_us=held)
    return replace(made, **more)  # type: ignore[arg-type]


def todo(slots: int, jobs: list[ClusterJob], target: dict[int, int], waiting=(), passive: bool = True):
    found = next_actions(ClusterSnapshot(slots, tuple(jobs)), target, waiting, passive=passive)
    return [entry.action for entry in found]


def test_a_running_job_of_another_size_is_stopped_and_one_of_its_size_is_left() -> None:
    jobs = [job(1, R, 1), job(2, R, 2), job(3, R, 1), job(4, S, 1)]
    assert todo(8, jobs, {1: 2, 2: 2, 3: 0, 4: 2}) == [Stop(1)], "job 3 runs on: no job needs its slot"


def test_a_job_stops_only_when_its_successor_could_start_there_and_then() -> None:
    running, target = job(1, R, 1), {2: 1, 1: 0}
    assert todo(1, [running, job(2, held=True)], target) == [Start(2, 1)], "released first, so that Slurm judges it"
    assert todo(1, [running, job(2)], target) == [Stop(1)], "it waits for slots alone"
    assert todo(1, [running, job(2, blocked="QOSMaxGRESPerUser")], target) == []
    assert todo(1, [running, job(2, judged=False)], target) == [], "Slurm has not looked at it yet"
    assert todo(1, [job(1, S, 1), job(2)], target) == [], "its slot is coming"
    assert todo(1, [replace(running, stoppable=False), job(2)], target) == []


def test_only_as_many_stop_as_the_successor_needs_the_last_of_the_ranking_first() -> None:
    jobs = [*(job(number, R, 1) for number in (1, 2, 3, 4)), job(5, shape=2)]
    assert todo(4, jobs, {5: 2, 1: 1, 2: 0, 3: 0, 4: 0}, [(4, 1), (2, 1), (3, 1)]) == [Stop(3), Stop(2)]
    assert todo(5, jobs, {5: 2, 1: 1, 2: 0, 3: 0, 4: 0}, [(4, 1), (2, 1), (3, 1)]) == [Stop(3)]
    assert todo(4, jobs, {5: 2, 1: 1, 2: 1, 3: 1, 4: 0}) == [], "one slot would not hold it"


def test_a_job_of_another_pool_is_not_stopped_and_free_slots_there_are_no_use() -> None:
    nodes = (ClusterNode("a1", 1, 0, "a"), ClusterNode("b1", 1, 1, "b"))
    jobs = (job(1, R, 1, pool="b"), job(2, pool="a"), job(3, R, 1, pool="a", nodes=("a1",)))
    snapshot = ClusterSnapshot(2, jobs, nodes=nodes)
    assert [one.action for one in next_actions(snapshot, {2: 1, 1: 0, 3: 1}, [], passive=True)] == []
    assert [one.action for one in next_actions(snapshot, {2: 1, 1: 0, 3: 0}, [], passive=True)] == [Stop(3)]


def test_slots_on_several_nodes_do_not_hold_a_job_that_needs_them_on_one() -> None:
    nodes = tuple(ClusterNode(f"g{n}", 2, 1, "") for n in (1, 2))
    held = job(9, held=True, shape=2, spread=False)
    busy = [job(n, R, 1, nodes=(f"g{n}",)) for n in (1, 2)]
    snapshot = ClusterSnapshot(4, (*busy, held), nodes=nodes)
    assert next_actions(snapshot, {9: 2, 1: 1, 2: 1}, [], passive=True) == []
    released = replace(snapshot, jobs=(*busy, replace(held, held_by_us=False)))
    actions = next_actions(released, {9: 2, 1: 0, 2: 1}, [], passive=True)
    assert [one.action for one in actions] == [Stop(1)], "both of node g1"


def test_a_job_runs_on_for_its_first_minutes() -> None:
    jobs = (job(1, R, 1, start_s=100.0), job(2))
    snapshot = ClusterSnapshot(1, jobs)
    for now_s, stopped in ((150.0, []), (500.0, [Stop(1)])):
        rules = StopRules(None, now_s, 300.0)
        actions = next_actions(snapshot, {2: 1, 1: 0}, [], passive=True, stops=rules)
        assert [one.action for one in actions] == stopped


def test_a_blocked_job_reserves_nothing_and_is_left_to_the_cluster() -> None:
    blocked = job(1, blocked="Licenses")
    assert todo(1, [blocked, job(2, held=True)], {1: 1, 2: 0}, [(2, 1)]) == [Start(2, 1)]
    assert todo(1, [blocked], {1: 0}) == []


def test_a_job_held_while_it_runs_is_released_unless_it_is_stopped_anyway() -> None:
    jobs = [job(1, R, 1, held=True), job(2, R, 1, held=True), job(3, S, 1, held=True)]
    assert todo(8, jobs, {1: 1, 2: 2, 3: 1}) == [Stop(2), Release(1)]


def test_a_stopped_job_starts_at_its_new_size_when_it_fits() -> None:
    assert todo(2, [job(1, held=True)], {1: 2}) == [Start(1, 2)]
    assert todo(2, [job(1, held=True), job(2, S, 1)], {1: 2, 2: 0}) == []


def test_reserved_slots_are_not_given_to_the_waiting() -> None:
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


def test_other_waiting_jobs_are_held_once() -> None:
    assert todo(1, [job(1, R, 1), job(2), job(3, held=True)], {1: 1}) == [Hold(2)]


def test_a_planned_job_that_does_not_fit_yet_is_held() -> None:
    assert todo(2, [job(1, R, 2), job(2, shape=1)], {1: 2, 2: 2}) == [Hold(2)]


def test_exempt_and_ended_jobs_are_not_touched() -> None:
    jobs = [job(1, exempt="an array"), job(2, R, 1, exempt="an array"), job(3, JobState.DONE)]
    assert todo(4, jobs, {1: 1, 2: 0, 3: 1}) == []


def test_orphaned_holds_are_released() -> None:
    seen = ClusterSnapshot(4, (job(1, held=True), job(2, held=True), job(3)))

    assert [entry.action for entry in orphaned_holds(seen, frozenset({2}))] == [Release(1)]
    assert orphaned_holds(replace(seen, self_starting=False), frozenset()) == []


@given(
    st.integers(1, 8),
    st.lists(st.tuples(st.sampled_from([W, R, S]), st.integers(1, 4), st.booleans(), st.integers(0, 4)), max_size=10),
)
def test_slots_that_are_not_free_are_never_given(slots: int, generated: list[tuple[JobState, int, bool, int]]) -> None:
    jobs, used = [], 0
    for number, (state, size, held, _) in enumerate(generated, 1):
        takes = size if state is not W and used + size <= slots else 0
        used += takes
        jobs.append(job(number, state if takes else W, takes, shape=size, held=held and not takes))
    target = {number: want for number, (_, _, _, want) in enumerate(generated, 1)}
    snapshot = ClusterSnapshot(slots, tuple(jobs), self_starting=False)
    actions = next_actions(snapshot, target, [(j.id, j.shape) for j in jobs], passive=True)
    given_out = [one.action.slots for one in actions if isinstance(one.action, Start)]

    assert sum(given_out) <= slots - used


@given(st.permutations([1, 2, 3]))
def test_asked_twice_it_says_the_same(order: list[int]) -> None:
    jobs = [job(1, R, 1), job(2), job(3, held=True)]
    once: list[ClusterAction] = todo(3, jobs, {1: 2, 2: 0, 3: 1}, [(n, 1) for n in order])
    assert todo(3, jobs, {1: 2, 2: 0, 3: 1}, [(n, 1) for n in order]) == once
