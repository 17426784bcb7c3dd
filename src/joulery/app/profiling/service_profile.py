"""A profile of a service on this machine: measured now, read from a file, or kept from the last time."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from joulery.accounting.load_line import cpu_channels, gpu_channels, gpu_points, power_points
from joulery.accounting.steps import power_steps
from joulery.app.profiling.inputs import inputs_for
from joulery.app.profiling.upstreams import mixed_profile, upstream_profile
from joulery.app.wiring.engine import local_engine, upstream_engine
from joulery.domain.energy.channel import MeterSpec
from joulery.domain.errors import CapabilityError, DataError
from joulery.domain.ports import Engine, Places
from joulery.domain.quality import weakest
from joulery.domain.serving.engine import InferResponse, ModelKind, ReplicaSpec
from joulery.domain.serving.profile import Profile
from joulery.domain.serving.service import Slice
from joulery.perf.power.power_line import PowerLine, fit_power_line
from joulery.runtime.measuring.sampling import start_sampler
from joulery.runtime.profiling.slice_timings import (
    BRIEF,
    MeasuredSlice,
    Plan,
    SliceRecording,
    assemble,
    digest,
    machine,
    measure,
)
from joulery.runtime.serving.running_service import ServiceSetup
from joulery.store.files import disk_errors, require_json, write_atomically
from joulery.store.run.readings import RunReadings, read_samples

BUSY_CORES = 0.25
"""Busy cores of other processes above which they distort a profile."""
_MAX_BATCH = "max_batch"
"""Key in a profile for the largest batch to measure, where that is more than one request."""
REST_S = 1.0
"""Time for which the idle machine is measured, as the idle end of the power line."""
_BIN_S = 0.25
_PERIOD_S = 0.05

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True, eq=False)
class Obtained:
    """A profile and its source.

    Attributes:
        profile: The profile.
        source: Source as text: measured now, kept, or the file.
        file: File of the profile; None where it could not be kept.
    """

    profile: Profile
    source: str
    file: Path | None


async def obtain_profile(
    setup: ServiceSetup,
    *,
    given: Path | None,
    cache: Path,
    folder: Path | None,
    meters: Sequence[MeterSpec] | None,
    fresh: bool = False,
    plan: Plan = BRIEF,
    progress: Progress = lambda done, of, what: None,
    places: Places | None = None,
) -> Obtained:
    """Obtain the profile of a service: from the given file, else the one kept for this machine and these models, else
    by measuring.

    Args:
        setup: The service.
        given: Profile that the site file names; None for none.
        cache: Folder of kept profiles.
        folder: Folder of photographs to measure with; None to generate inputs.
        meters: Meters to use; None for those this machine has.
        fresh: Whether to measure even where a profile is kept.
        plan: Amount of measurement.
        progress: As for :func:`~joulery.runtime.profiling.slice_timings.measure`.
        places: Hands out slices of GPUs; None to run on the CPU.

    Raises:
        JouleryError: The given file is not a profile of this service, or measuring failed.
    """
    if given is not None:
        profile = read_profile(given)
        _require(profile, setup)
        return Obtained(profile, f"from {given}", given)
    file = cache / "profiles" / f"{setup.name}-{_key(setup, meters)}.json"
    kept = read_profile(file) if file.exists() and not fresh else None
    if kept is not None and not busy_cores(kept):
        return Obtained(kept, "kept from an earlier start", file)
    profile = await measure_profile(setup, folder=folder, meters=meters, plan=plan, progress=progress, places=places)
    again = "" if kept is None else f", as {busy_cores(kept):.1f} cores were busy when the kept one was measured"
    try:
        write_profile(file, profile)
    except CapabilityError as error:
        return Obtained(profile, f"measured now{again}; not kept: {error}", None)
    return Obtained(profile, f"measured now{again}", file)


def busy_cores(profile: Profile) -> float:
    """Cores that other processes kept busy while a profile was measured; 0 where too few to distort it."""
    others = profile.machine.get("others_busy_cores")
    return others if isinstance(others, float) and others > BUSY_CORES else 0.0


async def measure_profile(
    setup: ServiceSetup,
    *,
    folder: Path | None,
    meters: Sequence[MeterSpec] | None,
    plan: Plan = BRIEF,
    progress: Progress = lambda done, of, what: None,
    places: Places | None = None,
) -> Profile:
    """Measure a service's variants on its slices.

    Args:
        setup: The service: its variants, partitions and cores.
        folder: Folder of photographs to send; generated inputs of the models' shapes when None.
        meters: Meters to use; None for those that this machine has.
        plan: Number of requests to time.
        progress: Called with the number of measurements done, the total number, and the current one.
        places: Hands out slices of GPUs; None for CPU slices.

    Raises:
        JouleryError: A model, a slice or a meter is missing, or the power does not follow the load.
    """
    with tempfile.TemporaryDirectory(prefix="joulery-profile-") as scratch:
        samples = Path(scratch)
        with _workers_log(samples) as stderr:
            remote = [model.kind is ModelKind.REMOTE for model in setup.models.values()]
            made = (
                upstream_engine(here=setup.beside_upstreams, stderr=stderr)
                if any(remote)
                else local_engine(cores=setup.cores, stderr=stderr, places=places)
            )
            engine = SliceRecording(made)
            try:
                sampler = await asyncio.to_thread(start_sampler, samples, meters, _PERIOD_S)
                try:
                    await asyncio.sleep(REST_S)
                    inputs = await _inputs(engine, setup, folder)
                    found = await measure(
                        engine,
                        setup.name,
                        setup.models,
                        setup.partitions,
                        inputs,
                        plan,
                        max_batch=setup.max_batch,
                        progress=progress,
                    )
                finally:
                    await asyncio.to_thread(sampler.stop)
            finally:
                await engine.close()
        readings = read_samples(samples)
        if all(remote):
            return upstream_profile(setup.models, found, readings, plan.warmup, engine.answers)
        profile = _finished(setup, found, readings, plan, engine.answers)
        return mixed_profile(profile, setup.models) if any(remote) else profile


@contextmanager
def _workers_log(folder: Path) -> Iterator[int]:
    """Open a file for the output of models, to keep it off the screen."""
    with disk_errors(folder), (folder / "workers.log").open("ab") as file:
        yield file.fileno()


async def _inputs(engine: Engine, setup: ServiceSetup, folder: Path | None) -> list[dict[str, Any]]:
    """Inputs that fit the declared inputs of the first variant; the other variants must take the same."""
    name, model = next(iter(setup.models.items()))
    smallest: Slice = min(piece for partition in setup.partitions for piece in partition)
    await engine.apply([ReplicaSpec(setup.name, name, smallest, model)])
    (view,) = engine.replicas()
    return inputs_for(view.inputs, folder)


def _finished(
    setup: ServiceSetup,
    found: Sequence[MeasuredSlice],
    readings: RunReadings,
    plan: Plan,
    answers: Sequence[InferResponse],
) -> Profile:
    if setup.gpus:
        line, others_cores = gpu_power_line(readings, answers, setup.gpus), math.nan
        channels = gpu_channels((trace.channel for trace in readings.traces), setup.gpus)
    else:
        line, others_cores = power_line(readings)
        channels = cpu_channels(trace.channel for trace in readings.traces)
    made = assemble(
        found,
        line,
        setup.models,
        cores=len(setup.cores),
        quality=weakest(channel.quality for channel in channels),
        meter="+".join(sorted({channel.meter for channel in channels})),
        band_ratio=max(channel.band_ratio for channel in channels),
        warmup=plan.warmup,
        others_cores=others_cores,
    )
    batched = {_MAX_BATCH: setup.max_batch} if setup.max_batch > 1 else {}
    return replace(made, machine={**made.machine, **batched})


def power_line(readings: RunReadings) -> tuple[PowerLine, float]:
    """Fit the power of the CPUs over busy cores; also return the mean number of cores that other processes kept busy.

    Raises:
        DataError: No meter measures the CPUs, or their power does not follow the load.
    """
    channels = cpu_channels(trace.channel for trace in readings.traces)
    sockets = [times for device, times in readings.busy.items() if device.startswith("cpu:")]
    if not channels or not sockets:
        raise DataError(
            "no meter sees the power of the CPUs, so no request can be charged for it",
            hint="joulery doctor lists what can be read; --meter cpu-model:IDLE,MAX names the watts of the machine",
        )
    start_ns = max(int(times.edges_ns[0]) for times in sockets)
    end_ns = min(int(times.edges_ns[-1]) for times in sockets)
    bins_ns = np.arange(start_ns, end_ns, round(_BIN_S * 1e9))
    cores, watts = power_points([power_steps(trace) for trace in readings.traces], readings.busy, bins_ns)
    idle_w = math.fsum(channel.idle_w for channel in channels)
    seconds = (end_ns - start_ns) / 1e9
    others_s = sum(float(np.nansum(np.maximum(times.all_s - times.app_s, 0.0))) for times in sockets)
    return fit_power_line(cores, watts, idle_w=idle_w), others_s / seconds if seconds > 0 else math.nan


def gpu_power_line(readings: RunReadings, answers: Sequence[InferResponse], gpus: Sequence[str]) -> PowerLine:
    """Fit the power of GPUs over their utilisation, which follows from the times of requests and their share of a GPU.

    A slice has no meter of its own: the power of a whole GPU is divided by arithmetic, so joules are modelled.

    Raises:
        DataError: No meter measures the GPUs, or their power does not follow the load.
    """
    channels = gpu_channels((trace.channel for trace in readings.traces), gpus)
    if {channel.device for channel in channels} != set(gpus):
        raise DataError(
            f"no meter sees the power of {', '.join(gpus)}, so no request can be charged for it",
            hint="add nvml to meters.use; joulery doctor lists what can be read",
        )
    traces = [trace for trace in readings.traces if trace.channel in channels]
    start_ns = max(int(trace.t_ns[0]) for trace in traces)
    end_ns = min(int(trace.t_ns[-1]) for trace in traces)
    bins_ns = np.arange(start_ns, end_ns, round(_BIN_S * 1e9))
    times = np.array([(one.start_s, one.start_s + one.service_s, one.cpu_s) for one in answers]).reshape(-1, 3)
    return fit_power_line(*gpu_points([power_steps(trace) for trace in traces], times, bins_ns))


def write_profile(file: Path, profile: Profile) -> None:
    """Write a profile to a file atomically.

    Raises:
        CapabilityError: The file cannot be written.
    """
    text = orjson.dumps(profile.as_dict(), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
    with disk_errors(file.parent):
        file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, lambda out: out.write(text))


def read_profile(file: Path) -> Profile:
    """Read a profile from its file.

    Raises:
        DataError: The file cannot be read, or is not a profile.
    """
    data = require_json(file)
    try:
        return Profile.from_dict(data)
    except DataError as error:
        raise DataError(error.message, file=str(file), hint=error.hint) from error


def _require(profile: Profile, setup: ServiceSetup) -> None:
    """Raise unless the profile has an entry for every variant on every slice and covers the largest batch."""
    for variant in setup.models:
        for piece in {piece for partition in setup.partitions for piece in partition}:
            profile.entry(variant, piece)
    timed = profile.machine.get(_MAX_BATCH, 1)
    if setup.max_batch > 1 and not (isinstance(timed, int) and timed >= setup.max_batch):
        raise DataError(
            f"the profile of {setup.name} has times of batches up to {timed}, and max_batch is {setup.max_batch}",
            hint="run: joulery profile SITE -o FILE; or leave profile out",
        )


def _key(setup: ServiceSetup, meters: Sequence[MeterSpec] | None) -> str:
    """Hash of all that a kept profile depends on, as sixteen hexadecimal digits."""
    facts = {
        "machine": machine(),
        "models": {name: digest(model) for name, model in setup.models.items()},
        "slices": sorted({str(piece) for partition in setup.partitions for piece in partition}),
        "partitions": [list(map(str, partition)) for partition in setup.partitions],
        **({"gpus": setup.gpus} if setup.gpus else {}),
        **({"max_batch": setup.max_batch} if setup.max_batch > 1 else {}),
        "meters": None if meters is None else [[spec.kind, dict(spec.options)] for spec in meters],
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def age_text(profile: Profile, now_s: float | None = None) -> str:
    """The age of a profile as text."""
    age_s = (time.time() if now_s is None else now_s) - profile.created_s
    for unit, seconds in (("day", 86400.0), ("hour", 3600.0), ("minute", 60.0)):
        if age_s >= seconds:
            count = int(age_s // seconds)
            return f"{count} {unit}{'s' if count > 1 else ''} ago"
    return "just now"
