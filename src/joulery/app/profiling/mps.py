"""``joulery profile NAME=MODEL --mps GPU``: a model's coefficients on a GPU of this machine, measured under MPS."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np

from joulery.app.planning.shares import read_profile
from joulery.app.profiling.interference_file import hand_over
from joulery.app.profiling.kernels import nsight_compute
from joulery.config.parsing.quantity import TIME, parse_quantity
from joulery.domain.errors import ConfigError, DataError
from joulery.domain.serving.engine import ModelRef
from joulery.domain.serving.tensors import Tensor
from joulery.perf import catalog
from joulery.perf.interference.runs import ModelFacts
from joulery.runtime.profiling.gpu import MpsPlan, profile_under_mps
from joulery.ui.kit.progress import progress_bar


@dataclass(frozen=True, slots=True)
class MpsRequest:
    """What the command line asked for.

    Attributes:
        what: ``NAME=MODEL``.
        gpu: Index or UUID.
        inputs: One request, in an .npz file.
        seconds, warmup: How much each run measures.
        kernels, launch: Kernels and their launch delay as the user states them; 0 and None where not.
        ncu: Whether Nsight Compute counts kernels, where it is installed.
        base: The profile to start from: a name of the catalog or a file.
        output: Where the profile goes.
        as_json: Print it as one object.
    """

    what: str | None
    gpu: str
    inputs: Path | None
    seconds: float
    warmup: int
    kernels: int
    launch: str | None
    ncu: bool
    base: str
    output: Path | None
    as_json: bool


def profile_mps(request: MpsRequest) -> None:
    """Measure, fit, print and keep.

    Raises:
        ConfigError: The model, its inputs or the GPU is not named, or not so.
        CapabilityError: No GPU, driver or MPS here.
        DataError: The model does not answer, or the runs do not determine the coefficients.
    """
    name, equals, model = (request.what or "").partition("=")
    if not (name and equals and model):
        raise ConfigError("name the model to profile", got=request.what, expected="NAME=MODEL --mps GPU")
    if request.inputs is None:
        raise ConfigError("say what to ask the model", pointer="--inputs", expected="an .npz file of one request")
    base = read_profile(Path(request.base)) if request.base.endswith(".json") else catalog.profile(request.base)
    launch_s = 0.0 if request.launch is None else _time_s(request.launch)
    facts = ModelFacts(name, 0.0, 0.0, float(request.kernels), 1e3 * launch_s)
    with progress_bar(quiet=request.as_json) as progress:
        profile = asyncio.run(
            profile_under_mps(
                ModelRef.parse(model),
                facts,
                one_request(request.inputs),
                int(request.gpu) if request.gpu.isdigit() else request.gpu,
                base,
                MpsPlan(request.seconds, request.warmup),
                counter=nsight_compute() if request.ncu else None,
                progress=progress,
                tell=lambda said: click.echo(said, err=True),
            )
        )
    hand_over(profile, request.output, as_json=request.as_json)


def one_request(file: Path) -> dict[str, Tensor]:
    """The arrays of one request.

    Raises:
        DataError: It cannot be read, or an array's first axis, the batch, is not of length 1.
    """
    try:
        with np.load(file, allow_pickle=False) as arrays:
            found = {name: arrays[name] for name in arrays.files}
    except (OSError, ValueError) as error:
        raise DataError(f"not an .npz file of arrays: {error}", file=str(file)) from None
    for name, array in found.items():
        if array.ndim == 0 or array.shape[0] != 1:
            raise DataError(
                f"{name} has shape {list(array.shape)}: the first axis is the batch, of length 1", file=str(file)
            )
    return found


def _time_s(text: str) -> float:
    from pydantic_core import PydanticCustomError

    try:
        return parse_quantity(text, TIME)
    except PydanticCustomError as error:
        raise ConfigError(error.message(), pointer="--launch", got=text, expected="such as 32 us") from None
