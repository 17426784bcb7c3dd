"""One NVIDIA board, found by index or UUID, with the driver's errors converted into errors for the user."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from joulery.adapters.nvidia import ComputeMode, compute_mode, open_driver, text
from joulery.domain.errors import CapabilityError, ConfigError, JouleryError

GRANT = "sudo -E joulery ..."
HINT = "in a container: docker run --gpus all --cap-add SYS_ADMIN ..."


@dataclass(frozen=True, slots=True)
class NvidiaBoard:
    """A board and its driver.

    Attributes:
        nvml: The module ``pynvml``, initialised.
        handle: The driver's handle of the board.
        device: ``gpu:0`` ...
        name: The vendor's product name.
        uuid: Its UUID.
    """

    nvml: Any
    handle: Any
    device: str
    name: str
    uuid: str

    @property
    def failures(self) -> tuple[type[Exception], ...]:
        """Exceptions that the driver raises."""
        return (self.nvml.NVMLError,)

    def refused(self, error: Exception) -> JouleryError | None:
        """The error for the user where the driver reports that an action is impossible here; None otherwise."""
        nvml, code = self.nvml, getattr(error, "value", None)
        if code == nvml.NVML_ERROR_NO_PERMISSION:
            return CapabilityError(
                f"this process may not set {self.device} ({self.name}): the driver asks for CAP_SYS_ADMIN",
                resource=self.device,
                grant=GRANT,
                hint=f"run: {GRANT}; {HINT}",
            )
        if code == nvml.NVML_ERROR_NOT_SUPPORTED:
            return CapabilityError(f"{self.device} ({self.name}) does not support this", resource=self.device)
        if code == nvml.NVML_ERROR_FUNCTION_NOT_FOUND:
            return CapabilityError(
                f"the driver of {self.device} is too old for this", resource=self.device, hint="update the driver"
            )
        return None

    def trouble(self, error: Exception) -> JouleryError:
        """The error for the user when reading the board failed."""
        if getattr(error, "value", None) == self.nvml.NVML_ERROR_GPU_IS_LOST:
            return CapabilityError(
                f"{self.device} ({self.name}) is lost: it fell off the bus",
                resource=self.device,
                hint="see dmesg for Xid errors; it comes back with a reset of the board or the machine",
            )
        return self.refused(error) or CapabilityError(
            f"{self.device} ({self.name}) does not answer: {error}", resource=self.device
        )

    def require_room(self, *, shared: bool) -> bool:
        """Check that a process can compute on the board, and return whether only one process can.

        Args:
            shared: Whether MPS will share the board: all its clients count as one process.

        Raises:
            CapabilityError: The compute mode prohibits computing, or another process has the board exclusively.
        """
        mode = compute_mode(self.nvml, self.handle)
        default = f"sudo nvidia-smi -i {self.device.removeprefix('gpu:')} -c DEFAULT"
        if mode is ComputeMode.PROHIBITED:
            raise CapabilityError(
                f"{self.device} ({self.name}) is in prohibited compute mode: nothing can compute on it",
                resource=self.device,
                grant=default,
            )
        if mode is ComputeMode.DEFAULT or shared:
            return False
        try:
            pids = sorted(process.pid for process in self.nvml.nvmlDeviceGetComputeRunningProcesses(self.handle))
        except self.failures:
            pids = []
        if pids:
            raise CapabilityError(
                f"{self.device} ({self.name}) is in exclusive-process mode and process {pids[0]} has it",
                resource=self.device,
                grant=default,
                hint=f"end that process, or share the GPU: mode: mps, or {default}",
            )
        return True

    def close(self) -> None:
        """Shut down the connection to the driver.

        Raises:
            CapabilityError: The driver refuses.
        """
        try:
            self.nvml.nvmlShutdown()
        except self.nvml.NVMLError as error:
            raise CapabilityError(f"NVML did not shut down cleanly: {error}", resource=self.device) from error


def open_board(gpu: int | str = 0, nvml: Any = None) -> NvidiaBoard:
    """Open a board by its index (the driver's order) or its UUID (``GPU-…``).

    Args:
        gpu: Its index or UUID.
        nvml: The module ``pynvml``, or one that behaves like it; imported when not given.

    Raises:
        CapabilityError: The package or the driver is missing, or the board does not answer.
        ConfigError: There is no such board.
    """
    nvml = open_driver(nvml)
    try:
        return _board(nvml, gpu)
    except nvml.NVMLError as error:
        count = nvml.nvmlDeviceGetCount()
        nvml.nvmlShutdown()
        if getattr(error, "value", None) in (nvml.NVML_ERROR_NOT_FOUND, nvml.NVML_ERROR_INVALID_ARGUMENT):
            raise ConfigError(
                "there is no such GPU here", got=str(gpu), expected=f"0 to {count - 1}, or a UUID (nvidia-smi -L)"
            ) from error
        raise CapabilityError(f"GPU {gpu} does not answer: {error}", resource=f"gpu:{gpu}") from error


def _board(nvml: Any, gpu: int | str) -> NvidiaBoard:
    if isinstance(gpu, int):
        handle, index = nvml.nvmlDeviceGetHandleByIndex(gpu), gpu
    else:
        handle = nvml.nvmlDeviceGetHandleByUUID(gpu)
        index = nvml.nvmlDeviceGetIndex(handle)
    return NvidiaBoard(
        nvml, handle, f"gpu:{index}", text(nvml.nvmlDeviceGetName(handle)), text(nvml.nvmlDeviceGetUUID(handle))
    )
