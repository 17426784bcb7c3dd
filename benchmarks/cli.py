"""Response time of the command line: ``--help``, and the time that ``measure`` adds to the shortest command."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import Result

RUNS = 15


def run() -> Result:
    """Time cold starts: a new process each, caches of the file system warm."""
    joulery = [sys.executable, "-m", "joulery"]
    help_s = times([*joulery, "--help"])
    bare_s = times([sys.executable, "-c", "pass"])
    verb_s = times([*joulery, "measure", "--help"])
    measure_s = times([*joulery, "measure", "--", "true"])
    rows = [
        ["python -c pass", spread(bare_s)],
        ["joulery --help", spread(help_s)],
        ["joulery measure --help", spread(verb_s)],
        ["joulery measure -- true", spread(measure_s)],
    ]
    return Result(
        title="The command line",
        columns=["command", "median / longest"],
        rows=rows,
        notes=[
            f"Wall time of a new process, {RUNS} runs each. `measure` waits until its sampler has read everything once."
        ],
        checks=[("joulery --help answers within 0.2 s", statistics.median(help_s) <= 0.2)],
    )


def times(command: list[str]) -> list[float]:
    """Wall seconds of each run."""
    found = []
    with tempfile.TemporaryDirectory(prefix="joulery-bench-") as folder:
        for _ in range(RUNS):
            start_s = time.perf_counter()
            subprocess.run(command, cwd=Path(folder), capture_output=True, check=True)
            found.append(time.perf_counter() - start_s)
    return found


def spread(seconds: list[float]) -> str:
    """Median and longest time, as text."""
    return f"{statistics.median(seconds) * 1e3:.0f} / {max(seconds) * 1e3:.0f} ms"
