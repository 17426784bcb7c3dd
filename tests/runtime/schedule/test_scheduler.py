"""The scheduler on a cluster in memory: rounds, passive starts, crashes, everything that goes wrong."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from joulery.accounting.training_jobs import JobWindow, MeasureRules, Tally
from joulery.adapters.carbon.stated import Stated
from joulery.config.site import Mode
from joulery.domain.cluster import ClusterNode, Hold, JobEnergy, JobState, Order, Release, Start, Stop
from joulery.domain.errors import ActuationError, CapabilityError, DataError
from joulery.domain.quality import Quality
from joulery.policies.training.green import Green
from joulery.runtime.schedule.energy import SourceTotal
from joulery.runtime.schedule.intensity_tracker import IntensityTracker
from joulery.runtime.schedule.polling import run_scheduler
from joulery.runtime.schedule.rounds import JournaledPolicy, SchedulerTiming
from joulery.runtime.schedule.scheduler import Scheduler, TickResult, release_all
from joulery.runtime.schedule.state import (
    SchedulerState,
    apply_event,
    compacted,
    plan_event,
    replay_events,
    tallies_event,
)
from joulery.store.journal import Journal
from tests.runtime.schedule.fake_cluster import FakeCluster

ACTING = Green(theta=1.0, cap=4)
T0_S = 1.7e9


class World:
    """A cluster, a scheduler beside it, and a clock for both."""

    def __init__(
        self,
        folder: Path,
        cluster: FakeCluster,
        mode: Mode = Mode.ACT,
        policy: JournaledPolicy = ACTING,
        *,
        quantum_s: float = 60.0,
        priority_step: float = 0.0,
    ) -> None:
        self.cluster, self.mode, self.policy = cluster, mode, policy
        self.quantum_s, self.priority_step = quantum_s, priority_step
        self.file = folder / "journal.jsonl"
        self.now_s = T0_S
        self.log: list[tuple[str, Mapping[str, Any]]] = []
        self.begin()

    def begin(self) -> None:
        """A new scheduler on the journal of the one before."""
        self.journal = Journal(self.file)
        grid = IntensityTracker(Stated(300.0, source="stated", now_s=lambda: self.now_s), 3600.0, lambda _: None)
        self.scheduler = Scheduler(
            self.cluster, self.policy, self.journal, self.cluster, grid,
            lambda kind, fields: self.log.append((kind, fields)), mode=self.mode,
            timing=SchedulerTiming(self.quantum_s, 5.0, MeasureRules(20.0, 5)), priority_step=self.priority_step,
        )  # fmt: skip

    def crash(self) -> None:
        """kill -9, and started again."""
        self.journal.close()
        self.begin()

    def tick(self) -> TickResult:
        return self.scheduler.tick(self.now_s)

    def run(self, seconds: float, step_s: float = 1.0) -> None:
        for _ in range(round(seconds / step_s)):
            self.tick()
            self.cluster.pass_time(step_s)
            self.now_s += step_s

    def said(self, kind: str) -> list[Mapping[str, Any]]:
        return [fields for name, fields in self.log if name == kind]


def as_json(value: object) -> bytes:
    """For comparisons in which NaN equals NaN."""
    return orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS)


@pytest.fixture
def world(tmp_path: Path):
    made: list[World] = []

    def make(cluster: FakeCluster | None = None, **more: Any) -> World:
        made.append(World(tmp_path, cluster or FakeCluster(), **more))
        return made[-1]

    yield make
    for one in made:
        one.journal.close()


def test_jobs_grow_while_it_pays_and_every_one_ends(world) -> None:
    world = world(FakeCluster(rate=0.002))
    world.cluster.submit(1, most=4)
    world.run(900)

    starts = [fields["slots"] for fields in world.said("action") if fields["do"] == "start"]
    assert starts[:2] == [2, 3] or starts[:3] == [1, 2, 3], starts
    assert world.cluster.jobs[1].state is JobState.DONE
    (over,) = world.said("over")
    assert over["energy_j"] == pytest.approx(world.cluster.energy[1].energy_j, rel=0.02)
    assert over["carbon_g"] == pytest.approx(over["energy_j"] * 300 / 3.6e6)
    assert set(over["rates"]) >= {"2", "3"}, "what-if learns from the log how jobs scale"
    assert over["rates"] == {n: pytest.approx(0.002 * int(n) ** 0.9, rel=0.1) for n in over["rates"]}
    state = world.scheduler.state
    assert (state.target, state.tallies, state.submitted_s, state.who, state.energy_seen) == ({}, {}, {}, {}, {})


def test_more_jobs_than_slots_all_end_and_slots_are_never_given_twice(world) -> None:
    world = world(FakeCluster(rate=0.02))
    for number in range(1, 21):
        world.cluster.submit(number, most=3)
    world.run(600)

    assert {job.state for job in world.cluster.jobs.values()} == {JobState.DONE}
    assert world.cluster.most_used <= world.cluster.slots
    assert world.cluster.held() == set()
    assert len(world.said("over")) == 20


def test_between_rounds_the_next_in_the_ranking_starts_and_no_job_is_moved(world) -> None:
    world = world(FakeCluster(slots=1, rate=0.05))
    for number in (1, 2, 3):
        world.cluster.submit(number)
    world.run(3)
    assert world.cluster.running() == {1: 1}
    assert world.cluster.held() == {3}, "job 2 is next in line: the cluster starts it the moment job 1 ends"
    world.run(30)

    assert world.cluster.running() == {2: 1}
    assert len(world.said("round")) == 1
    assert not any(isinstance(action, Stop) for action in world.cluster.actions)


def test_a_newcomer_is_held_until_it_is_its_turn(world) -> None:
    world = world(FakeCluster(slots=1))
    world.cluster.submit(1)
    world.run(2)
    for number in (2, 3):
        world.cluster.submit(number)
    world.run(2)

    assert world.cluster.held() == {3}, "one is next in line"
    assert world.scheduler.state.waiting == ((2, 1), (3, 1))


def test_between_rounds_no_later_job_passes_the_tasks_of_an_array(world) -> None:
    world = world(FakeCluster(rate=0.2), quantum_s=600.0)
    world.cluster.submit(1, array=1, tasks=12)
    world.run(2)
    later = range(200, 206)
    for number in later:
        world.cluster.submit(number)
    began: list[int] = []
    for _ in range(40):
        world.run(1)
        began += [number for number in world.cluster.running() if number not in began]

    assert len(began) == 12 + len(later)
    assert began[-len(later) :] == list(later)


@pytest.mark.parametrize("order", ["service", "first-come"])
def test_the_last_task_of_an_array_stops_none_of_the_others(world, order: str) -> None:
    """It keeps the number of the array, which is the least of all."""
    policy = Green(theta=1.0, preempt_after_s=0.0, order=order)
    world = world(FakeCluster(rate=0.08), policy=policy, quantum_s=10.0)
    world.cluster.submit(1, array=1, tasks=9)
    world.run(2)
    world.cluster.submit(200, least=2, most=2)  # a wide one: now the oldest go first
    world.run(60)

    assert {job.state for job in world.cluster.jobs.values()} == {JobState.DONE}
    assert not any(isinstance(action, Stop) for action in world.cluster.actions)


def test_a_wide_job_that_waited_long_is_not_overtaken_when_a_node_comes_free(world) -> None:
    """Jobs of one length on a node end together; narrow ones that are released take its slots at once."""
    world = world(FakeCluster(slots=2, rate=0.02), quantum_s=600.0)
    for number in (1, 2):
        world.cluster.submit(number)
    world.run(2)
    for number, slots in ((3, 2), (4, 1), (5, 1), (6, 1)):
        world.cluster.submit(number, least=slots, most=slots)
    world.run(40)
    world.cluster.pass_time(0.5)
    for _ in range(15):  # the cluster starts jobs more often than joulery looks
        world.tick()
        world.cluster.pass_time(0.5)
        world.cluster.pass_time(0.5)
        world.now_s += 1.0

    assert world.cluster.running() == {3: 2}


def test_the_ranking_goes_to_the_cluster_once_a_round(world) -> None:
    world = world(FakeCluster(slots=1))
    for number in (1, 2, 3):
        world.cluster.submit(number)
    world.run(5)

    assert [action for action in world.cluster.actions if isinstance(action, Order)] == [Order((1, 2, 3))]


@pytest.mark.parametrize("when", range(1, 12))
def test_killed_at_any_moment_of_a_resize_nothing_is_lost(world, when: int) -> None:
    world = world(FakeCluster(rate=0.001, stop_s=4.0))
    world.cluster.submit(1, most=2)
    world.run(115)
    world.run(when)
    world.crash()
    world.run(30)

    assert world.cluster.running() == {1: 2}
    assert world.cluster.jobs[1].restarts == 1, "stopped once, started once"
    assert world.cluster.held() == set()


@pytest.mark.slow
def test_killed_between_every_two_looks_everything_still_ends_once(world) -> None:
    world = world(FakeCluster(rate=0.03))
    for number in range(1, 9):
        world.cluster.submit(number, most=3)
    for _ in range(200):
        world.run(1)
        world.crash()

    assert {job.state for job in world.cluster.jobs.values()} == {JobState.DONE}
    assert len(world.said("over")) == 8
    assert world.cluster.held() == set()


def test_measurements_and_queues_survive_a_crash(world) -> None:
    world = world(FakeCluster(rate=0.001))
    world.cluster.submit(1, most=4)
    world.run(200)
    before, energy_j = world.scheduler.state.policy, world.scheduler.state.tallies[1].energy_j
    assert energy_j > 0
    world.crash()

    assert world.scheduler.state.policy == before
    assert world.scheduler.state.tallies[1].energy_j == energy_j
    world.run(1)
    assert world.scheduler.state.tallies[1].energy_j >= energy_j, "sources report totals, so nothing is missed"


def test_what_a_decision_rests_on_survives_a_kill_right_after_it(world) -> None:
    world = world(FakeCluster(rate=0.001))
    world.cluster.submit(1, most=4)
    world.run(200)
    while not world.tick().round:
        world.cluster.pass_time(1.0)
        world.now_s += 1.0
    learnt = dict(world.scheduler.state.tallies[1].efficiency)
    assert learnt
    world.crash()

    assert dict(world.scheduler.state.tallies[1].efficiency) == learnt


def test_a_plan_is_read_back_as_it_was_written() -> None:
    state = SchedulerState(
        target={1: 2}, waiting=((3, 1), (4, 2)), newcomers={0: 2}, passive=False, next_round_s=5.0,
        kinds=("ada/train/1",), submitted_s={1: 3.0},
    )  # fmt: skip
    again = apply_event(SchedulerState(), {"kind": "plan", **json.loads(json.dumps(plan_event(state)))})
    assert again == state

    again = apply_event(again, {"kind": "arrived", "job": 5, "slots": 1})
    again = apply_event(again, {"kind": "started", "job": 3, "slots": 1})
    assert (again.target, again.waiting) == ({1: 2, 3: 1}, ((4, 2), (5, 1)))


def test_a_job_held_in_our_name_that_the_journal_does_not_know_is_released(world) -> None:
    cluster = FakeCluster(slots=4)
    cluster.submit(7, held_by_us=True)
    world = world(cluster)
    world.tick()

    assert world.cluster.actions == [Release(7)]
    world.cluster.pass_time(1.0)
    assert world.cluster.running() == {7: 1}


def test_a_truncated_journal_only_forgets(world) -> None:
    world = world(FakeCluster(slots=2, rate=0.01))
    for number in range(1, 6):
        world.cluster.submit(number)
    world.run(10)
    world.journal.close()
    content = world.file.read_bytes()
    world.file.write_bytes(content[: len(content) // 2 + 3])
    world.begin()
    world.run(600)

    assert {job.state for job in world.cluster.jobs.values()} == {JobState.DONE}
    assert world.cluster.held() == set()


@pytest.mark.parametrize(
    "line",
    ['{"kind": "plan"}', '{"kind": "tallies", "jobs": []}', '{"kind": "started"}', '{"kind": "gone", "job": "x"}'],
)
def test_lines_that_are_not_understood_are_left_out(world, line: str) -> None:
    world = world(FakeCluster(slots=2, rate=0.001))
    for number in range(1, 6):
        world.cluster.submit(number)
    world.run(70)
    state = compacted(world.scheduler.state)
    with world.file.open("a") as file:
        file.write(line + "\n")
    world.crash()

    assert as_json(compacted(world.scheduler.state)) == as_json(state)
    (note,) = world.said("note")
    assert note["text"].startswith("1 journal events")


def test_a_policy_that_does_not_understand_what_it_wrote_begins_anew(world) -> None:
    world = world(FakeCluster(slots=2, rate=0.01))
    world.cluster.submit(1)
    world.run(10)
    world.journal.append("plan", **plan_event(world.scheduler.state, policy={}))
    world.crash()
    assert "the policy starts from its initial state" in world.said("note")[0]["text"]
    world.run(400)
    assert world.cluster.jobs[1].state is JobState.DONE


def test_a_compacted_journal_says_the_same(world) -> None:
    world = world(FakeCluster(slots=2, rate=0.001))
    for number in range(1, 6):
        world.cluster.submit(number, most=2)
    world.run(130)
    world.crash()
    state = compacted(world.scheduler.state)
    world.journal.replace(state)
    world.crash()

    assert len(world.journal.entries) <= 5, "one event for each part of the state"
    assert as_json(compacted(world.scheduler.state)) == as_json(state)


@pytest.mark.parametrize("jump_s", [-1e7, -30.0, 1e7])
def test_a_clock_that_is_set_stops_nothing_and_charges_nothing(world, jump_s: float) -> None:
    world = world(FakeCluster(slots=1, rate=0.001))
    world.cluster.submit(1)
    world.cluster.submit(2)
    world.run(30)
    before = world.scheduler.state.tallies[1].executed_s
    world.now_s += jump_s
    world.scheduler.tick(world.now_s, 1.0)
    assert world.scheduler.state.tallies[1].executed_s == pytest.approx(before + 1.0)
    rounds = len(world.said("round"))
    world.run(70)

    assert len(world.said("round")) > rounds


def test_a_clock_set_back_charges_nothing_even_where_only_it_is_known(world) -> None:
    world = world(FakeCluster(rate=0.001))
    world.cluster.submit(1)
    world.run(10)
    before = world.scheduler.state.tallies[1].executed_s
    world.now_s -= 5000.0
    world.tick()

    assert world.scheduler.state.tallies[1].executed_s == before


def test_a_cluster_that_does_not_answer_is_waited_for(world) -> None:
    world = world(FakeCluster(slots=1, rate=0.05))
    for number in (1, 2):
        world.cluster.submit(number)
    world.run(3)
    world.cluster.away = True
    world.run(30)
    assert len(world.said("unreachable")) == 1, "said once, not at every look"
    world.cluster.away = False
    world.run(40)
    assert "the cluster answers again" in [fields["text"] for fields in world.said("note")]

    assert {job.state for job in world.cluster.jobs.values()} == {JobState.DONE}


def test_an_answer_that_is_not_understood_ends_the_look_and_not_the_scheduler(world) -> None:
    world = world(FakeCluster(slots=1, rate=0.05))
    for number in (1, 2, 3):
        world.cluster.submit(number)
    apply = world.cluster.apply

    def nonsense(action: object) -> str:
        raise DataError("squeue --json answered something that is not understood")

    world.cluster.apply = nonsense
    assert [outcome for _, _, outcome in world.tick().done] == ["failed"]
    world.cluster.apply = apply
    world.run(150)
    assert {job.state for job in world.cluster.jobs.values()} == {JobState.DONE}


def test_a_cluster_that_goes_away_meanwhile_is_not_asked_again_in_the_same_look(world) -> None:
    world = world(FakeCluster(slots=1))
    for number in (1, 2, 3):
        world.cluster.submit(number)
    snapshot = world.cluster.snapshot()
    world.cluster.snapshot = lambda: snapshot
    world.cluster.away = True
    tick = world.tick()

    assert [outcome for _, _, outcome in tick.done] == ["failed"]


def test_a_job_whose_resize_is_refused_goes_on_as_it_is(world) -> None:
    world = world(FakeCluster(rate=0.002))
    world.cluster.submit(1, most=4)
    world.cluster.rigid = {1}
    world.run(900)

    refused = [fields for fields in world.said("action") if fields["outcome"] == "failed"]
    assert 1 <= len(refused) <= 900 / 60, "at most once a round"
    assert world.cluster.jobs[1].state is JobState.DONE and world.cluster.most_used == 1


def test_a_job_that_goes_on_under_another_number_keeps_its_place_and_its_cost(world) -> None:
    world = world(FakeCluster(rate=0.002))
    world.cluster.submit(1, most=4)
    world.run(100)
    before = world.scheduler.state.tallies[1]
    old = world.cluster.jobs[1]
    world.cluster.jobs[1] = replace(old, state=JobState.CANCELLED, slots=0)
    world.cluster.jobs[9] = replace(old, id=9, state=JobState.WAITING, slots=0, shape=old.slots, follows=1)
    world.tick()
    world.crash()
    world.run(30)

    state = world.scheduler.state
    assert 1 not in state.target and state.target[9] >= 1 and 1 not in state.tallies
    assert state.tallies[9].energy_j >= before.energy_j and state.submitted_s[9] == 1.0
    assert "9" in state.policy["jobs"] and "1" not in state.policy["jobs"]
    assert 9 in world.cluster.running()


def test_a_job_under_another_number_takes_everything_along_and_only_once(world) -> None:
    world = world(FakeCluster(rate=0.002))
    world.cluster.submit(1, most=4)
    world.run(100)
    before = world.scheduler.state
    seen, learnt = before.energy_seen[1], before.policy["jobs"]["1"]
    old = world.cluster.jobs[1]
    world.cluster.jobs[1] = replace(old, state=JobState.CANCELLED, slots=0)
    world.cluster.jobs[9] = replace(old, id=9, submit_s=77.0, state=JobState.WAITING, slots=0, shape=2, follows=1)
    world.cluster.jobs[12] = replace(old, id=12, submit_s=78.0, state=JobState.WAITING, slots=0, follows=5)
    world.tick()
    state = world.scheduler.state
    assert state.energy_seen[9] == seen and state.submitted_s[9] == 1.0 and 1 not in state.submitted_s
    assert state.policy["jobs"]["9"] == learnt
    for _ in range(3):
        world.tick()
    follows = [line for line in map(json.loads, world.file.read_text().splitlines()) if line["kind"] == "follows"]
    assert [(line["job"], line["after"]) for line in follows] == [(9, 1)], "an unknown job leaves nothing"


def test_what_is_started_between_rounds_is_written_down_before_it_is_done(world) -> None:
    world = world(FakeCluster(slots=1, rate=0.05))
    for number in (1, 2):
        world.cluster.submit(number)
    world.run(3)
    apply, killed = world.cluster.apply, RuntimeError("kill -9")

    def dying(action: object) -> str:
        if action == Start(2, 1):
            raise killed
        return apply(action)

    world.cluster.apply = dying
    with pytest.raises(RuntimeError, match="kill -9"):
        world.run(40)
    world.cluster.apply = apply
    world.crash()
    assert world.scheduler.state.target[2] == 1 and world.scheduler.state.waiting == ()


def test_a_journal_that_cannot_be_written_stops_the_actions_and_not_the_scheduler(
    world, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = world(FakeCluster(slots=2))
    for number in (1, 2, 3):
        world.cluster.submit(number)
    said: list[str] = []
    stop = threading.Event()
    ticks = 0

    def refuse(kind: str, **fields: object) -> dict[str, object]:
        raise CapabilityError("cannot write journal: No space left on device")

    full = pytest.MonkeyPatch()
    full.setattr(world.journal, "append", refuse)
    real = world.scheduler.tick

    def tick(now_s: float, elapsed_s: float) -> TickResult:
        nonlocal ticks
        ticks += 1
        if ticks == 4:
            full.undo()
        stop.set() if ticks == 6 else None
        if ticks > 1 and ticks < 5:
            assert not world.cluster.actions, "nothing was done that was not written first"
        return real(world.now_s, elapsed_s)

    monkeypatch.setattr(world.scheduler, "tick", tick)
    run_scheduler(world.scheduler, 0.0, stop, said.append)

    assert [text.partition(":")[0] for text in said] == [
        "nothing is started or stopped until this can be written", "the disk takes writes again",
    ]  # fmt: skip
    monkeypatch.undo()
    world.run(400.0)
    assert not world.cluster.running() and all(job.state.over for job in world.cluster.jobs.values())
    assert sorted(entry["job"] for entry in world.said("over")) == [1, 2, 3]


def test_newcomers_queue_by_submission_and_start_at_the_size_of_their_kind(world) -> None:
    world = world(FakeCluster(slots=4, rate=0.001))
    world.cluster.submit(1, least=4, most=4)
    world.run(3)
    state = world.scheduler.state
    world.scheduler.record("plan", **plan_event(state, newcomers={len(state.kinds): 2}))
    world.cluster.submit(5, most=4, submit_s=30.0)
    world.cluster.submit(4, most=4, submit_s=40.0, name="other")
    world.run(2)
    assert world.scheduler.state.waiting == ((5, 2), (4, 1))


def test_a_job_that_runs_before_anybody_decided_keeps_its_slots(world) -> None:
    world = world(FakeCluster(slots=4, rate=0.001))
    world.cluster.submit(1)
    world.run(3)
    world.cluster.submit(2, most=4, state=JobState.RUNNING, slots=2, shape=2)
    world.run(2)
    assert world.scheduler.state.target[2] == 2 and world.cluster.running() == {1: 1, 2: 2}


class ExplainingCluster(FakeCluster):
    """Shows texts of held jobs, and complains once."""

    texts: Mapping[int, str] = {}
    complaints = 1

    def explain(self, texts: Mapping[int, str]) -> str:
        if self.away:
            raise CapabilityError("the controller does not answer")
        self.texts, self.complaints = texts, self.complaints - 1
        return "no right" if self.complaints == 0 else ""


def test_the_cluster_shows_why_held_jobs_wait(world) -> None:
    w = world(ExplainingCluster(slots=1, rate=0.001), quantum_s=60.0)
    for number in (1, 2, 3):
        w.cluster.submit(number, limit_s=600.0, start_s=T0_S)
    w.run(3)
    assert w.cluster.texts[3].startswith("rank 2 of 2: 1 job of its pool before it, expected start 2023-")
    w.cluster.submit(4)
    w.run(3)
    assert w.cluster.texts[4].startswith("rank 3 of 3: 2 jobs"), "a job held between rounds, too"
    assert [fields["text"] for fields in w.said("note")] == ["no right"]
    w.cluster.away = True
    w.run(3)
    assert "controller" in w.said("unreachable")[0]["text"]


def test_only_those_that_wait_are_ranked(world) -> None:
    world = world(FakeCluster(slots=1, rate=0.001))
    for number in (1, 2):
        world.cluster.submit(number)
    world.run(70)
    assert [action for action in world.cluster.actions if isinstance(action, Order)][-1] == Order((2,))


def test_a_tally_is_read_back_as_it_was_written() -> None:
    window = JobWindow(2, 1, 0.1, open_ratio=0.2, last_ratio=0.3, elapsed_s=40.0, energy_j=50.0, slot_j=30.0, looks=4)
    tally = Tally(
        10.0, 20.0, 30.0, 1.0, 2.0, 25.0, 200.0, 0.3, 0.01, {1: 0.5, 2: 0.4}, Quality.MODELLED, window, {2: 9.0}
    )
    state = SchedulerState(
        tallies={1: tally},
        energy_seen={1: {"stated-1": SourceTotal(7.0, 6.0, 5.0, 4.0), "agents": SourceTotal(30.0, 20.0)}},
        who={1: ("ada", "job", "gpu", "lab")},
    )
    document = orjson.loads(orjson.dumps(tallies_event(state, [1]), option=orjson.OPT_NON_STR_KEYS))
    again = apply_event(SchedulerState(), {"kind": "tallies", **document})
    assert again == state and list(again.energy_seen[1]) == ["stated-1", "agents"]


def test_what_an_earlier_version_remembered_of_a_meter_is_read() -> None:
    document = orjson.loads(orjson.dumps(tallies_event(SchedulerState(tallies={1: Tally(energy_j=30.0)}), [1])))
    document["jobs"]["1"]["seen"] = ["agents", 30.0, 20.0]
    state = apply_event(SchedulerState(), {"kind": "tallies", **document})
    assert state.energy_seen == {1: {"agents": SourceTotal(30.0, 20.0)}} and state.tallies[1].energy_j == 30.0


def test_a_refused_action_is_logged_and_tried_again(world) -> None:
    world = world(FakeCluster(slots=1))
    world.cluster.submit(1, held_by_us=True)
    world.begin()
    world.scheduler.record("started", job=1, slots=1)
    world.cluster.refuse = {1}
    world.run(3)
    outcomes = [fields["outcome"] for fields in world.said("action") if fields.get("job") == 1]
    assert outcomes and set(outcomes) == {"failed"}
    world.cluster.refuse = set()
    world.run(3)

    assert world.cluster.running() == {1: 1}


@pytest.mark.parametrize("mode", [Mode.ADVISE, Mode.SHADOW])
def test_nothing_is_touched_unless_it_is_to_act(world, mode: Mode) -> None:
    world = world(FakeCluster(slots=1, rate=0.001), mode=mode)
    for number in (1, 2, 3):
        world.cluster.submit(number)
    world.run(130)

    assert world.cluster.actions == []
    assert {fields["outcome"] for fields in world.said("action")} == {"advised" if mode is Mode.ADVISE else "shadow"}
    assert len(world.said("round")) == 3
    assert len(world.said("action")) <= 12, "said when it changes, not at every look"


def test_advice_leaves_no_plan_behind(world) -> None:
    world = world(FakeCluster(slots=1), mode=Mode.ADVISE)
    world.cluster.submit(1)
    world.run(70)

    assert world.file.read_bytes() == b""


@pytest.mark.parametrize("exempt", ["part of a job array", "held by its owner"])
def test_what_is_left_alone_is_not_touched_and_its_slots_are_not_counted(world, exempt: str) -> None:
    world = world(FakeCluster(slots=4))
    world.cluster.submit(1, exempt=exempt, state=JobState.RUNNING, slots=3)
    world.cluster.submit(2, exempt=exempt)
    world.cluster.submit(3, least=2, most=2)
    world.run(5)

    touched = {action.job for action in world.cluster.actions if not isinstance(action, Order)}
    assert touched <= {3}
    assert world.cluster.running() == {1: 3}


def test_a_job_larger_than_the_cluster_waits_without_blocking_the_rest(world) -> None:
    world = world(FakeCluster(slots=2, rate=0.05))
    world.cluster.submit(1, least=8, most=8)
    for number in (2, 3):
        world.cluster.submit(number)
    world.run(200)

    assert world.cluster.jobs[1].state is JobState.WAITING
    assert {world.cluster.jobs[number].state for number in (2, 3)} == {JobState.DONE}


def test_an_hour_of_unknown_intensity_is_not_called_dirty(world) -> None:
    world = world(FakeCluster())
    world.cluster.submit(1)
    world.tick()
    assert world.said("round")[0]["text"].startswith("dirty hour; ")
    world.scheduler._intensity = IntensityTracker(None, 3600.0, lambda _: None)
    world.scheduler.tick(world.now_s, round_now=True)
    assert world.said("round")[1]["text"].startswith("no intensity; 0 in the upper")


def test_no_node_up_decides_nothing(world) -> None:
    world = world(FakeCluster(slots=0))
    world.cluster.submit(1)
    world.run(3)

    assert "no slots are up" in world.said("round")[0]["text"]


def test_a_round_without_a_slot_to_plan_says_so(world) -> None:
    """``schedule --once --json`` prints it: an order of the queue alone would have no reason."""
    world = world(FakeCluster(slots=3))
    world.cluster.submit(1, exempt="part of a job array", state=JobState.RUNNING, slots=3)
    world.cluster.submit(2)
    world.tick()
    (said,) = world.said("round")
    assert "left alone hold every slot" in said["text"] and said["jobs"] == 1


def test_a_node_that_goes_down_takes_no_job_out_of_the_plan(world) -> None:
    world = world(FakeCluster(slots=2, rate=0.005))
    for number in (1, 2):
        world.cluster.submit(number)
    world.run(5)
    # Its node is gone: Slurm requeues the job by itself, not held.
    world.cluster.jobs[2] = replace(world.cluster.jobs[2], state=JobState.WAITING, slots=0, restarts=1)
    world.cluster.slots = 1
    world.run(20)
    assert world.cluster.running() == {1: 1}
    world.cluster.slots = 2
    world.run(400)

    assert {job.state for job in world.cluster.jobs.values()} == {JobState.DONE}


def test_a_job_that_ends_while_it_is_being_stopped_is_over(world) -> None:
    world = world(FakeCluster(slots=1))
    world.cluster.submit(1)
    world.run(3)
    world.cluster.apply(Stop(1))
    world.tick()
    assert world.cluster.jobs[1].state is JobState.STOPPING
    world.cluster.stopping_s.clear()
    world.cluster.jobs[1] = replace(world.cluster.jobs[1], state=JobState.DONE, slots=0)
    world.run(3)

    assert [fields["state"] for fields in world.said("over")] == ["done"]
    assert not world.scheduler.state.knows(1)


def test_what_is_reported_of_a_job_after_it_stopped_or_ended_counts(world) -> None:
    world = world(FakeCluster(slots=1, rate=0.001))
    world.cluster.submit(1)
    world.run(20)
    for state in (JobState.WAITING, JobState.DONE):
        old = world.cluster.energy[1]
        world.cluster.energy[1] = replace(old, energy_j=old.energy_j + 500.0)
        world.cluster.jobs[1] = replace(world.cluster.jobs[1], state=state, slots=0, held_by_us=state.over)
        world.tick()
        world.now_s += 1.0

    (over,) = world.said("over")
    assert over["energy_j"] == pytest.approx(world.cluster.energy[1].energy_j)
    assert over["executed_s"] == pytest.approx(18.0, abs=2.0)


def test_a_job_the_cluster_no_longer_knows_leaves_the_plan(world) -> None:
    world = world(FakeCluster(slots=1))
    world.cluster.submit(1)
    world.run(3)
    del world.cluster.jobs[1]
    world.run(1)

    assert [fields["state"] for fields in world.said("over")] == ["unknown"]


def test_totals_that_start_anew_count_from_nothing(world) -> None:
    world = world(FakeCluster(rate=0.001))
    world.cluster.submit(1)
    world.run(10)
    before = world.scheduler.state.tallies[1].energy_j
    world.cluster.energy[1] = JobEnergy(5.0, 5.0, Quality.MODELLED, "another agent")
    world.tick()

    assert world.scheduler.state.tallies[1].energy_j == pytest.approx(before + 5.0 + 0.0)
    assert world.scheduler.state.tallies[1].quality is Quality.MODELLED
    before = world.scheduler.state.tallies[1].energy_j
    world.cluster.energy[1] = JobEnergy(900.0, 900.0, Quality.MODELLED, "a third, which has counted more")
    world.tick()
    assert world.scheduler.state.tallies[1].energy_j == pytest.approx(before + 900.0)


def test_releasing_all_releases_the_held_alone(world) -> None:
    cluster = FakeCluster()
    cluster.submit(1, held_by_us=True)
    cluster.submit(2)
    cluster.submit(3, held_by_us=True)

    assert release_all(cluster) == [1, 3]
    assert cluster.held() == set()
    cluster.submit(4, held_by_us=True)
    cluster.refuse = {4}
    with pytest.raises(ActuationError, match="1 jobs stay held") as caught:
        release_all(cluster)
    assert caught.value.left_dirty


def test_a_scheduler_that_ends_while_a_job_is_being_stopped_leaves_no_hold(world) -> None:
    world = world(FakeCluster(slots=1, rate=0.001, stop_s=5.0))
    world.cluster.submit(1)
    world.run(3)
    world.cluster.apply(Stop(1))
    assert world.cluster.jobs[1].state is JobState.STOPPING
    assert release_all(world.cluster) == [1]
    for _ in range(10):
        world.cluster.pass_time(1.0)

    assert world.cluster.held() == set() and world.cluster.running() == {1: 1}


def test_a_job_that_began_before_its_hold_came_is_released_and_runs_on(world) -> None:
    world = world(FakeCluster(slots=1, rate=0.001))
    world.cluster.submit(1)
    world.run(3)
    world.cluster.apply(Hold(1))
    world.run(3)

    assert not world.cluster.jobs[1].held_by_us and world.cluster.running() == {1: 1}


def test_jobs_that_do_not_start_by_themselves_are_not_orphaned_holds(world) -> None:
    cluster = FakeCluster(self_starting=False)
    cluster.submit(1, held_by_us=True)
    world = world(cluster)
    world.tick()

    assert not any(isinstance(action, (Release, Hold, Order)) for action in cluster.actions)
    assert Start(1, 1) in cluster.actions
    cluster.submit(2, held_by_us=True)
    assert release_all(cluster) == [], "they wait only because no scheduler has started them"


def test_no_job_is_stopped_for_one_that_a_limit_keeps_from_starting(world) -> None:
    world = world(FakeCluster(slots=4, rate=0.0005, limits={"ada": 2}))
    for number in (1, 2):
        world.cluster.submit(number)
    for number in (3, 4):
        world.cluster.submit(number, owner="bob")
    world.run(100)
    for number in range(5, 9):
        world.cluster.submit(number)
    world.run(600)

    stops = [fields for fields in world.said("action") if fields["do"] == "stop"]
    assert sum(world.cluster.running().values()) == 4
    assert all(world.cluster.jobs[fields["job"]].owner == "ada" for fields in stops), "only for jobs within the limit"


def test_a_released_job_that_does_not_start_gives_its_slots_back(world) -> None:
    world = world(FakeCluster(slots=1, rate=0.002), quantum_s=600.0)
    world.cluster.never = {1}
    for number in (1, 2):
        world.cluster.submit(number)
    world.run(90)

    assert world.cluster.running() == {2: 1}
    assert not world.cluster.jobs[1].held_by_us, "the cluster may start it whenever it can"
    (note,) = [fields for fields in world.said("note") if fields.get("job") == 1]
    assert "60 s" in note["text"]


def test_a_released_job_that_the_cluster_passes_over_gives_its_slots_back_at_once(world) -> None:
    """It asks for something that the snapshot does not show."""
    world = world(FakeCluster(slots=2, rate=0.002), quantum_s=600.0)
    world.cluster.layout = {"g1": ("", 1), "g2": ("", 1)}
    world.cluster.secret = {1: frozenset({"g9"})}
    for number in (1, 2):
        world.cluster.submit(number)
    world.run(8)
    world.cluster.submit(3)
    world.run(4)

    assert world.cluster.running() == {2: 1, 3: 1}
    (note,) = [fields for fields in world.said("note") if fields.get("job") == 1]
    assert "passed over" in note["text"], "long before the 60 s that a verdict may take"


def test_a_job_that_lets_those_before_it_go_first_is_not_passed_over(world) -> None:
    """Two jobs wait for one slot that comes free; the cluster takes its time, and starts the first one on it."""
    world = world(FakeCluster(slots=2, rate=0.0005, stop_s=5.0, pass_s=4.0), quantum_s=40.0)
    for number in (1, 2):
        world.cluster.submit(number)
    world.run(100)
    for number in (3, 4):
        world.cluster.submit(number, most=2, owner="bob")
    world.run(200)

    assert world.cluster.running() == {3: 1, 4: 1}, "neither the slot of one nor that of the other went elsewhere"
    assert [fields["text"] for fields in world.said("note")] == []
    stops = [(fields["job"], fields["reason"]) for fields in world.said("action") if fields["do"] == "stop"]
    assert stops == [(2, "its 1 slots go to job 3"), (1, "its 1 slots go to job 4")]


def test_slots_that_take_long_to_come_free_are_kept_for_the_job_they_are_freed_for(world) -> None:
    """The stopped job uses its grace of 70 s; that its successor was released before counts for nothing."""
    world = world(FakeCluster(slots=1, rate=0.0005, stop_s=70.0, pass_s=3.0), quantum_s=200.0)
    world.cluster.submit(1)
    world.run(300)
    world.cluster.submit(2, most=2, owner="bob")
    world.run(400)

    assert [fields["job"] for fields in world.said("action") if fields["do"] == "stop"] == [1]
    assert world.cluster.running() == {2: 1}
    assert [fields["text"] for fields in world.said("note")] == []


def test_without_rights_there_is_one_error_and_a_pause(world) -> None:
    world = world(FakeCluster(slots=1, rate=0.001))
    for number in (1, 2, 3):
        world.cluster.submit(number)
    tried = []

    def refused(action: object) -> str:
        tried.append(action)
        raise CapabilityError("Slurm does not let this user change jobs", grant="sacctmgr modify user ...")

    apply, world.cluster.apply = world.cluster.apply, refused
    world.run(290)
    assert len(tried) == 1 and len(world.said("note")) == 1
    world.run(20)
    assert len(tried) == 2
    world.cluster.apply = apply
    world.run(310)
    assert world.cluster.held() == {3}


def test_a_job_that_saves_nothing_is_not_stopped_twice(world) -> None:
    world = world(FakeCluster(slots=1, rate=0.001))
    world.cluster.submit(1)
    world.run(100)
    world.cluster.apply(Stop(1))
    world.run(20)
    world.cluster.jobs[1] = replace(world.cluster.jobs[1], progress_ratio=0.01)
    for number in (2, 3):
        world.cluster.submit(number)
    world.run(300)

    assert world.scheduler.state.unsaved == {1} and world.cluster.running() == {1: 1}
    assert not [fields for fields in world.said("action") if fields["do"] == "stop"]


def test_a_job_that_a_limit_blocks_keeps_its_place(world) -> None:
    world = world(FakeCluster(slots=4, rate=0.01, licenses={"tool": 1}), quantum_s=600.0)
    world.cluster.layout = {"a1": ("a", 2), "b1": ("b", 2)}
    world.cluster.needs = dict.fromkeys((1, 2, 3), "tool")
    for number, pool in ((1, "b"), (2, "b"), (3, "a")):
        world.cluster.submit(number, pool=pool, submit_s=T0_S + number)
    world.run(5)
    world.tick()
    world.scheduler.tick(world.now_s, round_now=True)
    world.run(120)

    assert world.cluster.running() == {2: 1}, "the license goes to the next, whatever its pool"


def test_jobs_of_a_higher_class_of_the_clusters_priority_go_first(world) -> None:
    world = world(FakeCluster(slots=1, rate=0.001), priority_step=1000.0)
    for number, priority in ((1, 10.0), (2, 20.0), (3, 5000.0)):
        world.cluster.submit(number, priority=priority)
    world.run(3)
    assert world.cluster.running() == {3: 1}
    assert [a for a in world.cluster.actions if isinstance(a, Order)][-1].jobs[0] == 3


def test_the_clusters_priority_is_read_each_round_and_of_held_jobs_from_their_like(world) -> None:
    world = world(FakeCluster(slots=1, rate=0.001), priority_step=1000.0)
    for number in (1, 2, 3, 4):
        world.cluster.submit(number, owner="ada" if number < 4 else "bob", priority=10.0)
    world.run(3)
    assert world.cluster.running() == {1: 1} and world.cluster.held() == {3, 4}
    held = world.cluster.jobs[4]
    world.cluster.jobs[4] = replace(held, priority=float("nan"))
    world.cluster.submit(5, owner="bob", priority=7000.0)
    world.run(65)

    ranked = [fields["jobs"] for fields in world.said("action") if fields["reason"] == "the ranking of this round"][-1]
    assert set(ranked[:2]) == {4, 5}, "bob's fairshare rose: his held job goes first, too"
    world.crash()
    assert world.scheduler.state.priority[4] == 7000.0


def test_pools_are_planned_apart_and_profiles_are_shared(world) -> None:
    world = world(TwoPools(slots=4, rate=0.001))
    for number in range(1, 7):
        world.cluster.submit(number, pool="a" if number % 2 else "b")
    world.run(3)
    assert sorted(world.cluster.running()) == [1, 2, 3, 4], "two of each pool"
    assert {fields["pool"] for fields in world.said("round")} == {"a", "b"}
    world.crash()
    world.run(70)
    assert sorted(world.scheduler.state.policy["jobs"]) == ["1", "2", "3", "4", "5", "6"]


class TwoPools(FakeCluster):
    """Two pools of half the slots."""

    def snapshot(self):
        seen = super().snapshot()
        used = {pool: sum(job.slots for job in seen.jobs if job.pool == pool) for pool in "ab"}
        half = self.slots // 2
        return replace(seen, nodes=tuple(ClusterNode(pool, half, half - used[pool], pool) for pool in "ab"))


def test_every_action_has_a_reason_and_every_round_what_was_seen(world) -> None:
    world = world(FakeCluster(rate=0.002))
    world.cluster.submit(1, most=4)
    world.run(400)

    assert all(fields["reason"] for fields in world.said("action"))
    for fields in world.said("round"):
        assert fields["view"]["g_per_kwh"] == 300.0
        assert set(fields["target"]) <= {1}


def test_lengths_of_ended_jobs_outlive_a_crash_and_lead_to_the_order_of_submission(world) -> None:
    w = world(FakeCluster(slots=2, rate=0.05), policy=Green(theta=1.0, fixed_gpus=1), quantum_s=20.0)
    for job in range(1, 13):
        w.cluster.submit(job, most=1)
    w.run(60)
    ended = w.scheduler.state.ended_slot_s
    assert len(ended) >= 4 and all(slot_s == pytest.approx(20.0, abs=3.0) for slot_s in ended)
    w.crash()
    assert w.scheduler.state.ended_slot_s == ended
    assert replay_events(compacted(w.scheduler.state))[0].ended_slot_s == ended
    w.run(25)
    last = w.said("round")[-1]
    assert "in order of submission" in last["text"]
    assert last["view"]["ended_gpu_s"].tolist()[:4] == list(ended)[:4]
