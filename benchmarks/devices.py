"""Cost of a leased setting: setting, renewing, watching; and the time until it reverts after a kill."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from benchmarks import Result
from joulery.app.wiring.devices import open_clock
from joulery.domain.gpu.device import ClockSetting, DeviceSpec
from joulery.runtime.leasing.leases import LeaseHolder
from joulery.store.leases import LeaseBook
from tests.fakes.cpufreq import cpufreq_tree, settings

SETTINGS, KILLS, WATCHED_S = 100, 10, 20.0
CHILD = """
import signal, sys
from pathlib import Path
from joulery.domain.gpu.device import ClockSetting, DeviceSpec
from joulery.app.wiring.devices import open_clock
from joulery.runtime.leasing.leases import LeaseHolder
from joulery.store.leases import LeaseBook
spec = DeviceSpec("cpufreq", {"root": sys.argv[1]})
LeaseHolder(LeaseBook(Path(sys.argv[2])), 600.0).set(open_clock(spec), spec, ClockSetting(2000.0), "a benchmark")
print("set", flush=True)
signal.pause()
"""


def revert_delay_s(tree: Path, leases: Path) -> float:
    """Seconds from ``kill -9`` of a controller until its clock setting has reverted."""
    before = settings(tree)
    with subprocess.Popen([sys.executable, "-c", CHILD, str(tree), str(leases)], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        killed_s = time.monotonic()
        os.kill(child.pid, signal.SIGKILL)
        while settings(tree) != before:
            time.sleep(0.001)
        return time.monotonic() - killed_s


def run() -> Result:
    """Measure settings, renewals, the watchdog, and reverts after kills."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tree = cpufreq_tree(folder / "cpu", 8)
        spec = DeviceSpec("cpufreq", {"root": str(tree)})
        device = open_clock(spec)
        with LeaseHolder(LeaseBook(folder / "leases"), 600.0) as holder:
            holder.set(device, spec, ClockSetting(2000.0), "a benchmark")
            cpu_s, wall_s = time.thread_time(), time.monotonic()
            for number in range(SETTINGS):
                holder.set(device, spec, ClockSetting(1600.0 if number % 2 else 2400.0), "a benchmark")
            cpu_s, wall_s = time.thread_time() - cpu_s, time.monotonic() - wall_s
            renewing_s = time.thread_time()
            for _ in range(SETTINGS):
                holder.renew()
            renewing_s = time.thread_time() - renewing_s
            (watchdog,) = psutil.Process().children()
            busy_s = sum(watchdog.cpu_times()[:2])
            time.sleep(WATCHED_S)
            busy_s = sum(watchdog.cpu_times()[:2]) - busy_s
            memory_bytes = watchdog.memory_info().rss
        outlived = sorted(revert_delay_s(tree, folder / "others") for _ in range(KILLS))
    rows = [
        (
            "one leased clock setting (8 policies, verified): CPU / wall",
            f"{_ms(cpu_s / SETTINGS)} / {_ms(wall_s / SETTINGS)}",
        ),
        ("one renewal, CPU", _ms(renewing_s / SETTINGS)),
        ("the watchdog, CPU of one core", f"{100 * busy_s / WATCHED_S:.2f} %"),
        ("the watchdog, memory", f"{memory_bytes / 1e6:.0f} MB"),
        ("a clock outlives `kill -9`, median / longest", f"{_ms(statistics.median(outlived))} / {_ms(outlived[-1])}"),
    ]
    return Result(
        "Leased settings",
        ("what", "figure"),
        rows,
        notes=(
            f"A cpufreq tree on the disk; {SETTINGS} settings, each written down and forced to the disk first; "
            f"{KILLS} controllers killed. On hardware the kernel's and the driver's own time comes on top.",
        ),
        checks=(
            (
                "a controller that sets a clock every second spends at most 1 % of a core on it",
                cpu_s / SETTINGS <= 0.01,
            ),
            ("the watchdog takes at most 0.5 % of a core", busy_s / WATCHED_S <= 0.005),
            ("a setting outlives its controller by at most a second", outlived[-1] <= 1.0),
        ),
    )


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2g} ms"
