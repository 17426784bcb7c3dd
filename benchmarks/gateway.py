"""The gateway with a trivial model against Ray Serve's default proxy: requests per second and latency, same run."""

from __future__ import annotations

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import psutil

from benchmarks import Result

RAY = "ray[serve]==2.60.0"
ROUNDS = 3
SECONDS = 5
ROOT = Path(__file__).parents[1]
SERVICE = "/v2/models/trivial/infer"
BODY = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1.0, 2.0]}]}
RAY_SERVER = """
import sys
import ray
from ray import serve
from starlette.requests import Request

@serve.deployment(ray_actor_options={"num_cpus": 0}, max_ongoing_requests=100)
class Trivial:
    async def __call__(self, request: Request):
        body = await request.json()
        data = [2 * value for value in body["inputs"][0]["data"]]
        return {"outputs": [{"name": "y", "datatype": "FP32", "shape": [1, 2], "data": data}]}

ray.init(
    num_cpus=2, include_dashboard=False, object_store_memory=200 << 20, _temp_dir=sys.argv[2],
    _node_ip_address="127.0.0.1", configure_logging=False, log_to_driver=False,
)
serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[1])})
serve.run(Trivial.bind(), route_prefix="/")
print("ready", flush=True)
sys.stdin.read()
serve.shutdown()
ray.shutdown()
"""
LUA = f"""
wrk.method = "POST"
wrk.body = '{json.dumps(BODY)}'
wrk.headers["content-type"] = "application/json"
"""


@dataclass(frozen=True, slots=True)
class Point:
    """One measurement: requests per second, median latency."""

    rps: float
    p50_s: float


Load = Callable[[str, int], Point]


def run() -> Result:
    """Start both servers and load them in turn, with 1 and with 32 connections."""
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="jb-")))
        tool, load = load_tool(scratch)
        urls = {
            "joulery": stack.enter_context(joulery()) + SERVICE,
            "Ray Serve": stack.enter_context(ray_serve(scratch)) + SERVICE,
        }
        points: dict[tuple[str, int], list[Point]] = {(name, c): [] for name in urls for c in (1, 32)}
        for _ in range(ROUNDS):
            for (name, connections), found in points.items():
                found.append(load(urls[name], connections))
    rps = {key: statistics.median(point.rps for point in found) for key, found in points.items()}
    p50_s = {key: statistics.median(point.p50_s for point in found) for key, found in points.items()}
    faster = rps["joulery", 32] / rps["Ray Serve", 32]
    sooner = p50_s["Ray Serve", 1] / p50_s["joulery", 1]
    rows = [
        [name, str(c), f"{rps[name, c]:.0f} /s", f"{1e3 * p50_s[name, c]:.2f} ms", spread(points[name, c])]
        for name, c in points
    ]
    note = (
        f"Load: {tool}, closed loop on loopback, {SECONDS} s at a time, {ROUNDS} rounds in turn, medians. Both servers "
        "take and give the same JSON (two numbers). joulery: HTTP parsing, validation, queue, one worker process over "
        "its pipe, metrics. Ray Serve 2.60: default HTTP proxy, one replica, up to 100 requests at once."
    )
    return Result(
        "Gateway against Ray Serve's default proxy",
        ("server", "connections", "throughput", "p50", "throughput, all rounds"),
        rows,
        notes=(note,),
        checks=(
            (f"at least 10 x the requests per second at 32 connections: {faster:.1f} x", faster >= 10),
            (f"at most 1/10 of the p50 at one connection: 1/{sooner:.1f}", sooner >= 10),
        ),
    )


def spread(found: list[Point]) -> str:
    """The throughput of every round, as text."""
    return ", ".join(f"{point.rps:.0f}" for point in found)


def load_tool(scratch: Path) -> tuple[str, Load]:
    """``wrk`` where it is installed, else joulery's own generator in a closed loop."""
    wrk = shutil.which(os.environ.get("JOULERY_WRK", "wrk"))
    if wrk is None:
        inputs = scratch / "inputs.npz"
        np.savez(inputs, x=np.array([[1.0, 2.0]], np.float32))
        return "joulery's own generator (no wrk here)", lambda url, connections: own_load(url, connections, inputs)
    script = scratch / "post.lua"
    script.write_text(LUA)
    return "wrk", lambda url, connections: wrk_load(wrk, url, connections, script)


def wrk_load(wrk: str, url: str, connections: int, script: Path) -> Point:
    """One measurement with wrk."""
    line = [wrk, "-t1", f"-c{connections}", f"-d{SECONDS}s", "--latency", "-s", str(script), url]
    text = subprocess.run(line, capture_output=True, text=True, check=True).stdout
    rps, p50 = re.search(r"Requests/sec:\s+([\d.]+)", text), re.search(r"50%\s+([\d.]+)(us|ms|s)", text)
    if rps is None or p50 is None or "Non-2xx" in text:
        raise RuntimeError(f"wrk could not measure {url}:\n{text}")
    return Point(float(rps[1]), float(p50[1]) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[p50[2]])


def own_load(url: str, connections: int, inputs: Path) -> Point:
    """One measurement with joulery's generator."""
    base = url.removesuffix(SERVICE)
    line = [sys.executable, "-m", "joulery.runtime.load", "--url", base, "--service", "trivial", "--closed"]
    line += ["--no-binary", "--connections", str(connections), "--duration-s", str(SECONDS)]
    line += ["--inputs", str(inputs), "--out", str(inputs.with_name("outcomes.parquet"))]
    summary = json.loads(subprocess.run(line, capture_output=True, text=True, check=True).stdout)
    if summary["failed"]:
        raise RuntimeError(f"{url} failed requests: {summary}")
    return Point(summary["ok_rps"], summary["p50_s"])


@contextmanager
def joulery() -> Iterator[str]:
    """Run ``joulery serve`` with the trivial model; yields its address."""
    line = [sys.executable, "-m", "joulery", "serve", "--model", "trivial=benchmarks._trivial:model"]
    line += ["--listen", "127.0.0.1:0", "--json"]
    with subprocess.Popen(line, stdout=subprocess.PIPE, cwd=ROOT, text=True) as process:
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())["url"]
        finally:
            process.terminate()


@contextmanager
def ray_serve(scratch: Path) -> Iterator[str]:
    """Run Ray Serve with the trivial model, in its own virtual environment; yields its address."""
    python = ray_python()
    port = free_port()
    environment = os.environ | {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "RAY_worker_niceness": "0"}
    environment.pop("PYTHONPATH", None)
    line = [str(python), "-c", RAY_SERVER, str(port), str(scratch / "ray")]
    with (
        (scratch / "ray.log").open("w") as log,
        subprocess.Popen(
            line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, cwd=scratch, env=environment, text=True
        ) as process,
    ):
        assert process.stdout is not None
        assert process.stdin is not None
        try:
            if not any(line == "ready\n" for line in process.stdout):
                raise RuntimeError(f"Ray Serve did not start:\n{(scratch / 'ray.log').read_text()[-2000:]}")
            wait_for(f"http://127.0.0.1:{port}{SERVICE}")
            yield f"http://127.0.0.1:{port}"
        finally:
            started = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
            process.stdin.close()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
            _, left = psutil.wait_procs(started, timeout=10)
            for child in left:
                child.kill()


def ray_python() -> Path:
    """The interpreter of an environment with Ray, made on first use and kept."""
    default = Path(tempfile.gettempdir()) / "joulery-bench-ray"
    folder = Path(os.environ.get("JOULERY_BENCH_RAY", default))
    python = folder / "bin" / "python"
    if not (folder / "ready").exists():
        print(f"installing {RAY} in {folder} (about half a minute)", file=sys.stderr)
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "-qq", RAY], check=True)
        (folder / "ready").touch()
    return python


def free_port() -> int:
    """A free port."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def wait_for(url: str) -> None:
    """Wait until a server gives the right answer."""
    for _ in range(300):
        try:
            answer = httpx.post(url, json=BODY, timeout=5, trust_env=False)
            if answer.status_code == 200 and answer.json()["outputs"][0]["data"] == [2.0, 4.0]:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise RuntimeError(f"no right answer from {url}")
