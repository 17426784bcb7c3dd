"""joulery on Ray Serve against plain ``serve run``, a trivial model: requests per second and CPU time, same run."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks import Result
from benchmarks.gateway import ROOT, SERVICE, Load, free_port, load_tool, ray_python, ray_serve, spread, wait_for
from benchmarks.gateway import Point as Speed

ROUNDS = 2
CONNECTIONS = 32
PATIENCE = 6
"""Number of half minutes within which a server must be ready."""
PLAIN, DEFAULT, THROUGH = "plain `serve run`", "joulery on Ray", "joulery on Ray, `direct: false`"
SITE = """\
joulery: 1
name: ray
mode: advise
fleet: {{cpu: {{slices: [1]}}}}
services:
  - name: trivial
    family:
      task: doubling
      accuracy_metric: none
      variants:
        - name: v
          accuracy: 100 %
          accuracy_source: exact
          model: {{kind: python, target: "benchmarks._trivial:model"}}
    slo: {{latency: 2 s}}
    rate: 100 /s
serving: {{listen: "127.0.0.1:{port}", engine: {{kind: ray, cpus: 2{direct}}}}}
"""


@dataclass(frozen=True, slots=True)
class Cost:
    """One measurement: speed, and CPU time a request of all processes of the server."""

    speed: Speed
    cpu_s: float


def run() -> Result:
    """Measure the servers in turn; only one of them runs at a time."""
    found: dict[str, list[Cost]] = {PLAIN: [], DEFAULT: [], THROUGH: []}
    with tempfile.TemporaryDirectory(prefix="jb-") as scratch:
        tool, load = load_tool(Path(scratch))
        for number in range(ROUNDS):
            for name, costs in found.items():
                folder = Path(scratch) / f"{number}{len(name)}"
                folder.mkdir()
                with plain(folder) if name == PLAIN else on_ray(folder, through=name == THROUGH) as url:
                    costs.append(measured(load, url))
    rps = {name: statistics.median(cost.speed.rps for cost in costs) for name, costs in found.items()}
    cpu_s = {name: statistics.median(cost.cpu_s for cost in costs) for name, costs in found.items()}
    rows = [
        [
            name,
            f"{rps[name]:.0f} /s",
            f"{1e3 * statistics.median(cost.speed.p50_s for cost in costs):.1f} ms",
            f"{1e3 * cpu_s[name]:.2f} ms",
            spread([cost.speed for cost in costs]),
        ]
        for name, costs in found.items()
    ]
    faster, less = rps[DEFAULT] / rps[PLAIN], cpu_s[DEFAULT] / cpu_s[THROUGH]
    note = (
        f"Load: {tool}, {CONNECTIONS} connections, closed loop on loopback, 5 s at a time after 5 s unmeasured, "
        f"rounds in turn: {ROUNDS}, medians. One server runs at a time, on a Ray cluster of its own, with one replica. "
        "CPU time: of all processes of the server and its cluster, whatever else Ray does included; the joules of a "
        f"request above idle follow it. With `direct: false` the requests pass through Ray's handle: "
        f"{rps[THROUGH] / rps[PLAIN]:.2f} x plain `serve run`."
    )
    return Result(
        "On Ray Serve, against plain `serve run`",
        ("server", "throughput", "p50", "CPU time a request", "throughput, all rounds"),
        rows,
        notes=(note,),
        checks=(
            (f"at least 0.95 x plain serve run's requests a second: {faster:.2f} x", faster >= 0.95),
            (f"at most half of the CPU time a request of the way through Ray's handle: {less:.2f} x", less <= 0.5),
        ),
    )


def measured(load: Load, url: str) -> Cost:
    """Measure once after a warm-up: CPU time of all child processes during the load, over its requests."""
    load(url, CONNECTIONS)
    before_s = cpu_time_s()
    speed = load(url, CONNECTIONS)
    return Cost(speed, (cpu_time_s() - before_s) / (speed.rps * 5.0))


def cpu_time_s() -> float:
    """CPU seconds of all living descendants of this process."""
    total_s = 0.0
    for process in psutil.Process().children(recursive=True):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total_s += times.user + times.system
    return total_s


def until_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    """Wait until the server answers; it first makes a profile and starts a Ray cluster.

    Raises:
        RuntimeError: The server ended, or does not answer.
    """
    for _ in range(PATIENCE):
        try:
            wait_for(url)
            return
        except RuntimeError:
            if process.poll() is not None:
                break
    raise RuntimeError(f"joulery on Ray does not serve:\n{log.read_text()[-2000:]}")


@contextmanager
def plain(folder: Path) -> Iterator[str]:
    """Run Ray Serve with its default proxy; yields the address of the model."""
    with ray_serve(folder) as url:
        yield url + SERVICE


@contextmanager
def on_ray(folder: Path, *, through: bool) -> Iterator[str]:
    """Run ``joulery up`` on a Ray cluster of its own; yields the address of the model."""
    port, site = free_port(), folder / "site.yaml"
    site.write_text(SITE.format(port=port, direct=", direct: false" if through else ""))
    line = [str(ray_python()), "-m", "joulery", "up", str(site), "--stay", "--out", str(folder / "run")]
    here = os.pathsep.join(entry for entry in (str(ROOT / "src"), str(ROOT), *sys.path) if entry)
    environ = os.environ | {"RAY_AUTH_MODE": "disabled", "PYTHONPATH": here, "JOULERY_CACHE": str(folder / "cache")}
    with (folder / "log").open("w") as log, subprocess.Popen(line, stdout=log, stderr=log, env=environ) as process:
        started: list[psutil.Process] = []
        try:
            until_ready(process, f"http://127.0.0.1:{port}{SERVICE}", folder / "log")
            started = psutil.Process(process.pid).children(recursive=True)
            yield f"http://127.0.0.1:{port}{SERVICE}"
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
            _, left = psutil.wait_procs(started, timeout=10)
            for child in left:
                child.kill()
