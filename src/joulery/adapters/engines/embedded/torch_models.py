"""PyTorch models inside a worker: TorchScript, and programs of ``torch.export``.

Inputs are passed by the names of ``forward``'s parameters. Outputs are named by the dict or named tuple that the model
returns; one tensor is ``output``, the tensors of a tuple are ``output_0``, ``output_1`` and so on.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from joulery.adapters.engines.embedded.models import (
    LoadedModel,
    Run,
    declared,
    one_line,
    only,
    options_of,
    readable,
)
from joulery.domain.errors import CapabilityError, ConfigError, DataError
from joulery.domain.gpu.device import DEVICE
from joulery.domain.serving.engine import ModelKind, ModelRef, Outcome, RequestError
from joulery.domain.serving.tensors import Tensor, TensorSpec

GRANT = "pip install 'joulery[torch]'"
_DATATYPES = {
    "bool": "BOOL",
    "uint8": "UINT8",
    "uint16": "UINT16",
    "uint32": "UINT32",
    "uint64": "UINT64",
    "int8": "INT8",
    "int16": "INT16",
    "int32": "INT32",
    "int64": "INT64",
    "float16": "FP16",
    "bfloat16": "FP32",
    "float32": "FP32",
    "float64": "FP64",
}
"""The protocol's datatypes by PyTorch's; bfloat16, which the protocol does not have, is returned as FP32."""


def load_torch(model: ModelRef, threads: int) -> LoadedModel:
    """A PyTorch model, ready to run with ``threads`` threads inside an operator.

    Raises:
        ConfigError: No such file, or inputs are declared that the model does not take.
        DataError: The file is not such a model.
        CapabilityError: PyTorch is not installed, or finds no GPU where the model is to run on one.
    """
    path = readable(model)
    torch = require_torch(threads)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of TorchScript, which concerns those who save models
            if model.kind is ModelKind.TORCHSCRIPT:
                return _script(torch, model)
            return _program(torch, model)
    except (ConfigError, DataError, CapabilityError):
        raise
    except Exception as error:  # torch and a damaged pickle raise anything
        what = "TorchScript" if model.kind is ModelKind.TORCHSCRIPT else "a program of torch.export"
        raise DataError(f"not {what} that can be run: {one_line(error)[:300]}", file=str(path)) from error


def require_torch(threads: int) -> Any:
    """Import PyTorch and set its number of threads inside an operator; 0 for PyTorch's own number.

    Raises:
        CapabilityError: PyTorch is not installed, or finds no GPU where models are to run on one.
    """
    try:
        import torch
    except ImportError as error:
        raise CapabilityError("PyTorch models need PyTorch", resource="torch", grant=GRANT) from error
    if threads:
        torch.set_num_threads(threads)
    if on_cuda() and not torch.cuda.is_available():
        raise CapabilityError(
            "PyTorch models on a GPU need a build of PyTorch for CUDA",
            resource="torch",
            grant="pip install torch --index-url https://download.pytorch.org/whl/cu130",
        )
    return torch


def on_cuda() -> bool:
    """Whether models of this process run on a GPU."""
    return os.environ.get(DEVICE) == "cuda"


def _script(torch: Any, model: ModelRef) -> LoadedModel:
    """Load a TorchScript model. Its file names its inputs; only the site file can declare their types and shapes."""
    module = torch.jit.load(model.location, map_location="cuda" if on_cuda() else "cpu").eval()
    arguments = module.forward.schema.arguments[1:]
    names = [argument.name for argument in arguments]
    required = {argument.name for argument in arguments if not argument.has_default_value()}
    inputs = declared(model, "inputs", options_of(model).get("inputs", ()))
    for spec in inputs:
        if spec.name not in names:
            raise ConfigError(
                f"the model has no input {spec.name!r}", file=model.location, expected=", ".join(names) or "no input"
            )

    def call(tensors: dict[str, Any]) -> Any:
        _complete(tensors, names, required)
        return module(**tensors)

    return LoadedModel(_runner(torch, call), inputs, (), "torch_torchscript")


def _program(torch: Any, model: ModelRef) -> LoadedModel:
    """Load a program of torch.export, which declares its inputs and outputs."""
    program = torch.export.load(model.location)
    if on_cuda():
        from torch.export.passes import move_to_device_pass

        program = move_to_device_pass(program, "cuda")
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    positional, named = program.call_spec.in_spec.children()
    names = list(program.graph_signature.user_inputs)
    flat = len(names) == positional.num_children + named.num_children
    if not flat or not all(isinstance(values.get(name), torch.Tensor) for name in names):
        raise DataError("the program takes something else than tensors, such as a list of them", file=model.location)
    count, keywords = positional.num_children, list(named.context or ())
    exported = [*names[:count], *keywords]
    inputs = tuple(_spec(name, values[node]) for name, node in zip(exported, names, strict=True))
    results = [values.get(name) for name in program.graph_signature.user_outputs]
    returned = torch.utils._pytree.tree_unflatten(results, program.call_spec.out_spec)
    outputs = tuple(_spec(name, value) for name, value in _named(returned))
    module = program.module()

    def call(tensors: dict[str, Any]) -> Any:
        _complete(tensors, exported, set(exported))
        return module(*(tensors[name] for name in exported[:count]), **{name: tensors[name] for name in keywords})

    return LoadedModel(_runner(torch, call), inputs, outputs, "torch_export")


def _complete(tensors: Mapping[str, Any], names: Sequence[str], required: set[str]) -> None:
    """Raise unless a request has every input and no other."""
    for name in names:
        if name in required and name not in tensors:
            raise RequestError(f"input {name!r} is missing", Outcome.INVALID)
    for name in tensors:
        if name not in names:
            raise RequestError(f"the model has no input {name!r}", Outcome.INVALID)


def _runner(torch: Any, call: Any) -> Run:
    device = "cuda" if on_cuda() else "cpu"

    def run(inputs: dict[str, Tensor], wanted: tuple[str, ...]) -> Mapping[str, Any]:
        with torch.inference_mode():
            tensors = {name: _tensor(torch, name, array).to(device) for name, array in inputs.items()}
            try:
                returned = call(tensors)
            except torch.OutOfMemoryError:
                raise
            except (RuntimeError, AssertionError, IndexError, TypeError) as error:
                raise RequestError(f"the model refuses the inputs: {_last_line(error)}", Outcome.INVALID) from error
            return only({name: _array(value) for name, value in _named(returned)}, wanted)

    return run


def _tensor(torch: Any, name: str, array: Tensor) -> Any:
    if array.dtype == object:
        raise RequestError(f"input {name!r} is BYTES, and PyTorch has no such tensors", Outcome.INVALID)
    return torch.from_numpy(array if array.flags.writeable else np.array(array))


def _array(tensor: Any) -> Tensor:
    found: Tensor = (tensor.float() if str(tensor.dtype) == "torch.bfloat16" else tensor).cpu().numpy()
    return found


def _named(returned: Any) -> Iterator[tuple[str, Any]]:
    """A model's outputs, by name.

    Raises:
        TypeError: The model returned neither a tensor nor a flat dict or tuple of them.
    """
    if isinstance(returned, Mapping):
        found = [(str(name), value) for name, value in returned.items()]
    elif isinstance(returned, tuple | list):
        fields = getattr(returned, "_fields", None)
        found = list(zip(fields or (f"output_{index}" for index in range(len(returned))), returned, strict=True))
    else:
        found = [("output", returned)]
    for name, value in found:
        if not hasattr(value, "dtype"):
            raise TypeError(f"the model returned {type(value).__name__} as {name}, not a tensor")
        yield name, value


def _spec(name: str, value: Any) -> TensorSpec:
    datatype = _DATATYPES[str(value.dtype).removeprefix("torch.")]
    return TensorSpec(name, datatype, tuple(size if isinstance(size, int) else -1 for size in value.shape))


def _last_line(error: Exception) -> str:
    """The last line of an error: TorchScript puts its own traceback before it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[-1] if lines else ""
    return text if text.startswith(type(error).__name__) else f"{type(error).__name__}: {text}"
