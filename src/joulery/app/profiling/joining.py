"""Timing of a variant that joins a running service: it is loaded beside the replicas, and a few requests are timed.

A full profile needs idle cores, which a running service does not have. CPU seconds of a request hardly depend on other
processes, so a variant on CPU cores is planned with the profiled times of the variant next to it in accuracy, times the
ratio of their CPU seconds. A variant on another server is planned by the ratio of their times. Its live times replace
these as soon as enough requests were answered.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path

import numpy as np

from joulery.app.profiling.inputs import inputs_for
from joulery.app.profiling.upstreams import stated_w
from joulery.app.wiring.engine import local_engine, upstream_engine
from joulery.domain.errors import DataError
from joulery.domain.ports import Engine
from joulery.domain.serving.engine import InferRequest, ModelKind, ModelRef, ReplicaSpec, RequestError
from joulery.domain.serving.profile import Profile, Timings
from joulery.domain.serving.service import Slice
from joulery.domain.serving.tensors import Tensor, TensorSpec
from joulery.perf.blend import stretched
from joulery.runtime.serving.running_service import ServiceSetup

WARM_UP, REQUESTS = 3, 10
"""Numbers of requests that a joining variant answers before it joins: untimed and timed."""
_PRIORITY = 10
"""Niceness of the worker that is timed beside the replicas."""
_CPU_BOUND, _QUICK = 0.5, 0.1
"""Share of CPU time in a quick request's time above which a model counts as CPU-bound; and the quantile of a quick
request."""


@dataclass(frozen=True, slots=True, eq=False)
class JoiningTimes:
    """Times of a variant, measured beside the running replicas.

    Attributes:
        piece: The slice that the variant ran on.
        times: Times of a few requests.
    """

    piece: Slice
    times: Timings


async def time_joining(
    setup: ServiceSetup,
    variant: str,
    model: ModelRef,
    *,
    declared: Sequence[TensorSpec] = (),
    folder: Path | None = None,
    stderr: int | None = None,
) -> JoiningTimes | None:
    """Load a variant and time a few requests; None where it declares no inputs and there is no folder.

    Args:
        setup: The running service.
        variant: The variant.
        model: Model of the variant.
        declared: Inputs of the running replicas; empty where they declare none.
        folder: Folder of photographs to send; None to generate inputs.
        stderr: File descriptor for what the model prints.

    Raises:
        JouleryError: The variant cannot be loaded, takes other inputs, or does not answer.
    """
    remote = model.kind is ModelKind.REMOTE
    engine = upstream_engine() if remote else local_engine(cores=setup.cores, stderr=stderr)
    piece: Slice = min(piece for partition in setup.partitions for piece in partition)
    try:
        await engine.apply([ReplicaSpec(setup.name, variant, piece, model)])
        (view,) = engine.replicas()
        if declared and view.inputs and tuple(declared) != view.inputs:
            raise DataError(f"{variant} takes other inputs than the variants of {setup.name} that serve")
        if view.pid:
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, view.pid, _PRIORITY)
        if not view.inputs and folder is None:
            return None
        return JoiningTimes(piece, await _timed(engine, setup.name, variant, inputs_for(view.inputs, folder)))
    finally:
        await engine.close()


def is_bound(times: Timings) -> bool:
    """Whether a model is CPU-bound: it computes for most of a request's time, so that CPU seconds measure its speed.

    Other programs lengthen the times of some requests, so the quickest requests decide.
    """
    return times.mean_cpu_s >= _CPU_BOUND * times.quantile_s(_QUICK)


def live_ratio(
    profile: Profile, variant: str, seen: Mapping[tuple[str, Slice], Timings], known: Collection[str]
) -> float:
    """Ratio of a variant's live times to those of its profile; NaN where none are known.

    Compares CPU seconds where the variant is CPU-bound. Else compares times, divided by the slowdown of the service's
    measured variants on the same slices, so that a slow machine does not count as a slow variant.

    Args:
        profile: The profile.
        variant: The variant.
        seen: Live times by variant and slice.
        known: The variants that were measured.
    """
    entries = {(entry.variant, entry.slice): entry.loaded for entry in profile.entries}

    def ratio(name: str, piece: Slice, *, cpu: bool) -> float:
        live, planned = (one.cpu_s if cpu else one.service_s for one in (seen[name, piece], entries[name, piece]))
        return float(np.median(live) / np.median(planned)) if np.median(planned) > 0 else math.nan

    pieces = [piece for name, piece in seen if name == variant and (name, piece) in entries]
    if not pieces:
        return math.nan
    if all(is_bound(entries[variant, piece]) for piece in pieces):
        return statistics.median(ratio(variant, piece, cpu=True) for piece in pieces)
    others = [key for key in seen if key[0] in known and key in entries and key[1] in pieces]
    slowdown = max(1.0, statistics.median(ratio(*key, cpu=False) for key in others)) if others else 1.0
    return statistics.median(ratio(variant, piece, cpu=False) for piece in pieces) / slowdown


async def _timed(engine: Engine, service: str, variant: str, inputs: Sequence[dict[str, Tensor]]) -> Timings:
    service_s, cpu_s = [], []
    for number, tensors in enumerate(islice(cycle(inputs), WARM_UP + REQUESTS)):
        try:
            answer = await engine.infer(service, InferRequest(tensors))
        except RequestError as error:
            raise DataError(f"{variant} does not answer the inputs it is timed with: {error}") from error
        if number >= WARM_UP:
            service_s.append(answer.end_s - answer.start_s)
            cpu_s.append(answer.cpu_s)
    return Timings(service_s, cpu_s)


def with_joined(
    profile: Profile, variant: str, model: ModelRef, like: str, found: JoiningTimes | None
) -> tuple[Profile, str]:
    """Add a joining variant to the profile; return the profile and a text on how the variant is planned.

    Args:
        profile: The profile.
        variant: The variant; nothing changes where it was measured.
        model: Model of the variant.
        like: The measured variant next to it in accuracy.
        found: Times of the variant; None where it was not timed.
    """
    stated = stated_w(model)
    watts = math.nan if stated is None else stated
    if found is None:
        return stretched(profile, variant, like, 1.0, watts), f"{variant} is planned as if it took the times of {like}"
    known = profile.entry(like, found.piece).alone
    computes = model.kind is not ModelKind.REMOTE and is_bound(known)
    what = "CPU time" if computes else "time"
    took_s, known_s = (float(np.median(times.cpu_s if computes else times.service_s)) for times in (found.times, known))
    ratio = took_s / known_s if known_s > 0 else 0.0
    if not ratio > 0:
        return stretched(profile, variant, like, 1.0, watts), f"{variant} is planned as if it took the times of {like}"
    return stretched(profile, variant, like, ratio, watts), (
        f"{variant} took {1e3 * took_s:.3g} ms of {what} a request (median of {len(found.times)}) and is planned with "
        f"the times of {like} times {ratio:.2f}"
    )
