"""Meter of AMD GPUs through AMD SMI (package ``amdsmi``, part of ROCm; imported when opened).

Every board is read from the better source that it supports:

1. the energy accumulator (``amdsmi_get_energy_count``): counts of ``counter_resolution`` microjoules, with the time of
   the count. Some boards and drivers count in another unit than they report: where the accumulator disagrees with the
   board's own power by more than a factor of :data:`AGREE`, the power is read instead, and a note reports it;
2. power (``amdsmi_get_power_info``): ``current_socket_power`` (MI300 and later), else ``average_socket_power``, else
   ``socket_power``, watts.

A partitioned board shows one processor for each partition; they share the board's sensors, so only the first is read.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from joulery.adapters.meters.nvml import sees_host_processes
from joulery.adapters.presence import AMD, require_amd
from joulery.domain.energy.channel import Channel, ReadingKind
from joulery.domain.errors import CapabilityError
from joulery.domain.quality import Quality

AGREE = 10.0
"""Factor by which the counter's power and the board's power may differ before the counter is discarded."""
COMPARE_S = 0.2
_UPDATE_S = 0.1
_UNKNOWN = (0xFFFF, 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF)
_POWERS = ("current_socket_power", "average_socket_power", "socket_power")

Reader = Callable[[], float]


class AmdMeter:
    """Meter of AMD boards with one channel for each board."""

    def __init__(
        self,
        smi: Any,
        channels: tuple[Channel, ...],
        readers: tuple[Reader, ...],
        handles: tuple[Any, ...],
        notes: tuple[str, ...],
    ) -> None:
        self._smi, self._channels, self._readers, self._handles = smi, channels, readers, handles
        self._notes = list(notes)
        self._failure = [""] * len(channels)
        self._open = True

    @property
    def channels(self) -> tuple[Channel, ...]:
        """One channel for each board."""
        return self._channels

    @property
    def uuids(self) -> dict[str, str]:
        """Device name of each board by its UUID."""
        found = {}
        for channel, handle in zip(self._channels, self._handles, strict=True):
            with contextlib.suppress(self._smi.AmdSmiException):
                found[str(self._smi.amdsmi_get_gpu_device_uuid(handle))] = channel.device
        return found

    def read(self) -> tuple[float, ...]:
        """Joules or watts, by the kind of each channel; NaN for a board that does not answer."""
        return tuple(self._read(slot, reader) for slot, reader in enumerate(self._readers))

    def notes(self) -> tuple[str, ...]:
        """New notes on boards that were left out, stopped answering or answer again."""
        notes, self._notes = tuple(self._notes), []
        return notes

    def close(self) -> None:
        """Shut down the connection to the driver. Safe to call twice."""
        if self._open:
            self._open = False
            with contextlib.suppress(self._smi.AmdSmiException):
                self._smi.amdsmi_shut_down()

    def holders(self) -> Mapping[str, Mapping[int, float] | None]:
        """Processes that use each board; shares are NaN where there are several: the driver does not report them."""
        return {channel.device: self._holders(slot) for slot, channel in enumerate(self._channels)}

    def _holders(self, slot: int) -> dict[int, float] | None:
        if not self._open or not sees_host_processes():
            return None
        try:
            found = self._smi.amdsmi_get_gpu_process_list(self._handles[slot])
        except self._smi.AmdSmiException:
            return None
        pids = {int(item["pid"]) for item in found}
        return dict.fromkeys(pids, 1.0 if len(pids) == 1 else math.nan)

    def _read(self, slot: int, reader: Reader) -> float:
        if not self._open:
            return math.nan
        device = self._channels[slot].device
        try:
            value = reader()
        except (self._smi.AmdSmiException, CapabilityError) as error:
            if not self._failure[slot]:
                self._notes.append(f"{device} does not answer: {_error_name(error)}")
            self._failure[slot] = _error_name(error)
            return math.nan
        if self._failure[slot]:
            self._failure[slot] = ""
            self._notes.append(f"{device} answers again")
        return value


def open_amd(smi: Any = None, sleep: Callable[[float], None] = time.sleep) -> AmdMeter:
    """Open a meter of every AMD board of this machine.

    Args:
        smi: The module ``amdsmi``, or one that behaves like it; imported when not given.
        sleep: Waits between two readings of a counter.

    Raises:
        CapabilityError: The package or the driver is missing, nothing may be read, or there is no board.
    """
    smi = smi or _import_smi()
    try:
        smi.amdsmi_init()
        handles = smi.amdsmi_get_processor_handles()
    except smi.AmdSmiException as error:
        raise CapabilityError(
            f"AMD's driver does not answer: {_error_name(error)}",
            resource=AMD,
            grant="sudo usermod -aG render,video $USER" if "PERM" in _error_name(error) else None,
            hint="try: amd-smi list",
        ) from error
    channels: list[Channel] = []
    readers: list[Reader] = []
    boards: list[Any] = []
    notes: list[str] = []
    for handle in handles:
        device = f"gpu:{len(channels)}"
        try:
            if _partition(smi, handle):
                continue
            kind, reader, note = _source(smi, handle, device, sleep)
        except (smi.AmdSmiException, CapabilityError) as error:
            notes.append(f"an AMD board ({device} if it answered) is left out: {_error_name(error)}")
            continue
        notes += [note] if note else []
        channels.append(Channel(device, "board", kind, "amd", Quality.MEASURED, update_s=_UPDATE_S))
        readers.append(reader)
        boards.append(handle)
    if not channels:
        with contextlib.suppress(smi.AmdSmiException):
            smi.amdsmi_shut_down()
        raise CapabilityError(
            f"no AMD GPU can be read: {'; '.join(notes) or 'the driver shows none'}", resource="amdsmi"
        )
    return AmdMeter(smi, tuple(channels), tuple(readers), tuple(boards), tuple(notes))


def _import_smi() -> Any:
    require_amd()
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # the module prints where it does not find its library
            return importlib.import_module("amdsmi")
    except ModuleNotFoundError as error:
        raise CapabilityError(
            "reading AMD GPUs needs the package amdsmi",
            resource="amdsmi",
            grant="pip install /opt/rocm/share/amd_smi",
            hint="it must match the installed ROCm; where ROCm lacks it: pip install 'joulery[amd]'",
        ) from error
    except (ImportError, OSError, KeyError, AttributeError) as error:
        raise CapabilityError(
            f"amdsmi does not fit the installed ROCm: {error}",
            resource="libamd_smi.so",
            grant="pip install --force-reinstall /opt/rocm/share/amd_smi",
        ) from error


def _partition(smi: Any, handle: Any) -> bool:
    """Whether this processor is a further partition of a board that is read already."""
    try:
        number = smi.amdsmi_get_gpu_kfd_info(handle)["current_partition_id"]
    except (smi.AmdSmiException, AttributeError, KeyError):
        return False
    return isinstance(number, int) and number > 0


def _source(smi: Any, handle: Any, device: str, sleep: Callable[[float], None]) -> tuple[ReadingKind, Reader, str]:
    """The reading kind, the reader and a note (or "") of the better source that this board supports."""

    def counted() -> float:
        return _counter(smi, handle)[0]

    def power() -> float:
        return _power_w(smi.amdsmi_get_power_info(handle), device)

    try:
        watts = power()
    except (smi.AmdSmiException, CapabilityError):
        watts = math.nan
    try:
        counter_w = _counter_power_w(smi, handle, sleep)
    except (smi.AmdSmiException, CapabilityError):
        counter_w = math.nan
    if math.isnan(counter_w) and math.isnan(watts):
        raise CapabilityError("it reports neither energy nor power", resource=device)
    if math.isnan(counter_w):
        return ReadingKind.POWER, power, ""
    if not math.isnan(watts) and not watts / AGREE <= counter_w <= watts * AGREE:
        note = f"{device}: its energy counter runs at {counter_w:.3g} W, its power is {watts:.3g} W: the power is read"
        return ReadingKind.POWER, power, note
    return ReadingKind.COUNTER, counted, ""


def _counter_power_w(smi: Any, handle: Any, sleep: Callable[[float], None]) -> float:
    """The mean power between two readings of the counter, by its own time stamps, watts."""
    first_j, first_ns = _counter(smi, handle)
    sleep(COMPARE_S)
    last_j, last_ns = _counter(smi, handle)
    seconds = (last_ns - first_ns) / 1e9 if last_ns > first_ns else COMPARE_S
    return (last_j - first_j) / seconds


def _counter(smi: Any, handle: Any) -> tuple[float, int]:
    """Joules of the accumulator and its time stamp, nanoseconds; older releases call the count ``power``."""
    found = smi.amdsmi_get_energy_count(handle)
    count = found["energy_accumulator"] if "energy_accumulator" in found else found.get("power")
    resolution_uj = found.get("counter_resolution")
    if not isinstance(count, int) or count in _UNKNOWN or not isinstance(resolution_uj, int | float):
        raise CapabilityError("its energy counter gives no number", resource="amdsmi")
    return count * float(resolution_uj) / 1e6, int(found.get("timestamp") or 0)


def _power_w(found: Mapping[str, Any], device: str) -> float:
    """The power of a board, watts; the driver gives ``N/A`` or all ones for a missing value."""
    for name in _POWERS:
        value = found.get(name)
        if isinstance(value, int | float) and value not in _UNKNOWN and 0 < value < math.inf:
            return float(value)
    raise CapabilityError("it reports no power", resource=device)


def _error_name(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
