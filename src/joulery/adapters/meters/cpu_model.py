"""Model of CPU power for machines without a power sensor: P = idle + (max - idle) x utilisation, for each socket.

Utilisation is measured (``/proc/stat``), power is not. Watts are given by the user, or by a table of processors. The
table contains the power of whole servers divided by their hardware threads (SPECpower measures at the plug: memory,
fans and power supply included), hence the component's name ``server``. The error of such a model is large: every number
has an uncertainty band, ± 50 % unless the user states a better one.

Source of the table: SPECpower_ssj2008 results as reduced by Cloud Carbon Footprint, ccf-coefficients,
output/coefficients-aws-use.csv of 2026-03 (revision b0032d9), columns "Min Watts" and "Max Watts" per thread.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from joulery.adapters.meters.cputimes import CpuTimes, open_cpu_times
from joulery.domain.energy.channel import Channel, ReadingKind
from joulery.domain.errors import ConfigError
from joulery.domain.quality import Quality

BAND_RATIO = 0.5
_UPDATE_S = 0.05


class CpuPower(NamedTuple):
    """Assumed power of one logical CPU, including its share of the rest of the server.

    Attributes:
        name: Source of the numbers.
        idle_w, max_w: Watts of a logical CPU, idle and fully busy.
        quality: Modelled where the processor is known, assumed where a default is used.
    """

    name: str
    idle_w: float
    max_w: float
    quality: Quality = Quality.MODELLED


class _Row(NamedTuple):
    vendor: str
    family: int
    models: tuple[int, ...]
    power: CpuPower
    steppings: range = range(256)


_INTEL, _AMD = "GenuineIntel", "AuthenticAMD"
_TABLE = (
    _Row(_INTEL, 6, (45,), CpuPower("Sandy Bridge", 2.212, 8.631)),
    _Row(_INTEL, 6, (62,), CpuPower("Ivy Bridge", 1.707, 5.557)),
    _Row(_INTEL, 6, (63,), CpuPower("Haswell", 1.857, 5.595)),
    _Row(_INTEL, 6, (79, 86), CpuPower("Broadwell", 0.713, 3.685)),
    _Row(_INTEL, 6, (85,), CpuPower("Skylake", 0.613, 4.104), range(5)),
    _Row(_INTEL, 6, (85,), CpuPower("Cascade Lake", 0.690, 4.063), range(5, 10)),
    _Row(_INTEL, 6, (106, 108), CpuPower("Ice Lake", 0.767, 3.758)),
    _Row(_INTEL, 6, (143,), CpuPower("Sapphire Rapids", 1.036, 4.160)),
    _Row(_INTEL, 6, (207,), CpuPower("Emerald Rapids", 0.814, 4.482)),
    _Row(_INTEL, 6, (173,), CpuPower("Granite Rapids", 0.582, 2.527)),
    _Row(_AMD, 23, (1,), CpuPower("EPYC 1st Gen", 0.847, 2.604)),
    _Row(_AMD, 23, (49,), CpuPower("EPYC 2nd Gen", 0.474, 1.693)),
    _Row(_AMD, 25, (1,), CpuPower("EPYC 3rd Gen", 0.456, 1.957)),
    _Row(_AMD, 25, (17, 160), CpuPower("EPYC 4th Gen", 0.739, 2.282)),
)
DEFAULT = CpuPower("an unknown processor, taken for Coffee Lake, the highest since 2017", 1.138, 5.422, Quality.ASSUMED)
"""For processors the table does not know: errs upward."""


def cpu_power(proc: Path = Path("/proc")) -> CpuPower:
    """The table's entry for this machine's processor; :data:`DEFAULT` where the table has none."""
    fields: dict[str, str] = {}
    for line in (proc / "cpuinfo").read_text().split("\n\n")[0].splitlines():
        key, _, value = line.partition(":")
        fields[key.strip()] = value.strip()
    try:
        family, model, stepping = (int(fields[key]) for key in ("cpu family", "model", "stepping"))
    except (KeyError, ValueError):
        return DEFAULT
    for row in _TABLE:
        known = row.vendor == fields.get("vendor_id") and row.family == family
        if known and model in row.models and stepping in row.steppings:
            return row.power
    return DEFAULT


class CpuModelMeter:
    """Modelled energy counter of each socket: idle watts over time, plus dynamic watts over busy CPU seconds."""

    def __init__(
        self,
        times: CpuTimes,
        power: CpuPower,
        *,
        band_ratio: float = BAND_RATIO,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._times = times
        self._clock = clock
        self._start_s = clock()
        self._busy_s = times.read()
        self._idle_w = tuple(power.idle_w * cpus for cpus in times.cpus)
        self._dynamic_w = power.max_w - power.idle_w
        self._open = True
        self._channels = tuple(
            Channel(
                f"cpu:{socket}",
                "server",
                ReadingKind.COUNTER,
                "cpu-model",
                power.quality,
                idle_w=idle_w,
                band_ratio=band_ratio,
                max_w=power.max_w * cpus,
                update_s=_UPDATE_S,
            )
            for socket, cpus, idle_w in zip(times.sockets, times.cpus, self._idle_w, strict=True)
        )
        self._notes = [
            f"CPU power is {power.quality}, not measured: {power.idle_w:.3g} W idle to {power.max_w:.3g} W busy "
            f"a logical CPU ({power.name}), ± {100 * band_ratio:.0f} %"
        ]

    @property
    def channels(self) -> tuple[Channel, ...]:
        """One channel for each socket."""
        return self._channels

    def read(self) -> tuple[float, ...]:
        """Joules since the meter was opened."""
        if not self._open:
            return (math.nan,) * len(self._channels)
        now_s = self._clock() - self._start_s
        busy = self._times.read()
        return tuple(
            idle_w * now_s + self._dynamic_w * (busy_s - start_s)
            for idle_w, busy_s, start_s in zip(self._idle_w, busy, self._busy_s, strict=True)
        )

    def notes(self) -> tuple[str, ...]:
        """A note on the source of the watts, once."""
        notes, self._notes = tuple(self._notes), []
        return notes

    def close(self) -> None:
        """Release the file. Safe to call twice."""
        self._open = False
        self._times.close()


def open_cpu_model(
    idle_w: float | None = None,
    max_w: float | None = None,
    band_ratio: float = BAND_RATIO,
    *,
    proc: Path = Path("/proc"),
    sys: Path = Path("/sys"),
) -> CpuModelMeter:
    """Open the CPU power model for this machine.

    Args:
        idle_w, max_w: Watts of the whole machine, idle and with every CPU busy; both or neither. Sockets share them by
            their number of CPUs.
        band_ratio: Half-width of the uncertainty band, as a ratio.
        proc, sys: Mount points of the kernel's ``/proc`` and ``/sys``.

    Raises:
        ConfigError: One of the watts is missing, they are not 0 <= idle < max, or ``band_ratio`` is not 0 to 1.
        CapabilityError: ``/proc/stat`` cannot be read.
    """
    if (idle_w is None) is not (max_w is None):
        raise ConfigError("a CPU model needs idle and max watts, or neither", got=f"idle {idle_w}, max {max_w}")
    if not 0 <= band_ratio <= 1:
        raise ConfigError("a band is a ratio", got=str(band_ratio), expected="0 to 1")
    if idle_w is not None and max_w is not None and not 0 <= idle_w < max_w < float("inf"):
        raise ConfigError("the watts of a CPU model must be 0 <= idle < max", got=f"{idle_w} and {max_w}")
    times = open_cpu_times(proc, sys)
    if idle_w is None or max_w is None:
        return CpuModelMeter(times, cpu_power(proc), band_ratio=band_ratio)
    power = CpuPower("as given", idle_w / sum(times.cpus), max_w / sum(times.cpus))
    return CpuModelMeter(times, power, band_ratio=band_ratio)
