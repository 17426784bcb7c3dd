"""Count the kernels of one inference and their use of the L2 cache with a kernel profiler (Nsight in the paper)."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from joulery.domain.errors import DataError
from joulery.domain.gpu.device import DEVICE
from joulery.domain.serving.engine import ModelRef
from joulery.domain.serving.tensors import Tensor

_FEW, _MORE = 1, 3
"""Inferences of the two runs: their difference excludes the kernels of loading and of the first inference."""


class KernelProfiler(Protocol):
    """A profiler that lists the kernels of a command, such as Nsight Compute."""

    def kernels(self, command: Sequence[str], environ: Mapping[str, str]) -> Sequence[tuple[float, float]]:
        """Run a command; return each kernel's duration in ns and its use of the L2 cache in percent of its peak."""
        ...


@dataclass(frozen=True, slots=True)
class KernelCount:
    """Kernels that one inference launches.

    Attributes:
        kernels: How many.
        l2_percent: Use of the L2 cache while they run, in percent of its peak, weighted by their time.
    """

    kernels: int
    l2_percent: float


def count_kernels(
    profiler: KernelProfiler, model: ModelRef, inputs: dict[str, Tensor], gpu: int | str, batches: Sequence[int]
) -> dict[int, KernelCount]:
    """Count the kernels of one inference at several batch sizes, alone on the whole GPU.

    Args:
        profiler: Lists kernels.
        model: Model to run.
        inputs: One request: arrays whose first axis is the batch, of length 1.
        gpu: Index or UUID.
        batches: Sizes of a batch.

    Returns:
        By batch size.

    Raises:
        CapabilityError: The profiler may not read the counters, or fails.
        DataError: The number of kernels differs between inferences, or is zero.
    """
    # All SMs, where a daemon for sharing runs meanwhile.
    environ = {"CUDA_VISIBLE_DEVICES": str(gpu), "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "100", DEVICE: "cuda"}
    program = [sys.executable, "-m", "joulery.adapters.engines.embedded.once", str(model)]
    with tempfile.TemporaryDirectory(prefix="joulery-kernels-") as folder:
        request = Path(folder) / "request.npz"
        np.savez(request, **inputs)  # type: ignore[arg-type]
        found = {}
        for batch in batches:
            few, more = (
                profiler.kernels([*program, str(request), str(batch), str(times)], environ) for times in (_FEW, _MORE)
            )
            found[batch] = _one_inference(few, more, f"{model} at batch {batch}")
    return found


def _one_inference(few: Sequence[tuple[float, float]], more: Sequence[tuple[float, float]], what: str) -> KernelCount:
    count, odd = divmod(len(more) - len(few), _MORE - _FEW)
    if count <= 0 or odd:
        raise DataError(
            f"{what}: {_FEW} inference launched {len(few)} kernels and {_MORE} launched {len(more)}",
            hint="the number of kernels must not change from one inference to the next; --kernels N states it",
        )
    last = np.array(more[-count:], np.float64)
    return KernelCount(count, float(np.average(last[:, 1], weights=last[:, 0])))
