"""A loaded model, and what every loader of one needs: its file, options, declared tensors, the outputs asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from joulery.domain.errors import ConfigError
from joulery.domain.serving.engine import ModelRef, Outcome, RequestError
from joulery.domain.serving.tensors import NUMPY_TYPES, Tensor, TensorSpec

Run = Callable[[dict[str, Tensor], tuple[str, ...]], Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready to run.

    Attributes:
        run: Inputs by name and the names of the outputs wanted (none for all) to outputs by name.
        inputs, outputs: What it declares; empty when it declares nothing.
        platform: What runs it.
    """

    run: Run
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    platform: str


def one_line(error: BaseException) -> str:
    """``ValueError: wrong size``: an error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def readable(model: ModelRef) -> Path:
    """The file of a model.

    Raises:
        ConfigError: It cannot be read.
    """
    path = Path(model.location)
    try:
        with path.open("rb"):
            return path
    except OSError as error:
        raise ConfigError(f"the model cannot be read: {error.strerror}", file=str(path)) from error


def only(results: Mapping[str, Any], wanted: tuple[str, ...]) -> Mapping[str, Any]:
    """The outputs wanted; all where none is named.

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
        ConfigError: They are no JSON object.
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
        ConfigError: One is none.
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
