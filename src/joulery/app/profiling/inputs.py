"""Inputs to send to a model: photographs from a folder, or data generated from its declared inputs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from joulery.adapters.models.photos import photo_files, read_photo
from joulery.domain.arrays import FloatArray
from joulery.domain.errors import ConfigError, DataError
from joulery.domain.serving.tensors import NUMPY_TYPES, Tensor, TensorSpec
from joulery.runtime.load.load_plan import PROMPTS
from joulery.store.columns import read_column


def inputs_for(
    specs: Sequence[TensorSpec], folder: Path | None, *, count: int = 8, seed: int = 0
) -> list[dict[str, Tensor]]:
    """Create inputs for a model, one dictionary of tensors per request.

    Args:
        specs: Declared inputs of the model.
        folder: Folder of photographs to send; None to generate inputs.
        count: Number of inputs to generate.
        seed: Seed of the generated inputs.

    Raises:
        ConfigError: A folder is given and the model takes no photographs, or the model declares no inputs.
        DataError: A photograph cannot be read.
    """
    if folder is not None:
        name, side = _photo_input(specs)
        return [{name: read_photo(path, side)[None]} for path in photo_files(folder)]
    if not specs:
        raise ConfigError(
            "the model declares no inputs, so none can be generated for it",
            pointer="load.inputs",
            hint="serve an ONNX model, or leave out load and send requests yourself",
        )
    rng = np.random.default_rng(seed)
    return [{spec.name: _random_input(spec, rng) for spec in specs} for _ in range(count)]


def read_arrivals(file: Path) -> FloatArray:
    """Read recorded arrivals from the column ``arrival_s`` of a CSV file, seconds from the start, float64[n].

    Raises:
        DataError: No such file, column or rows, or the times do not count up from 0.
    """
    times_s = read_column(file, "arrival_s")
    wrong = np.diff(times_s, prepend=0.0) < 0
    if bool(wrong.any()):
        row = int(np.argmax(wrong))
        raise DataError(f"arrivals count up from 0 s, {times_s[row]:g} does not", file=str(file), row=row + 2)
    return times_s


def prompts_from(file: Path | None) -> list[str]:
    """Prompts for a language model: the non-empty lines of a text file; joulery's own prompts without a file.

    Raises:
        DataError: The file cannot be read, is not UTF-8, or contains no prompt.
    """
    if file is None:
        return list(PROMPTS)
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", file=str(file)) from error
    except UnicodeDecodeError as error:
        raise DataError(f"is not UTF-8: {error.reason} at byte {error.start}", file=str(file)) from error
    prompts = [line.strip() for line in lines if line.strip()]
    if not prompts:
        raise DataError("holds no prompt", file=str(file), hint="a prompt a line")
    return prompts


def _photo_input(specs: Sequence[TensorSpec]) -> tuple[str, int]:
    """Name and side length of the only input, which must be a batch of square RGB pictures."""
    if len(specs) == 1 and specs[0].datatype == "UINT8" and len(specs[0].shape) == 4:
        batch, height, width, channels = specs[0].shape
        if batch in (-1, 1) and height == width > 0 and channels == 3:
            return specs[0].name, height
    takes = ", ".join(f"{spec.name} {spec.datatype}{list(spec.shape)}" for spec in specs) or "something undeclared"
    raise ConfigError(
        "photographs cannot be sent to this model",
        pointer="load.inputs",
        got=takes,
        expected="one input UINT8[N, side, side, 3]",
        hint="leave load.inputs out: joulery then generates inputs",
    )


def _random_input(spec: TensorSpec, rng: np.random.Generator) -> Tensor:
    shape = tuple(1 if size == -1 else size for size in spec.shape)
    if spec.datatype == "BYTES":
        return np.full(shape, b"made up", object)
    dtype = NUMPY_TYPES[spec.datatype]
    if dtype.kind == "f":
        return rng.standard_normal(shape).astype(dtype)
    high = 2 if dtype.kind == "b" else 128
    return rng.integers(0, high, shape).astype(dtype)
