"""Time on slots: a job's runs, whenever the scheduler looks, and its joules beside it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from joulery.accounting.training_jobs import MeasureRules, Tally
from joulery.config.site import Mode
from joulery.domain.cluster import ClusterJob, ClusterSnapshot, JobRun, JobState, Placement
from joulery.domain.energy.channel import Channel, ReadingKind
from joulery.domain.quality import Quality
from joulery.policies.training.green import Green
from joulery.runtime.schedule.energy import FirstSource, JobMeter, MachineShares, StatedPower
from joulery.runtime.schedule.intensity_tracker import IntensityTracker
from joulery.runtime.schedule.rounds import SchedulerTiming
from joulery.runtime.schedule.scheduler import EnergySource, Scheduler
from joulery.store.journal import Journal

EPOCH_S = 1.79e9
IDLE_W, BUSY_W, BOARD_W = 20.0, 10.0, 100.0
CORES = 4


@dataclass
class Machine:
    """Jobs on a timeline, one board each, and the meters and processor times of the machine they run on.

    Attributes:
        runs: Begin and end of each run of each job, seconds from the start.
        exact: Whether a run under way says how long it has held its slots.
    """

    runs: dict[int, list[tuple[float, float]]]
    exact: bool = True
    now_s: float = 0.0
    reported_s: float = -1.0
    kinds: list[object] = field(default_factory=list)

    # the cluster

    def snapshot(self) -> ClusterSnapshot:
        return ClusterSnapshot(len(self.runs), tuple(map(self._job, sorted(self.runs))), self_starting=False)

    def _job(self, number: int) -> ClusterJob:
        begun = [run for run in self.runs[number] if run[0] <= self.now_s]
        under_way = bool(begun) and self.now_s < begun[-1][1]
        over = len(begun) == len(self.runs[number]) and not under_way
        state = JobState.RUNNING if under_way else JobState.DONE if over else JobState.WAITING
        run = self._run(begun[-1]) if begun else None
        if run is not None and under_way and not self.exact:
            run = replace(run, held_s=math.nan)
        return ClusterJob(number, "job", "ada", EPOCH_S, state, slots=int(under_way), restarts=max(0, len(begun) - 1),
                          run=run)  # fmt: skip

    def _run(self, run: tuple[float, float]) -> JobRun:
        return JobRun(EPOCH_S + run[0], min(self.now_s, run[1]) - run[0], 1)

    def apply(self, action: object, /) -> str:
        self.kinds.append(action)
        return ""

    def close(self) -> None:
        return

    # what the meter reads

    channels = tuple(
        Channel(device, name, ReadingKind.COUNTER, "fake", Quality.MEASURED)
        for device, name in (("cpu:0", "package"), ("gpu:1", "board"), ("gpu:2", "board"))
    )
    sockets, cpus = (0,), (CORES,)

    def held_s(self, number: int) -> float:
        return math.fsum(max(0.0, min(self.now_s, end) - begin) for begin, end in self.runs.get(number, ()))

    def read(self) -> tuple[float, ...]:
        busy_j = math.fsum(map(self.held_s, self.runs)) * BUSY_W
        return (IDLE_W * self.now_s + busy_j, *(BOARD_W * self.now_s for _ in (1, 2)))

    def notes(self) -> tuple[str, ...]:
        return ()

    def placements(self) -> tuple[Placement, ...]:
        found = []
        for number, runs in self.runs.items():
            for at, run in enumerate(runs):
                if self.reported_s < run[1] <= self.now_s:
                    used_s = run[1] - run[0]
                    found.append(Placement(number, (10 * number + at,), 1, (number,), run=self._run(run), ended=True,
                                           cpu_s=used_s))  # fmt: skip
                elif run[0] <= self.now_s < run[1]:
                    found.append(Placement(number, (10 * number + at,), 1, (number,), run=self._run(run)))
        self.reported_s = self.now_s
        return tuple(found)

    def meter(self) -> JobMeter:
        shares = MachineShares(Busy(self), lambda pid: Tree(self, pid), slots=2)
        return JobMeter((self,), shares, self.placements, clock_s=lambda: self.now_s)  # type: ignore[arg-type]


@dataclass
class Busy:
    machine: Machine
    sockets, cpus = (0,), (CORES,)

    def read(self) -> tuple[float, ...]:
        return (math.fsum(map(self.machine.held_s, self.machine.runs)),)

    def close(self) -> None:
        return


@dataclass
class Tree:
    """The processor time of one run, as long as its process lives."""

    machine: Machine
    pid: int
    last_s: float = 0.0

    def discover(self) -> None:
        return

    def pids(self) -> frozenset[int]:
        return frozenset({self.pid})

    def read(self) -> tuple[float, ...]:
        begin, end = self.machine.runs[self.pid // 10][self.pid % 10]
        if self.machine.now_s < end:
            self.last_s = self.machine.now_s - begin
        return (self.last_s,)

    def close(self) -> None:
        return


class World:
    """A scheduler that looks at the machine every ``poll_s``."""

    def __init__(self, folder: Path, machine: Machine, energy: EnergySource, mode: Mode = Mode.ADVISE) -> None:
        self.folder, self.machine, self.energy, self.mode = folder, machine, energy, mode
        self.costs: dict[int, dict[str, Any]] = {}
        self.open()

    def open(self) -> None:
        timing = SchedulerTiming(1e9, 1.0, MeasureRules())
        self.scheduler = Scheduler(
            self.machine, Green(theta=1.0, cap=4), Journal(self.folder / "journal.jsonl"), self.energy,
            IntensityTracker(None, 3600.0, lambda _: None), self._log, mode=self.mode, timing=timing,
        )  # fmt: skip

    def _log(self, kind: str, fields: Any) -> None:
        if kind == "over":
            assert fields["job"] not in self.costs, "a job ends once"
            self.costs[fields["job"]] = dict(fields)

    def look(self, now_s: float, elapsed_s: float) -> None:
        self.machine.now_s = now_s
        self.scheduler.tick(EPOCH_S + now_s, elapsed_s)

    def play(self, poll_s: float, until_s: float, meanwhile: Callable[[], None] = lambda: None) -> None:
        now_s = 0.0
        self.look(now_s, 0.0)
        while now_s < until_s:
            now_s += poll_s
            self.look(now_s, poll_s)
            meanwhile()


polls = st.floats(2.0, 60.0)
lengths = st.floats(0.01, 200.0)


@st.composite
def timelines(draw: st.DrawFn, most_runs: int = 1) -> dict[int, list[tuple[float, float]]]:
    """Runs of two jobs, each begun after the first look."""
    found: dict[int, list[tuple[float, float]]] = {}
    for number in (1, 2):
        at_s, runs = draw(st.floats(0.001, 50.0)), []
        for _ in range(draw(st.integers(1, most_runs))):
            end_s = at_s + draw(lengths)
            runs.append((at_s, end_s))
            at_s = end_s + draw(st.floats(130.0, 200.0))  # no run begins before the end of the last was seen
        found[number] = runs
    return found


def total_s(runs: list[tuple[float, float]]) -> float:
    return math.fsum(end - begin for begin, end in runs)


@given(timelines(most_runs=3), polls)
def test_the_time_on_slots_is_that_of_the_runs_whatever_the_poll(
    tmp_path_factory: pytest.TempPathFactory, runs: dict[int, list[tuple[float, float]]], poll_s: float
) -> None:
    machine = Machine(runs)
    meter = machine.meter()
    world = World(tmp_path_factory.mktemp("w"), machine, meter)
    world.play(poll_s, max(of[-1][1] for of in runs.values()) + poll_s)

    for number, of in runs.items():
        cost = world.costs[number]
        assert cost["executed_s"] == pytest.approx(total_s(of), abs=1e-6)
        assert cost["slot_s"] == pytest.approx(total_s(of), abs=1e-6)
        assert cost["unmetered_s"] == pytest.approx(0.0, abs=1e-6), "the meter ran all the time"
        # Its board's watts and its own work for as long as it ran, and its slots' part of the idle watts.
        assert cost["energy_j"] > (BOARD_W + BUSY_W) * total_s(of) * (1 - 1e-6)
    charged_j = math.fsum(cost["energy_j"] for cost in world.costs.values())
    assert charged_j <= meter.machine_j * (1 + 1e-9), "the rest is idle or of no job"
    assert meter.machine_j == pytest.approx(math.fsum(machine.read()), rel=1e-9)


@given(timelines(), polls)
def test_a_cluster_that_gives_starts_and_ends_alone_settles_at_the_end(
    tmp_path_factory: pytest.TempPathFactory, runs: dict[int, list[tuple[float, float]]], poll_s: float
) -> None:
    machine = Machine(runs, exact=False)
    world = World(tmp_path_factory.mktemp("w"), machine, FirstSource([]))
    world.play(poll_s, max(of[-1][1] for of in runs.values()) + poll_s)

    for number, of in runs.items():
        cost = world.costs[number]
        assert cost["executed_s"] == pytest.approx(total_s(of), abs=1e-6)
        assert cost["unmetered_s"] == pytest.approx(total_s(of), abs=1e-6), "nothing measured it"
        assert cost["energy_j"] == 0.0


@given(timelines(), polls)
def test_a_stated_power_goes_by_the_time_of_the_runs(
    tmp_path_factory: pytest.TempPathFactory, runs: dict[int, list[tuple[float, float]]], poll_s: float
) -> None:
    machine = Machine(runs)
    stated = StatedPower(200.0, 50.0, lambda: machine.now_s)
    world = World(tmp_path_factory.mktemp("w"), machine, stated)
    world.play(poll_s, max(of[-1][1] for of in runs.values()) + poll_s)

    for number, of in runs.items():
        assert world.costs[number]["energy_j"] == pytest.approx(250.0 * total_s(of), abs=1e-3)
        assert world.costs[number]["unmetered_s"] == pytest.approx(0.0, abs=1e-6)


def test_time_while_no_scheduler_ran_is_on_slots_and_not_metered(tmp_path: Path) -> None:
    machine = Machine({1: [(1.0, 1000.0)]})
    world = World(tmp_path, machine, machine.meter(), Mode.SHADOW)
    for now_s in range(0, 105, 5):
        world.look(float(now_s), 5.0)
    machine.now_s = 500.0
    world.energy = machine.meter()
    world.open()
    world.look(500.0, 0.0)
    tally: Tally = world.scheduler.state.tallies[1]
    assert (tally.executed_s, tally.unmetered_s) == pytest.approx((499.0, 400.0))

    for now_s in range(505, 1010, 5):
        world.look(float(now_s), 5.0)
    cost = world.costs[1]
    assert (cost["executed_s"], cost["unmetered_s"]) == pytest.approx((999.0, 400.0))


def test_a_run_that_an_earlier_version_counted_is_not_counted_again(tmp_path: Path) -> None:
    machine = Machine({1: [(1.0, 1000.0)]})
    world = World(tmp_path, machine, machine.meter())
    world.play(5.0, 100.0)
    tally = world.scheduler.state.tallies[1]
    old = replace(tally, run_start_s=0.0, run_s=0.0, ahead_s=0.0)
    world.scheduler.state = replace(world.scheduler.state, tallies={1: old})
    world.look(105.0, 5.0)

    assert world.scheduler.state.tallies[1].executed_s == pytest.approx(104.0)
