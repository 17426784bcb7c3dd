"""Meter of NVIDIA GPUs through NVML, with the package ``nvidia-ml-py`` (imported when opened).

Every board is read from the best source that it supports:

1. the energy counter (``nvmlDeviceGetTotalEnergyConsumption``, Volta and later): cumulative millijoules, renewed about
   every 100 ms, which misses no energy between two readings;
2. instantaneous power (field ``NVML_FI_DEV_POWER_INSTANT``, board scope);
3. ``nvmlDeviceGetPowerUsage``: the average of the last second on Ampere and later (GA100 excepted), instantaneous on
   GA100 and before.

The counter takes milliseconds of CPU a reading (an H100: 2.9 ms, measured). Between two of its readings, the shape of
the power comes from the readings that the driver keeps (``nvmlDeviceGetSamples``: one every 20 ms for 2.4 s, 0.4 ms for
all of them, measured), scaled to the counter (:mod:`joulery.domain.energy.buffered`). Such a reading is the mean of
some 35 ms, the middle of which lies 16 ms before its stamp (an H100: where kernels began and ended, measured).

A board in MIG mode is read as a whole: its instances have no sensors of their own. ``CUDA_VISIBLE_DEVICES`` has no
effect here: a board draws power whether or not a program may see it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from joulery.adapters.nvidia import ComputeMode, compute_mode, open_driver, text
from joulery.domain.energy.channel import Channel, ReadingKind
from joulery.domain.errors import CapabilityError
from joulery.domain.quality import Quality

_GA100 = re.compile(r"\bA(100|800|30)X?\b")
_MODES = {
    ComputeMode.EXCLUSIVE: "is in exclusive-process mode: one process at a time computes on it; MPS shares it",
    ComputeMode.PROHIBITED: "is in prohibited compute mode: nothing computes on it, its joules are idle power",
}
_MPS_SERVER = "nvidia-cuda-mps"
"""Name of the server of MPS, as far as the kernel keeps names."""
_UPDATE_S = 0.1
_BUFFER_LATE_S = 0.016
_AVERAGING_S = 1.0
_FIRST_PID_NAMESPACE = "pid:[4026531836]"
"""Target of ``/proc/self/ns/pid`` outside any container: the kernel's fixed number of the first namespace."""


@dataclass(frozen=True, slots=True)
class Board:
    """One GPU that NVML reports.

    Attributes:
        device: ``gpu:0`` ...
        name: The vendor's product name.
        uuid: Its UUID.
        mig: Whether MIG mode was enabled when the board was opened.
        channel: The channel of its energy or power.
    """

    device: str
    name: str
    uuid: str
    mig: bool
    channel: Channel


class NvmlMeter:
    """Meter of NVIDIA boards with one channel for each board.

    Attributes:
        boards: The boards that are read, in order.
        buffer_late_s: Seconds from the middle of a buffered reading to its stamp.
    """

    buffer_late_s = _BUFFER_LATE_S

    def __init__(
        self,
        nvml: Any,
        boards: tuple[Board, ...],
        readers: tuple[Callable[[], float], ...],
        handles: tuple[Any, ...],
        notes: tuple[str, ...],
    ) -> None:
        self.boards = boards
        self._nvml = nvml
        self._readers = readers
        self._handles = handles
        self._notes = list(notes)
        self._failure: list[str] = [""] * len(boards)
        self._seen_us, self._busy_us = [0] * len(boards), [0] * len(boards)
        self._kept_us = {
            slot: newest
            for slot, board in enumerate(boards)
            if board.channel.kind is ReadingKind.COUNTER and (newest := self._newest_us(slot)) is not None
        }
        self._open = True

    @property
    def channels(self) -> tuple[Channel, ...]:
        """One channel for each board."""
        return tuple(board.channel for board in self.boards)

    @property
    def uuids(self) -> dict[str, str]:
        """The device name of each board by its UUID and by the UUIDs of its MIG instances."""
        found = {board.uuid: board.device for board in self.boards}
        for board, handle in zip(self.boards, self._handles, strict=True):
            found |= dict.fromkeys(_mig_uuids(self._nvml, handle) if board.mig else (), board.device)
        return found

    def read(self) -> tuple[float, ...]:
        """Joules or watts, by the kind of each channel; NaN for a board that does not answer."""
        return tuple(self._read(slot, reader) for slot, reader in enumerate(self._readers))

    @property
    def buffered(self) -> tuple[int, ...]:
        """Numbers of the boards that are read by their counter and whose driver keeps power readings."""
        return tuple(self._kept_us)

    def drain(self) -> list[tuple[int, int, float]]:
        """(Unix ns, number of the board, watts) of each power reading that the driver has kept since the last call."""
        found = []
        for slot, since_us in self._kept_us.items() if self._open else ():
            for at_us, watts in self._kept(slot, since_us):
                found.append((1000 * at_us, slot, watts))
                self._kept_us[slot] = max(self._kept_us[slot], at_us)
        return sorted(found)

    def _kept(self, slot: int, since_us: int) -> list[tuple[int, float]]:
        """(Unix microseconds, watts) of the readings kept since a time; empty where the driver fails or has none."""
        nvml = self._nvml
        try:
            form, samples = nvml.nvmlDeviceGetSamples(self._handles[slot], nvml.NVML_TOTAL_POWER_SAMPLES, since_us)
        except nvml.NVMLError:
            return []
        if form != nvml.NVML_VALUE_TYPE_UNSIGNED_INT:
            return []
        return [(one.timeStamp, one.sampleValue.uiVal / 1e3) for one in samples if one.timeStamp > since_us]

    def _newest_us(self, slot: int) -> int | None:
        """The time of the newest kept reading, Unix microseconds; None where the driver keeps none."""
        kept = self._kept(slot, 0)
        return max(at_us for at_us, _ in kept) if kept else None

    def notes(self) -> tuple[str, ...]:
        """New notes on boards that were left out, stopped answering or answer again."""
        notes, self._notes = tuple(self._notes), []
        return notes

    def close(self) -> None:
        """Shut down the connection to the driver. Safe to call twice."""
        if self._open:
            self._open = False
            try:
                self._nvml.nvmlShutdown()
            except self._nvml.NVMLError as error:
                self._notes.append(f"NVML did not shut down cleanly: {error}")

    def holders(self) -> Mapping[str, Mapping[int, float] | None]:
        """Processes that use each board, and their shares.

        Returns:
            By device: process id -> share of the busy time since the last call (0 where none was busy), or None
            where the driver does not report it. Shares are NaN where processes are known and their shares are not.
        """
        return {board.device: self._holders(slot) for slot, board in enumerate(self.boards)}

    def busy(self) -> Mapping[str, bool | None]:
        """Whether anything computed on each board since the last call; None where the driver does not report it."""
        return {board.device: self._busy(slot) for slot, board in enumerate(self.boards)}

    def _busy(self, slot: int) -> bool | None:
        nvml = self._nvml
        try:
            samples = nvml.nvmlDeviceGetProcessUtilization(self._handles[slot], self._busy_us[slot])
        except (nvml.NVMLError_NotFound, nvml.NVMLError_NotReady):
            return False
        except nvml.NVMLError:
            return None
        self._busy_us[slot] = max([self._busy_us[slot], *(sample.timeStamp for sample in samples)])
        return any(sample.smUtil > 0 for sample in samples)

    def _holders(self, slot: int) -> dict[int, float] | None:
        nvml, handle = self._nvml, self._handles[slot]
        if not sees_host_processes():
            return None
        try:
            pids = {p.pid for p in nvml.nvmlDeviceGetComputeRunningProcesses(handle)}
            pids |= {p.pid for p in nvml.nvmlDeviceGetGraphicsRunningProcesses(handle)}
        except nvml.NVMLError:
            return None
        pids = _without_mps_servers(pids)
        if len(pids) < 2:
            return dict.fromkeys(pids, 1.0)
        try:
            samples = nvml.nvmlDeviceGetProcessUtilization(handle, self._seen_us[slot])
        except (nvml.NVMLError_NotFound, nvml.NVMLError_NotReady):
            return dict.fromkeys(pids, 0.0)
        except nvml.NVMLError:
            return dict.fromkeys(pids, math.nan)
        busy = dict.fromkeys(pids, 0.0)
        for sample in samples:
            self._seen_us[slot] = max(self._seen_us[slot], sample.timeStamp)
            if sample.pid not in pids and is_mps_server(sample.pid):
                return dict.fromkeys(pids, math.nan)  # its clients' work, counted as the server's
            busy[sample.pid] = busy.get(sample.pid, 0.0) + sample.smUtil
        total = sum(busy.values())
        return {pid: share / total for pid, share in busy.items()} if total > 0 else busy

    def _read(self, slot: int, reader: Callable[[], float]) -> float:
        if not self._open:
            return math.nan
        try:
            value = reader()
        except self._nvml.NVMLError as error:
            if self._failure[slot] != str(error):
                self._failure[slot] = str(error)
                self._notes.append(f"{self.boards[slot].device} ({self.boards[slot].name}) does not answer: {error}")
            return math.nan
        if self._failure[slot]:
            self._failure[slot] = ""
            self._notes.append(f"{self.boards[slot].device} ({self.boards[slot].name}) answers again")
        return value


def is_mps_server(pid: int) -> bool:
    """Whether a process is the server of MPS, which computes nothing itself."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip() == _MPS_SERVER
    except OSError:
        return False


def _without_mps_servers(pids: set[int]) -> set[int]:
    """The processes on a board; the MPS server is included only where it has no client."""
    clients = {pid for pid in pids if not is_mps_server(pid)} if len(pids) > 1 else pids
    return clients or pids


def sees_host_processes() -> bool:
    """Whether the driver's process ids are valid in this process: true outside a container's own PID namespace."""
    try:
        return str(Path("/proc/self/ns/pid").readlink()) == _FIRST_PID_NAMESPACE
    except OSError:
        return False


def open_nvml(nvml: Any = None) -> NvmlMeter:
    """Open a meter of every NVIDIA board of this machine.

    Args:
        nvml: The module ``pynvml``, or one that behaves like it; imported when not given.

    Raises:
        CapabilityError: The package or the driver is missing, nothing may be read, or there is no board.
    """
    nvml = open_driver(nvml)
    boards, readers, handles, notes = [], [], [], []
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            board, reader = _board(nvml, handle, f"gpu:{index}")
        except (nvml.NVMLError, CapabilityError) as error:
            notes.append(f"gpu:{index} is left out: {error}")
            continue
        if board.mig:
            notes.append(f"{board.device} ({board.name}) is in MIG mode: its joules are the whole board's")
        if mode_note := _MODES.get(compute_mode(nvml, handle)):
            notes.append(f"{board.device} ({board.name}) {mode_note}")
        boards.append(board)
        readers.append(reader)
        handles.append(handle)
    if not boards:
        nvml.nvmlShutdown()
        raise CapabilityError(f"no GPU can be read: {'; '.join(notes) or 'the driver shows none'}", resource="nvml")
    return NvmlMeter(nvml, tuple(boards), tuple(readers), tuple(handles), tuple(notes))


def _board(nvml: Any, handle: Any, device: str) -> tuple[Board, Callable[[], float]]:
    name = text(nvml.nvmlDeviceGetName(handle))
    channel, reader = _source(nvml, handle, device, name)
    try:
        mig = nvml.nvmlDeviceGetMigMode(handle)[0] == nvml.NVML_DEVICE_MIG_ENABLE
    except nvml.NVMLError:
        mig = False
    return Board(device, name, text(nvml.nvmlDeviceGetUUID(handle)), mig, channel), reader


def _mig_uuids(nvml: Any, handle: Any) -> list[str]:
    """UUIDs of the MIG instances of a board."""
    found = []
    try:
        for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
            try:
                found.append(text(nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index))))
            except nvml.NVMLError:  # this place holds no instance
                continue
    except nvml.NVMLError:
        return found
    return found


def _source(nvml: Any, handle: Any, device: str, name: str) -> tuple[Channel, Callable[[], float]]:
    """The channel and the reader of the best source that this board supports now."""
    attempts = (_counter, _instant, _usage)
    reasons = []
    for attempt in attempts:
        try:
            return attempt(nvml, handle, device, name)
        except nvml.NVMLError as error:
            reasons.append(f"{attempt.__name__.strip('_')}: {error}")
    raise CapabilityError(f"{name} reports neither energy nor power ({'; '.join(reasons)})", resource=device)


def _counter(nvml: Any, handle: Any, device: str, name: str) -> tuple[Channel, Callable[[], float]]:
    def read() -> float:
        return float(nvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1e3

    read()
    return _channel(device, ReadingKind.COUNTER), read


def _instant(nvml: Any, handle: Any, device: str, name: str) -> tuple[Channel, Callable[[], float]]:
    field = [(nvml.NVML_FI_DEV_POWER_INSTANT, nvml.NVML_POWER_SCOPE_GPU)]

    def read() -> float:
        answer = nvml.nvmlDeviceGetFieldValues(handle, field)[0]
        if answer.nvmlReturn != nvml.NVML_SUCCESS:
            raise nvml.NVMLError(answer.nvmlReturn)
        return float(answer.value.uiVal) / 1e3

    read()
    return _channel(device, ReadingKind.POWER), read


def _usage(nvml: Any, handle: Any, device: str, name: str) -> tuple[Channel, Callable[[], float]]:
    def read() -> float:
        return float(nvml.nvmlDeviceGetPowerUsage(handle)) / 1e3

    read()
    return _channel(device, ReadingKind.AVERAGE if _averages(nvml, handle, name) else ReadingKind.POWER), read


def _averages(nvml: Any, handle: Any, name: str) -> bool:
    """Whether ``nvmlDeviceGetPowerUsage`` of this board is the mean of the last second."""
    try:
        architecture = nvml.nvmlDeviceGetArchitecture(handle)
    except nvml.NVMLError:
        return False
    newer = nvml.NVML_DEVICE_ARCH_AMPERE <= architecture < nvml.NVML_DEVICE_ARCH_UNKNOWN
    return bool(newer) and not _GA100.search(name)


def _channel(device: str, kind: ReadingKind) -> Channel:
    return Channel(
        device,
        "board",
        kind,
        "nvml",
        Quality.MEASURED,
        averaging_s=_AVERAGING_S if kind is ReadingKind.AVERAGE else 0.0,
        update_s=_UPDATE_S,
    )
