"""Measure what variants cost on slices: real workers, models and inputs, alone and with busy neighbours."""

from __future__ import annotations

import asyncio
import hashlib
import math
import platform
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np

from joulery.domain.errors import DataError
from joulery.domain.ports import Engine
from joulery.domain.quality import Quality
from joulery.domain.serving.engine import (
    InferRequest,
    InferResponse,
    ModelKind,
    ModelRef,
    ReplicaSpec,
    ReplicaView,
    RequestError,
    Transition,
)
from joulery.domain.serving.profile import Profile, SliceProfile, Timings
from joulery.domain.serving.service import Slice
from joulery.domain.serving.tensors import Tensor
from joulery.perf.power.power_line import PowerLine

Inputs = Mapping[str, Tensor]
_RELATIVE, _ABSOLUTE = 1e-2, 1e-3
"""Differences between an answer in a batch and alone that rounding explains: sums in another order."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Number of requests and batches to measure.

    Attributes:
        warmup: Requests that do not count, after each start.
        alone: Requests to time one by one, on each kind of slice.
        loaded: Requests to time on each slice while all slices are busy.
        batches: Batches of each size to time on each slice.
    """

    warmup: int = 5
    alone: int = 30
    loaded: int = 30
    batches: int = 12


BRIEF = Plan()
"""Enough for a first start: a few seconds a variant."""


@dataclass(slots=True)
class _Samples:
    """Measured times of one (variant, slice)."""

    service_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)

    def add(self, answer: InferResponse) -> None:
        # From taken to answered: what the instance is busy for, copying to and from the worker included.
        self.service_s.append(answer.end_s - answer.start_s)
        self.cpu_s.append(answer.cpu_s)

    def timings(self) -> Timings:
        return Timings(self.service_s, self.cpu_s)


class SliceRecording:
    """An engine that records its answers, without their outputs. Implements :class:`joulery.domain.ports.Engine`.

    Attributes:
        answers: Every answer so far, in order.
    """

    def __init__(self, engine: Engine) -> None:
        self.answers: list[InferResponse] = []
        self._engine = engine

    async def apply(self, target: Sequence[ReplicaSpec], /) -> Transition:
        """Forward to the engine."""
        return await self._engine.apply(target)

    def replicas(self) -> tuple[ReplicaView, ...]:
        """The engine's replicas."""
        return self._engine.replicas()

    async def infer(self, service: str, request: InferRequest, /) -> InferResponse:
        """Forward to the engine and record the answer."""
        answer = await self._engine.infer(service, request)
        self.answers.append(answer._replace(outputs={}))
        return answer

    async def close(self) -> None:
        """Forward to the engine."""
        await self._engine.close()


@dataclass(frozen=True, slots=True, eq=False)
class MeasuredSlice:
    """Measured times of one variant on one kind of slice, without power.

    Attributes:
        variant, slice: What was measured.
        alone, loaded: See :class:`~joulery.domain.serving.profile.SliceProfile`.
        startup_s, startup_cpu_s: From launch to ready, for all slices of the partition together.
        batches: Times of whole batches by their size; empty where its model answers one request at a time.
    """

    variant: str
    slice: Slice
    alone: Timings
    loaded: Timings
    startup_s: float
    startup_cpu_s: float
    batches: Mapping[int, Timings] = field(default_factory=dict)


async def measure(
    engine: Engine,
    service: str,
    models: Mapping[str, ModelRef],
    partitions: Sequence[Sequence[Slice]],
    inputs: Sequence[Inputs],
    plan: Plan = BRIEF,
    *,
    max_batch: int = 1,
    progress: Callable[[int, int, str], None] = lambda done, of, what: None,
) -> tuple[MeasuredSlice, ...]:
    """Time every variant on every slice of every partition. The engine runs nothing else meanwhile.

    Args:
        engine: The engine, the same that serves later.
        service: A name for the replicas.
        models: What each variant loads.
        partitions: Slices that exist together; a kind of slice that occurs in several is measured in the first.
        inputs: Real inputs, sent in turn.
        plan: Number of requests and batches to measure.
        max_batch: Requests of the largest batch to time; 1 for none.
        progress: Called with the steps done, their number and the next one.

    Raises:
        JouleryError: A replica cannot be created, or a model does not answer its own inputs.
    """
    found: dict[tuple[str, Slice], MeasuredSlice] = {}
    steps = [(slices, variant) for slices in partitions for variant in models]
    for done, (slices, variant) in enumerate(steps):
        progress(done, len(steps), f"{variant} on {' + '.join(map(str, slices))}")
        specs = [ReplicaSpec(service, variant, piece, models[variant]) for piece in slices]
        change = await engine.apply(specs)
        alone, loaded = await _time_layout(engine, service, len(slices), cycle(inputs), plan)
        batches = await _time_batches(engine, service, len(slices), inputs, plan, max_batch)
        for piece in dict.fromkeys(slices):
            quiet = alone[piece].timings()
            busy = loaded[piece].timings() if len(slices) > 1 else quiet
            together = {size: found_s.timings() for size, found_s in batches.get(piece, {}).items()}
            entry = MeasuredSlice(variant, piece, quiet, busy, change.ready_s, change.startup_cpu_s, together)
            found.setdefault((variant, piece), entry)
    progress(len(steps), len(steps), "")
    await engine.apply([])
    return tuple(found.values())


async def _time_layout(
    engine: Engine, service: str, width: int, inputs: Any, plan: Plan
) -> tuple[dict[Slice, _Samples], dict[Slice, _Samples]]:
    """Times by slice with one request running, and with one for each of ``width`` slices."""
    slice_of = {view.id: view.spec.slice for view in engine.replicas()}
    alone: defaultdict[Slice, _Samples] = defaultdict(_Samples)
    loaded: defaultdict[Slice, _Samples] = defaultdict(_Samples)
    for request in islice(inputs, plan.warmup * width):
        await _ask(engine, service, request)
    # With nothing else under way the longest idle replica answers: requests go round.
    for request in islice(inputs, plan.alone * width):
        answer = await _ask(engine, service, request)
        alone[slice_of[answer.replica]].add(answer)
    if width > 1:
        wanted = iter(list(islice(inputs, plan.loaded * width)))
        for answers in await asyncio.gather(*(_ask_in_turn(engine, service, wanted) for _ in range(width))):
            for answer in answers[1:]:
                loaded[slice_of[answer.replica]].add(answer)
    return alone, loaded


def batch_sizes(max_batch: int) -> tuple[int, ...]:
    """The sizes of batches that are timed: 2, 4, 8 … and the largest."""
    sizes = [1 << power for power in range(1, max_batch.bit_length()) if 1 << power <= max_batch]
    return tuple(dict.fromkeys([*sizes, *([max_batch] if max_batch > 1 else [])]))


async def _time_batches(
    engine: Engine, service: str, width: int, inputs: Sequence[Inputs], plan: Plan, max_batch: int
) -> dict[Slice, dict[int, _Samples]]:
    """Times by slice and size of a batch while every slice is busy; empty where the model answers no batches.

    A batch is one request with the rows of several: the model gets the same input as from the engine.
    """
    views, found = engine.replicas(), defaultdict[Slice, dict[int, _Samples]](dict)
    fixed = any(spec.shape and spec.shape[0] != -1 for view in views for spec in view.inputs)
    if max_batch < 2 or fixed or not await _answers_batches(engine, service, inputs):
        return {}
    slice_of = {view.id: view.spec.slice for view in views}
    for size in batch_sizes(max_batch):
        joined = [_joined(list(islice(cycle(inputs), start, start + size))) for start in range(len(inputs))]
        wanted = iter(list(islice(cycle(joined), (plan.batches + 1) * width)))
        for answers in await asyncio.gather(*(_ask_in_turn(engine, service, wanted) for _ in range(width))):
            for answer in answers[1:]:
                found[slice_of[answer.replica]].setdefault(size, _Samples()).add(answer)
    return found


async def _answers_batches(engine: Engine, service: str, inputs: Sequence[Inputs]) -> bool:
    """Whether a batch of two requests gets the same answers as the two requests alone."""
    pair = list(islice(cycle(inputs), 2))
    alone = [await _ask(engine, service, one) for one in pair]
    try:
        together = await engine.infer(service, InferRequest(_joined(pair)))
    except (RequestError, ValueError):
        return False  # it refuses another first dimension, or the inputs cannot be joined
    for name, array in together.outputs.items():
        if any(one.outputs[name].ndim == 0 for one in alone):
            return False
        expected = np.concatenate([one.outputs[name] for one in alone])
        if array.shape != expected.shape:
            return False
        floats = array.dtype.kind == "f"
        if not (
            np.allclose(array, expected, _RELATIVE, _ABSOLUTE, equal_nan=True) if floats else (array == expected).all()
        ):
            return False
    return True


def _joined(requests: Sequence[Inputs]) -> Inputs:
    return {name: np.concatenate([one[name] for one in requests]) for name in requests[0]}


async def _ask_in_turn(engine: Engine, service: str, inputs: Any) -> list[InferResponse]:
    return [await _ask(engine, service, request) for request in inputs]


async def _ask(engine: Engine, service: str, inputs: Inputs) -> InferResponse:
    try:
        return await engine.infer(service, InferRequest(inputs))
    except RequestError as error:
        raise DataError(
            f"{error.variant or service} does not answer the inputs it is profiled with: {error}"
        ) from error


def assemble(
    measured: Sequence[MeasuredSlice],
    line: PowerLine,
    models: Mapping[str, ModelRef],
    *,
    cores: int,
    quality: Quality,
    meter: str,
    band_ratio: float,
    warmup: int,
    others_cores: float,
) -> Profile:
    """Build a profile from timings and the machine's power line.

    Args:
        measured: The timings.
        line: The machine's power over busy cores.
        models: What each variant loaded.
        cores: Cores that were divided into slices.
        quality, meter, band_ratio: Where the watts come from.
        warmup: Requests that did not count.
        others_cores: Mean number of cores that other processes kept busy meanwhile.
    """
    entries = tuple(
        SliceProfile(
            m.variant, m.slice, m.alone, m.loaded, line.active_w, m.startup_s, m.startup_cpu_s, batches=m.batches
        )
        for m in measured
    )
    conditions = {
        "cores_used": cores,
        "others_busy_cores": round(others_cores, 3) if math.isfinite(others_cores) else None,
        "power_line_residual_ratio": line.residual_ratio,
    }
    return Profile(
        {**machine(), **conditions},
        entries,
        line.idle_w,
        quality,
        meter,
        band_ratio,
        created_s=time.time(),
        warmup=warmup,
        models={name: digest(model) for name, model in models.items()},
    )


def machine() -> dict[str, Any]:
    """Description of this machine, as far as a profile depends on it."""
    import psutil

    return {
        "processor": _processor(),
        "logical_cpus": psutil.cpu_count(),
        "physical_cores": psutil.cpu_count(logical=False),
        "memory_bytes": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.release()}",
        "architecture": platform.machine(),
    }


_CHUNK_BYTES = 1 << 20


def digest(model: ModelRef) -> str:
    """SHA-256 of a model's file or folder; for any other model, its location and options.

    Raises:
        DataError: A file cannot be read.
    """
    place = Path(model.location)
    if model.kind.is_file:
        files = [place]
    elif model.kind is ModelKind.TRANSFORMERS and place.is_dir():
        files = sorted(file for file in place.rglob("*") if file.is_file())
    else:
        return f"{model.location} {model.options}".rstrip()
    found = hashlib.sha256(model.options.encode())
    for file in files:
        try:
            with file.open("rb") as content:
                while chunk := content.read(_CHUNK_BYTES):
                    found.update(chunk)
        except OSError as error:
            raise DataError(f"the model cannot be read: {error.strerror}", file=str(file)) from error
    return found.hexdigest()


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
