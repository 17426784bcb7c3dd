"""Dynamic batching in the embedded engine: the same model with batches of 1 and of 8, alternately in one run.

The model is a multilayer perceptron whose weights (64 MB) do not fit the cache of a core: a batch reads them once for
all of its requests. 32 clients each wait for their answer before the next request, so that a free replica finds the
queue of a fully loaded service. The benchmark measures answers and CPU seconds of the replicas.
"""

from __future__ import annotations

import asyncio
import math
import statistics
import time
from dataclasses import dataclass

import numpy as np

from benchmarks import Result
from joulery.adapters.engines.embedded.engine import LocalEngine
from joulery.domain.serving.engine import InferRequest, ModelKind, ModelRef, ReplicaSpec
from joulery.domain.serving.service import Slice, SliceKind

ROUNDS, SECONDS, CLIENTS, BATCH = 5, 3.0, 32, 8
WIDTH = 2048
"""Units of each of the model's four layers."""
ONE = Slice(SliceKind.CPU, cores=1)
MODEL = ModelRef(ModelKind.PYTHON, "benchmarks._perceptron:Perceptron")


@dataclass(frozen=True, slots=True)
class Round:
    """Figures of one round.

    Attributes:
        rps: Answers a second.
        cpu_s: CPU seconds a request.
        batch: Mean requests of a batch.
        p95_s: 95th percentile of the latency.
    """

    rps: float
    cpu_s: float
    batch: float
    p95_s: float


def run() -> Result:
    """Alternate both batch sizes on one replica on one core."""
    return asyncio.run(_measured())


async def _measured() -> Result:
    rounds: dict[int, list[Round]] = {1: [], BATCH: []}
    for _ in range(ROUNDS):
        for size, found in rounds.items():
            found.append(await _round(size))
    alone, together = rounds[1], rounds[BATCH]
    faster = [after.rps / before.rps for before, after in zip(alone, together, strict=True)]
    cheaper = [after.cpu_s / before.cpu_s for before, after in zip(alone, together, strict=True)]
    rows = [
        [
            f"batches of {size}",
            _span([one.rps for one in found], 1.0, " /s"),
            _span([one.cpu_s for one in found], 1e3, " ms"),
            f"{statistics.median(one.batch for one in found):.1f}",
            _span([one.p95_s for one in found], 1e3, " ms"),
        ]
        for size, found in rounds.items()
    ]
    rows.append(["ratio, round by round", _span(faster, 1.0, " x"), _span(cheaper, 1.0, " x"), "", ""])
    return Result(
        title="Dynamic batching in the embedded engine",
        columns=["", "answers, median (least to most)", "CPU a request", "mean batch", "p95"],
        rows=rows,
        notes=[
            f"One replica on one core, {CLIENTS} clients that wait for their answers, {ROUNDS} rounds of {SECONDS:g} s "
            f"each, alternating; a perceptron of four layers of {WIDTH} units in float32. Joules follow CPU time. "
            "A model that is as fast alone as in a batch gains nothing."
        ],
        checks=[
            (f"batches of {BATCH} take less CPU time a request in every round", max(cheaper) < 1),
            (f"batches of {BATCH} answer more requests a second in the median round", statistics.median(faster) > 1),
        ],
        figures={"rps_ratio": statistics.median(faster), "cpu_ratio": statistics.median(cheaper)},
    )


async def _round(size: int) -> Round:
    engine = LocalEngine()
    try:
        await engine.apply([ReplicaSpec("mlp", "mlp", ONE, MODEL, batch=size)])
        request = InferRequest({"x": np.ones((1, WIDTH), np.float32)})
        for _ in range(5):
            await engine.infer("mlp", request)
        until_s = time.monotonic() + SECONDS
        begun_s, answers = time.monotonic(), []

        async def client() -> None:
            while time.monotonic() < until_s:
                answers.append((await engine.infer("mlp", request))._replace(outputs={}))

        await asyncio.gather(*(client() for _ in range(CLIENTS)))
        took_s = time.monotonic() - begun_s
    finally:
        await engine.close()
    return Round(
        len(answers) / took_s,
        math.fsum(one.cpu_s for one in answers) / len(answers),
        len(answers) / math.fsum(1.0 / one.batch for one in answers),
        float(np.quantile([one.end_s - one.arrival_s for one in answers], 0.95)),
    )


def _span(values: list[float], factor: float, unit: str) -> str:
    low, middle, high = (factor * one for one in (min(values), statistics.median(values), max(values)))
    return f"{middle:.3g} ({low:.3g} to {high:.3g}){unit}"
