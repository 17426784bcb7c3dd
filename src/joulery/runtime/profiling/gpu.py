"""Profile a model on a GPU under MPS: real processes with real shares, measured through NVML."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from joulery.domain.errors import DataError
from joulery.domain.ports import Engine
from joulery.domain.serving.engine import InferRequest, InferResponse, ModelRef, ReplicaSpec, RequestError
from joulery.domain.serving.service import Slice, SliceKind
from joulery.domain.serving.tensors import Tensor
from joulery.perf.interference.model import InterferenceProfile
from joulery.perf.interference.runs import (
    MIDDLE,
    GpuFacts,
    ModelFacts,
    ShareRun,
    configurations,
    profile_of_runs,
)
from joulery.runtime.profiling.kernels import KernelCount

_LOOK_S = 0.02
"""Interval at which clock and power are read."""


class BoardWatch(Protocol):
    """Reads power and clock of one board between two moments."""

    @property
    def name(self) -> str:
        """The vendor's name of the board."""
        ...

    def begin(self) -> None:
        """Start a new interval."""
        ...

    def look(self) -> None:
        """Take one reading."""
        ...

    def end(self) -> tuple[float, float]:
        """Mean power in W and mean clock in MHz of the interval."""
        ...

    def limits(self) -> tuple[float, float]:
        """Power limit in W and highest clock in MHz."""
        ...

    def pcie_bytes_per_ms(self) -> float:
        """Bandwidth of transfers to the board."""
        ...


@dataclass(frozen=True, slots=True)
class MpsPlan:
    """Duration and warm-up of a profiling measurement.

    Attributes:
        seconds: How long each configuration runs.
        warmup: Batches of each process that do not count.
    """

    seconds: float = 2.0
    warmup: int = 5


async def profile_under_mps(
    model: ModelRef,
    facts: ModelFacts,
    inputs: dict[str, Tensor],
    base: InterferenceProfile,
    plan: MpsPlan,
    *,
    watch: BoardWatch,
    engine: Callable[[], AbstractAsyncContextManager[Engine]],
    counts: Mapping[int, KernelCount] | None = None,
    progress: Callable[[int, int, str], None] = lambda done, of, what: None,
) -> InterferenceProfile:
    """Run every configuration and fit the profile.

    Args:
        model: What each process loads.
        facts: Known properties of the model; the sizes of inputs and results are measured.
        inputs: One request: arrays whose first axis is the batch, of length 1.
        base: Profile to start from; its GPU's coefficients are kept where it was profiled on a GPU of this name.
        plan: How much to measure.
        watch: Reads the board.
        engine: Opens an engine whose replicas share the board under MPS.
        counts: Kernels of one inference by batch size; None where they were not counted.
        progress: Called with the configurations done, their number and the next one.

    Raises:
        CapabilityError: No GPU, driver or MPS here.
        DataError: The model does not answer, or the runs do not determine the coefficients.
    """
    if counts is not None:
        kernels = facts.kernels or float(counts[MIDDLE[0]].kernels)
        facts = replace(facts, kernels=kernels, cache_percent=tuple((n, c.l2_percent) for n, c in counts.items()))
    hardware = base.gpu.name != watch.name
    wanted = configurations(hardware=hardware)
    idle_w, _ = await _watched(watch, asyncio.sleep(plan.seconds))
    runs = []
    async with engine() as replicas:
        for done, (copies, batch, share) in enumerate(wanted):
            progress(done, len(wanted), f"{copies} x batch {batch} at {share:g} %")
            runs.append(await _run(replicas, watch, model, inputs, plan, copies, batch, share))
        result_bytes = await _result_bytes(replicas, inputs)
    progress(len(wanted), len(wanted), "")
    cap_w, clock_mhz = watch.limits()
    board = GpuFacts(watch.name, cap_w, clock_mhz, idle_w, watch.pcie_bytes_per_ms())
    load_bytes = float(sum(array.nbytes for array in inputs.values()))
    known = replace(facts, load_bytes=load_bytes, feedback_bytes=result_bytes)
    return profile_of_runs(board, known, runs, base, hardware=hardware)


async def _run(
    engine: Engine,
    watch: BoardWatch,
    model: ModelRef,
    inputs: dict[str, Tensor],
    plan: MpsPlan,
    copies: int,
    batch: int,
    share_percent: float,
) -> ShareRun:
    """Measure one configuration: equal processes side by side, each running one batch after the other."""
    slice_ = Slice(SliceKind.MPS, share_ratio=share_percent / 100)
    names = [f"copy{index}" for index in range(copies)]
    await engine.apply([ReplicaSpec(name, name, slice_, model) for name in names])
    batched = {name: np.repeat(array, batch, axis=0) for name, array in inputs.items()}
    await asyncio.gather(*(_asked(engine, name, batched, plan.warmup) for name in names))
    times: list[float] = []
    power_w, clock_mhz = await _watched(watch, _timed(engine, names, batched, plan.seconds, times))
    return ShareRun(copies, batch, share_percent, 1e3 * float(np.median(times)), power_w, clock_mhz)


async def _timed(
    engine: Engine, names: Sequence[str], batched: dict[str, Tensor], seconds: float, times: list[float]
) -> None:
    """Add to ``times`` the seconds inside the replicas of every batch answered while all replicas were busy."""
    end_s = time.monotonic() + seconds

    async def one(name: str) -> None:
        while time.monotonic() < end_s or not times:
            times.append((await _ask(engine, name, batched)).service_s)

    await asyncio.gather(*(one(name) for name in names))


async def _watched(watch: BoardWatch, work: Coroutine[Any, Any, None]) -> tuple[float, float]:
    """Mean power in W and mean clock in MHz of the board while a coroutine runs."""
    watch.begin()
    task = asyncio.create_task(work)
    while not task.done():
        await asyncio.wait({task}, timeout=_LOOK_S)
        watch.look()
    task.result()
    return watch.end()


async def _asked(engine: Engine, name: str, batched: dict[str, Tensor], count: int) -> None:
    for _ in range(count):
        await _ask(engine, name, batched)


async def _ask(engine: Engine, name: str, batched: dict[str, Tensor]) -> InferResponse:
    try:
        return await engine.infer(name, InferRequest(batched))
    except RequestError as error:
        raise DataError(f"the model does not answer the inputs it is profiled with: {error}") from error


async def _result_bytes(engine: Engine, inputs: dict[str, Tensor]) -> float:
    """Size of the answer to one request."""
    answer = await _ask(engine, "copy0", inputs)
    return float(sum(array.nbytes for array in answer.outputs.values()))
