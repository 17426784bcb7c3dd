"""Placement of partitions on devices by clock sensitivity, so that partitions on one device can share a clock.

``place_partitions`` is the greedy of μ-Serve (ATC'24, section 3.2, Alg. 2) with its slips fixed: bins exist from the
start, the best score starts at minus infinity, distinct devices are counted, a partition that fits nowhere is an
error. ``improve_placement`` is ours: moves and swaps while the scatter falls, under the same constraints.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from joulery.domain.arrays import BoolArray, FloatArray
from joulery.domain.errors import ConfigError, InfeasibleError

_ROUNDING = 1e-12
"""Rounding error allowed in the used memory, relative to a device's memory: a device may be full to the last byte."""


@dataclass(frozen=True, slots=True)
class Partition:
    """A part of a model that runs on one device.

    Attributes:
        key: Unique; ties are broken by its text.
        model: Which model it belongs to.
        score: Sensitivity score to the clock.
        memory_bytes: Memory it needs.
        weight: How much it counts in a device's mean score, > 0.
    """

    key: Hashable
    model: Hashable
    score: float
    memory_bytes: float
    weight: float

    def __post_init__(self) -> None:
        if not self.weight > 0:
            raise ConfigError("a partition needs a positive weight", pointer=str(self.key), got=str(self.weight))
        if not self.memory_bytes >= 0:
            raise ConfigError("memory cannot be negative", pointer=str(self.key), got=str(self.memory_bytes))


@dataclass(frozen=True, slots=True)
class PlacementLimits:
    """Constraints on a placement.

    Attributes:
        capacity_bytes: Free memory of each device.
        devices_per_model: Most distinct devices one model may use (the paper's CT).
        empty_penalty: Distance at which an empty device is as good as an occupied one (the spec's tau).
    """

    capacity_bytes: tuple[float, ...]
    devices_per_model: int = 3
    empty_penalty: float = 0.2


@dataclass(slots=True)
class _Bins:
    """Running state of a placement: free memory and weighted moments of each device, devices of each model."""

    limits: PlacementLimits
    free: FloatArray
    weight: FloatArray
    first: FloatArray
    devices_of: dict[Hashable, dict[int, int]]

    @classmethod
    def empty(cls, limits: PlacementLimits) -> _Bins:
        n = len(limits.capacity_bytes)
        return cls(limits, np.array(limits.capacity_bytes, float), np.zeros(n), np.zeros(n), {})

    def fits(self, partition: Partition) -> BoolArray:
        """Mask of the devices that have the memory, bool[devices]."""
        return np.asarray(self.free >= partition.memory_bytes - _ROUNDING * np.array(self.limits.capacity_bytes))

    def admits(self, partition: Partition) -> BoolArray:
        """Mask of the devices that have the memory and respect the model's device limit, bool[devices]."""
        fits = self.fits(partition)
        used = self.devices_of.get(partition.model, {})
        if len(used) >= self.limits.devices_per_model:
            allowed = np.zeros(len(fits), bool)
            allowed[list(used)] = True
            fits &= allowed
        return fits

    def add(self, partition: Partition, device: int, sign: int = 1) -> None:
        """Put a partition on a device (``sign=-1`` takes it off)."""
        self.free[device] -= sign * partition.memory_bytes
        self.weight[device] += sign * partition.weight
        self.first[device] += sign * partition.weight * partition.score
        used = self.devices_of.setdefault(partition.model, {})
        used[device] = used.get(device, 0) + sign
        if used[device] == 0:
            del used[device]


def place_partitions(partitions: Sequence[Partition], limits: PlacementLimits) -> dict[Hashable, int]:
    """Alg. 2: most sensitive first, each to the device of nearest mean score.

    Returns:
        Device index of each partition key.

    Raises:
        InfeasibleError: A partition fits on no device; ``nearest`` holds what was placed until then.
        ConfigError: Two partitions share a key.
    """
    if len({partition.key for partition in partitions}) != len(partitions):
        raise ConfigError("partitions must have distinct keys")
    bins, assignment = _Bins.empty(limits), dict[Hashable, int]()
    order = sorted(partitions, key=lambda p: (-p.score, -p.memory_bytes, str(p.key)))
    for partition in order:
        device = _nearest_device(bins, partition)
        if device is None:
            raise InfeasibleError(
                f"partition {partition.key} of model {partition.model} fits on no device",
                binding="devices per model" if bool(np.any(bins.fits(partition))) else "memory",
                nearest={str(key): device for key, device in assignment.items()},
                hint="add memory or devices, or raise the number of devices a model may use",
            )
        bins.add(partition, device)
        assignment[partition.key] = device
    return assignment


def _nearest_device(bins: _Bins, partition: Partition) -> int | None:
    admitted = np.flatnonzero(bins.admits(partition))
    if not len(admitted):
        return None
    occupied = bins.weight[admitted] > 0
    mean = np.divide(bins.first[admitted], bins.weight[admitted], out=np.zeros(len(admitted)), where=occupied)
    # Rounded: of distances that are equal but for the last bit, a device of the model's own is the nearer.
    apart = np.round(np.where(occupied, np.abs(partition.score - mean), bins.limits.empty_penalty), 9)
    used = bins.devices_of.get(partition.model, {})
    ranked = sorted(zip(apart.tolist(), (int(d) not in used for d in admitted), admitted.tolist(), strict=True))
    return int(ranked[0][2])


def scatter(partitions: Sequence[Partition], assignment: Mapping[Hashable, int]) -> float:
    """Sum over devices of ``sum w (score - mean of the device)^2``: 0 when every device is homogeneous."""
    device = np.array([assignment[p.key] for p in partitions], np.int64)
    weight = np.array([p.weight for p in partitions], float)
    score = np.array([p.score for p in partitions], float)
    if not len(device):
        return 0.0
    total = np.bincount(device, weight)
    mean = np.divide(np.bincount(device, weight * score), total, out=np.zeros(len(total)), where=total > 0)
    return float(np.sum(weight * (score - mean[device]) ** 2))


def improve_placement(
    partitions: Sequence[Partition],
    assignment: Mapping[Hashable, int],
    limits: PlacementLimits,
    *,
    max_rounds: int = 1000,
) -> dict[Hashable, int]:
    """Improve a feasible placement by moves and swaps, best first, until none lowers the scatter.

    The result is never worse than the given placement, and feasible whenever that is.

    Args:
        partitions: The placed partitions.
        assignment: Device of each partition key; must respect ``limits``.
        limits: Memory and devices a model.
        max_rounds: Changes at most.
    """
    bins, current = _Bins.empty(limits), dict(assignment)
    for partition in partitions:
        bins.add(partition, current[partition.key])
    for _ in range(max_rounds):
        change = _best_change(bins, partitions, current)
        if change is None:
            break
        for partition, _ in change:
            bins.add(partition, current[partition.key], sign=-1)
        for partition, device in change:
            bins.add(partition, device)
            current[partition.key] = device
    return current


_Change = list[tuple[Partition, int]]


def _best_change(bins: _Bins, partitions: Sequence[Partition], current: Mapping[Hashable, int]) -> _Change | None:
    """The feasible move or swap that lowers the scatter most; None when nothing lowers it."""
    tolerance = 1e-12 * (1.0 + float(np.sum(bins.weight)))
    candidates: list[tuple[float, int, _Change]] = []
    for index, one in enumerate(partitions):
        home = current[one.key]
        for device in range(len(bins.free)):
            if device != home:
                candidates.append((_gain(bins, [(one, home, device)]), len(candidates), [(one, device)]))
        for other in partitions[index + 1 :]:
            away = current[other.key]
            if away != home:
                exchange = [(one, home, away), (other, away, home)]
                candidates.append((_gain(bins, exchange), len(candidates), [(one, away), (other, home)]))
    for gain, _, change in sorted(candidates, key=lambda candidate: (-candidate[0], candidate[1])):
        if gain <= tolerance:
            return None
        if _feasible(bins, change, current):
            return change
    return None


def _gain(bins: _Bins, moves: Sequence[tuple[Partition, int, int]]) -> float:
    """By how much the scatter falls: per device it is ``sum w s² - (sum w s)² / sum w``, whose first term stays."""
    touched = {device for _, home, away in moves for device in (home, away)}
    gain = 0.0
    for device in touched:
        weight, first = float(bins.weight[device]), float(bins.first[device])
        gain -= first * first / weight if weight > 1e-12 else 0.0
        for partition, home, away in moves:
            sign = (device == away) - (device == home)
            weight += sign * partition.weight
            first += sign * partition.weight * partition.score
        gain += first * first / weight if weight > 1e-12 else 0.0
    return gain


def _feasible(bins: _Bins, change: _Change, current: Mapping[Hashable, int]) -> bool:
    for partition, _ in change:
        bins.add(partition, current[partition.key], sign=-1)
    fits, placed = True, 0
    for partition, device in change:
        fits = bool(bins.admits(partition)[device])
        if not fits:
            break
        bins.add(partition, device)
        placed += 1
    for partition, device in change[:placed]:
        bins.add(partition, device, sign=-1)
    for partition, _ in change:
        bins.add(partition, current[partition.key])
    return fits
