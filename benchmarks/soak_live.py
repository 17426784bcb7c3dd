"""Memory of every process of a served session against the number of its requests: ``soak --live``.

``joulery up`` with three gateways answers a million requests.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np

from benchmarks import Result
from benchmarks._killed_service import ROOT, Service

REQUESTS = int(os.environ.get("JOULERY_SOAK_REQUESTS", "1_000_000"))
WARM_RATIO = 0.2
"""Share of the requests before the first reading; windows of recent requests are full by then."""
CONNECTIONS = 16
ROUND_S = 15
FLAT_BYTES = 4.0
"""Most bytes that a request may leave behind in the memory of all processes together."""


def run() -> Result:
    """Serve the requests and read the memory of every process."""
    with tempfile.TemporaryDirectory(prefix="jb-") as name:
        return asyncio.run(_play(Path(name)))


async def _play(folder: Path) -> Result:
    service, began_s = Service(folder), time.monotonic()
    sent = answered = 0
    readings: list[tuple[int, Counter[str]]] = []
    try:
        await service.start()
        while sent < REQUESTS:
            summary = await _load(service.port, folder)
            sent, answered = sent + summary["sent"], answered + summary["ok"]
            if sent >= WARM_RATIO * REQUESTS:
                readings.append((sent, memory(service)))
        took_s = time.monotonic() - began_s
        await service.stop()
        recorded, switches = service.recorded(), service.switches()
    finally:
        service.clear()
    (first, low), (last, high) = readings[0], readings[-1]
    growth = (high.total() - low.total()) / (last - first)
    shown = [readings[at * (len(readings) - 1) // 4] for at in range(5)]
    columns = ("process", *(f"{done:,} requests" for done, _ in shown))
    rows = [[what, *(f"{found[what] / 2**20:.1f} MiB" for _, found in shown)] for what in sorted(high)]
    rows.append(["all", *(f"{found.total() / 2**20:.1f} MiB" for _, found in shown)])
    return Result(
        "Soak: a million requests through real processes",
        columns,
        rows,
        notes=(
            "`joulery up` with three gateways on one port and two cores; joulery's own generator, closed loop, "
            f"{CONNECTIONS} connections, {ROUND_S} s at a time: {sent:,} requests in {took_s:.0f} s, of them "
            f"{answered:,} answered; {switches} changes of the layout. Memory is RssAnon of all processes of a kind, "
            "between two of those loads; "
            f"{growth:.2f} bytes a request are left behind. Recorded are the rows in the run folder.",
        ),
        checks=(
            (f"{REQUESTS:,} requests in one session: {sent:,}", sent >= REQUESTS),
            (f"each of them is in the records: {recorded.total():,} of {sent:,}", recorded.total() == sent),
            (
                f"flat memory: at most {FLAT_BYTES:g} bytes a request, all processes together: {growth:.2f}",
                growth <= FLAT_BYTES,
            ),
        ),
    )


async def _load(port: int, folder: Path) -> dict[str, int]:
    """Run the load generator once; its counts."""
    inputs = folder / "inputs.npz"
    np.savez(inputs, x=np.array([[1.0]], np.float32))
    line = [sys.executable, "-m", "joulery.runtime.load", "--url", f"http://127.0.0.1:{port}", "--service", "trivial"]
    line += ["--closed", "--no-binary", "--connections", str(CONNECTIONS), "--duration-s", str(ROUND_S)]
    line += ["--inputs", str(inputs), "--out", str(folder / "outcomes.parquet")]
    process = await asyncio.create_subprocess_exec(*line, cwd=ROOT, stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    if process.returncode:
        raise RuntimeError(f"the load generator ended with {process.returncode}")
    return dict(json.loads(output))


def memory(service: Service) -> Counter[str]:
    """RssAnon by kind of process, bytes."""
    assert service.controller is not None
    found: Counter[str] = Counter(controller=_anonymous_bytes(service.controller.pid))
    for what, processes in (
        ("gateways", service.processes("gateway")),
        ("engine server", service.processes("engine server")),
        ("replicas", service.processes("replica")),
    ):
        found[what] = sum(_anonymous_bytes(process.pid) for process in processes)
    return found


def _anonymous_bytes(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:  # a replica of the layout before
        return 0
    return next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("RssAnon:")), 0)
