"""Optimality of a joint plan: its objective, its bound, and the certificate with which the bound can be checked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from joulery.domain.errors import ConfigError

_W_PER_KW = 1000.0
_G_PER_KG = 1000.0


@dataclass(frozen=True, slots=True)
class PlanObjective:
    """Objective that a plan minimises: a sum of watts and dollars, each at its price.

    Attributes:
        name: ``energy``, ``carbon``, ``cost`` or ``weights``.
        unit: Unit of the value, such as ``W``.
        per_w: Value of a watt.
        per_usd: Value of a dollar an hour.
        g_per_kwh: Carbon intensity, g/kWh; None where none is known.
        pue: Watts of the site for each watt of the GPUs and their hosts.
        embodied_g_per_hour: Embodied grams an hour of each powered GPU, as stated.
        per_gpu: Value of a powered GPU beside its watts and its price.
    """

    name: str = "energy"
    unit: str = "W"
    per_w: float = 1.0
    per_usd: float = 0.0
    g_per_kwh: float | None = None
    pue: float = 1.0
    embodied_g_per_hour: float = 0.0
    per_gpu: float = 0.0

    def value(self, power_w: float, usd_per_hour: float, gpus: int) -> float:
        """Value of the objective."""
        return self.per_w * power_w + self.per_usd * usd_per_hour + self.per_gpu * gpus

    def carbon_g_per_hour(self, power_w: float, gpus: int) -> float | None:
        """Grams an hour; None where no intensity is known."""
        if self.g_per_kwh is None:
            return None
        return power_w * self.pue * self.g_per_kwh / _W_PER_KW + gpus * self.embodied_g_per_hour


def objective_of(
    name: str | Mapping[str, float],
    g_per_kwh: float | None = None,
    pue: float = 1.0,
    embodied_g_per_hour: float = 0.0,
) -> PlanObjective:
    """Create an objective from its name or from weights.

    Args:
        name: ``energy`` (W), ``cost`` (USD/h), ``carbon`` (g/h), or weights: dollars per kWh under ``energy``, per
            kilogram of CO2 under ``carbon``, per dollar of rent under ``cost``.
        g_per_kwh: Carbon intensity.
        pue: Power usage effectiveness of the site, from 1.
        embodied_g_per_hour: Grams an hour of each GPU.

    Raises:
        ConfigError: The objective is unknown, a value is out of range, all weights are 0, or grams lack an intensity.
    """
    if not 1 <= pue < math.inf:
        raise ConfigError("a power usage effectiveness is a number from 1", got=str(pue))
    if g_per_kwh is not None and not 0 <= g_per_kwh < math.inf:
        raise ConfigError("a carbon intensity is a number from 0", got=str(g_per_kwh), expected="such as 300 g/kWh")
    if not 0 <= embodied_g_per_hour < math.inf:
        raise ConfigError("embodied grams are a number from 0", got=str(embodied_g_per_hour))
    if isinstance(name, Mapping):
        return _weighted(name, g_per_kwh, pue, embodied_g_per_hour)
    if name == "energy":
        return PlanObjective("energy", "W", 1.0, 0.0, g_per_kwh, pue, embodied_g_per_hour)
    if name == "cost":
        return PlanObjective("cost", "USD/h", 0.0, 1.0, g_per_kwh, pue, embodied_g_per_hour)
    if name == "carbon":
        per_w = pue * _intensity(g_per_kwh) / _W_PER_KW
        return PlanObjective("carbon", "g/h", per_w, 0.0, g_per_kwh, pue, embodied_g_per_hour, embodied_g_per_hour)
    raise ConfigError("no such objective", got=str(name), expected="energy, carbon, cost or weights")


def _weighted(
    weights: Mapping[str, float], g_per_kwh: float | None, pue: float, embodied_g_per_hour: float
) -> PlanObjective:
    unknown = set(weights) - {"energy", "carbon", "cost"}
    if unknown:
        raise ConfigError("no such weight", got=", ".join(sorted(unknown)), expected="energy, carbon or cost")
    if not all(0 <= each < math.inf for each in weights.values()) or not any(weights.values()):
        raise ConfigError(
            "weights are numbers from 0, one of them above 0",
            got=", ".join(f"{key} {value}" for key, value in weights.items()),
            pointer="plan.weights",
            expected="energy (USD/kWh), carbon (USD/kg) or cost (1 for rent) above 0",
        )
    per_kwh, per_kg = weights.get("energy", 0.0), weights.get("carbon", 0.0)
    if per_kg > 0:
        per_kwh += per_kg * pue * _intensity(g_per_kwh, "plan.weights.carbon") / _G_PER_KG
    return PlanObjective(
        "weights",
        "USD/h",
        per_kwh / _W_PER_KW,
        weights.get("cost", 0.0),
        g_per_kwh,
        pue,
        embodied_g_per_hour,
        per_kg * embodied_g_per_hour / _G_PER_KG,
    )


def _intensity(g_per_kwh: float | None, pointer: str = "--intensity") -> float:
    if g_per_kwh is None or g_per_kwh <= 0:
        raise ConfigError(
            "grams need a carbon intensity above 0; none is assumed",
            got=None if g_per_kwh is None else f"{g_per_kwh:g} g/kWh",
            pointer=pointer,
            expected="such as plan.intensity: 300 g/kWh",
            hint="add it to the site, give --intensity '300 g/kWh', or plan without grams",
        )
    return g_per_kwh


class CertifiedInstance(NamedTuple):
    """One instance of a certified pattern.

    Attributes:
        service, variant: What it serves, with which model.
        capacity_rps: The rate that it is provided for.
        overhead_w: Power that its presence adds to the GPU, without requests.
        share_ratio, batch: As in the plan.
    """

    service: str
    variant: str
    capacity_rps: float
    overhead_w: float
    share_ratio: float
    batch: int


class CertifiedPattern(NamedTuple):
    """One GPU layout in the optimiser's set of patterns.

    Attributes:
        type: GPU type.
        clock_mhz: Its clock.
        standing_w: Power of the idle board and its host.
        planned: How many of them the plan has.
        instances: Its instances.
    """

    type: str
    clock_mhz: float
    standing_w: float
    planned: int
    instances: tuple[CertifiedInstance, ...]


class CertifiedCost(NamedTuple):
    """Dynamic joules of a request of a service's variant on a GPU type at a clock."""

    service: str
    variant: str
    type: str
    clock_mhz: float
    request_j: float
    accuracy_ratio: float


class CertifiedSlice(NamedTuple):
    """One choice for a slice of a GPU type at a clock.

    Attributes:
        service, variant: What it serves, with which model.
        type, clock_mhz: The GPU.
        slice: MIG profile.
        processes, batch: Processes there, and their largest batch.
        capacity_rps: The rate that it keeps, at most the service's.
        request_j: Dynamic joules of a request.
        accuracy_ratio: Of the variant, as stated.
    """

    service: str
    variant: str
    type: str
    clock_mhz: float
    slice: str
    processes: int
    batch: int
    capacity_rps: float
    request_j: float
    accuracy_ratio: float


class CertifiedPartition(NamedTuple):
    """One MIG partition of a GPU type at a clock.

    Attributes:
        type, clock_mhz: The GPU.
        standing_w: Power of the idle board and its host.
        usd_per_hour: Its price.
        planned: How many of them the plan has.
        slices: MIG profiles, one for each slice.
    """

    type: str
    clock_mhz: float
    standing_w: float
    usd_per_hour: float
    planned: int
    slices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PlanCertificate:
    """All data with which a plan's bound can be checked independently.

    The prices prove ``Σ demand_price · rate - power_price · cap - Σ pool_price · available``. It holds when no layout
    of a GPU that fits is worth more than it costs at these prices, where a request a second of a service's variant is
    worth ``max(0, demand_price + accuracy_price · (accuracy - floor) - (per_w + power_price) · joules)``. A partitioned
    GPU is worth the sum, over its slices, of the best choice for each.

    Attributes:
        objective: What is minimised.
        value: Value of the plan.
        bound: Lower bound on the value of any plan within the choices. The prices prove it or, for partitioned GPUs,
            branch and bound over every choice of a better plan where that proves a higher bound.
        method: The choices that the bound covers, and what proves it.
        optimal: Whether the plan is proven to be optimal, to the solver's tolerance: every layout that a better plan
            could have was known when the integer problem was solved.
        power_w: Predicted power of all GPUs and hosts.
        demand_price: By service: what one more request a second costs.
        accuracy_price: By service: what one request a second costs for each unit of accuracy its floor is higher.
        pool_price: By GPU type: saving of one more GPU.
        power_price: Saving of one more watt under the cap.
        rates_rps, floors_ratio: Demand and accuracy floor by service.
        available: Available GPUs by type; None for no limit.
        power_cap_w: The power cap; None without a cap.
        carbon_cap_g_per_hour: The carbon cap that corresponds to ``power_cap_w``; None where grams are not capped.
        costs: Joules by service, variant, type and clock.
        patterns: Layouts known at the end, those of the plan first.
        slices: Every choice for a slice; empty where no GPU can be partitioned.
        partitions: Every MIG partition of a GPU.
        relaxed: The bound that the prices prove; NaN where it is ``bound``.
        alike: Names of services that were planned as one kind: ``costs`` and ``patterns`` name the first of them, and
            an instance may serve any. Their prices are equal.
        limit_reached: Whether the integer solver ended at its limit of branchings or seconds: the plan is the best one
            found until then, and further search may close more of the gap.
    """

    objective: PlanObjective
    value: float
    bound: float
    method: str
    optimal: bool
    power_w: float
    demand_price: Mapping[str, float] = field(default_factory=dict)
    accuracy_price: Mapping[str, float] = field(default_factory=dict)
    pool_price: Mapping[str, float] = field(default_factory=dict)
    power_price: float = 0.0
    rates_rps: Mapping[str, float] = field(default_factory=dict)
    floors_ratio: Mapping[str, float] = field(default_factory=dict)
    available: Mapping[str, int | None] = field(default_factory=dict)
    power_cap_w: float | None = None
    costs: tuple[CertifiedCost, ...] = ()
    patterns: tuple[CertifiedPattern, ...] = ()
    slices: tuple[CertifiedSlice, ...] = ()
    partitions: tuple[CertifiedPartition, ...] = ()
    relaxed: float = math.nan
    alike: tuple[tuple[str, ...], ...] = ()
    carbon_cap_g_per_hour: float | None = None
    limit_reached: bool = False

    @property
    def carbon_price(self) -> float:
        """Saving of one more gram an hour under the carbon cap; 0 where grams are not capped."""
        if self.carbon_cap_g_per_hour is None or self.power_cap_w is None:
            return 0.0
        return self.power_price * self.power_cap_w / self.carbon_cap_g_per_hour

    @property
    def gap_ratio(self) -> float:
        """Gap of the bound below the plan, as a ratio of the plan's value."""
        return max(0.0, 1.0 - self.bound / self.value) if self.value > 0 else 0.0
