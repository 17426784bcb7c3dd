"""One pass of a model, ready to be run again and again: an ONNX file on zeros, or anybody's function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from joulery.adapters.engines.embedded.models import load
from joulery.domain.errors import ConfigError
from joulery.domain.serving.engine import ModelKind, ModelRef
from joulery.domain.serving.tensors import NUMPY_TYPES, Tensor, TensorSpec


def onnx_pass(file: Path, dimensions: Mapping[str, int], threads: int) -> Callable[[], object]:
    """One pass of an ONNX model on zeros.

    Args:
        file: The model.
        dimensions: ``batch`` for a first dimension of any size; other such dimensions are 1.
        threads: Threads inside an operator.

    Raises:
        ConfigError, DataError, CapabilityError: It cannot be run here.
    """
    model = load(ModelRef(ModelKind.ONNX, str(file)), threads)
    zeros = {spec.name: _zeros(spec, dimensions.get("batch", 1)) for spec in model.inputs}
    return lambda: model.run(zeros, ())


def python_pass(target: str) -> Callable[[], object]:
    """A function without arguments that runs one pass, and has finished it when it returns.

    Args:
        target: ``module:function``.

    Raises:
        ConfigError: It cannot be imported, or is no function.
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
