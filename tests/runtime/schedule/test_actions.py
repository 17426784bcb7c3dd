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
    Split,
    Start,
    Stop,
)
from joulery.runtime.schedule.actions import next_actions
from joulery.runtime.schedule.released import orphaned_holds
from joulery.runtime.schedule.rounds import StopRules

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


def test_a_running_job_loses_the_hold_or_the_mark_that_a_killed_scheduler_left_on_it() -> None:
    """Released, killed before the mark was removed: its owner's own hold would later count as joulery's."""
    jobs = [job(1, R, 1, held=True, marked=True), job(2, R, 1, marked=True), job(3, R, 1), job(4, S, 1, marked=True)]
    assert todo(8, jobs, {1: 1, 2: 1, 3: 1, 4: 0}) == [Release(1), Release(2)], "one that stops keeps its mark"


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


def test_of_an_array_as_many_waiting_tasks_are_separated_as_could_run_and_the_rest_waits_held() -> None:
    rest = job(7, array=7, tasks=30)
    assert todo(4, [rest], {}) == [Hold(7), Split(7, 5)], "four of them and the next"
    held = replace(rest, held_by_us=True)
    tasks = [job(8, R, 1, array=7), job(9, array=7, held=True)]
    assert todo(4, [held, *tasks], {8: 1}, [(9, 1)]) == [Split(7, 4), Start(9, 1)], "the one that runs does not count"
    assert todo(4, [replace(held, most_tasks=2), *tasks], {8: 1, 9: 1}) == [Split(7, 2), Start(9, 1)]
    assert todo(4, [replace(held, tasks=2)], {}) == [Split(7, 1)], "the last one is the rest itself"
    assert todo(4, [replace(held, tasks=1)], {}, [(7, 1)]) == [Start(7, 1)]


def test_tasks_of_an_array_are_separated_several_at_a_time() -> None:
    held = job(7, array=7, tasks=30, held=True)
    waiting = [job(number, array=7, held=True) for number in (8, 9, 10)]
    assert todo(4, [held, *waiting, job(1, R, 4)], {1: 4}) == []
    assert todo(4, [held, *waiting[:2], job(1, R, 4)], {1: 4}) == [Split(7, 3)], "half of the five are left"


def test_the_first_in_line_is_released_whatever_its_width_once_it_has_waited_long() -> None:
    wide, narrow = job(9, held=True, min_slots=2, max_slots=2, shape=2), job(10, held=True)
    snapshot = ClusterSnapshot(4, (*(job(n, R, 1) for n in range(1, 5)), wide, narrow))
    target = dict.fromkeys(range(1, 5), 1)
    for now_s, released in ((20.0, [Start(10, 1)]), (40.0, [Start(9, 2), Start(10, 1)])):
        rules = StopRules(now_s=now_s, patience_s=30.0)
        actions = next_actions(snapshot, target, [(9, 2), (10, 1)], passive=True, stops=rules)
        assert [one.action for one in actions] == released
    behind = next_actions(snapshot, target, [(10, 1), (9, 2)], passive=True, stops=rules)
    assert [one.action for one in behind] == [Start(10, 1)], "only the first"


def test_a_heterogeneous_job_starts_when_every_component_has_a_node_of_its_own() -> None:
    het = job(1, held=True, shape=3, parts=(1, 2), spread=False, min_slots=3, max_slots=3)

    def actions(*free: int) -> list[ClusterAction]:
        nodes = tuple(ClusterNode(f"g{n}", 2, count) for n, count in enumerate(free))
        snapshot = ClusterSnapshot(2 * len(free), (het,), nodes=nodes)
        return [one.action for one in next_actions(snapshot, {}, [(1, 3)], passive=True)]

    assert actions(2, 1) == [Start(1, 3)]
    assert actions(1, 1, 1) == [], "no node holds the larger one"
    assert actions(2, 0) == []


def test_of_two_successors_that_one_limit_counts_one_is_judged_at_a_time() -> None:
    def play(*limits: str) -> list[ClusterAction]:
        running = [job(n, R, 1, limits=frozenset({f"user {n}", "qos normal"})) for n in (1, 2)]
        waiting = [job(n, limits=frozenset({user, "qos normal"})) for n, user in zip((3, 4), limits, strict=True)]
        return todo(2, [*running, *waiting], {3: 1, 4: 1, 1: 0, 2: 0})

    assert play("user eve", "user bob") == [Stop(2), Stop(1)], "what the QOS counts stays the same"
    assert play("user eve", "user eve") == [Stop(2)], "the second might exceed her limit together with the first"


def test_a_node_without_cpus_or_memory_for_a_job_has_no_room_for_it() -> None:
    wide = job(2, held=True, cpus_per_slot=8.0, memory_per_slot_bytes=4e9)
    for cpus, memory_bytes, starts in ((8.0, 4e9, True), (7.0, 4e9, False), (8.0, 3e9, False)):
        node = ClusterNode("g1", 2, 2, free_cpus=cpus, free_memory_bytes=memory_bytes)
        actions = next_actions(ClusterSnapshot(2, (wide,), nodes=(node,)), {}, [(2, 1)], passive=True)
        assert [one.action for one in actions] == ([Start(2, 1)] if starts else [])


def test_a_job_runs_only_on_nodes_that_suit_it() -> None:
    nodes = (ClusterNode("a1", 1, 1), ClusterNode("b1", 1, 0))
    jobs = (job(1, held=True, runs_on=frozenset({"b1"})), job(2, R, 1, nodes=("b1",)))
    (planned,) = next_actions(ClusterSnapshot(2, jobs, nodes=nodes), {}, [(1, 1)], passive=True)
    assert planned.reason.startswith("next in line"), "the free slot of a1 is no use"
    moved = next_actions(ClusterSnapshot(2, jobs, nodes=nodes), {1: 1, 2: 0}, [], passive=True)
    assert [one.action for one in moved] == [Start(1, 1)], "released, to be judged: job 2 could make room"


def test_the_next_in_line_is_released_so_that_it_starts_when_a_job_ends() -> None:
    jobs = [job(1, R, 1), job(2, R, 2), job(3, held=True), job(4, held=True, shape=2), job(5, held=True)]
    assert todo(3, jobs, {1: 1, 2: 2}, [(4, 2), (3, 1), (5, 1)]) == [Start(3, 1)], "job 1 would not make room for 4"
    short = [*jobs, job(6, S, 1)]
    assert todo(4, short, {1: 1, 2: 2, 3: 1}, [(5, 1)]) == [], "its slot is coming: no job may take it"


def test_a_planned_job_that_finds_no_place_for_long_is_left_to_the_cluster() -> None:
    nodes = tuple(ClusterNode(f"g{n}", 2, 1) for n in (1, 2))
    wide = job(3, held=True, shape=2, min_slots=2, spread=False)
    snapshot = ClusterSnapshot(4, (*(job(n, R, 1, nodes=(f"g{n}",)) for n in (1, 2)), wide), nodes=nodes)
    for now_s, actions in ((100.0, []), (1000.0, [Start(3, 2)])):
        rules = StopRules(frozenset(), now_s, 0.0, 500.0)
        planned = next_actions(snapshot, {3: 2, 1: 1, 2: 1}, [], passive=True, stops=rules)
        assert [one.action for one in planned] == actions


def scattered(waiting: ClusterJob, *, start_s: float = 0.0) -> ClusterSnapshot:
    """Two full nodes of two slots; of each the plan stops one job, and no two of them hold a wider job together."""
    busy = (job(n, R, 1, nodes=(f"g{(n + 1) // 2}",), start_s=start_s) for n in (1, 2, 3, 4))
    return ClusterSnapshot(4, (*busy, waiting), nodes=tuple(ClusterNode(f"g{n}", 2, 0) for n in (1, 2)))


def test_a_job_whose_slots_would_come_free_on_several_nodes_starts_on_fewer_once_it_has_waited_long() -> None:
    """Seen beside a real Slurm: it waited a hundred seconds on a quantum of four, and nothing was stopped for it."""
    target = {9: 2, 1: 1, 2: 0, 3: 1, 4: 0}
    waits = job(9, held=True, shape=2, spread=False)

    def made(waiting: ClusterJob, now_s: float = 1000.0, start_s: float = 0.0) -> list[ClusterAction]:
        rules = StopRules(None, now_s, 60.0, 500.0)
        planned = next_actions(scattered(waiting, start_s=start_s), target, [], passive=True, stops=rules)
        return [one.action for one in planned]

    assert made(waits, 400.0) == []
    assert made(waits) == [Start(9, 1)], "on one slot, released first"
    assert made(replace(waits, held_by_us=False, shape=1)) == [Stop(4)], "the last of the ranking"
    assert made(replace(waits, held_by_us=False)) == [Start(9, 1)], "also one that was released on two slots before"
    assert made(replace(waits, stoppable=False)) == [Start(9, 2)], "it could never grow: the cluster keeps a place"
    assert made(replace(waits, min_slots=2)) == [Start(9, 2)]
    assert made(replace(waits, spread=True)) == [Start(9, 2)], "two slots on two nodes hold it"
    assert made(replace(waits, spread=True, held_by_us=False)) == [Stop(4), Stop(2)]
    assert made(replace(waits, spread=True), start_s=990.0) == [Start(9, 2)], "the jobs to stop are young: not for long"


def test_fewer_slots_are_those_of_whole_nodes_or_of_a_part_of_one() -> None:
    """Three nodes with a free slot each hold three slots, one a node: no job is cut so."""
    nodes = tuple(ClusterNode(f"g{n}", 2, 1) for n in (1, 2, 3))
    busy = (job(n, R, 1, nodes=(f"g{n}",)) for n in (1, 2, 3))
    snapshot = ClusterSnapshot(6, (*busy, job(9, held=True, shape=4, spread=False)), nodes=nodes)
    rules = StopRules(None, 1000.0, 60.0, 500.0)
    planned = next_actions(snapshot, {9: 4, 1: 1, 2: 1, 3: 1}, [], passive=True, stops=rules)
    assert [one.action for one in planned] == [Start(9, 1)]


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
