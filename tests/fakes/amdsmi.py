"""AMD SMI as its Python module behaves (7.0): names, results and errors of the real one around invented boards.

The real module cannot be imported without AMD's library. ``SIGNATURES`` are its parameters, read from its source.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

SIGNATURES = {
    "amdsmi_init": ["flag"],
    "amdsmi_shut_down": [],
    "amdsmi_get_processor_handles": [],
    "amdsmi_get_energy_count": ["processor_handle"],
    "amdsmi_get_power_info": ["processor_handle"],
    "amdsmi_get_gpu_device_uuid": ["processor_handle"],
    "amdsmi_get_gpu_kfd_info": ["processor_handle"],
    "amdsmi_get_gpu_process_list": ["processor_handle"],
}


class AmdSmiException(Exception):  # noqa: N818 - the real module's name
    """Base of all errors."""


class AmdSmiLibraryException(AmdSmiException):
    """An error of the driver, by its name."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.err_info = f"AMDSMI_STATUS_{name}"

    def __str__(self) -> str:
        return f"Error code:\n\t2 | {self.err_info}"


@dataclass
class AmdBoard:
    """One processor handle.

    Attributes:
        count: Of the energy accumulator; None where it is not supported.
        resolution_uj: Microjoules a count, as the driver says.
        current_w, average_w: What ``amdsmi_get_power_info`` says; 65535 is not known.
        draws_w: What the accumulator moves by, each second of its time stamp, as the driver counts.
        partition: Number of the partition.
        key: What the count is called: releases before 6.1 said ``power``.
    """

    count: int | None = 1_000_000
    resolution_uj: float = 15.259
    current_w: int = 0xFFFF
    average_w: int = 300
    draws_w: float = 300.0
    partition: int = 0
    uuid: str = "53ff74a1-0000-1000-80fa-6fd7a2c0f3a3"
    pids: list[int] = field(default_factory=list)
    key: str = "energy_accumulator"
    timestamp_ns: int = 1
    lost: bool = False


class AmdSmiFake:
    """The module."""

    AmdSmiException = AmdSmiException
    AmdSmiLibraryException = AmdSmiLibraryException

    def __init__(self, *boards: AmdBoard, init_error: str = "") -> None:
        self.boards = boards
        self.init_error = init_error
        self.open = 0

    def amdsmi_init(self, flag: int = 2) -> None:
        if self.init_error:
            raise AmdSmiLibraryException(self.init_error)
        self.open += 1

    def amdsmi_shut_down(self) -> None:
        if not self.open:
            raise AmdSmiLibraryException("NOT_INIT")
        self.open -= 1

    def amdsmi_get_processor_handles(self) -> list[AmdBoard]:
        return list(self.boards)

    def amdsmi_get_energy_count(self, processor_handle: AmdBoard) -> dict[str, Any]:
        board = self._answering(processor_handle)
        if board.count is None:
            raise AmdSmiLibraryException("NOT_SUPPORTED")
        return {
            board.key: board.count,
            "counter_resolution": board.resolution_uj,
            "timestamp": board.timestamp_ns,
        }

    def amdsmi_get_power_info(self, processor_handle: AmdBoard) -> dict[str, Any]:
        board = self._answering(processor_handle)
        socket_w = board.current_w if board.current_w != 0xFFFF else board.average_w
        found = {
            "socket_power": socket_w,
            "current_socket_power": board.current_w,
            "average_socket_power": board.average_w,
            "gfx_voltage": 900,
            "soc_voltage": 800,
            "mem_voltage": 0xFFFF,
            "power_limit": 560_000_000,
        }
        return {name: "N/A" if value == 0xFFFF else value for name, value in found.items()}

    def amdsmi_get_gpu_device_uuid(self, processor_handle: AmdBoard) -> str:
        return self._answering(processor_handle).uuid

    def amdsmi_get_gpu_kfd_info(self, processor_handle: AmdBoard) -> dict[str, Any]:
        return {"kfd_id": 1, "node_id": 1, "current_partition_id": self._answering(processor_handle).partition}

    def amdsmi_get_gpu_process_list(self, processor_handle: AmdBoard) -> list[dict[str, Any]]:
        return [{"name": "python", "pid": pid, "mem": 0} for pid in self._answering(processor_handle).pids]

    def sleep(self, seconds: float) -> None:
        """Let time pass for all accumulators."""
        for board in self.boards:
            board.timestamp_ns += round(seconds * 1e9)
            if board.count is not None:
                board.count += round(board.draws_w * seconds * 1e6 / board.resolution_uj)

    @staticmethod
    def _answering(board: AmdBoard) -> AmdBoard:
        if board.lost:
            raise AmdSmiLibraryException("DRM_ERROR")
        return board
