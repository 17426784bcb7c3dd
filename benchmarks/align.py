"""Time to account joules by operation: joulery against a plain walk over segments; a million events from JSON."""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import numpy as np

from benchmarks import Result
from joulery.accounting.operations.align import align
from joulery.accounting.steps import PowerSteps
from joulery.domain.energy.channel import Channel, ReadingKind
from joulery.domain.quality import Quality
from joulery.domain.trace.events import EventTrace

SIZES = (10_000, 100_000, 1_000_000, 3_000_000)
WALKED = 1_000_000
"""Largest number of events for which the plain walk is timed."""
OPS, PERIOD_NS = 2_000, 4_000_000
STEP_EVENTS = 13
"""Events of one repetition of the written trace: see ``_step``."""
CHILD = """
import sys, time
from pathlib import Path
from joulery.app.runs.accounts import account_files
from joulery.runtime.tracing.anatomy import AccountSettings
ready = time.process_time()
made = account_files(Path(sys.argv[1]), Path(sys.argv[2]), AccountSettings())
gpu = made.footprint.devices[1]
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(time.process_time() - ready, peak.split()[1], len(made.trace),
      abs(gpu.attributed_j + gpu.unattributed_j - gpu.total_j) / gpu.total_j)
"""


def trace(count: int) -> EventTrace:
    """Two lanes of back-to-back events of about 40 us, of 2,000 operations."""
    rng = np.random.default_rng(0)
    length = rng.lognormal(np.log(40_000), 0.8, count).astype(np.int64)
    lane = np.arange(count) % 2
    start = np.empty(count, np.int64)
    for one in (0, 1):
        here = length[lane == one]
        start[lane == one] = np.cumsum(here + rng.integers(0, 8_000, len(here))) - here
    zeros = np.zeros(count, np.int64)
    names = [f"net/layer_{i % 12}/op{i}" for i in range(OPS)]
    op = rng.integers(0, OPS, count)
    return EventTrace(
        names, ["CPU:0"], ["forward"], op=op, start_ns=start, dur_ns=length, device=zeros, lane=lane, phase=zeros
    )


def meter(end_ns: int) -> PowerSteps:
    """Random power of 50 to 150 W, with a reading every 4 ms."""
    edges = np.arange(0, end_ns + PERIOD_NS, PERIOD_NS)
    watts = np.random.default_rng(1).uniform(50, 150, len(edges) - 1)
    return PowerSteps(Channel("CPU:0", "package", ReadingKind.POWER, "fake", Quality.MEASURED), edges, watts)


def walk(events: EventTrace, power: PowerSteps) -> dict[int, float]:
    """Account in the plain way: between successive timestamps, the active events share the energy equally."""
    entry, leave = defaultdict(list), defaultdict(list)
    for number, (start, end) in enumerate(zip(events.start_ns.tolist(), events.end_ns.tolist(), strict=True)):
        entry[start].append(number)
        leave[end].append(number)
    stamps = sorted({*entry, *leave, *power.edges_ns[:-1].tolist()})
    watts = power.at(np.array(stamps)).tolist()
    energy: dict[int, float] = defaultdict(float)
    ops, active = events.op.tolist(), set()
    for at, begin in enumerate(stamps[:-1]):
        active.difference_update(leave[begin])
        active.update(entry[begin])
        if active:
            share = watts[at] * (stamps[at + 1] - begin) / 1e9 / len(active)
            for number in active:
                energy[ops[number]] += share
    return energy


def _timed(count: int) -> tuple[float, float, float]:
    """User CPU seconds of joulery and of the walk (NaN when too large), and the largest difference between them."""
    events = trace(count)
    end = int(events.end_ns.max())
    power = meter(end)
    taken = []
    for _ in range(3 if count > 1_000_000 else 5):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_utime
        got = align(events, {"CPU:0": [power]}, (0, end))
        taken.append(resource.getrusage(resource.RUSAGE_SELF).ru_utime - before)
    if count > WALKED:
        return statistics.median(taken), float("nan"), float("nan")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    plain = walk(events, power)
    walked = resource.getrusage(resource.RUSAGE_SELF).ru_utime - before
    by_name = got.energy_by_op
    apart = max(abs(by_name[events.ops[op]] - joules) / joules for op, joules in plain.items())
    return statistics.median(taken), walked, apart


def write_trace(path: Path, count: int) -> int:
    """Write a Kineto file of about ``count`` events (modules, backward, arrows, launches, kernels); their number."""
    steps = count // STEP_EVENTS
    with path.open("w") as file:
        file.write('{"schemaVersion": 1, "baseTimeNanoseconds": 1711964646000000000, "traceEvents": [\n')
        for step in range(steps):
            file.write(("" if step == 0 else ",\n") + ",\n".join(_step(step)))
        file.write('\n], "traceName": "benchmark"}\n')
    return steps * STEP_EVENTS


def _step(step: int) -> list[str]:
    """Events of one linear layer, forward and backward, with a kernel each."""
    at = 4_458_676_522_690_655 + step * 300_000
    layer, seq, ids = step % 48, step + 1, 20 * step

    def event(cat: str, name: str, start: int, length: int, tid: int, args: str) -> str:
        ts, dur = at + start, length
        return (
            f'  {{"ph": "X", "cat": "{cat}", "name": "{name}", "pid": 291, "tid": {tid}, '
            f'"ts": {ts // 1000}.{ts % 1000:03d}, "dur": {dur // 1000}.{dur % 1000:03d}, "args": {{{args}}}}}'
        )

    def arrow(end: str, start: int, tid: int) -> str:
        ts = at + start
        place = f'"pid": 291, "tid": {tid}, "ts": {ts // 1000}.{ts % 1000:03d}'
        return f'  {{"ph": "{end}", "id": {seq}, {place}, "cat": "fwdbwd", "name": "fwdbwd", "bp": "e"}}'

    def external(k: int) -> str:
        return f'"External id": {ids + k}, "Record function id": {ids + k}, "Ev Idx": {ids + k}'

    grad = f'"Sequence number": {seq}, "Fwd thread id": 1'
    node = "autograd::engine::evaluate_function: AddmmBackward0"
    launch, ran = '"cbid": 211, "correlation"', '"device": 0, "context": 1, "stream": 7, "correlation"'
    return [
        event("user_annotation", f"QTN:Net/layer.{layer}.dense", 0, 90_000, 1, external(1)),
        event(
            "cpu_op", "aten::linear", 5_000, 80_000, 1, f'{external(2)}, "Sequence number": {seq}, "Fwd thread id": 0'
        ),
        event(
            "cpu_op", "aten::addmm", 9_000, 70_000, 1, f'{external(3)}, "Sequence number": {seq}, "Fwd thread id": 0'
        ),
        arrow("s", 9_000, 1),
        event("cuda_runtime", "cudaLaunchKernel", 30_000, 9_000, 1, f"{external(3)}, {launch}: {ids + 4}"),
        event("kernel", "ampere_sgemm_128x64_nn", 50_000, 60_000, 7, f"{external(3)}, {ran}: {ids + 4}"),
        event("cpu_op", node, 120_000, 150_000, 2, f"{external(5)}, {grad}"),
        event("cpu_op", "AddmmBackward0", 122_500, 140_000, 2, f"{external(6)}, {grad}"),
        arrow("f", 122_500, 2),
        event("cpu_op", "aten::mm", 130_000, 50_000, 2, external(7)),
        event("cuda_runtime", "cudaLaunchKernel", 140_000, 9_000, 2, f"{external(7)}, {launch}: {ids + 8}"),
        event("kernel", "ampere_sgemm_128x64_tn", 160_000, 60_000, 7, f"{external(7)}, {ran}: {ids + 8}"),
        event("cpu_op", "aten::mm", 190_000, 50_000, 2, external(9)),
    ]


def _from_json(count: int) -> tuple[int, float, float, float, float]:
    """Events in the file, its megabytes, CPU seconds, peak MB of memory, error of conservation."""
    with tempfile.TemporaryDirectory(prefix="joulery-bench-") as folder:
        file, power = Path(folder) / "trace.json", Path(folder) / "power.csv"
        written = write_trace(file, count)
        begin = 1_711_964_646_000_000_000 + 4_458_676_522_690_655
        end = begin + (count // STEP_EVENTS) * 300_000
        rows = "".join(f"{t},{device},90\n" for device in ("CPU:0", "GPU:0") for t in range(begin, end, PERIOD_NS))
        power.write_text("t_ns,device,power_w\n" + rows)
        size = file.stat().st_size / 1e6
        done = subprocess.run(
            [sys.executable, "-c", CHILD, str(file), str(power)], capture_output=True, text=True, check=True
        )
    seconds, peak_kb, _, apart = done.stdout.split()
    return written, size, float(seconds), float(peak_kb) / 1024, float(apart)


def run() -> Result:
    """Time joulery and the plain walk at every size, and joulery from JSON to the footprint."""
    rows, differences = [], list[float]()
    ours: dict[int, float] = {}
    for count in SIZES:
        ours[count], walked, difference = _timed(count)
        differences += [difference] if count <= WALKED else []
        shown = "" if walked != walked else f"{walked:.2f} s"
        times = "" if walked != walked else f"{walked / ours[count]:.0f} x"
        rows.append((f"{count:,} events, accounted", f"{ours[count]:.3f} s", shown, times))
    started = time.perf_counter()
    written, size, seconds, peak, broken = _from_json(1_000_000)
    rows.append((f"{written:,} events, from {size:.0f} MB of JSON to the footprint", f"{seconds:.2f} s", "", ""))
    apart = float(np.max(differences))  # NaN stays NaN, which does not hold
    checks = [
        ("1,000,000 events accounted in at most 1.0 s of CPU", ours[1_000_000] <= 1.0),
        ("100,000 in at most 0.1 s", ours[100_000] <= 0.1),
        ("3,000,000 take at most 4 times as long as 1,000,000", ours[3_000_000] <= 4 * ours[1_000_000]),
        ("the walk finds the same joules to 1e-9", apart <= 1e-9),
        ("JSON to footprint in at most 8 s of CPU for each 1,000,000 events", seconds <= 8 * written / 1e6),
        ("at most 600 MB of memory for it", peak <= 600),
        ("its joules add up to 1e-9", broken <= 1e-9),
    ]
    return Result(
        "Joules by operation",
        ("what", "joulery, user CPU", "plain walk over segments", "faster"),
        rows,
        notes=[
            f"Two lanes of events of about 40 µs, {OPS:,} operations, power every 4 ms. The walk is the plain way of "
            f"doing it, in Python, without the defects of the published code; the two differ by {apart:.0e} at most. "
            f"The JSON is a PyTorch trace written for the purpose (modules, backward, arrows, launches, kernels); it "
            f"is read, named and accounted in a process of its own, {peak:.0f} MB at its peak, "
            f"{time.perf_counter() - started:.0f} s on the clock with writing it.",
        ],
        checks=checks,
    )
