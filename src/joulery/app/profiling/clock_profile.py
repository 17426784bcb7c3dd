"""``joulery profile MODEL --clocks``: read a model's graph, score its operators, keep the profile.

A graph is a file, a built-in model, or one of the published catalog. On a device, the timed pass is an ONNX file that
runs on zeros, or a Python function.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from joulery.adapters.engines.embedded.models import load
from joulery.adapters.graphs.hlo import read_hlo
from joulery.adapters.graphs.onnx import read_onnx
from joulery.adapters.graphs.torch_export import read_torch_export
from joulery.adapters.models.efficientnet_lite import LITE_VARIANTS
from joulery.app.wiring.models import cache_folder, lite_file
from joulery.domain.errors import ConfigError, DataError
from joulery.domain.gpu.clock_profile import ClockProfile
from joulery.domain.gpu.device import DeviceSpec
from joulery.domain.serving.engine import ModelKind, ModelRef
from joulery.domain.serving.tensors import NUMPY_TYPES, Tensor, TensorSpec
from joulery.domain.trace.operators import GraphOperator, OperationCost, OperatorKind
from joulery.perf.catalog.architectures import architectures, operations_of, published_latency_s
from joulery.perf.catalog.clock_models import clock_model
from joulery.perf.power.clock_curves import V100
from joulery.perf.power.operator_costs import operator_costs
from joulery.perf.power.sensitivity import emulated_profile
from joulery.store.scores import ScoreDatabase


@dataclass(frozen=True, slots=True)
class ClockRequest:
    """Request to profile a model against the clock.

    Attributes:
        model: A graph file, a built-in model or one of the catalog.
        gpu: Emulated GPU type.
        device: Real device whose clock is set and on which the model is timed: ``cpu``, ``nvidia`` or ``nvidia:N``;
            None to emulate.
        run: ``module:function`` that runs one pass on the device; not needed for an ONNX model on the CPU.
        passes: Passes timed at each clock.
        latency: Latency of one pass at the highest clock to calibrate to, such as ``51 ms``.
        dimensions: ``NAME=N`` for symbolic dimensions.
        decode: Graph of one decoding step, which runs ``steps`` times.
        steps: Number of decoding steps.
        scores: Database to keep the profile in.
    """

    model: str
    gpu: str = "v100"
    device: str | None = None
    run: str | None = None
    passes: int = 20
    latency_s: float | None = None
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
    if request.latency_s is not None:
        latency_s = request.latency_s
    return emulated_profile(model.name, model.operations, gpu, latency_s=latency_s)


def _measured(model: NamedModel, request: ClockRequest) -> ClockProfile:
    """Time the model on a real device whose clock is leased."""
    from joulery.app.wiring.devices import open_clock
    from joulery.app.wiring.leases import start_watchdog
    from joulery.app.wiring.meters import open_meters
    from joulery.perf.power.sensitivity import measured_profile
    from joulery.runtime.leasing.leases import LeaseHolder
    from joulery.runtime.profiling.clock_sweep import PowerWatch, SweepPlan, Wall, sweep
    from joulery.store.leases import LeaseBook

    if request.latency_s is not None or request.decode is not None:
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


def onnx_pass(file: Path, dimensions: Mapping[str, int], threads: int) -> Callable[[], object]:
    """Return a function that runs one pass of an ONNX model on zeros.

    Args:
        file: The model.
        dimensions: ``batch`` for a symbolic first dimension; other symbolic dimensions are 1.
        threads: Threads inside an operator.

    Raises:
        ConfigError, DataError, CapabilityError: The model cannot be run here.
    """
    model = load(ModelRef(ModelKind.ONNX, str(file)), threads)
    zeros = {spec.name: _zeros(spec, dimensions.get("batch", 1)) for spec in model.inputs}
    return lambda: model.run(zeros, ())


def python_pass(target: str) -> Callable[[], object]:
    """Import a function without arguments that runs one pass to its end.

    Args:
        target: ``module:function``.

    Raises:
        ConfigError: It cannot be imported, or is not a function.
    """
    import importlib

    module, colon, name = target.partition(":")
    if not (module and colon and name):
        raise ConfigError("not a function", pointer="--run", got=target, expected="module:function")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"cannot be imported: {error}", pointer="--run", got=target) from None
    if not callable(found):
        raise ConfigError("not a function", pointer="--run", got=target, expected="module:function")
    made: Callable[[], object] = found
    return made


def _zeros(spec: TensorSpec, batch: int) -> Tensor:
    shape = [size if size > 0 else batch if axis == 0 else 1 for axis, size in enumerate(spec.shape)]
    return np.full(shape, b"", object) if spec.datatype == "BYTES" else np.zeros(shape, NUMPY_TYPES[spec.datatype])


@dataclass(frozen=True, slots=True)
class NamedModel:
    """A model and its operators.

    Attributes:
        name: Name of the model.
        operations: Its operators in topological order.
        published_s: Published latency on a V100 at 1380 MHz; None where there is none.
        notes: Remarks on how the model was read, one sentence each.
        file: File of its graph; None for the catalog.
    """

    name: str
    operations: tuple[OperationCost, ...]
    published_s: float | None = None
    notes: tuple[str, ...] = ()
    file: Path | None = None


def named_model(what: str, dimensions: Mapping[str, int]) -> NamedModel:
    """Find a model by name: a graph file, ``lite0`` to ``lite2``, or a model of the published catalog.

    Raises:
        CapabilityError: A package that reads the file is missing.
        DataError: There is no such file or model, or it cannot be read.
        ConfigError: A dimension is invalid.
    """
    file = Path(what)
    if file.is_file():
        return read_model(file, dimensions)
    if what in {variant.name for variant in LITE_VARIANTS}:
        return replace(read_model(lite_file(what, cache_folder()), dimensions), name=what)
    if what in architectures():
        return NamedModel(what, operations_of(what), published_latency_s(what))
    known = ", ".join((*(variant.name for variant in LITE_VARIANTS), *architectures()))
    raise DataError(
        f"no such file or model: {what}",
        hint=f"name an ONNX file, a .pt2 file of torch.export, a file of HLO text, or one of {known}",
    )


def read_model(file: Path, dimensions: Mapping[str, int]) -> NamedModel:
    """Read the model in a graph file: ONNX, ``torch.export`` (``.pt2``) or HLO text, recognised by its content.

    Raises:
        CapabilityError, DataError: As :func:`named_model`.
    """
    graph = _read(file, dimensions)
    unknown: dict[str, int] = {}
    for operator in _all(graph):
        if operator.kind is OperatorKind.OTHER:
            unknown[operator.type] = unknown.get(operator.type, 0) + 1
    notes: tuple[str, ...] = ()
    if unknown:
        listed = ", ".join(f"{name} ({count})" for name, count in sorted(unknown.items()))
        notes = (f"no rule for the arithmetic of {listed}: counted by their memory traffic alone",)
    name = file.name.removesuffix(".txt").removesuffix(file.suffix if file.suffix != ".txt" else "")
    return NamedModel(name, operator_costs(graph), notes=notes, file=file)


def with_decoding(model: NamedModel, step: NamedModel, steps: int) -> NamedModel:
    """Combine two graphs to a generative model: a prefill, and one decoding step that runs ``steps`` times.

    The weights are counted once, with the prefill.
    """
    prefill = tuple(replace(each, phase="prefill") for each in model.operations)
    decode = tuple(
        replace(each, phase="decode", count=steps * each.count, parameter_bytes=0.0) for each in step.operations
    )
    return replace(model, operations=(*prefill, *decode), notes=(*model.notes, *step.notes))


def _read(file: Path, dimensions: Mapping[str, int]) -> tuple[GraphOperator, ...]:
    try:
        with file.open("rb") as handle:
            start = handle.read(4096)
    except OSError as error:
        raise DataError(f"cannot read: {error.strerror}", file=str(file)) from None
    if not start:
        raise DataError("the file is empty", file=str(file), hint="name a file with a graph")
    if start.startswith(b"PK"):
        return read_torch_export(file, dimensions)
    if b"HloModule" in start or file.suffix in (".hlo", ".txt"):
        return read_hlo(file)
    return read_onnx(file, dimensions)


def _all(graph: tuple[GraphOperator, ...]) -> list[GraphOperator]:
    found: list[GraphOperator] = []
    for operator in graph:
        found += [operator, *_all(operator.inner)]
    return found
