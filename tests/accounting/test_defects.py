"""The nine defects of the published code (specs: Smaragdine report, section 1), each put back.

An accountant is a set of functions. ``Sound`` asks joulery; each mutant overrides one with what the published code
does there. The same examination is put to all of them: joulery passes it, every mutant is caught, and by the question
that is meant for it.
"""

import itertools
import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from joulery.accounting.charge import ShareRule, split
from joulery.accounting.steps import power_steps
from joulery.adapters.tracers.tables import read_event_table, read_power_table
from joulery.adapters.tracers.tf1 import read_tf1
from joulery.domain.energy.channel import Channel, ReadingKind
from joulery.domain.energy.power import PowerTrace
from joulery.domain.quality import Quality
from tests.accounting.fair_oracle import Event
from tests.accounting.worlds import World, accounted

J_PER_WATT_TICK = 1e-6
Energies = dict[str, float]


class Sound:
    """What joulery does."""

    def account(self, world: World) -> tuple[Energies, float]:
        """Energy by operation, and unattributed energy of all devices."""
        got = accounted(world)
        return got.energy_by_op, sum(d.unattributed_j for d in got.devices if d.metered)

    def run_share(self, energy_j: float, run: Sequence[float], busy: Sequence[float]) -> float:
        """Energy of a run on one socket, from busy ticks by CPU."""
        return float(split(energy_j, sum(run), sum(busy), by=ShareRule.BUSY)[0])

    def counter_watts(self, readings: Sequence[float], wrap_j: float) -> list[float]:
        """Power between readings one second apart."""
        channel = Channel("cpu:0", "package", ReadingKind.COUNTER, "rapl", Quality.MEASURED, wrap_j=wrap_j)
        stamps = [i * 10**9 for i in range(len(readings))]
        return power_steps(PowerTrace(channel, stamps, readings, 1.0)).watts.tolist()

    def table_energy(self, folder: Path) -> float:
        """Energy of one operation of 1 s at 1 W, through the files."""
        (folder / "e.csv").write_text("op,start_ns,dur_ns,device\na,1600000000000000000,1000000000,CPU:0\n")
        (folder / "p.csv").write_text("t_ns,device,power_w\n1600000000000000000,CPU:0,1\n1600000001000000000,CPU:0,1\n")
        trace, (power,) = read_event_table(folder / "e.csv"), read_power_table(folder / "p.csv")
        seconds = trace.dur_ns[0] / 1e9
        return float(seconds * power_steps(power).at(trace.start_ns)[0])

    def events_on_gpu(self, timeline: Path) -> list[tuple[str, int]]:
        """(name, start in us) of what ran on the GPU of a timeline."""
        trace = read_tf1(timeline)
        gpu = trace.devices.index("GPU:0")
        rows = zip(trace.op.tolist(), trace.start_ns.tolist(), trace.device.tolist(), strict=True)
        return sorted((trace.ops[op], start // 1000) for op, start, device in rows if device == gpu)


# ---- the published walk over segments, defect by defect


def walk(
    world: World,
    *,
    exit_after_charge: bool = False,
    names_only: bool = False,
    stop_at_last_event: bool = False,
    one_power_for_all: bool = False,
) -> tuple[Energies, float]:
    """Segments between stamps, charged one by one; with no flag set it is right for events without nesting."""
    energy: Energies = defaultdict(float)
    idle = 0.0
    for device, steps in world.power.items():
        events = [e for e in world.events if one_power_for_all or e.device == device]
        if one_power_for_all and device != next(iter(world.power)):
            continue
        t0, t1 = world.window
        stamps = sorted({t0, t1, *(t for t, _ in steps), *(e.start for e in events), *(e.end for e in events)})
        entry, leave = defaultdict(list), defaultdict(list)
        for number, event in enumerate(events):
            key = event.op if names_only else (event.op, number)
            entry[event.start].append(key)
            leave[event.end].append(key)
        active: list = []

        def gone(at: int, active: list = active, leave: dict = leave) -> None:
            for key in leave[at]:
                if key in active:
                    active.remove(key)

        for begin, end in itertools.pairwise(stamps):
            if not exit_after_charge:
                gone(begin)
            active += [key for key in entry[begin] if not names_only or key not in active]
            watts = next((w for t, w in reversed(steps) if t <= begin), steps[0][1])
            spent = watts * (end - begin) * J_PER_WATT_TICK
            if active:
                for key in active:
                    energy[key if names_only else key[0]] += spent / len(active)
            elif not stop_at_last_event:
                idle += spent
            if exit_after_charge:
                gone(begin)
    return dict(energy), idle


class ExitAfterCharging(Sound):
    """1: an event is charged for the segment that starts where it ends."""

    def account(self, world):
        return walk(world, exit_after_charge=True)


class NamesForEvents(Sound):
    """2: a set of operation names, so one event of two hides the other."""

    def account(self, world):
        return walk(world, names_only=True)


class IdleLost(Sound):
    """3: energy of the time in which nothing runs vanishes."""

    def account(self, world):
        return walk(world, stop_at_last_event=True)


class UndefinedEnergy(Sound):
    """4: the path to the energy of a CPU socket ends in a name that is not defined."""

    def run_share(self, energy_j, run, busy):
        return energy  # noqa: F821  # the published line


class EveryCpuTheWholeSocket(Sound):
    """5: each CPU's activity times the power of the whole socket, summed."""

    def run_share(self, energy_j, run, busy):
        return sum(energy_j * r / b for r, b in zip(run, busy, strict=True) if b)


class WrapInAnotherUnit(Sound):
    """6: a wrap constant of 16384 against a counter that wraps elsewhere, so a wrap reads as no power."""

    def counter_watts(self, readings, wrap_j):
        watts = []
        for before, after in itertools.pairwise(readings):
            difference = after - before
            watts.append(difference + 16384 if difference < -16384 else max(0.0, difference))
        return watts


class StampsInAnotherUnit(Sound):
    """7: nanoseconds taken for microseconds: power a thousand times too large."""

    def table_energy(self, folder):
        return super().table_energy(folder) * 1000


class LaunchesOnTheGpu(Sound):
    """8: the host's launch and the kernel both count as running on the GPU, all streams once more."""

    def events_on_gpu(self, timeline):
        document = json.loads(timeline.read_text())["traceEvents"]
        gpus = {e["pid"] for e in document if e["ph"] == "M" and "GPU:0" in e["args"]["name"]}
        return sorted((e["args"]["name"], e["ts"]) for e in document if e["ph"] == "X" and e["pid"] in gpus)


class OneSocketForAll(Sound):
    """9: operations of every socket are charged to the first."""

    def account(self, world):
        return walk(world, one_power_for_all=True)


# ---- the examination

FLAT = [(0, 100.0)]


def close(got: float, right: float) -> bool:
    return abs(got - right) <= 1e-12 + 1e-9 * abs(right)


def same(got: tuple[Energies, float], energies: Energies, idle: float) -> bool:
    ops = got[0].keys() | energies.keys()
    return all(close(got[0].get(op, 0.0), energies.get(op, 0.0)) for op in ops) and close(got[1], idle)


def ends_where_it_ends(a: Sound, folder: Path) -> bool:
    alone = World((Event("A", 0, 100),), {"CPU:0": FLAT}, (0, 200))
    chained = World((Event("A", 0, 100), Event("B", 100, 200)), {"CPU:0": FLAT}, (0, 200))
    return same(a.account(alone), {"A": 0.01}, 0.01) and same(a.account(chained), {"A": 0.01, "B": 0.01}, 0.0)


def counts_events_not_names(a: Sound, folder: Path) -> bool:
    streams = World((Event("A", 0, 100), Event("A", 50, 200), Event("B", 0, 200)), {"CPU:0": FLAT}, (0, 200))
    energies = {"A": 0.01 * (0.25 + 0.5 * 2 / 3 + 0.5), "B": 0.0}
    energies["B"] = 0.02 - energies["A"]
    return same(a.account(streams), energies, 0.0)


def keeps_idle(a: Sound, folder: Path) -> bool:
    return same(a.account(World((Event("A", 50, 100),), {"CPU:0": FLAT}, (0, 200))), {"A": 0.005}, 0.015)


def has_a_path_for_cpus(a: Sound, folder: Path) -> bool:
    try:
        return close(a.run_share(100.0, [100.0], [100.0]), 100.0)
    except NameError:
        return False


def gives_no_more_than_the_socket(a: Sound, folder: Path) -> bool:
    try:
        shares = a.run_share(100.0, [100.0] * 4, [100.0] * 4), a.run_share(100.0, [100, 0, 0, 0], [100.0] * 4)
    except NameError:
        return False
    return close(shares[0], 100.0) and close(shares[1], 25.0)


def undoes_a_wrap(a: Sound, folder: Path) -> bool:
    watts = a.counter_watts([262000.0, 262100.0, 56.0], 262144.0)
    return len(watts) == 2 and close(watts[0], 100.0) and close(watts[1], 100.0)


def keeps_units(a: Sound, folder: Path) -> bool:
    return close(a.table_energy(folder), 1.0)


def counts_a_kernel_once(a: Sound, folder: Path) -> bool:
    tracks = {
        1: "/job:localhost/replica:0/task:0/device:GPU:0 Compute",
        2: "/device:GPU:0/stream:all Compute",
        3: "/device:GPU:0/stream:16 Compute",
    }
    events = [{"name": "process_name", "ph": "M", "pid": pid, "args": {"name": name}} for pid, name in tracks.items()]
    for pid, ts in ((1, 10), (2, 20), (3, 20)):
        events.append(
            {"ph": "X", "name": "M", "pid": pid, "tid": 0, "ts": ts, "dur": 5, "args": {"name": "bert/MatMul"}}
        )
    path = folder / "timeline.json"
    path.write_text(json.dumps({"traceEvents": events}))
    return a.events_on_gpu(path) == [("bert/MatMul", 20)]


def divides_sockets_apart(a: Sound, folder: Path) -> bool:
    events = (Event("A", 0, 100, "CPU:0"), Event("B", 0, 100, "CPU:1"))
    world = World(events, {"CPU:0": FLAT, "CPU:1": [(0, 300.0)]}, (0, 100))
    return same(a.account(world), {"A": 0.01, "B": 0.03}, 0.0)


Question = Callable[[Sound, Path], bool]
EXAM: tuple[Question, ...] = (
    ends_where_it_ends,
    counts_events_not_names,
    keeps_idle,
    has_a_path_for_cpus,
    gives_no_more_than_the_socket,
    undoes_a_wrap,
    keeps_units,
    counts_a_kernel_once,
    divides_sockets_apart,
)
MUTANTS: dict[type[Sound], Question] = {
    ExitAfterCharging: ends_where_it_ends,
    NamesForEvents: counts_events_not_names,
    IdleLost: keeps_idle,
    UndefinedEnergy: has_a_path_for_cpus,
    EveryCpuTheWholeSocket: gives_no_more_than_the_socket,
    WrapInAnotherUnit: undoes_a_wrap,
    StampsInAnotherUnit: keeps_units,
    LaunchesOnTheGpu: counts_a_kernel_once,
    OneSocketForAll: divides_sockets_apart,
}


@pytest.mark.parametrize("question", EXAM, ids=lambda q: q.__name__)
def test_joulery_passes_every_question(question: Question, tmp_path: Path) -> None:
    assert question(Sound(), tmp_path)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.__name__)
def test_every_defect_put_back_is_caught(mutant: type[Sound], tmp_path: Path) -> None:
    assert not MUTANTS[mutant](mutant(), tmp_path)
    others = [q for q in EXAM if q is not MUTANTS[mutant]]
    assert sum(q(mutant(), tmp_path) for q in others) >= len(others) - 2, "the question is meant for this defect"


def test_the_walk_without_a_defect_is_right(tmp_path: Path) -> None:
    class Walk(Sound):
        def account(self, world):
            return walk(world)

    assert all(question(Walk(), tmp_path) for question in EXAM)


def test_the_golden_cases_catch_the_defects_of_the_walk() -> None:
    """The published results stored beside the golden cases are what the walk with its defects gives."""
    from tests.data_folder import data_folder

    cases = json.loads((data_folder("smaragdine") / "align" / "cases.json").read_text())["cases"]
    caught = defaultdict(int)
    for case in cases[:10]:
        events = tuple(Event(e["op"], e["start"], e["end"]) for e in case["events"])
        world = World(events, {"CPU:0": [tuple(sample) for sample in case["power"]]}, tuple(case["window"]))
        right = {op: float(value[1]) for op, value in case["expected"]["event"]["energy_J"].items()}
        idle = float(case["expected"]["event"]["unattributed_J"][1])
        for flag in ("exit_after_charge", "names_only", "stop_at_last_event"):
            caught[flag] += not same(walk(world, **{flag: True}), right, idle)
        assert same(Sound().account(world), right, idle), case["name"]
    assert min(caught.values()) >= 1
