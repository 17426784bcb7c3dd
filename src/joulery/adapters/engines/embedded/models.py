"""Loading and warm-up of a model inside a worker, from an ONNX file or a Python callable.

PyTorch and Transformers have loaders in modules of their own, which use the helpers here. Every mistake that a user can
make here raises one :class:`~joulery.domain.errors.JouleryError`.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from joulery.domain.errors import CapabilityError, ConfigError, DataError, JouleryError
from joulery.domain.gpu.device import DEVICE
from joulery.domain.serving.engine import ModelKind, ModelRef, Outcome, RequestError
from joulery.domain.serving.tensors import NUMPY_TYPES, Tensor, TensorSpec

Run = Callable[[dict[str, Tensor], tuple[str, ...]], Mapping[str, Any]]
_ONNX_TYPES = {
    "tensor(bool)": "BOOL",
    "tensor(uint8)": "UINT8",
    "tensor(uint16)": "UINT16",
    "tensor(uint32)": "UINT32",
    "tensor(uint64)": "UINT64",
    "tensor(int8)": "INT8",
    "tensor(int16)": "INT16",
    "tensor(int32)": "INT32",
    "tensor(int64)": "INT64",
    "tensor(float16)": "FP16",
    "tensor(float)": "FP32",
    "tensor(double)": "FP64",
    "tensor(string)": "BYTES",
}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready to run.

    Attributes:
        run: Maps inputs by name, and the names of the wanted outputs (none for all), to outputs by name.
        inputs, outputs: What it declares; empty when it declares nothing.
        platform: Name of its runtime, such as ``onnxruntime_onnx``.
    """

    run: Run
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    platform: str


class Inputs(dict[str, Tensor]):
    """Inputs of a callable; a missing one is the request's fault, not the callable's."""

    def __missing__(self, name: str) -> Tensor:
        raise RequestError(f"input {name!r} is missing", Outcome.INVALID)


def load(model: ModelRef, threads: int) -> LoadedModel:
    """The model, ready to run with ``threads`` threads inside an operator.

    Raises:
        ConfigError: No such file, module or function.
        DataError: The file is not a model that can be run.
        CapabilityError: A package that it needs is not installed.
    """
    if model.kind is ModelKind.ONNX:
        return _load_onnx(model, threads)
    if model.kind in (ModelKind.TORCHSCRIPT, ModelKind.TORCH_EXPORT):
        from joulery.adapters.engines.embedded.torch_models import load_torch

        return load_torch(model, threads)
    if model.kind is ModelKind.TRANSFORMERS:
        from joulery.adapters.engines.embedded.pipelines import load_pipeline

        return load_pipeline(model, threads)
    return _load_callable(model)


def described(model: ModelRef) -> dict[str, str]:
    """A model reference in the form that the worker is sent."""
    return {"kind": model.kind.value, "location": model.location, "options": model.options}


def reference(entry: Mapping[str, str]) -> ModelRef:
    """The inverse of :func:`described`."""
    return ModelRef(ModelKind(entry["kind"]), entry["location"], entry["options"])


def keep_warm(
    models: dict[str, LoadedModel], name: str, entry: Mapping[str, str], threads: int, most_bytes: int
) -> str:
    """Load one more variant into this process; the first of ``models`` is its own.

    Args:
        models: The loaded variants by name; gains this one if it answers the same requests and memory allows.
        name: The variant.
        entry: Its model.
        threads: Threads inside an operator.
        most_bytes: Resident memory that the process may reach; 0 for no bound.

    Returns:
        Why the variant is not kept, as text; empty where it is.
    """
    own = next(iter(models.values()))
    try:
        model = load(reference(entry), threads)
    except JouleryError as error:
        return f"{name} is not kept warm: {error}"
    if (model.inputs, model.outputs) != (own.inputs, own.outputs):
        return f"{name} is not kept warm: it declares other inputs or outputs"
    warm_up(model)
    resident_bytes = _resident_bytes()
    if 0 < most_bytes < resident_bytes:
        return f"{name} is not kept warm: {resident_bytes / 1e6:.0f} MB of at most {most_bytes / 1e6:.0f} MB"
    models[name] = model
    return ""


def _resident_bytes() -> int:
    """Resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def warm_up(model: LoadedModel) -> str:
    """Run once on zeros of the declared shape, so that the first request does not pay for lazy allocations.

    Returns:
        The error as text, empty for none; a model may reject zeros, or a size of 1 where any is allowed.
    """
    if not model.inputs:
        return ""
    zeros = {spec.name: _zeros(spec) for spec in model.inputs}
    try:
        model.run(zeros, ())
    except Exception as error:  # noqa: BLE001 - an error on made-up inputs is reported, not raised
        return f"the warm-up failed: {one_line(error)}"
    return ""


def failure(error: Exception) -> tuple[str, Outcome]:
    """The message for the client about an error of the model, and the outcome of its request."""
    if isinstance(error, RequestError):
        return str(error), error.outcome
    if isinstance(error, ValueError):
        return f"the model refuses the inputs: {one_line(error)}", Outcome.INVALID
    return f"the model failed: {one_line(error)}", Outcome.FAILED


def one_line(error: BaseException) -> str:
    """An error on one line, such as ``ValueError: wrong size``."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def readable(model: ModelRef) -> Path:
    """The path of a model's file, after a check that it can be read.

    Raises:
        ConfigError: The file cannot be read.
    """
    path = Path(model.location)
    try:
        with path.open("rb"):
            return path
    except OSError as error:
        raise ConfigError(f"the model cannot be read: {error.strerror}", file=str(path)) from error


def only(results: Mapping[str, Any], wanted: tuple[str, ...]) -> Mapping[str, Any]:
    """The outputs that are wanted; all where none is named.

    Raises:
        RequestError: The model has no such output.
    """
    if not wanted:
        return results
    for missing in (name for name in wanted if name not in results):
        raise RequestError(f"the model has no output {missing!r}", Outcome.INVALID)
    return {name: results[name] for name in wanted}


def options_of(model: ModelRef) -> dict[str, Any]:
    """The options of a model.

    Raises:
        ConfigError: The options are not a JSON object.
    """
    try:
        options = orjson.loads(model.options or "{}")
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"options are not JSON: {error}", pointer=model.location, got=model.options) from error
    if not isinstance(options, dict):
        raise ConfigError("options are a JSON object", pointer=model.location, got=model.options)
    return options


def declared(model: ModelRef, side: str, entries: Sequence[Any]) -> tuple[TensorSpec, ...]:
    """Tensors declared as ``(name, datatype, shape)``.

    Args:
        model: The model, for errors.
        side: ``inputs`` or ``outputs``, for errors.
        entries: The declarations.

    Raises:
        ConfigError: An entry is not such a declaration.
    """
    specs: list[TensorSpec] = []
    for entry in entries:
        try:
            name, datatype, shape = entry
            spec = TensorSpec(str(name), str(datatype), tuple(int(size) for size in shape))
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{side} are declared as (name, datatype, shape)", pointer=model.location, got=repr(entry)
            ) from error
        if spec.datatype not in NUMPY_TYPES:
            raise ConfigError("unknown datatype", pointer=model.location, got=spec.datatype)
        specs.append(spec)
    return tuple(specs)


def _zeros(spec: TensorSpec) -> Tensor:
    shape = [max(size, 1) if size else 0 for size in spec.shape]
    return np.full(shape, b"", object) if spec.datatype == "BYTES" else np.zeros(shape, NUMPY_TYPES[spec.datatype])


def _load_onnx(model: ModelRef, threads: int) -> LoadedModel:
    path = readable(model)
    try:
        import onnxruntime
    except ImportError as error:
        raise CapabilityError(
            "ONNX models need ONNX Runtime", resource="onnxruntime", grant="pip install 'joulery[vision]'"
        ) from error
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    # Threads that spin while they wait burn joules without serving.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 4  # what it would print is in the error that it raises
    try:
        session = onnxruntime.InferenceSession(str(path), options, providers=_providers(onnxruntime))
    except CapabilityError:
        raise
    except Exception as error:  # onnxruntime has a class for each status, and no common one
        raise DataError(f"not an ONNX model that can be run: {one_line(error)}", file=str(path)) from error
    inputs, outputs = _onnx_specs(path, session.get_inputs()), _onnx_specs(path, session.get_outputs())
    return LoadedModel(_onnx_runner(session, outputs), inputs, outputs, "onnxruntime_onnx")


def _providers(onnxruntime: Any) -> list[str]:
    """ONNX Runtime's providers for a model.

    Raises:
        CapabilityError: The model is to run on a GPU, and the installed build does not support one.
    """
    if os.environ.get(DEVICE) != "cuda":
        return ["CPUExecutionProvider"]
    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        raise CapabilityError(
            "ONNX models on a GPU need the GPU build of ONNX Runtime",
            resource="onnxruntime",
            grant="pip uninstall -y onnxruntime && pip install onnxruntime-gpu",
        )
    return ["CUDAExecutionProvider"]


def _onnx_runner(session: Any, outputs: Sequence[TensorSpec]) -> Run:
    from onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument

    every = tuple(spec.name for spec in outputs)

    def run(inputs: dict[str, Tensor], wanted: tuple[str, ...]) -> Mapping[str, Any]:
        names = wanted or every
        texts = {name: _text(array) if array.dtype == object else array for name, array in inputs.items()}
        try:
            return dict(zip(names, session.run(names, texts), strict=True))
        except (InvalidArgument, ValueError) as error:
            raise RequestError(f"the model refuses the inputs: {one_line(error)}", Outcome.INVALID) from error

    return run


def _text(array: Tensor) -> Tensor:
    """Decode a BYTES tensor: ONNX Runtime takes text where the protocol has bytes."""
    try:
        decoded = [element.decode() for element in array.ravel().tolist()]
    except UnicodeDecodeError as error:
        raise RequestError(f"the model takes text, and a BYTES element is none: {error}", Outcome.INVALID) from error
    return np.array([*decoded, None], dtype=object)[:-1].reshape(array.shape)


def _onnx_specs(path: Path, arguments: Sequence[Any]) -> tuple[TensorSpec, ...]:
    specs: list[TensorSpec] = []
    for argument in arguments:
        if argument.type not in _ONNX_TYPES:
            raise DataError(f"{argument.name!r} is a {argument.type}, which the protocol cannot carry", file=str(path))
        shape = tuple(size if isinstance(size, int) and size >= 0 else -1 for size in argument.shape)
        specs.append(TensorSpec(argument.name, _ONNX_TYPES[argument.type], shape))
    return tuple(specs)


def _load_callable(model: ModelRef) -> LoadedModel:
    """Load ``module:function``. Its attributes ``inputs`` and ``outputs``, where it has them, declare its tensors."""
    module_name, _, name = model.location.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # the import runs the user's code
        raise ConfigError(
            f"the module of the model cannot be imported: {one_line(error)}",
            pointer=model.location,
            hint="start joulery in the folder of the module, or put that folder on PYTHONPATH",
        ) from error
    target = getattr(module, name, None)
    if not callable(target):
        raise ConfigError(f"{module_name} has no callable {name!r}", pointer=model.location, expected="module:function")
    options = options_of(model)
    if isinstance(target, type):
        try:
            target, options = target(**options), {}
        except Exception as error:  # the user's constructor
            raise ConfigError(f"the model cannot be made: {one_line(error)}", pointer=model.location) from error
        if not callable(target):
            raise ConfigError(f"{name!r} makes objects that cannot be called", pointer=model.location)
    function: Callable[..., Any] = target
    inputs, outputs = (_attribute(model, function, side) for side in ("inputs", "outputs"))

    def run(arrays: dict[str, Tensor], wanted: tuple[str, ...]) -> Mapping[str, Any]:
        results = function(Inputs(arrays), **options)
        if not isinstance(results, Mapping):
            raise TypeError(f"{model} returned {type(results).__name__}, not a dict of arrays by name")
        return only(results, wanted)

    return LoadedModel(run, inputs, outputs, "python")


def _attribute(model: ModelRef, function: object, side: str) -> tuple[TensorSpec, ...]:
    """A callable's declaration: ``function.inputs = [("photo", "UINT8", (-1, 292, 292, 3))]``."""
    return declared(model, side, getattr(function, side, ()))
