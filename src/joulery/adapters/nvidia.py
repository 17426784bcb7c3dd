"""Access to the NVIDIA driver through ``nvidia-ml-py`` (imported on first use), shared by meters and devices."""

from __future__ import annotations

import importlib
from enum import StrEnum
from typing import Any

from joulery.adapters.presence import NVML, no_nvidia, require_nvidia
from joulery.domain.errors import CapabilityError


def open_driver(nvml: Any = None) -> Any:
    """Initialise NVML and return the module ``pynvml``; ``nvmlShutdown`` undoes one initialisation.

    Args:
        nvml: The module, or one that behaves like it; imported when not given.

    Raises:
        CapabilityError: The package or the driver is missing, or the driver does not answer.
    """
    nvml = nvml or _import_nvml()
    try:
        nvml.nvmlInit()
    except nvml.NVMLError_LibraryNotFound as error:
        raise no_nvidia() from error
    except nvml.NVMLError as error:
        raise CapabilityError(
            f"the NVIDIA driver does not answer: {error}", resource=NVML, hint="try: nvidia-smi"
        ) from error
    return nvml


def _import_nvml() -> Any:
    try:
        return importlib.import_module("pynvml")
    except ImportError as error:
        require_nvidia()  # without a driver there is no package to install
        raise CapabilityError(
            "reading NVIDIA GPUs needs the package nvidia-ml-py",
            resource="pynvml",
            grant="pip install 'joulery[nvidia]'",
        ) from error


class ComputeMode(StrEnum):
    """Number of processes that may compute on a board."""

    DEFAULT = "default"
    """Any number."""
    EXCLUSIVE = "exclusive-process"
    """One at a time; under MPS it is the daemon, which shares the board."""
    PROHIBITED = "prohibited"
    """None."""


def compute_mode(nvml: Any, handle: Any) -> ComputeMode:
    """The compute mode of a board (``nvidia-smi -c``); the default where the driver does not report it."""
    try:
        mode = nvml.nvmlDeviceGetComputeMode(handle)
    except nvml.NVMLError:
        return ComputeMode.DEFAULT
    if mode == nvml.NVML_COMPUTEMODE_PROHIBITED:
        return ComputeMode.PROHIBITED
    # One thread of one process, of drivers before CUDA 8, is one process too.
    one = (nvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS, nvml.NVML_COMPUTEMODE_EXCLUSIVE_THREAD)
    return ComputeMode.EXCLUSIVE if mode in one else ComputeMode.DEFAULT


def text(value: str | bytes) -> str:
    """A string of the driver as ``str``; older bindings return bytes."""
    return value.decode() if isinstance(value, bytes) else value
