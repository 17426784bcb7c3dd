"""``joulery profile MODEL --clocks``: read a model's graph, score its operators, keep the profile."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from joulery.app.profiling.graphs import NamedModel, named_model, with_decoding
from joulery.config.parsing.quantity import TIME, flag_quantity
from joulery.domain.errors import ConfigError
from joulery.domain.gpu.clock_profile import ClockProfile
from joulery.domain.gpu.device import DeviceSpec
from joulery.perf.catalog.clock_models import clock_model
from joulery.perf.power.clock_curves import V100
from joulery.perf.power.sensitivity import emulated_profile
from joulery.store.scores import ScoreDatabase


@dataclass(frozen=True, slots=True)
class ClockRequest:
    """What to profile against the clock, and how.

    Attributes:
        model: A graph file, a built-in model or one of the catalog.
        gpu: Emulated GPU type.
        device: Real device whose clock is set and on which the model is timed: ``cpu``, ``nvidia`` or ``nvidia:N``;
            None to emulate.
        run: ``module:function`` that runs one pass on it; an ONNX model runs on the CPU by itself.
        passes: Passes timed at each clock.
        latency: Latency of one pass at the highest clock to calibrate to, such as ``51 ms``.
        dimensions: ``NAME=N`` for symbolic dimensions.
        decode: Graph of one decoding step, with ``steps`` of them.
        steps: Decoding steps.
        scores: Database to keep the profile in.
    """

    model: str
    gpu: str = "v100"
    device: str | None = None
    run: str | None = None
    passes: int = 20
    latency: str | None = None
    dimensions: tuple[str, ...] = ()
    decode: str | None = None
    steps: int = 64
    scores: Path | None = None


def profile_clocks(request: ClockRequest) -> tuple[ClockProfile, tuple[str, ...]]:
    """Profile a model against the clock, and keep it in the score database where one is named.

    Returns:
        The profile, and notes on how the model was read.

    Raises:
        ConfigError, DataError, CapabilityError: The model cannot be read, or the database cannot be written.
    """
    model = _model(request)
    profile = _profile(model, request) if request.device is None else _measured(model, request)
    if request.scores is not None:
        with ScoreDatabase(request.scores) as database:
            database.keep(profile)
    return profile, tuple(model.notes)


def _model(request: ClockRequest) -> NamedModel:
    dimensions = _dimensions(request.dimensions)
    model = named_model(request.model, dimensions)
    if request.decode is None:
        return model
    return with_decoding(model, named_model(request.decode, dimensions), request.steps)


def _profile(model: NamedModel, request: ClockRequest) -> ClockProfile:
    gpu = clock_model(request.gpu)
    latency_s = model.published_s if gpu is V100 else None
    if request.latency is not None:
        latency_s = flag_quantity(request.latency, TIME, "--latency")
    return emulated_profile(model.name, model.operations, gpu, latency_s=latency_s)


def _measured(model: NamedModel, request: ClockRequest) -> ClockProfile:
    """Timed on a real device whose clock is leased."""
    from joulery.app.wiring.devices import open_clock
    from joulery.app.wiring.leases import start_watchdog
    from joulery.app.wiring.meters import open_meters
    from joulery.perf.power.sensitivity import measured_profile
    from joulery.runtime.leasing.leases import LeaseHolder
    from joulery.runtime.profiling.clock_sweep import PowerWatch, SweepPlan, Wall, sweep
    from joulery.store.leases import LeaseBook

    if request.latency is not None or request.decode is not None:
        raise ConfigError("--latency and --decode are for emulated GPUs", pointer="--device")
    spec = _device_spec(request.device or "cpu")
    device = open_clock(spec)
    run = _one_pass(model, request)
    opened = open_meters(None)
    try:
        power = PowerWatch(opened.meters, device.capability().device)
        with LeaseHolder(LeaseBook(), watch=start_watchdog) as holder:
            curve = sweep(device, spec, holder, run, power, SweepPlan(passes=request.passes), Wall())
    finally:
        for meter in opened.meters:
            meter.close()
    return measured_profile(model.name, model.operations, clock_model(request.gpu), curve)


def _device_spec(text: str) -> DeviceSpec:
    from joulery.app.wiring.devices import cpufreq_spec

    kind, colon, number = text.partition(":")
    if kind == "cpu" and not colon:
        return cpufreq_spec()
    if kind == "nvidia" and (number.isdecimal() or not colon):
        return DeviceSpec("nvidia-clock", {"gpu": int(number or 0)})
    raise ConfigError("no such device", pointer="--device", got=text, expected="cpu, nvidia or nvidia:N")


def _one_pass(model: NamedModel, request: ClockRequest) -> Callable[[], object]:
    from joulery.app.profiling.passes import onnx_pass, python_pass

    if request.run is not None:
        return python_pass(request.run)
    if request.device == "cpu" and model.file is not None and model.file.suffix == ".onnx":
        return onnx_pass(model.file, _dimensions(request.dimensions), len(os.sched_getaffinity(0)))
    raise ConfigError(
        f"joulery cannot run {model.name} on {request.device} by itself",
        pointer="--run",
        expected="module:function",
        hint="name a function that runs one pass and returns when it is done: --run module:function",
    )


def _dimensions(pairs: Sequence[str]) -> Mapping[str, int]:
    found = {"batch": 1}
    for pair in pairs:
        name, _, size = pair.partition("=")
        if not (name and size.isdecimal() and int(size) > 0):
            raise ConfigError("not a dimension", pointer="--dim", got=pair, expected="NAME=N, such as batch=8")
        found[name] = int(size)
    return found
