"""CPU time of a request in the gateway, against a bare Starlette application with the same JSON."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import psutil

from benchmarks import Result
from benchmarks.gateway import ROOT, SERVICE, free_port, wait_for

ROUNDS, SECONDS, CONNECTIONS = 5, 4, 16
STARLETTE = """
import sys
import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

async def infer(request):
    body = await request.json()
    data = [2 * value for value in body["inputs"][0]["data"]]
    return JSONResponse({"outputs": [{"name": "y", "datatype": "FP32", "shape": [1, 2], "data": data}]})

app = Starlette(routes=[Route("/{path:path}", infer, methods=["POST"])])
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), loop="uvloop", http="httptools", access_log=False,
            log_level="warning")
"""


@contextmanager
def joulery() -> Iterator[tuple[str, psutil.Process]]:
    """Run ``joulery serve`` with a trivial model; yields its address and the gateway's process."""
    line = [sys.executable, "-m", "joulery", "serve", "--model", "trivial=benchmarks._trivial:model"]
    line += ["--listen", "127.0.0.1:0", "--json"]
    with subprocess.Popen(line, stdout=subprocess.PIPE, cwd=ROOT, text=True) as process:
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())["url"], psutil.Process(process.pid)
        finally:
            process.terminate()


@contextmanager
def starlette() -> Iterator[tuple[str, psutil.Process]]:
    """Run a bare Starlette application under uvicorn with uvloop and httptools; yields its address and process."""
    port = free_port()
    with subprocess.Popen([sys.executable, "-c", STARLETTE, str(port)]) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            wait_for(url + SERVICE)
            yield url, psutil.Process(process.pid)
        finally:
            process.terminate()


def cpu_s(process: psutil.Process) -> float:
    """CPU seconds of a process so far, without its children."""
    times = process.cpu_times()
    return float(times.user + times.system)


def loaded(url: str, process: psutil.Process, inputs: Path) -> tuple[float, int]:
    """CPU seconds a request of a server under a closed loop, and the number of requests."""
    line = [sys.executable, "-m", "joulery.runtime.load", "--url", url, "--service", "trivial", "--closed"]
    line += ["--no-binary", "--connections", str(CONNECTIONS), "--duration-s", str(SECONDS)]
    line += ["--inputs", str(inputs), "--out", str(inputs.with_name("outcomes.parquet"))]
    before_s = cpu_s(process)
    summary = json.loads(subprocess.run(line, capture_output=True, text=True, check=True).stdout)
    if summary["failed"]:
        raise RuntimeError(f"{url} failed requests: {summary}")
    return (cpu_s(process) - before_s) / summary["requests"], summary["requests"]


def run() -> Result:
    """Load the gateway and Starlette in turn."""
    found: dict[str, list[tuple[float, int]]] = {"Starlette": [], "joulery, gateway": [], "joulery, worker": []}
    with ExitStack() as stack:
        inputs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="jb-"))) / "inputs.npz"
        np.savez(inputs, x=np.array([[1.0, 2.0]], np.float32))
        bare_url, bare = stack.enter_context(starlette())
        url, gateway = stack.enter_context(joulery())
        wait_for(url + SERVICE)
        workers = gateway.children(recursive=True)
        for _ in range(ROUNDS):
            found["Starlette"].append(loaded(bare_url, bare, inputs))
            before_s = sum(map(cpu_s, workers))
            found["joulery, gateway"].append(loaded(url, gateway, inputs))
            requests = found["joulery, gateway"][-1][1]
            found["joulery, worker"].append(((sum(map(cpu_s, workers)) - before_s) / requests, requests))
    each = {name: [1e3 * one for one, _ in rounds] for name, rounds in found.items()}
    ratios = [mine / bare for mine, bare in zip(each["joulery, gateway"], each["Starlette"], strict=True)]
    ratio = statistics.median(ratios)
    rows = [
        [
            name,
            f"{statistics.median(ms):.3f} ({min(ms):.3f} to {max(ms):.3f}) ms",
            f"{sum(n for _, n in found[name]):,}",
        ]
        for name, ms in each.items()
    ]
    rows.append(["gateway over Starlette, round by round", f"{ratio:.2f} ({min(ratios):.2f} to {max(ratios):.2f})", ""])
    return Result(
        "CPU time of a request in the gateway",
        ("process", "CPU time a request, median (least to most)", "requests"),
        rows,
        notes=(
            f"Kernel's count of a process's own CPU time, {CONNECTIONS} connections in a closed loop, {ROUNDS} rounds "
            f"of {SECONDS} s in turn. The same JSON (two numbers) in and out. Starlette: one route under uvicorn with "
            "uvloop and httptools, no validation, no log, the model in the handler. The gateway validates the request "
            "by the Open Inference Protocol, queues it, sends it to a worker process, and keeps a record, metrics and "
            "limits of it.",
        ),
        checks=((f"at most 3 x the CPU time of Starlette: {ratio:.2f} x", ratio <= 3.0),),
        figures={"ratio": ratio, "ms": {name: statistics.median(ms) for name, ms in each.items()}},
    )
