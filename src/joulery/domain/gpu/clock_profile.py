"""Clock profiles: the effect of a device's clock on a model's time (by operator, phase and in total) and power."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from joulery.domain.arrays import FloatArray, readonly
from joulery.domain.errors import DataError
from joulery.domain.json_numbers import known_numbers, or_nan
from joulery.domain.quality import Quality
from joulery.domain.trace.operators import OperationCost, OperatorKind

SCHEMA = "joulery.clocks/1"


@dataclass(frozen=True, slots=True)
class ScoredOperator:
    """One operator of a model, with its sensitivity to the clock.

    Attributes:
        cost: Its work.
        score: Relative slowdown per relative clock loss between full and half clock: 0 (launch) to 2 (arithmetic).
        time_s: Time of all its calls in one pass at the highest clock, > 0.
    """

    cost: OperationCost
    score: float
    time_s: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.score) and self.score >= 0 and 0 < self.time_s < math.inf):
            raise DataError(
                f"operator {self.cost.name}: a score of {self.score} in {self.time_s} s",
                hint="a score is a number of 0 or more, a time above 0 s; run joulery profile MODEL --clocks again",
            )


@dataclass(frozen=True, slots=True, eq=False)
class ClockProfile:
    """Latency and power of one model on one device by clock. Versioned JSON: :meth:`as_dict`, :meth:`from_dict`.

    Attributes:
        model, device: The profiled model and device.
        quality: Of the curve: measured where clocks were set, modelled on an emulator fitted to measurements, assumed
            on an emulator that is not fitted.
        source: Origin of the profile, as text.
        operators: In topological order, at least one; their scores are always modelled.
        clocks_mhz: Ascending, the last is the highest clock, float64[n].
        latency_s: Time of one pass at each clock, float64[n].
        power_w: Board power while it runs at each clock, float64[n]; NaN where not known.
        idle_w: Board power while nothing runs at each clock, float64[n]; NaN where not known.
        calibration_ratio: Factor that the sum of the operators' modelled times was multiplied by.

    Raises:
        DataError: No operators, or curves that do not fit together.
    """

    model: str
    device: str
    quality: Quality
    source: str
    operators: tuple[ScoredOperator, ...]
    clocks_mhz: FloatArray
    latency_s: FloatArray
    power_w: FloatArray
    idle_w: FloatArray
    calibration_ratio: float = 1.0

    def __init__(
        self,
        model: str,
        device: str,
        quality: Quality,
        source: str,
        operators: tuple[ScoredOperator, ...],
        clocks_mhz: npt.ArrayLike,
        latency_s: npt.ArrayLike,
        power_w: npt.ArrayLike,
        idle_w: npt.ArrayLike,
        calibration_ratio: float = 1.0,
    ) -> None:
        if not operators:
            raise DataError(f"{model} has no operators", hint="an empty model cannot be profiled or placed")
        arrays = [readonly(each, np.float64) for each in (clocks_mhz, latency_s, power_w, idle_w)]
        clocks, latency = arrays[0], arrays[1]
        if len({len(array) for array in arrays}) != 1 or len(clocks) < 2 or not bool(np.all(np.diff(clocks) > 0)):
            raise DataError(f"{model}: a clock curve needs two or more ascending clocks and a value for each")
        if not bool(np.all((clocks > 0) & (latency > 0) & np.isfinite(latency))):
            raise DataError(f"{model}: clocks and latencies of a curve must be finite and above 0")
        values = (model, device, quality, source, operators, *arrays, calibration_ratio)
        for slot, value in zip(fields(self), values, strict=True):
            object.__setattr__(self, slot.name, value)

    @property
    def score(self) -> float:
        """Sensitivity of the whole model between the highest clock and half of it (or the lowest known).

        It is measured where the curve is; else it is the operators' mean, weighted by their time, which is the same.
        """
        if self.quality is not Quality.MEASURED:
            total = math.fsum(operator.time_s for operator in self.operators)
            return math.fsum(operator.score * operator.time_s for operator in self.operators) / total
        top = float(self.clocks_mhz[-1])
        low = max(top / 2, float(self.clocks_mhz[0]))
        slow, fast = np.interp([low, top], self.clocks_mhz, self.latency_s)
        return float((slow / fast - 1.0) / (1.0 - low / top))

    @property
    def phases(self) -> tuple[str, ...]:
        """Names of the phases, in order of first appearance."""
        return tuple(dict.fromkeys(operator.cost.phase for operator in self.operators))

    def phase_score(self, phase: str) -> float:
        """Score of one phase: the mean of its operators, weighted by their time.

        Raises:
            KeyError: No such phase.
        """
        mine = [operator for operator in self.operators if operator.cost.phase == phase]
        if not mine:
            raise KeyError(phase)
        total = math.fsum(operator.time_s for operator in mine)
        return math.fsum(operator.score * operator.time_s for operator in mine) / total

    def phase_share(self, phase: str) -> float:
        """Share of the pass a phase takes at the highest clock."""
        total = math.fsum(operator.time_s for operator in self.operators)
        return math.fsum(each.time_s for each in self.operators if each.cost.phase == phase) / total

    @property
    def parameter_bytes(self) -> float:
        """Bytes of the model's weights."""
        return math.fsum(operator.cost.parameter_bytes for operator in self.operators)

    def as_dict(self) -> dict[str, Any]:
        """The profile as a JSON-ready object."""
        return {
            "schema": SCHEMA,
            "model": self.model,
            "device": self.device,
            "quality": self.quality.value,
            "source": self.source,
            "score": self.score,
            "calibration_ratio": self.calibration_ratio,
            "phases": {
                phase: {"score": self.phase_score(phase), "share_ratio": self.phase_share(phase)}
                for phase in self.phases
            },
            "curve": {
                "clock_mhz": self.clocks_mhz.tolist(),
                "latency_s": self.latency_s.tolist(),
                "power_w": known_numbers(self.power_w.tolist()),
                "idle_w": known_numbers(self.idle_w.tolist()),
            },
            "operators": [_operator_as_dict(operator) for operator in self.operators],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ClockProfile:
        """The inverse of :meth:`as_dict`.

        Raises:
            DataError: The data is not a clock profile, or has a schema that this version does not support.
        """
        schema = data.get("schema") if hasattr(data, "get") else None
        if schema != SCHEMA:
            raise DataError(
                f"not a clock profile: schema is {schema!r}, expected {SCHEMA!r}",
                hint="write one with: joulery profile MODEL --clocks -o FILE",
            )
        try:
            curve = data["curve"]
            return cls(
                model=str(data["model"]),
                device=str(data["device"]),
                quality=Quality(data["quality"]),
                source=str(data["source"]),
                operators=tuple(_operator_from_dict(each) for each in data["operators"]),
                clocks_mhz=curve["clock_mhz"],
                latency_s=curve["latency_s"],
                power_w=[or_nan(value) for value in curve["power_w"]],
                idle_w=[or_nan(value) for value in curve["idle_w"]],
                calibration_ratio=float(data["calibration_ratio"]),
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"not a usable clock profile: {type(error).__name__} {error}", hint="run joulery profile --clocks again"
            ) from error


def _operator_as_dict(operator: ScoredOperator) -> dict[str, Any]:
    cost = operator.cost
    return {
        "name": cost.name,
        "type": cost.type,
        "kind": cost.kind.value,
        "phase": cost.phase,
        "count": cost.count,
        "flops": cost.flops,
        "traffic_bytes": cost.traffic_bytes,
        "parameter_bytes": cost.parameter_bytes,
        "output_bytes": cost.output_bytes,
        "score": operator.score,
        "time_s": operator.time_s,
    }


def _operator_from_dict(data: Mapping[str, Any]) -> ScoredOperator:
    cost = OperationCost(
        name=str(data["name"]),
        flops=float(data["flops"]),
        traffic_bytes=float(data["traffic_bytes"]),
        count=float(data["count"]),
        type=str(data["type"]),
        kind=OperatorKind(data["kind"]),
        phase=str(data["phase"]),
        parameter_bytes=float(data["parameter_bytes"]),
        output_bytes=float(data["output_bytes"]),
    )
    return ScoredOperator(cost, float(data["score"]), float(data["time_s"]))
