"""Energy of a node, divided between its workloads, idle devices and the rest, interval by interval.

Always ``workloads + idle + unattributed = devices``. Processors are one device, whatever their number: a workload has
its share of the processor time of all of them. Idle energy is the known idle power of the processors (``idle_w``);
where that is not known, the share of the processor time that nothing used. Of a GPU, the power that it drew while
nothing computed is idle, and the rest belongs to the workloads with processes on it, by the busy time of each that the
driver reports; without a process, or where none computed, all of it is idle.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from joulery.accounting.charge import ShareRule, split
from joulery.accounting.steps import RESET_RATIO
from joulery.domain.energy.carbon import JOULES_PER_KWH
from joulery.domain.energy.channel import Channel, ReadingKind
from joulery.domain.energy.workload import ENDED, NodeWorkload
from joulery.domain.quality import Quality, weakest

PROCESSORS = "cpu"
"""Name of all processors of a node as one device."""
_WORKLOADS, _IDLE, _UNATTRIBUTED = "workloads", "idle", "unattributed"


@dataclass(frozen=True, slots=True)
class NodeUse:
    """Use of the devices of a node over an interval.

    Attributes:
        elapsed_s: Length of the interval.
        capacity_s: CPU seconds that the processors had.
        busy_s: CPU seconds of all processes; NaN unknown.
        cpu_s: CPU seconds of each workload.
        idle_w: Power of each GPU when nothing computes on it, as far as it is known.
        boards: For each GPU, the share of its busy time that each workload had (NaN where only the workloads are
            known); empty where no process was on it; None where the driver does not report it.
    """

    elapsed_s: float
    capacity_s: float
    busy_s: float
    cpu_s: Mapping[NodeWorkload, float]
    boards: Mapping[str, Mapping[NodeWorkload, float] | None] = field(default_factory=dict)
    idle_w: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Division:
    """The energy of one device over an interval, divided: the parts add up to ``energy_j``.

    Attributes:
        device: ``cpu`` (all processors) or ``gpu:0`` ...
        quality: Weakest quality of its channels.
        energy_j: Joules of the device.
        workloads: Joules of each workload.
        idle_j: Joules of the idle device.
        unattributed_j: The rest: processes too short to be seen, the kernel, or all of it where the use is not known.
    """

    device: str
    quality: Quality
    energy_j: float
    workloads: Mapping[NodeWorkload, float]
    idle_j: float
    unattributed_j: float


def counter_delta(channel: Channel, before: float, now: float, elapsed_s: float, peak_w: float) -> float:
    """Joules between two readings of a channel; NaN where the readings do not determine them.

    A counter that ran backwards has wrapped if that explains it with a plausible power, else it was reset and the
    energy between is not known. Power is held to the next reading; an average stands for the time before it.

    Args:
        channel: The channel.
        before, now: Its readings; NaN where it has none.
        elapsed_s: Time between them.
        peak_w: Highest power seen of the channel; 0 for none yet.
    """
    if channel.kind is ReadingKind.POWER:
        return before * elapsed_s
    if channel.kind is ReadingKind.AVERAGE:
        return now * elapsed_s
    grown_j = now - before
    known_w = channel.max_w if channel.max_w > 0 else 0.0
    if channel.wrap_j > 0 and (known_w or peak_w) * elapsed_s >= channel.wrap_j:
        return math.nan  # it may have wrapped more than once
    if not grown_j < 0:
        return grown_j
    wrapped_j = grown_j + channel.wrap_j
    believable_w = known_w or (RESET_RATIO * peak_w if peak_w > 0 else math.inf)
    if channel.wrap_j > 0 and 0 <= wrapped_j <= believable_w * elapsed_s:
        return wrapped_j
    return math.nan


def divide(energies: Sequence[tuple[Channel, float]], use: NodeUse) -> tuple[Division, ...]:
    """Divide the energy of an interval, device by device.

    Args:
        energies: Joules of each channel; NaN where unknown, which counts in no device.
        use: Use of the devices.
    """
    pools: dict[str, list[tuple[Channel, float]]] = {}
    for channel, energy_j in energies:
        if not math.isnan(energy_j):
            device = channel.device if channel.device.startswith("gpu:") else PROCESSORS
            pools.setdefault(device, []).append((channel, energy_j))
    return tuple(
        _board(device, parts, use.boards.get(device), use.idle_w.get(device, 0.0) * use.elapsed_s)
        if device != PROCESSORS
        else _processors(parts, use)
        for device, parts in pools.items()
    )


def _processors(parts: Sequence[tuple[Channel, float]], use: NodeUse) -> Division:
    total_j = math.fsum(energy_j for _, energy_j in parts)
    quality = weakest(channel.quality for channel, _ in parts)
    names = list(use.cpu_s)
    app_s = np.array([max(0.0, use.cpu_s[name]) for name in names] or [0.0])
    sum_s = float(app_s.sum())
    busy_s = max(use.busy_s, sum_s)
    if math.isnan(use.busy_s):
        return Division(PROCESSORS, quality, total_j, {}, 0.0, total_j)
    idle_j, run_j = 0.0, np.zeros(len(app_s))
    for channel, energy_j in parts:
        floor_j = min(energy_j, channel.idle_w * use.elapsed_s) if channel.idle_w > 0 else 0.0
        rule = ShareRule.BUSY if channel.idle_w > 0 else ShareRule.CAPACITY
        run, _, idle, _ = split(energy_j - floor_j, app_s, busy_s, by=rule, capacity_s=use.capacity_s)
        run_j += run
        idle_j += floor_j + float(idle[0])
    workloads = {name: float(each) for name, each in zip(names, run_j, strict=False) if each > 0}
    rest_j = max(0.0, total_j - idle_j - math.fsum(workloads.values()))
    return Division(PROCESSORS, quality, total_j, workloads, idle_j, rest_j)


def _board(
    device: str, parts: Sequence[tuple[Channel, float]], shares: Mapping[NodeWorkload, float] | None, floor_j: float
) -> Division:
    total_j = math.fsum(energy_j for _, energy_j in parts)
    quality = weakest(channel.quality for channel, _ in parts)
    if shares is None:
        return Division(device, quality, total_j, {}, 0.0, total_j)
    if any(math.isnan(share) for share in shares.values()):
        if len(shares) > 1:
            return Division(device, quality, total_j, {}, 0.0, total_j)
        shares = dict.fromkeys(shares, 1.0)
    held = max(1.0, math.fsum(shares.values()))
    above_j = max(0.0, total_j - floor_j)
    workloads = {name: above_j * share / held for name, share in shares.items() if share > 0}
    idle_j = max(0.0, total_j - math.fsum(workloads.values()))
    return Division(device, quality, total_j, workloads, idle_j if idle_j > 1e-12 * total_j else 0.0, 0.0)


@dataclass(slots=True)
class EnergyTotal:
    """Joules and grams since a book was opened.

    Attributes:
        energy_j: Joules.
        carbon_g: Grams of the joules with a known intensity.
        unknown_j: Joules without a known intensity.
    """

    energy_j: float = 0.0
    carbon_g: float = 0.0
    unknown_j: float = 0.0

    def add(self, energy_j: float, g_per_kwh: float) -> None:
        """Add joules at an intensity; NaN for an unknown one."""
        self.energy_j += energy_j
        if math.isnan(g_per_kwh):
            self.unknown_j += energy_j
        else:
            self.carbon_g += energy_j * g_per_kwh / JOULES_PER_KWH

    def merge(self, other: EnergyTotal) -> None:
        """Add another total."""
        self.energy_j += other.energy_j
        self.carbon_g += other.carbon_g
        self.unknown_j += other.unknown_j


class NodeBook:
    """Joules and grams of a node since the book was opened; no sum ever falls.

    Attributes:
        workloads: Totals by workload, device and quality.
        idle, unattributed, devices: Totals by device and quality.
    """

    def __init__(self) -> None:
        self.workloads: dict[tuple[NodeWorkload, str, Quality], EnergyTotal] = {}
        self.idle: dict[tuple[str, Quality], EnergyTotal] = {}
        self.unattributed: dict[tuple[str, Quality], EnergyTotal] = {}
        self.devices: dict[tuple[str, Quality], EnergyTotal] = {}

    def settle(self, divisions: Iterable[Division], g_per_kwh: float) -> None:
        """Book the energy of an interval.

        Args:
            divisions: One per device.
            g_per_kwh: Intensity over the interval, facility overhead included; NaN unknown.
        """
        for part in divisions:
            where = (part.device, part.quality)
            for workload, energy_j in part.workloads.items():
                self.workloads.setdefault((workload, *where), EnergyTotal()).add(energy_j, g_per_kwh)
            for book, energy_j in (
                (self.idle, part.idle_j),
                (self.unattributed, part.unattributed_j),
                (self.devices, part.energy_j),
            ):
                book.setdefault(where, EnergyTotal()).add(energy_j, g_per_kwh)

    def retire(self, workload: NodeWorkload) -> None:
        """Move the joules of a workload that has ended to :data:`ENDED`."""
        for key in [key for key in self.workloads if key[0] == workload]:
            self.workloads.setdefault((ENDED, *key[1:]), EnergyTotal()).merge(self.workloads.pop(key))
