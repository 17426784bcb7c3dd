"""Host operations weighed by the CPU time of their threads: waiting is free, and nothing is lost."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from joulery.accounting.operations.align import align
from joulery.accounting.operations.cpu_lanes import PER_CPU, weighed
from joulery.accounting.operations.session import session
from joulery.accounting.steps import PowerSteps, power_steps
from joulery.domain.energy.channel import Channel, ReadingKind
from joulery.domain.energy.power import PowerTrace
from joulery.domain.quality import Quality
from joulery.domain.trace.events import EventTrace
from joulery.domain.trace.threads import ThreadTimes

MS = 1_000_000
CPU = "cpu:0"


@dataclass(frozen=True)
class Stretch:
    """What one thread does for some time: an operation or none, at some share of a CPU."""

    op: str | None
    length_ms: float
    busy_ratio: float = 1.0


def world(
    threads: Sequence[Sequence[Stretch]], *, sweep_ms: float = 20.0, per_cpu_w: float = 30.0, process: int = 100
) -> tuple[EventTrace, ThreadTimes, PowerSteps, tuple[int, int], dict[str, float]]:
    """Threads that do one thing after the other; a socket with so many watts a busy CPU; joules by operation."""
    ops: dict[str, int] = {}
    events: list[tuple[int, int, int, int]] = []
    truth: dict[str, float] = {}
    curves = []
    for lane, stretches in enumerate(threads):
        at, spent, curve = 0.0, 0.0, [(0.0, 0.0)]
        for stretch in stretches:
            if stretch.op is not None:
                number = ops.setdefault(stretch.op, len(ops))
                events.append((number, round(at * MS), round(stretch.length_ms * MS), lane))
                joules = per_cpu_w * stretch.busy_ratio * stretch.length_ms / 1e3
                truth[stretch.op] = truth.get(stretch.op, 0.0) + joules
            at += stretch.length_ms
            spent += stretch.length_ms * stretch.busy_ratio
            curve.append((at, spent))
        curves.append(np.array(curve))
    end = max(curve[-1, 0] for curve in curves)
    sweeps = np.arange(0.0, end + sweep_ms, sweep_ms)
    rows = [
        (t * MS, process + lane, process + lane, np.interp(t, curve[:, 0], curve[:, 1]) / 1e3, number)
        for number, t in enumerate(sweeps)
        for lane, curve in enumerate(curves)
    ]
    times = ThreadTimes(*(list(column) for column in zip(*rows, strict=True)))
    fine = np.arange(0.0, end + 1.0)
    watts = sum(np.gradient(np.interp(fine, curve[:, 0], curve[:, 1]), fine) for curve in curves) * per_cpu_w
    channel = Channel(CPU, "package", ReadingKind.POWER, "fake", Quality.MEASURED)
    power = power_steps(PowerTrace(channel, (fine * MS).astype(np.int64), np.maximum(watts, 0.0), 0.001))
    op, start, length, lane = (np.array(column) for column in zip(*events, strict=True))
    trace = EventTrace(
        list(ops),
        [CPU],
        ["forward"],
        op=op,
        start_ns=start,
        dur_ns=length,
        device=np.zeros(len(op)),
        lane=lane,
        phase=np.zeros(len(op)),
        lanes=[(process + lane, process + lane) for lane in range(len(threads))],
    )
    return trace, times, power, (0, round(end * MS)), truth


def work_and_wait(work_ms: float, wait_ms: float, steps: int, name: str) -> list[Stretch]:
    return [Stretch(f"{name}/mm", work_ms), Stretch("gloo:all_reduce", wait_ms, 0.0)] * steps


def test_a_rank_that_waits_gets_nothing_for_it() -> None:
    fast, slow = work_and_wait(15, 85, 20, "fast"), work_and_wait(95, 5, 20, "slow")
    trace, times, power, window, truth = world([fast, slow])
    got = align(trace, {CPU: [power]}, window, threads=times)
    energy = got.energy_by_op
    assert energy["gloo:all_reduce"] <= 0.02 * sum(truth.values())
    for op in ("fast/mm", "slow/mm"):
        assert energy[op] == pytest.approx(truth[op], rel=0.05)
    assert got.process_j[100] / sum(got.process_j.values()) == pytest.approx(15 / 110, rel=0.05)
    without = align(trace, {CPU: [power]}, window).energy_by_op
    assert without["gloo:all_reduce"] > 0.3 * sum(truth.values())


def test_a_module_that_sleeps_gets_nothing() -> None:
    steps = [Stretch("net/a", 20), Stretch("net/nap", 50, 0.0), Stretch("net/b", 10), Stretch(None, 7)] * 20
    trace, times, power, window, truth = world([steps])
    energy = align(trace, {CPU: [power]}, window, threads=times).energy_by_op
    assert energy["net/nap"] <= 0.01 * sum(truth.values())
    assert energy["net/a"] == pytest.approx(truth["net/a"], rel=0.05)
    assert energy["net/b"] == pytest.approx(truth["net/b"], rel=0.05)


def test_helpers_count_for_the_thread_that_calls_them_and_not_for_one_that_sleeps() -> None:
    """An OpenMP worker works beside its caller; a Python thread beside a sleeping one works for itself."""
    caller = [Stretch("net/mm", 40), Stretch("net/nap", 60, 0.0)] * 20
    for helper, kept in (([Stretch(None, 40), Stretch(None, 60, 0.0)] * 20, 1.0), ([Stretch(None, 2000)], 0.55)):
        trace, times, power, window, _ = world([caller, helper])
        process = np.full(len(times), 100)
        times = ThreadTimes(times.t_ns, process, times.thread, times.cpu_s, times.sweep)
        trace = EventTrace(
            trace.ops,
            [CPU],
            ["forward"],
            op=trace.op,
            start_ns=trace.start_ns,
            dur_ns=trace.dur_ns,
            device=trace.device,
            lane=trace.lane,
            phase=trace.phase,
            lanes=[(100, 100)],
        )
        got = align(trace, {CPU: [power]}, window, threads=times)
        total = got.devices[0].total_j
        assert got.energy_by_op["net/mm"] / total == pytest.approx(kept, abs=0.05)
        assert got.energy_by_op["net/nap"] <= 0.02 * total


def test_processes_without_operations_are_named_in_a_note() -> None:
    trace, times, power, window, _ = world([[Stretch("net/mm", 400)], [Stretch(None, 400)]])
    got = align(trace, {CPU: [power]}, window, threads=times)
    assert got.energy_by_op["net/mm"] == pytest.approx(0.5 * got.devices[0].total_j, rel=0.05)
    assert any("1 other process(es)" in note for note in got.notes)


def test_lanes_that_the_readings_do_not_know_share_equally() -> None:
    trace, times, power, window, _ = world([[Stretch("net/mm", 400)], [Stretch("net/b", 400, 0.0)]])
    strangers = ThreadTimes(times.t_ns, times.process + 1000, times.thread + 1000, times.cpu_s, times.sweep)
    got = align(trace, {CPU: [power]}, window, threads=strangers)
    np.testing.assert_array_equal(got.energy_j, align(trace, {CPU: [power]}, window).energy_j)
    assert any("threads share equally" in note for note in got.notes)


stretches = st.builds(
    Stretch, st.sampled_from(["a", "b", "c", None]), st.floats(0.5, 60.0), st.sampled_from([0.0, 0.3, 1.0])
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(stretches, min_size=3, max_size=12), min_size=1, max_size=3), st.floats(5.0, 60.0))
def test_no_joule_is_lost_or_made(threads: list[list[Stretch]], sweep_ms: float) -> None:
    if not any(stretch.op for thread in threads for stretch in thread):
        return
    trace, times, power, window, _ = world(threads, sweep_ms=sweep_ms)
    for estimator in ("recency", "regression"):
        got = align(trace, {CPU: [power]}, window, threads=times, estimator=estimator)
        (device,) = got.devices
        assert device.attributed_j + device.unattributed_j == pytest.approx(device.total_j, rel=1e-9, abs=1e-9)
        assert device.attributed_j == pytest.approx(float(np.sum(got.energy_j)), rel=1e-9, abs=1e-9)
        assert sum(got.process_j.values()) == pytest.approx(device.attributed_j, rel=1e-9, abs=1e-9)
        assert np.all(got.energy_j >= -1e-12)


def busy_machine(
    threads: Sequence[Sequence[Stretch]], *, seed: int, slice_ms: float = 4.0
) -> tuple[EventTrace, ThreadTimes, tuple[int, int], dict[str, float]]:
    """Threads that have a CPU in 40 % of all slices if they are ready; readings every 20 ms; CPU seconds by operation.

    An operation lasts until it had its CPU time; a thread that waits for a CPU is ready.
    """
    dice = np.random.default_rng(seed)
    ops: dict[str, int] = {}
    events, rows, truth, hull = [], [], dict[str, float](), 0.0
    for lane, stretches in enumerate(threads):
        served = set(np.flatnonzero(dice.random(100_000) < 0.4).tolist())
        t, cpu, ready, curve = 0.0, 0.0, 0.0, [(0.0, 0.0, 0.0)]
        for stretch in stretches:
            begin, left = t, stretch.length_ms
            while left > 1e-9:
                slot = int(t / slice_ms + 1e-9)
                share = 1.0 if slot in served or not stretch.busy_ratio else 0.0
                spent = (slot + 1) * slice_ms - t
                spent = min(spent, left) if share else spent
                t += spent
                left -= spent * share
                cpu += spent * share * stretch.busy_ratio
                ready += spent * stretch.busy_ratio
                curve.append((t, cpu, ready))
            if stretch.op is not None:
                number = ops.setdefault(stretch.op, len(ops))
                events.append((number, round(begin * MS), round((t - begin) * MS), lane))
                truth[stretch.op] = truth.get(stretch.op, 0.0) + stretch.length_ms * stretch.busy_ratio / 1e3
        at, spent_ms, ready_ms = (np.array(column) for column in zip(*curve, strict=True))
        hull = max(hull, t)
        for number, sweep in enumerate(np.arange(0.0, t, 20.0)):
            had, could = np.interp(sweep, at, spent_ms) / 1e3, np.interp(sweep, at, ready_ms) / 1e3
            rows.append((round(sweep * MS), 100, 100 + lane, had, number, could - had))
    rows.sort(key=lambda row: (row[4], row[2]))
    op, start, length, lanes = (list(column) for column in zip(*sorted(events, key=lambda each: each[1]), strict=True))
    trace = EventTrace(
        list(ops),
        ["CPU"],
        [""],
        op=op,
        start_ns=start,
        dur_ns=length,
        device=[0] * len(op),
        lane=lanes,
        phase=[0] * len(op),
        lanes=[(100, 100 + lane) for lane in range(len(threads))],
    )
    return trace, ThreadTimes(*(list(column) for column in zip(*rows, strict=True))), (0, round(hull * MS)), truth


@pytest.mark.parametrize("seed", range(4))
def test_on_a_busy_machine_no_cpu_time_is_lost_to_short_operations(seed: int) -> None:
    one = [Stretch("a/zero", 0.1), Stretch("a/mm", 12), Stretch("a/nap", 15, 0.0), Stretch("a/add", 0.3)] * 60
    other = [Stretch("b/mm", 6), Stretch(None, 20, 0.0)] * 80
    trace, times, window, truth = busy_machine([one, other], seed=seed)
    cut = weighed(session(trace, window), "CPU", trace.lanes, times)
    assert cut is not None
    rest = cut.rest["CPU"]
    spent = float(np.sum(cut.weight * (cut.end_ns - cut.start_ns))) / (PER_CPU * 1e9)
    spent += float(np.sum(rest.weight * (rest.end_ns - rest.start_ns))) / (PER_CPU * 1e9)
    assert spent == pytest.approx(sum(truth.values()), rel=0.03), "all CPU time has a place"
    found = np.bincount(cut.row, cut.weight * (cut.end_ns - cut.start_ns) / (PER_CPU * 1e9))
    by_op = dict(zip(cut.rows.op, found.tolist(), strict=True))
    total = sum(truth.values())
    for op, seconds in truth.items():
        assert by_op[op] / total == pytest.approx(seconds / total, abs=0.05), op
