"""Cost of the sampler at 4 ms: its share of a core, and the slowdown of a busy workload."""

from __future__ import annotations

import math
import os
import random
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from mmap import mmap
from pathlib import Path

import numpy as np

from benchmarks import Result
from joulery.domain.energy.channel import MeterSpec
from joulery.runtime.measuring.sampler_config import SamplerConfig
from joulery.runtime.measuring.sampling import SamplerProcess
from joulery.store.run.readings import Recording, read_recordings

PERIOD_S = 0.004
ALONE_S = 10.0
PAIRS = 20
SLICE_S = 1.0
WORK = """
import mmap, struct, sys
with open(sys.argv[1], "r+b") as file:
    shown = mmap.mmap(file.fileno(), 8)
done = x = 0
while True:
    for i in range(2000):
        x += i * i % 7
    done += 1
    shown[:8] = struct.pack("q", done)
"""
NOTE = (
    "Four counters (two packages, two DRAM domains) in a stand-in for /sys/class/powercap on the disk, read with "
    "`pread` as the real ones are; CPU shares of the run every 100 ms. CPU is that of the sampler process while it "
    f"samples, over {ALONE_S:.0f} s beside one busy process. For the slowdown, one process a core runs pure Python "
    "without a pause and counts its rounds; the sampler is stopped and let go in turn (SIGSTOP, SIGCONT), "
    f"{SLICE_S:.0f} s each, each pair in random order; slowdown is rounds without over rounds with, less one."
)


def run() -> Result:
    """Sample a RAPL-shaped tree of four counters, alone and beside as many busy processes as there are cores."""
    with tempfile.TemporaryDirectory(prefix="joulery-bench-") as folder:
        root = Path(folder)
        tree = powercap(root / "powercap")
        cpu_ratio, gaps_ms, late = alone(root, tree)
        ratios = slowdowns(root, tree)
    mean, half = statistics.fmean(ratios), half_interval(ratios)
    cores = len(os.sched_getaffinity(0))
    return Result(
        title="The sampler at 4 ms",
        columns=["what", "figure"],
        rows=[
            ["CPU of the sampler, of one core", f"{cpu_ratio:.2%}"],
            ["time between readings, median / p95 / longest", " / ".join(f"{ms:.2f}" for ms in gaps_ms) + " ms"],
            ["late ticks skipped", f"{late} of {ALONE_S / PERIOD_S:.0f}"],
            [f"slowdown of {cores} busy processes on {cores} cores", f"{mean:+.2%} ± {half:.2%} (95 %, {PAIRS} pairs)"],
        ],
        notes=[NOTE],
        checks=[
            ("at most 2.5 % of one core at 4 ms", cpu_ratio <= 0.025),
            ("at most 1 % slowdown of a busy workload", mean <= 0.01),
        ],
    )


def half_interval(values: list[float]) -> float:
    """Half the width of the 95 % interval of the mean."""
    from scipy.stats import t

    return float(t.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / math.sqrt(len(values))


def powercap(root: Path) -> Path:
    """Create a powercap tree of two packages with a DRAM domain each."""
    for package in range(2):
        for folder, name in ((f"intel-rapl:{package}", f"package-{package}"), (f"intel-rapl:{package}:0", "dram")):
            zone = root / folder
            zone.mkdir(parents=True)
            (zone / "name").write_text(f"{name}\n")
            (zone / "max_energy_range_uj").write_text("262143328850\n")
            (zone / "energy_uj").write_text("123456789012\n")
    return root


@contextmanager
def sampling(root: Path, tree: Path) -> Iterator[tuple[SamplerProcess, Path]]:
    """Run a sampler; yields it and the folder that it writes to."""
    folder = Path(tempfile.mkdtemp(dir=root))
    config = SamplerConfig(
        folder=str(folder),
        parent=os.getpid(),
        root=os.getpid(),
        include_root=True,
        period_s=PERIOD_S,
        max_cpu_ratio=1.0,
        meters=(MeterSpec("rapl", {"root": str(tree)}),),
    )
    sampler = SamplerProcess.start(config)
    sampler.wait_ready()
    yield sampler, folder
    sampler.stop()


@contextmanager
def busy(root: Path, processes: int) -> Iterator[list[mmap]]:
    """Run processes that work without a pause; yields the counts of their rounds."""
    started, counts = [], []
    for number in range(processes):
        file = root / f"rounds-{number}"
        file.write_bytes(bytes(8))
        with file.open("r+b") as shown:
            counts.append(mmap(shown.fileno(), 8))
        started.append(subprocess.Popen([sys.executable, "-c", WORK, str(file)]))
    try:
        while any(rounds([count]) == 0 for count in counts):
            time.sleep(0.01)
        yield counts
    finally:
        for process in started:
            process.kill()
            process.wait()


def rounds(counts: list[mmap]) -> int:
    """Rounds done so far by all processes together."""
    return sum(struct.unpack("q", count[:8])[0] for count in counts)


def alone(root: Path, tree: Path) -> tuple[float, list[float], int]:
    """Sample beside one process: share of a core; median, p95, longest time between readings in ms; late ticks."""
    with busy(root, 1), sampling(root, tree) as (sampler, folder):
        time.sleep(ALONE_S)
    found = read_recordings(folder)
    gaps_ms = np.diff(found["0-rapl"].t_ns) / 1e6
    assert sampler.done is not None
    return cpu_share(found["cpu"]), [float(np.quantile(gaps_ms, q)) for q in (0.5, 0.95, 1.0)], sampler.done["late"]


def cpu_share(cpu: Recording) -> float:
    """Share of one core the sampler took between its first and its last reading of itself."""
    own_s = cpu.column("self_s")
    return float((own_s[-1] - own_s[0]) / ((cpu.t_ns[-1] - cpu.t_ns[0]) / 1e9))


def slowdowns(root: Path, tree: Path) -> list[float]:
    """Slowdown of the workload beside the sampler, pair by pair."""
    ratios = []
    with busy(root, len(os.sched_getaffinity(0))) as counts, sampling(root, tree) as (sampler, _):
        time.sleep(SLICE_S)
        for _ in range(PAIRS):
            order = random.sample([True, False], 2)
            speed = {with_it: rate(counts, sampler.pid, with_it) for with_it in order}
            ratios.append(speed[False] / speed[True] - 1)
        os.kill(sampler.pid, signal.SIGCONT)
    return ratios


def rate(counts: list[mmap], sampler: int, with_it: bool) -> float:
    """Rounds a second over one slice, with or without the sampler."""
    os.kill(sampler, signal.SIGCONT if with_it else signal.SIGSTOP)
    time.sleep(0.05)
    before, start_s = rounds(counts), time.perf_counter()
    time.sleep(SLICE_S)
    return (rounds(counts) - before) / (time.perf_counter() - start_s)
