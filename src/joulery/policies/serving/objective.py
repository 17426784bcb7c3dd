"""Clover's objective (SC'23, section 4.1): carbon saved against accuracy lost, within a latency."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from joulery.domain.arrays import FloatArray
from joulery.domain.energy.carbon import JOULES_PER_KWH
from joulery.domain.serving.service import Slo, SloScope


def accuracy_change_ratio(accuracy_ratio: float, base_accuracy_ratio: float) -> float:
    """Eq. 1: relative change of accuracy against the most accurate variant; 0 or less."""
    return (accuracy_ratio - base_accuracy_ratio) / base_accuracy_ratio


def carbon_change_ratio(carbon_g: float, base_carbon_g: float) -> float:
    """Eq. 2: carbon saved a request, relative to the baseline; negative when more is emitted."""
    return (base_carbon_g - carbon_g) / base_carbon_g


def weigh(lambda_ratio: float, carbon_change: float, accuracy_change: float) -> float:
    """Eq. 3: what Clover maximises."""
    return lambda_ratio * carbon_change + (1.0 - lambda_ratio) * accuracy_change


def rank(score: float, latency_s: float, limit_s: float) -> tuple[bool, float]:
    """A key that orders candidates, best last: any that keeps the limit before any that does not.

    Clover's Eq. 6 multiplies the score by limit over latency instead, which makes a violation look *better* when the
    score is negative. Among violations, the one nearest to the limit counts as best here.
    """
    return (True, score) if latency_s <= limit_s else (False, -latency_s)


@dataclass(frozen=True, slots=True)
class ServiceObjectives:
    """Objectives of a service; may change while it runs.

    Attributes:
        lambda_ratio: Weight of carbon against accuracy, 0 to 1.
        slo: Latency to keep.
        minimum_accuracy_ratio: Mean accuracy never to go below.
        threatened_accuracy_ratio: The same while the SLO is threatened; ``minimum_accuracy_ratio`` when None: the floor
            comes before the SLO unless the user sets this floor.
    """

    lambda_ratio: float
    slo: Slo
    minimum_accuracy_ratio: float = 0.0
    threatened_accuracy_ratio: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """The objectives as a JSON-ready dictionary."""
        slo = {"latency_s": self.slo.latency_s, "quantile": self.slo.quantile, "scope": self.slo.scope.value}
        numbers = ("lambda_ratio", "minimum_accuracy_ratio", "threatened_accuracy_ratio")
        return {"slo": slo, **{name: getattr(self, name) for name in numbers}}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ServiceObjectives:
        """The inverse of :meth:`as_dict`.

        Raises:
            KeyError, TypeError, ValueError: ``data`` is not what ``as_dict`` writes.
        """
        slo = dict(data["slo"])
        return cls(**{**data, "slo": Slo(**{**slo, "scope": SloScope(slo["scope"])})})


NO_BASE_G_PER_KWH = 1.0
"""Base intensity of a policy that states none: its choice does not depend on it, and its messages name joules."""


@dataclass(frozen=True, slots=True)
class ReplanTrigger:
    """Thresholds at which a change of the grid or of the demand starts a new search.

    Attributes:
        base_g_per_kwh: Carbon intensity of the baseline, PUE included.
        pue: Facility energy per IT energy now.
        intensity_ratio: Search again when the intensity moved by more than this share of the base ...
        of_previous: ... or, as Clover's paper words it, of the intensity searched at last (its artifact uses the base).
        rate_ratio: Search again when the demand left the planned one by more than this share.
        settle_s: Time constant of the smoothed demand; seconds after a change before demand and latency count.
    """

    base_g_per_kwh: float
    pue: float = 1.0
    intensity_ratio: float = 0.05
    of_previous: bool = False
    rate_ratio: float = 0.3
    settle_s: float = 5.0

    def intensity_moved(self, now_g: float, planned_g: float) -> bool:
        """Whether the intensity (g/kWh, PUE left out; below zero counts as zero) left the planned one."""
        now, planned = max(0.0, now_g) * self.pue, max(0.0, planned_g) * self.pue
        return abs(now - planned) > self.intensity_ratio * (planned if self.of_previous else self.base_g_per_kwh)

    def demand_moved(self, now_rps: float, planned_rps: float) -> bool:
        """Whether the demand left the planned one."""
        ratio = now_rps / planned_rps
        return max(ratio, 1 / ratio) > 1 + self.rate_ratio


@dataclass(frozen=True, slots=True)
class Objective:
    """Eqs. 1-3 with the user's numbers in them.

    Attributes:
        lambda_ratio: Weight of carbon against accuracy, 0 to 1.
        base_accuracy_ratio: Accuracy of the most accurate variant.
        base_energy_j: Joules a request of the baseline, the most accurate variant everywhere; counted as the
            candidates' are.
        base_g_per_kwh: Intensity of the baseline.
        base_pue: Facility energy per IT energy of the baseline.
        pue: Facility energy per IT energy now.
    """

    lambda_ratio: float
    base_accuracy_ratio: float
    base_energy_j: float
    base_g_per_kwh: float
    base_pue: float = 1.0
    pue: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.lambda_ratio <= 1:
            raise ValueError(f"lambda is {self.lambda_ratio}, expected 0 to 1")
        for name in ("base_accuracy_ratio", "base_energy_j", "base_g_per_kwh", "base_pue", "pue"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise ValueError(f"{name} is {getattr(self, name)}, expected a finite value above 0")

    @property
    def base_carbon_g(self) -> float:
        """Grams a request of the baseline (``C_base``)."""
        return self.base_energy_j * self.base_pue * self.base_g_per_kwh / JOULES_PER_KWH

    def carbon_change(self, energy_j: float, g_per_kwh: float) -> float:
        """Eq. 2 for a request of so many joules at an intensity; an intensity below zero counts as zero.

        (A marginal signal can be negative. Taken literally, it would pay to waste energy.)
        """
        carbon_g = energy_j * self.pue * max(0.0, g_per_kwh) / JOULES_PER_KWH
        return carbon_change_ratio(carbon_g, self.base_carbon_g)

    def accuracy_change(self, accuracy_ratio: float) -> float:
        """Eq. 1."""
        return accuracy_change_ratio(accuracy_ratio, self.base_accuracy_ratio)

    def score(
        self, accuracy_ratio: float, energy_j: float, g_per_kwh: float, lambda_ratio: float | None = None
    ) -> float:
        """Eq. 3; with another weight of carbon where one is given."""
        weight = self.lambda_ratio if lambda_ratio is None else lambda_ratio
        return weigh(weight, self.carbon_change(energy_j, g_per_kwh), self.accuracy_change(accuracy_ratio))

    def scores(self, accuracy_ratio: FloatArray, energy_j: FloatArray, g_per_kwh: float) -> FloatArray:
        """As :meth:`score`, to the last digit, for arrays of accuracies and joules, float64[n]."""
        carbon_g = energy_j * self.pue * max(0.0, g_per_kwh) / JOULES_PER_KWH
        carbon_change = (self.base_carbon_g - carbon_g) / self.base_carbon_g
        accuracy_change = (accuracy_ratio - self.base_accuracy_ratio) / self.base_accuracy_ratio
        scores = self.lambda_ratio * carbon_change + (1.0 - self.lambda_ratio) * accuracy_change
        return np.asarray(scores, np.float64)
