"""The tensor energy footprint: joules by qualified operation, and the unattributed joules of each device."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from joulery.domain.arrays import BoolArray, FloatArray, IntArray, readonly
from joulery.domain.errors import DataError
from joulery.domain.quality import Quality


@dataclass(frozen=True, slots=True)
class DeviceEnergy:
    """Energy of one device during a session: attributed to operations and unattributed.

    The law, held to 1e-9: ``attributed_j + unattributed_j == total_j``. Energy of uncovered time is in none of them.

    Attributes:
        device: Device name.
        total_j: Known energy of the window; NaN for a device without a meter.
        attributed_j: Energy shared among the operations running at the time.
        unattributed_j: Energy of the time without operations (idle, or work the trace does not show).
        covered_s, uncovered_s: Window time with and without known power; they add up to the window.
        active_s: Time with at least one operation running, covered or not.
        resolution_s: Median interval between two updates of the sensor; NaN without two updates.
        quality: Weakest of its meters; ``MEASURED``, the neutral element, without a meter.
        estimator: Estimator of its operations' energy: ``recency`` or ``regression``.
        other_j: Of the unattributed energy, that of other processes on the device; 0 where not determined.
        idle_j: Of the unattributed energy, that of the idle device; 0 where not determined.
        carbon_g: Grams of CO2-equivalent of ``total_j``, facility overhead included; NaN where unknown.
    """

    device: str
    total_j: float
    attributed_j: float
    unattributed_j: float
    covered_s: float
    uncovered_s: float
    active_s: float
    resolution_s: float
    quality: Quality = Quality.MEASURED
    estimator: str = "recency"
    other_j: float = 0.0
    idle_j: float = 0.0
    carbon_g: float = float("nan")

    @property
    def metered(self) -> bool:
        """Whether the device's energy is known."""
        return not math.isnan(self.total_j)


@dataclass(frozen=True, slots=True, eq=False)
class TensorFootprint:
    """Energy by operation (TEF; Smaragdine, ICSE'24, Definition 3.3), one row for each (operation, device, phase).

    Attributes:
        window_ns: The session, half-open, on the clock of the trace.
        devices: Every device of the trace or of the meters, by name.
        op, device, phase: Key of each row, sorted.
        energy_j: Known energy, float64[n]; NaN where the device has no meter.
        runtime_ns: Exclusive time inside the window, events added up, int64[n].
        uncovered_ns: Of that, time without known power (its energy is missing, not zero), int64[n].
        count: Events touching the window, int64[n].
        samples: Power readings inside its exclusive time, int64[n].
        median_ns: Median exclusive time of one event, int64[n].
        first_ns: Start of the first event, int64[n].
        active_ns: Time with at least one event of the row running, int64[n].
        active_j: Energy of the whole device during that time, float64[n]; NaN where the device has no meter.
        carbon_g: Grams of CO2-equivalent of ``energy_j``, facility overhead included, float64[n]; NaN where unknown.
        error_j: Standard error of ``energy_j`` over the steps, float64[n]; NaN where no steps are known. The systematic
            error of operations shorter than the sensor resolves is not in it.
        estimator: ``recency`` or ``regression``, as requested; each device states which one was used for it.
        multiplicity: ``events`` or ``set``.
        composite: Operations that each represent many which the framework does not report.
        feeds: (producer, consumer) of operations, by name, where the trace has the dataflow; empty where not.
        process_j: Joules of the operations of each process; empty where the trace names none.
        notes: What a reader must know about these numbers, one sentence each.
    """

    window_ns: tuple[int, int]
    devices: tuple[DeviceEnergy, ...]
    op: tuple[str, ...]
    device: tuple[str, ...]
    phase: tuple[str, ...]
    energy_j: FloatArray
    runtime_ns: IntArray
    uncovered_ns: IntArray
    count: IntArray
    samples: IntArray
    median_ns: IntArray
    first_ns: IntArray
    active_ns: IntArray
    active_j: FloatArray
    carbon_g: FloatArray
    error_j: FloatArray
    estimator: str = "recency"
    multiplicity: str = "events"
    composite: frozenset[str] = frozenset()
    feeds: frozenset[tuple[str, str]] = frozenset()
    process_j: Mapping[int, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __init__(
        self,
        window_ns: tuple[int, int],
        devices: Sequence[DeviceEnergy],
        op: Sequence[str],
        device: Sequence[str],
        phase: Sequence[str],
        *,
        energy_j: npt.ArrayLike,
        runtime_ns: npt.ArrayLike,
        uncovered_ns: npt.ArrayLike,
        count: npt.ArrayLike,
        samples: npt.ArrayLike,
        median_ns: npt.ArrayLike,
        first_ns: npt.ArrayLike,
        active_ns: npt.ArrayLike,
        active_j: npt.ArrayLike,
        carbon_g: npt.ArrayLike | None = None,
        error_j: npt.ArrayLike | None = None,
        estimator: str = "recency",
        multiplicity: str = "events",
        composite: frozenset[str] = frozenset(),
        feeds: frozenset[tuple[str, str]] = frozenset(),
        process_j: Mapping[int, float] | None = None,
        notes: Sequence[str] = (),
    ) -> None:
        integers = {
            "runtime_ns": runtime_ns,
            "uncovered_ns": uncovered_ns,
            "count": count,
            "samples": samples,
            "median_ns": median_ns,
            "first_ns": first_ns,
            "active_ns": active_ns,
        }
        columns: dict[str, npt.NDArray[Any]] = {k: readonly(v, np.int64) for k, v in integers.items()}
        columns |= {"energy_j": readonly(energy_j, np.float64), "active_j": readonly(active_j, np.float64)}
        unknown = np.full(len(columns["energy_j"]), np.nan)
        columns["carbon_g"] = readonly(unknown if carbon_g is None else carbon_g, np.float64)
        columns["error_j"] = readonly(unknown if error_j is None else error_j, np.float64)
        names = {"op": tuple(op), "device": tuple(device), "phase": tuple(phase)}
        lengths = {name: len(column) for name, column in (*columns.items(), *names.items())}
        if len(set(lengths.values())) > 1:
            raise DataError(f"footprint columns differ in length: {lengths}")
        fields = {
            **columns,
            **names,
            "window_ns": (int(window_ns[0]), int(window_ns[1])),
            "devices": tuple(devices),
            "estimator": estimator,
            "multiplicity": multiplicity,
            "composite": frozenset(composite),
            "feeds": frozenset(feeds),
            "process_j": dict(process_j or {}),
            "notes": tuple(notes),
        }
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    def __len__(self) -> int:
        return len(self.op)

    @property
    def energy_by_op(self) -> dict[str, float]:
        """Joules by qualified name, devices and phases added up; unmetered rows are left out."""
        sums: dict[str, list[float]] = {}
        for name, joules in zip(self.op, self.energy_j.tolist(), strict=True):
            if not math.isnan(joules):
                sums.setdefault(name, []).append(joules)
        return {name: math.fsum(values) for name, values in sums.items()}

    @property
    def unread(self) -> BoolArray:
        """Rows that ran without known power throughout: their energy is missing, not zero, bool[n]."""
        never = (self.uncovered_ns == self.runtime_ns) & (self.runtime_ns > 0) & (self.energy_j == 0)
        return np.asarray(never | np.isnan(self.energy_j), np.bool_)

    @property
    def attributed_j(self) -> float:
        """Energy of all operations on metered devices."""
        return math.fsum(entry.attributed_j for entry in self.devices if entry.metered)
