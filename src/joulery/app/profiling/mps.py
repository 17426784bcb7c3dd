"""``joulery profile NAME=MODEL --mps GPU``: a model's coefficients on a GPU of this machine, measured under MPS."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from joulery.adapters.devices.nvidia_kernels import nsight_compute
from joulery.app.planning.shares import read_interference
from joulery.app.wiring.engine import local_engine
from joulery.app.wiring.gpus import board_watch, local_gpus
from joulery.app.wiring.leases import held_leases
from joulery.config.devices import GpuDeviceConfig
from joulery.domain.errors import CapabilityError, ConfigError, DataError
from joulery.domain.ports import Engine
from joulery.domain.serving.engine import ModelRef
from joulery.domain.serving.tensors import Tensor
from joulery.perf import catalog
from joulery.perf.interference.model import InterferenceProfile
from joulery.perf.interference.runs import BATCHES, ModelFacts
from joulery.runtime.profiling.gpu import MpsPlan, profile_under_mps
from joulery.runtime.profiling.kernels import KernelCount, KernelProfiler, count_kernels


@dataclass(frozen=True, slots=True)
class MpsRequest:
    """Request to profile a model under MPS.

    Attributes:
        what: ``NAME=MODEL``.
        gpu: Index or UUID of the GPU.
        inputs: An .npz file with one request.
        seconds, warmup: Duration of each run, and number of batches before it.
        kernels, launch_s: Number of kernels and their launch delay as stated by the user; 0 and None if not stated.
        ncu: Whether to count kernels with Nsight Compute, where it is installed.
        base: The profile to start from: a name of the catalog or a file.
    """

    what: str | None
    gpu: str
    inputs: Path | None
    seconds: float
    warmup: int
    kernels: int
    launch_s: float | None
    ncu: bool
    base: str


def profile_mps(
    request: MpsRequest, progress: Callable[[int, int, str], None], warn: Callable[[str], None]
) -> InterferenceProfile:
    """Measure a model on a GPU of this machine and fit its profile.

    Args:
        request: What to profile.
        progress: Called with the number of configurations done, the total number and the next one.
        warn: Called with each warning.

    Raises:
        ConfigError: The model, its inputs or the GPU is missing or wrong.
        CapabilityError: No GPU, driver or MPS here.
        DataError: The model does not answer, or the runs do not determine the coefficients.
    """
    name, equals, target = (request.what or "").partition("=")
    if not (name and equals and target):
        raise ConfigError("name the model to profile", got=request.what, expected="NAME=MODEL --mps GPU")
    if request.inputs is None:
        raise ConfigError("name the inputs of one request", pointer="--inputs", expected="an .npz file of one request")
    base = read_interference(Path(request.base)) if request.base.endswith(".json") else catalog.profile(request.base)
    facts = ModelFacts(name, 0.0, 0.0, float(request.kernels), 1e3 * (request.launch_s or 0.0))
    model, inputs = ModelRef.parse(target), one_request(request.inputs)
    gpu: int | str = int(request.gpu) if request.gpu.isdigit() else request.gpu
    profiler = nsight_compute() if request.ncu else None
    with closing(board_watch(gpu)) as watch:
        return asyncio.run(
            profile_under_mps(
                model,
                facts,
                inputs,
                base,
                MpsPlan(request.seconds, request.warmup),
                watch=watch,
                engine=lambda: _shared_gpu(gpu, warn),
                counts=None if profiler is None else _counted(profiler, model, inputs, gpu, warn),
                progress=progress,
            )
        )


@asynccontextmanager
async def _shared_gpu(gpu: int | str, warn: Callable[[str], None]) -> AsyncIterator[Engine]:
    """Open an engine on a GPU that is leased and shared under MPS until the block ends."""
    async with held_leases(warn) as holder:
        with closing(local_gpus([GpuDeviceConfig(gpu=gpu, mode="mps")], holder)) as here:
            engine = local_engine(places=here.places)
            try:
                yield engine
            finally:
                await engine.close()


def _counted(
    profiler: KernelProfiler, model: ModelRef, inputs: dict[str, Tensor], gpu: int | str, warn: Callable[[str], None]
) -> Mapping[int, KernelCount] | None:
    """Count the kernels of one inference by batch size; None, with a warning, where they cannot be counted."""
    try:
        return count_kernels(profiler, model, inputs, gpu, BATCHES)
    except (CapabilityError, DataError) as error:
        warn(f"kernels are not counted: {error}" + (f"; {error.hint}" if error.hint else ""))
        return None


def one_request(file: Path) -> dict[str, Tensor]:
    """Read the arrays of one request.

    Raises:
        DataError: The file cannot be read, or an array's first axis, the batch, is not of length 1.
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
