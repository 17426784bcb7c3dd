"""Measured cost of variants on slices, as samples, so that every later figure can be recomputed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from joulery.domain.arrays import FloatArray, readonly
from joulery.domain.errors import ConfigError, DataError
from joulery.domain.json_numbers import known_number
from joulery.domain.quality import Quality
from joulery.domain.serving.service import Slice

SCHEMA = "joulery.profile/1"


@dataclass(frozen=True, eq=False)
class Timings:
    """Requests answered one after another, each with its time and its CPU time.

    Attributes:
        service_s: Seconds inside the replica, float64[n].
        cpu_s: CPU seconds of the replica over the same time, all threads, float64[n].

    Raises:
        DataError: No samples, lengths differ, or a time is not a finite number above zero.
    """

    service_s: FloatArray
    cpu_s: FloatArray

    def __init__(self, service_s: npt.ArrayLike, cpu_s: npt.ArrayLike) -> None:
        service, cpu = readonly(service_s, np.float64), readonly(cpu_s, np.float64)
        if len(service) != len(cpu) or len(service) == 0:
            raise DataError(f"{len(service)} times and {len(cpu)} CPU times do not make a profile")
        if not bool(np.all(np.isfinite(service) & (service > 0) & np.isfinite(cpu) & (cpu >= 0))):
            raise DataError("a profile's times must be finite and above zero")
        object.__setattr__(self, "service_s", service)
        object.__setattr__(self, "cpu_s", cpu)

    def __len__(self) -> int:
        return len(self.service_s)

    # A policy asks for the same means and quantiles every second.
    @cached_property
    def mean_s(self) -> float:
        """Mean seconds a request."""
        return float(np.mean(self.service_s))

    @cached_property
    def mean_cpu_s(self) -> float:
        """Mean CPU seconds a request."""
        return float(np.mean(self.cpu_s))

    def quantile_s(self, quantile: float) -> float:
        """A quantile of the seconds a request takes."""
        if quantile not in self._quantiles:
            self._quantiles[quantile] = float(np.quantile(self.service_s, quantile))
        return self._quantiles[quantile]

    @cached_property
    def _quantiles(self) -> dict[float, float]:
        return {}

    @property
    def mean_error_ratio(self) -> float:
        """Half-width of the 95 % confidence interval of the mean, relative to it; NaN with fewer than two samples."""
        return _mean_error_ratio(self.service_s)

    @cached_property
    def mean_cpu_error_ratio(self) -> float:
        """The same for the CPU time; NaN also where the mean is 0."""
        return _mean_error_ratio(self.cpu_s)

    @property
    def drift_ratio(self) -> float:
        """Mean of the second half relative to the first, minus one; near zero on a steady machine."""
        half = len(self) // 2
        if half == 0:
            return float("nan")
        return float(np.mean(self.service_s[half:]) / np.mean(self.service_s[:half])) - 1.0

    def as_dict(self) -> dict[str, Any]:
        """The samples and a summary for people, as a JSON-ready object."""
        return {
            "service_s": self.service_s.tolist(),
            "cpu_s": self.cpu_s.tolist(),
            "summary": {
                "runs": len(self),
                "mean_s": self.mean_s,
                "mean_error_ratio": known_number(self.mean_error_ratio),
                "p50_s": self.quantile_s(0.5),
                "p95_s": self.quantile_s(0.95),
                "mean_cpu_s": self.mean_cpu_s,
                "drift_ratio": known_number(self.drift_ratio),
            },
        }


def _mean_error_ratio(samples: FloatArray) -> float:
    mean = float(np.mean(samples))
    if len(samples) < 2 or mean == 0:
        return float("nan")
    return 1.96 * float(np.std(samples, ddof=1)) / math.sqrt(len(samples)) / mean


@dataclass(frozen=True, slots=True, eq=False)
class SliceProfile:
    """Measured times and power of one variant on one slice.

    Attributes:
        variant, slice: The measured variant and slice.
        alone: Times while the rest of the device was idle.
        loaded: Times while every other slice of the device worked too; the same object where there is no other slice.
        active_w: Watts that one busy core draws above idle while running this variant.
        startup_s: Seconds from launch to ready.
        startup_cpu_s: CPU seconds of launching, loading and warming up.
        memory_bytes: Resident memory of the replica after it ran; 0 when not known.
        awake_w: Watts that the replica draws while it waits for requests; 0 when not measured.
        batches: Times of whole batches by the requests in them, 2 and more, while every other slice worked too; empty
            where requests are answered one by one.
        quality: Quality of the watts in ``active_w``; None for that of the profile.
    """

    variant: str
    slice: Slice
    alone: Timings
    loaded: Timings
    active_w: float
    startup_s: float = 0.0
    startup_cpu_s: float = 0.0
    memory_bytes: int = 0
    awake_w: float = 0.0
    batches: Mapping[int, Timings] = field(default_factory=dict)
    quality: Quality | None = None

    def __post_init__(self) -> None:
        if any(size < 2 for size in self.batches):
            raise DataError(f"{self.variant}: a batch has 2 requests or more, got {sorted(self.batches)}")
        if not (math.isfinite(self.awake_w) and self.awake_w >= 0):
            raise DataError(f"{self.variant}: a waiting replica draws {self.awake_w} W, expected 0 or more")
        if not (math.isfinite(self.active_w) and self.active_w > 0):
            raise DataError(f"{self.variant}: a busy core draws {self.active_w} W above idle, expected more than 0")

    @property
    def energy_j(self) -> float:
        """Mean joules above idle that one request costs while the rest of the device is busy."""
        return self.loaded.mean_cpu_s * self.active_w

    @property
    def max_batch(self) -> int:
        """Requests of the largest batch."""
        return max(self.batches, default=1)

    @property
    def each_s(self) -> float:
        """Least mean seconds that a request keeps the replica busy: its share of the best batch size's time."""
        return min(times.mean_s / size for size, times in self._by_size)

    @property
    def busy_energy_j(self) -> float:
        """Mean joules above idle that one request costs in the largest batch."""
        times = self.batches.get(self.max_batch, self.loaded)
        return times.mean_cpu_s / self.max_batch * self.active_w

    def slowest_s(self, quantile: float) -> float:
        """A quantile of the seconds that a request is in the replica, for the batch size that takes longest."""
        return max(times.quantile_s(quantile) for _, times in self._by_size)

    def batch_s(self, requests: float) -> float:
        """Mean seconds of a batch, interpolated linearly between measured sizes.

        Args:
            requests: Mean number of requests in the batch; at least 1.
        """
        sizes = [size for size, _ in self._by_size]
        return float(np.interp(requests, sizes, [times.mean_s for _, times in self._by_size]))

    def batched_to(self, requests: int) -> SliceProfile:
        """The same profile with batches of at most ``requests`` requests."""
        kept = {size: times for size, times in self.batches.items() if size <= requests}
        return self if len(kept) == len(self.batches) else replace(self, batches=kept)

    @property
    def _by_size(self) -> list[tuple[int, Timings]]:
        return [(1, self.loaded), *sorted(self.batches.items())]


@dataclass(frozen=True, slots=True, eq=False)
class Profile:
    """Measurements of a family's variants on a machine's slices. Versioned JSON: :meth:`as_dict`, :meth:`from_dict`.

    Attributes:
        machine: The measured machine: ``processor``, ``cores``, ``system`` ...
        entries: One for each (variant, slice), without duplicates.
        idle_w: Power of the idle machine; NaN when not known.
        quality: Quality of the watts behind ``active_w`` and ``idle_w``; the weakest where entries have their own.
        meter: The meter behind those watts.
        band_ratio: Half-width of the uncertainty of those watts, as a ratio; 0 when not stated.
        created_s: When it was measured, Unix seconds.
        warmup: Requests before the samples, not kept.
        models: SHA-256 of each variant's model, where it is a file.
    """

    machine: Mapping[str, Any]
    entries: tuple[SliceProfile, ...]
    idle_w: float
    quality: Quality
    meter: str
    band_ratio: float = 0.0
    created_s: float = 0.0
    warmup: int = 0
    models: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        pairs = [(entry.variant, entry.slice) for entry in self.entries]
        if not pairs or len(set(pairs)) != len(pairs):
            raise DataError("a profile needs entries, each variant once a slice")

    def entry(self, variant: str, piece: Slice) -> SliceProfile:
        """The measurements of a variant on a slice.

        Raises:
            DataError: That pair was not measured.
        """
        for entry in self.entries:
            if entry.variant == variant and entry.slice == piece:
                return entry
        raise DataError(
            f"{variant} was not measured on {piece}", hint=f"run: joulery profile SITE --variant {variant} -o FILE"
        )

    def quality_of(self, variant: str) -> Quality:
        """Quality of the watts of a variant."""
        own = next((entry.quality for entry in self.entries if entry.variant == variant), None)
        return self.quality if own is None else own

    def as_dict(self) -> dict[str, Any]:
        """The profile as a JSON-ready object."""
        return {
            "schema": SCHEMA,
            "created_s": self.created_s,
            "machine": dict(self.machine),
            "power": {
                "idle_w": known_number(self.idle_w),
                "meter": self.meter,
                "quality": self.quality.value,
                "band_ratio": self.band_ratio,
            },
            "warmup": self.warmup,
            "models": dict(self.models or {}),
            "entries": [_entry_as_dict(entry) for entry in self.entries],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Profile:
        """The inverse of :meth:`as_dict`.

        Raises:
            DataError: The data is not a profile, or has a schema that this version does not support.
        """
        schema = data.get("schema") if hasattr(data, "get") else None
        if schema != SCHEMA:
            raise DataError(f"not a profile: schema is {schema!r}, expected {SCHEMA!r}", hint="run joulery profile")
        try:
            power = data["power"]
            return cls(
                machine=dict(data["machine"]),
                entries=tuple(_entry_from_dict(entry) for entry in data["entries"]),
                idle_w=float("nan") if power["idle_w"] is None else float(power["idle_w"]),
                quality=Quality(power["quality"]),
                meter=str(power["meter"]),
                band_ratio=float(power["band_ratio"]),
                created_s=float(data["created_s"]),
                warmup=int(data["warmup"]),
                models={str(name): str(digest) for name, digest in data["models"].items()},
            )
        except (AttributeError, ConfigError, KeyError, TypeError, ValueError) as error:
            raise DataError(f"not a usable profile: {error!r}", hint="run joulery profile again") from error


def _entry_as_dict(entry: SliceProfile) -> dict[str, Any]:
    shared = entry.loaded is entry.alone
    return {
        "variant": entry.variant,
        "slice": str(entry.slice),
        "active_w": entry.active_w,
        "energy_j": entry.energy_j,
        "startup_s": entry.startup_s,
        "startup_cpu_s": entry.startup_cpu_s,
        "memory_bytes": entry.memory_bytes,
        **({"awake_w": entry.awake_w} if entry.awake_w else {}),
        **({"quality": entry.quality.value} if entry.quality is not None else {}),
        "alone": entry.alone.as_dict(),
        "loaded": None if shared else entry.loaded.as_dict(),
        **({"batches": {str(n): times.as_dict() for n, times in entry.batches.items()}} if entry.batches else {}),
    }


def _entry_from_dict(data: Mapping[str, Any]) -> SliceProfile:
    alone = Timings(data["alone"]["service_s"], data["alone"]["cpu_s"])
    loaded = data["loaded"]
    return SliceProfile(
        variant=str(data["variant"]),
        slice=Slice.parse(data["slice"]),
        alone=alone,
        loaded=alone if loaded is None else Timings(loaded["service_s"], loaded["cpu_s"]),
        active_w=float(data["active_w"]),
        startup_s=float(data["startup_s"]),
        startup_cpu_s=float(data["startup_cpu_s"]),
        memory_bytes=int(data["memory_bytes"]),
        awake_w=float(data.get("awake_w", 0.0)),
        batches={int(n): Timings(one["service_s"], one["cpu_s"]) for n, one in data.get("batches", {}).items()},
        quality=Quality(data["quality"]) if "quality" in data else None,
    )
