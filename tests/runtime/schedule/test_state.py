"""The scheduler's state is the fold of its journal: after any events, and killed anywhere, replay gives the same."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from joulery.domain.cluster import JobState
from joulery.runtime.schedule.state import SchedulerState, apply_event, compacted, replay_events
from joulery.store.journal import Journal
from tests.runtime.schedule.fake_cluster import FakeCluster
from tests.runtime.schedule.test_scheduler import World, as_json


class KilledError(BaseException):
    """kill -9 of the scheduler in the middle of a tick."""


OPERATIONS = st.one_of(
    st.tuples(st.just("submit"), st.integers(1, 3)),
    st.tuples(st.just("run"), st.integers(1, 70)),
    st.tuples(st.just("crash"), st.just(0)),
    st.tuples(st.just("kill in"), st.integers(0, 6)),
    st.tuples(st.just("vanish"), st.integers(0, 9)),
    st.tuples(st.just("resubmit"), st.integers(0, 9)),
    st.tuples(st.just("refuse"), st.integers(0, 9)),
    st.tuples(st.just("away"), st.just(0)),
)


def kill_in(world: World, writes: int) -> None:
    """Kill the scheduler at its n-th write to journal or cluster, whichever comes first, and start it again."""
    left = [writes]

    def counting(call):
        def made(*args, **kwargs):
            if left[0] == 0:
                raise KilledError
            left[0] -= 1
            return call(*args, **kwargs)

        return made

    apply = world.cluster.apply
    world.cluster.apply = counting(apply)
    world.journal.append = counting(world.journal.append)
    try:
        world.run(70)
    except KilledError:
        pass
    finally:
        world.cluster.apply = apply
    world.crash()


def operate(world: World, name: str, number: int) -> None:
    cluster = world.cluster
    chosen = sorted(cluster.jobs)[number % len(cluster.jobs)] if cluster.jobs else None
    new = max(cluster.jobs, default=0) + 1
    if name == "submit":
        cluster.submit(new, most=number, name=f"kind {number}")
    elif name == "run":
        world.run(number)
    elif name == "crash":
        world.crash()
    elif name == "kill in":
        kill_in(world, number)
    elif name == "away":
        cluster.away = True
        world.run(2)
        cluster.away = False
    elif chosen is not None and name == "vanish":
        del cluster.jobs[chosen]
        cluster.stopping_s.pop(chosen, None)
    elif chosen is not None and name == "refuse":
        cluster.refuse ^= {chosen}
    elif chosen is not None and not cluster.jobs[chosen].state.over:
        old = cluster.jobs[chosen]
        cluster.stopping_s.pop(chosen, None)
        cluster.jobs[chosen] = replace(old, state=JobState.CANCELLED, slots=0)
        cluster.jobs[new] = replace(old, id=new, state=JobState.WAITING, slots=0, follows=chosen)


@settings(max_examples=40, deadline=None)
@given(st.lists(OPERATIONS, min_size=1, max_size=12))
def test_replay_gives_the_state_of_the_scheduler_after_any_sequence(operations: list[tuple[str, int]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder), FakeCluster(rate=0.004))
        for name, number in operations:
            operate(world, name, number)
            with Journal(world.file) as journal:
                state, unread = replay_events(journal.entries)
            assert unread == 0
            assert as_json(compacted(state)) == as_json(compacted(world.scheduler.state))
            again, _ = replay_events([*map(_read_back, compacted(state))])
            assert as_json(compacted(again)) == as_json(compacted(state)), "a compacted journal gives the same state"
        world.journal.close()


def _read_back(event: dict) -> dict:
    return orjson.loads(orjson.dumps(event, option=orjson.OPT_NON_STR_KEYS))


def test_applying_an_event_leaves_the_state_before_it_unchanged() -> None:
    before = apply_event(SchedulerState(), {"kind": "arrived", "job": 1, "slots": 2})
    after = apply_event(before, {"kind": "started", "job": 1, "slots": 2})

    assert (before.waiting, before.target) == (((1, 2),), {})
    assert (after.waiting, after.target) == ((), {1: 2})


def test_an_event_of_a_later_version_changes_nothing() -> None:
    assert apply_event(SchedulerState(), {"kind": "unheard of", "job": 1}) == SchedulerState()


def test_an_event_without_its_fields_is_refused() -> None:
    with pytest.raises(KeyError):
        apply_event(SchedulerState(), {"kind": "arrived", "job": 1})
