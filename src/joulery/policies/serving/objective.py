"""Clover's objective (SC'23, section 4.1): carbon saved against accuracy lost, within a latency."""

from __future__ import annotations

import math
from dataclasses import dataclass

from joulery.domain.energy.carbon import JOULES_PER_KWH


def accuracy_change_ratio(accuracy_ratio: float, base_accuracy_ratio: float) -> float:
    """Eq. 1: relative change of accuracy against the most accurate variant; 0 or less."""
    return (accuracy_ratio - base_accuracy_ratio) / base_accuracy_ratio


def carbon_change_ratio(carbon_g: float, base_carbon_g: float) -> float:
    """Eq. 2: carbon saved a request, relative to the yardstick; negative when more is emitted."""
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


def has_moved(now_g: float, planned_g: float, base_g: float, threshold_ratio: float) -> bool:
    """Whether to plan again: the intensity has left the planned one by more than a share of the base.

    Clover's artifact measures the move against the fixed base, 5 % of 250 g/kWh; all three times PUE.
    """
    return abs(now_g - planned_g) > threshold_ratio * base_g


@dataclass(frozen=True, slots=True)
class Objective:
    """Eqs. 1-3 with the user's numbers in them.

    Attributes:
        lambda_ratio: Weight of carbon against accuracy, 0 to 1.
        base_accuracy_ratio: Accuracy of the most accurate variant.
        base_energy_j: Joules a request of the yardstick, the most accurate variant everywhere; counted as the
            candidates' are.
        base_g_per_kwh: Intensity of the yardstick.
        base_pue: Facility energy per IT energy of the yardstick.
        pue: The facility's own, now.
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
        """Grams a request of the yardstick (``C_base``)."""
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

    def score(self, accuracy_ratio: float, energy_j: float, g_per_kwh: float) -> float:
        """Eq. 3."""
        return weigh(self.lambda_ratio, self.carbon_change(energy_j, g_per_kwh), self.accuracy_change(accuracy_ratio))

    def calls_for_a_plan(self, g_per_kwh: float, planned_g_per_kwh: float, threshold_ratio: float) -> bool:
        """Whether the intensity has moved far enough from the planned one (PUE included)."""
        return has_moved(
            g_per_kwh * self.pue,
            planned_g_per_kwh * self.pue,
            self.base_g_per_kwh * self.base_pue,
            threshold_ratio,
        )
