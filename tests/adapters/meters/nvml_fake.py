"""A driver that follows the real module's names, constants and error classes; only its boards are invented.

Anything that the tests' meter calls and this does not define is an AttributeError, not a call of the real driver.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pynvml


@dataclass
class FakeBoard:
    name: str = "NVIDIA H100 80GB HBM3"
    uuid: str = "GPU-0"
    architecture: int = pynvml.NVML_DEVICE_ARCH_HOPPER
    energy_mj: int | None = 5_000
    instant_mw: int | None = 300_000
    usage_mw: int | None = 290_000
    mig: bool = False
    compute_mode: int = pynvml.NVML_COMPUTEMODE_DEFAULT
    compute_pids: list[int] | None = field(default_factory=list)
    graphics_pids: list[int] = field(default_factory=list)
    utilisation: list[tuple[int, int, int]] | Exception = field(default_factory=list)
    samples: list[tuple[int, int]] | None = None
    lost: bool = False
    denied: bool = False


class FakeNvml:
    def __init__(self, *boards: FakeBoard, init_error: int | None = None) -> None:
        self.boards = boards
        self.init_error = init_error
        self.open = 0
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("NVML"):
            return getattr(pynvml, name)
        raise AttributeError(name)

    def nvmlInit(self) -> None:
        if self.init_error is not None:
            raise pynvml.NVMLError(self.init_error)
        self.open += 1

    def nvmlShutdown(self) -> None:
        if self.open == 0:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_UNINITIALIZED)
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.boards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeBoard:
        if self.boards[index].denied:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NO_PERMISSION)
        return self.boards[index]

    def nvmlDeviceGetName(self, board: FakeBoard) -> str:
        return board.name

    def nvmlDeviceGetUUID(self, board: FakeBoard) -> str:
        return board.uuid

    def nvmlDeviceGetArchitecture(self, board: FakeBoard) -> int:
        return board.architecture

    def nvmlDeviceGetMigMode(self, board: FakeBoard) -> list[int]:
        if board.architecture < pynvml.NVML_DEVICE_ARCH_AMPERE:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return [int(board.mig), int(board.mig)]

    def nvmlDeviceGetComputeMode(self, board: FakeBoard) -> int:
        return board.compute_mode

    def nvmlDeviceGetTotalEnergyConsumption(self, board: FakeBoard) -> int:
        return self._value(board, "energy", board.energy_mj)

    def nvmlDeviceGetPowerUsage(self, board: FakeBoard) -> int:
        return self._value(board, "usage", board.usage_mw)

    def nvmlDeviceGetFieldValues(self, board: FakeBoard, fields: list[tuple[int, int]]) -> list[Any]:
        assert fields == [(pynvml.NVML_FI_DEV_POWER_INSTANT, pynvml.NVML_POWER_SCOPE_GPU)]
        self.calls.append("instant")
        if board.lost:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        failed = pynvml.NVML_ERROR_NOT_SUPPORTED if board.instant_mw is None else pynvml.NVML_SUCCESS
        return [SimpleNamespace(nvmlReturn=failed, value=SimpleNamespace(uiVal=board.instant_mw or 0))]

    def nvmlDeviceGetComputeRunningProcesses(self, board: FakeBoard) -> list[Any]:
        if board.compute_pids is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return [SimpleNamespace(pid=pid) for pid in board.compute_pids]

    def nvmlDeviceGetGraphicsRunningProcesses(self, board: FakeBoard) -> list[Any]:
        return [SimpleNamespace(pid=pid) for pid in board.graphics_pids]

    def nvmlDeviceGetProcessUtilization(self, board: FakeBoard, since_us: int) -> list[Any]:
        if isinstance(board.utilisation, Exception):
            raise board.utilisation
        fresh = [
            SimpleNamespace(pid=pid, timeStamp=at_us, smUtil=percent)
            for at_us, pid, percent in board.utilisation
            if at_us > since_us
        ]
        if not fresh:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return fresh

    def nvmlDeviceGetSamples(self, board: FakeBoard, kind: int, since_us: int) -> tuple[int, list[Any]]:
        assert kind == pynvml.NVML_TOTAL_POWER_SAMPLES
        self.calls.append("samples")
        if board.lost:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        if board.samples is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        fresh = [
            SimpleNamespace(timeStamp=at_us, sampleValue=SimpleNamespace(uiVal=mw))
            for at_us, mw in board.samples
            if at_us > since_us
        ]
        if not fresh:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return pynvml.NVML_VALUE_TYPE_UNSIGNED_INT, fresh

    def _value(self, board: FakeBoard, what: str, value: int | None) -> int:
        self.calls.append(what)
        if board.lost:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        if value is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return value


def error(code: int) -> Exception:
    made: Exception = pynvml.NVMLError(code)
    return made


Reader = Callable[[], float]
