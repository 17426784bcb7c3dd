"""Live trials: requests lost while layouts are switched under load, and the CPU time of the controller."""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from benchmarks import Result
from joulery.app.wiring.engine import local_engine
from joulery.domain.gpu.layout import Layout
from joulery.domain.serving.engine import ModelRef, Transition
from joulery.gateway.app import Gateway
from joulery.gateway.server import GatewayServer
from joulery.policies.serving.observation import SET_WEIGHTS, TRY_LAYOUT
from joulery.policies.serving.search.layout_space import core_partitions, cpu_slices, layouts
from joulery.runtime.serving.layout_actuator import LayoutActuator
from joulery.store.run.directory import open_run

REQUESTS = 200_000
CONNECTIONS = 16
ROUND_S = 20
SECONDS = 120
ROOT = Path(__file__).parents[1]
SITE = ROOT / "examples" / "carbon-budget.yaml"
MODEL = ModelRef.parse("benchmarks._trivial:model")
CANDIDATES = layouts([cpu_slices(cut) for cut in core_partitions(2)], ["large", "middle", "small"])


@dataclass(slots=True)
class Switched:
    """Outcomes of the requests, and the switches meanwhile."""

    outcomes: Counter[str] = field(default_factory=Counter)
    switches: list[Transition] = field(default_factory=list)

    @property
    def requests(self) -> int:
        """Requests sent."""
        return sum(self.outcomes.values())

    @property
    def lost(self) -> int:
        """Requests that were not answered with a result."""
        return self.requests - self.outcomes["200"]


def run() -> Result:
    """Switch under load, then run the example and read the CPU time of its controller."""
    with (
        tempfile.TemporaryDirectory(prefix="jb-") as folder,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop,
    ):
        found = loop.run(switching(Path(folder)))
        report, decisions = loop.run(example(Path(folder) / "run"))
    ready = [change.ready_s for change in found.switches]
    share = report["controller_cpu_s"] / report["duration_s"]
    tried = Counter(decisions)
    return Result(
        "Live trials: switching and the controller",
        ("what", "figure"),
        [
            ["requests sent while layouts are switched", f"{found.requests:,}"],
            ["lost", str(found.lost)],
            ["switches meanwhile, among nine layouts", str(len(found.switches))],
            ["until a new layout has taken over, median / longest", f"{np.median(ready):.2f} / {max(ready):.2f} s"],
            ["`carbon-budget.yaml`: requests, failed", f"{report['requests']:,}, {report['failed']}"],
            [
                "its trials, shifts of the mix, other decisions",
                f"{tried[TRY_LAYOUT]}, {tried[SET_WEIGHTS]}, {tried.total() - tried[TRY_LAYOUT] - tried[SET_WEIGHTS]}",
            ],
            ["its controller, CPU time of one core", f"{share:.2%}"],
        ],
        notes=(
            f"Switching: joulery's own client in a closed loop of {CONNECTIONS} connections over HTTP on loopback, "
            "replicas of a trivial model; the next layout is asked for as soon as the last has taken over and its old "
            f"replicas are gone. The example runs for {SECONDS} s, a whole day of the grid, with real image "
            "classifiers; its controller looks, samples, searches and decides once a second.",
        ),
        checks=(
            (f"0 of {REQUESTS:,} requests lost: {found.lost} of {found.requests:,}", found.lost == 0),
            (f"the controller takes at most 0.5 % of a core: {share:.2%}", share <= 0.005),
        ),
    )


async def switching(scratch: Path) -> Switched:
    """Send requests and switch layouts, both without a pause."""
    inputs = scratch / "inputs.npz"
    np.savez(inputs, x=np.array([[1.0, 2.0]], np.float32))
    engine = local_engine()
    server = GatewayServer(Gateway(engine), "127.0.0.1", 0)
    actuator = LayoutActuator(engine, "trivial", dict.fromkeys(("large", "middle", "small"), MODEL))
    found = Switched()
    await server.start()
    try:
        await engine.apply(actuator.specs(CANDIDATES[0]))
        while found.requests < REQUESTS:
            load = asyncio.create_task(asked(server.url, inputs))
            for layout in itertools.cycle(CANDIDATES):
                if load.done():
                    break
                found.switches.append(await engine.apply(actuator.specs(layout)))
            found.outcomes.update(await load)
    finally:
        await server.stop()
        await engine.close()
    return found


async def asked(url: str, inputs: Path) -> Counter[str]:
    """Run the client for one round; its requests by outcome."""
    line = [sys.executable, "-m", "joulery.runtime.load", "--url", url, "--service", "trivial", "--closed"]
    line += ["--connections", str(CONNECTIONS), "--duration-s", str(ROUND_S)]
    line += ["--inputs", str(inputs), "--out", str(inputs.with_name("outcomes.parquet"))]
    client = await asyncio.create_subprocess_exec(*line, stdout=asyncio.subprocess.PIPE)
    out, _ = await client.communicate()
    return Counter(json.loads(out)["by_outcome"])


async def example(folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Run the example site; its report with the duration, and the kinds of its decisions."""
    line = [sys.executable, "-m", "joulery", "up", str(SITE), "--duration", str(SECONDS), "--json"]
    line += ["--listen", "127.0.0.1:0", "--out", str(folder)]
    began_s = time.monotonic()
    client = await asyncio.create_subprocess_exec(*line, stdout=asyncio.subprocess.PIPE)
    out, _ = await client.communicate()
    if client.returncode:
        raise RuntimeError(f"the example ended with {client.returncode} after {time.monotonic() - began_s:.0f} s")
    entries = [entry for entry in open_run(folder).log() if entry["kind"] == "decision"]
    kinds = [entry["decision"]["kind"] for entry in entries]
    for entry, kind in zip(entries, kinds, strict=True):
        if kind != SET_WEIGHTS:
            Layout.parse(entry["decision"]["value"])
    return {**json.loads(out), "duration_s": SECONDS}, kinds
