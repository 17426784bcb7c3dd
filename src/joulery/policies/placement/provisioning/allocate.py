"""Alg. 2 of iGniter: the least shares with which every process on a GPU is within its SLO.

Raising one share only raises the power and cache use that the others feel, so from given batches there is one least
vector of shares, and growing every late process, one unit at a time, finds it.

Shares are counted in units of the GPU type here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from joulery.perf.interference.model import GpuCoefficients, ModelCoefficients, launch_delay_ms, work

Figures = tuple[float, float, float]
"""k_act (ms), p (W) and c (percent) of a process alone."""


class Process(NamedTuple):
    """The constants of a process that decide whether it is late, worked out once.

    Attributes:
        batch: Batch size.
        limit_ms: What execution may take when the GPU is shared.
        limit_alone_ms: What it may take when the process has the GPU to itself.
        launch_ms: Launch delay of all kernels when the GPU is shared, the part that grows with neighbours excluded.
        launch_alone_ms: Launch delay of all kernels when alone.
        kernels: Kernels of one inference.
        work: Eq. 11's numerator.
        k4, k5: Eq. 11.
        ability: Requests times 1000: over k_act, the processing ability.
        power_slope, power_offset_w, cache_slope, cache_offset_percent, cache_sensitivity: As in the profile.
    """

    batch: int
    limit_ms: float
    limit_alone_ms: float
    launch_ms: float
    launch_alone_ms: float
    kernels: float
    work: float
    k4: float
    k5: float
    ability: float
    power_slope: float
    power_offset_w: float
    cache_slope: float
    cache_offset_percent: float
    cache_sensitivity: float

    def figures(self, share_percent: float) -> Figures:
        """k_act, p and c alone with this share (Eq. 11)."""
        active_ms = self.work / (share_percent + self.k4) + self.k5
        ability = self.ability / active_ms
        return (
            active_ms,
            self.power_slope * ability + self.power_offset_w,
            self.cache_slope * ability + self.cache_offset_percent,
        )


def process(model: ModelCoefficients, batch: int, limit_ms: float, limit_alone_ms: float) -> Process:
    """The constants of a model with a batch and the limits of its execution."""
    return Process(
        batch=batch,
        limit_ms=limit_ms,
        limit_alone_ms=limit_alone_ms,
        launch_ms=model.launch_ms + model.shared_launch_ms,
        launch_alone_ms=model.launch_ms,
        kernels=model.kernels,
        work=work(model, batch),
        k4=model.k4,
        k5=model.k5,
        ability=1000.0 * batch,
        power_slope=model.power_slope,
        power_offset_w=model.power_offset_w,
        cache_slope=model.cache_slope,
        cache_offset_percent=model.cache_offset_percent,
        cache_sensitivity=model.cache_sensitivity,
    )


def units_of(gpu: GpuCoefficients) -> int:
    """How many units a whole GPU has."""
    return math.floor(100.0 / gpu.unit_percent + 1e-9)


def slowdown(gpu: GpuCoefficients, power_w: float) -> float:
    """F/f for processes that ask for this much power together (Eq. 9); infinite when no clock is left."""
    excess_w = gpu.idle_w + power_w - gpu.power_cap_w
    if excess_w <= 0:
        return 1.0
    clock_mhz = gpu.clock_max_mhz + gpu.clock_mhz_per_w * excess_w
    return gpu.clock_max_mhz / clock_mhz if clock_mhz > 0 else math.inf


def least_units(gpu: GpuCoefficients, one: Process) -> int | None:
    """The fewest units with which a process that has the GPU to itself is in time, throttling included.

    Not assumed monotone: a larger share also draws more power. None when no share is enough.
    """
    room_ms = one.limit_alone_ms - one.launch_alone_ms - one.k5
    if room_ms <= 0 or one.work <= 0:
        return None
    unit = gpu.unit_percent
    first = max(1, math.ceil((one.work / room_ms - one.k4) / unit - 1e-9))
    for units in range(first, units_of(gpu) + 1):
        active_ms, power_w, _ = one.figures(units * unit)
        if (one.launch_alone_ms + active_ms) * slowdown(gpu, power_w) <= one.limit_alone_ms:
            return units
    return None


def allocate(
    gpu: GpuCoefficients, processes: Sequence[Process], start: Sequence[int], most: int | None = None
) -> list[int] | None:
    """The least shares with which all are in time.

    Args:
        gpu: Hardware coefficients.
        processes: Who is on the GPU.
        start: Units each has at least, such as what it needs alone.
        most: Units there are in all; a whole GPU when left out.

    Returns:
        Units of each process; None when they come to more than ``most``.
    """
    most = units_of(gpu) if most is None else most
    total = sum(start)
    if total > most:
        return None
    if len(processes) == 1:
        least = least_units(gpu, processes[0])
        return None if least is None or max(least, *start) > most else [max(least, *start)]
    units = list(start)
    figures = [one.figures(n * gpu.unit_percent) for one, n in zip(processes, units, strict=True)]
    return units if settle(gpu, processes, units, figures, most - total) else None


def settle(
    gpu: GpuCoefficients, processes: Sequence[Process], units: list[int], figures: list[Figures], spare: int
) -> bool:
    """Grow the shares of several processes on a GPU, in place, until none is late (Eqs. 4-10).

    All that are late in the same snapshot gain one unit each.

    Args:
        gpu: Hardware coefficients.
        processes: Two or more.
        units, figures: What each has, and its figures with that; both are changed.
        spare: Units that may be added in all.

    Returns:
        False when more than ``spare`` would be needed; the shares are then of no use.
    """
    delay_ms, unit = launch_delay_ms(gpu, len(processes)), gpu.unit_percent
    spare_w = gpu.power_cap_w - gpu.idle_w
    clock_per_w = gpu.clock_mhz_per_w / gpu.clock_max_mhz
    while True:
        excess_w = sum([power_w for _, power_w, _ in figures]) - spare_w
        speed = 1.0 + clock_per_w * excess_w if excess_w > 0 else 1.0
        cache = sum([own for _, _, own in figures])
        late = [
            i
            for i, (one, (active_ms, _, own)) in enumerate(zip(processes, figures, strict=True))
            if one.launch_ms + one.kernels * delay_ms + active_ms * (1 + one.cache_sensitivity * (cache - own))
            > one.limit_ms * speed
        ]
        if not late:
            return True
        spare -= len(late)
        if spare < 0:
            return False
        for i in late:
            units[i] += 1
            figures[i] = processes[i].figures(units[i] * unit)
