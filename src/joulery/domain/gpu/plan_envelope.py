"""Joint plans over a price and a load, made once and looked up: which plan is best here.

At one load a plan's cost is a line in the price, and the least of all lines is the best plan that is known. A plan for
a higher load serves a lower one, its requests in proportion, so a look-up takes the least line among the plans for the
load asked for and above. What it finds can be run, so it is never below the best plan there is; it rises with the load,
and in the price it is concave.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from joulery.domain.arrays import FloatArray, IntArray
from joulery.domain.errors import ConfigError, InfeasibleError
from joulery.domain.gpu.optimum import PlanObjective, objective_of
from joulery.domain.gpu.provisioning import PlannedGpu
from joulery.domain.quality import Quality

_SAME = 1e-9
"""Loads that differ by less, as a ratio, are one."""


class PriceAxis(NamedTuple):
    """What is priced, and what a plan costs beside it.

    Attributes:
        what: ``carbon``, in dollars a kilogram, or ``energy``, in dollars a kWh.
        rent: Weight of a dollar of rent.
        per_kwh: Dollars a kWh beside the price.
        g_per_kwh: Carbon intensity; None where energy is priced.
        pue: Power usage effectiveness.
        embodied_g_per_hour: Grams an hour of each powered GPU.
    """

    what: str
    rent: float = 1.0
    per_kwh: float = 0.0
    g_per_kwh: float | None = None
    pue: float = 1.0
    embodied_g_per_hour: float = 0.0

    @property
    def unit(self) -> str:
        """Unit of the price."""
        return "USD/kg" if self.what == "carbon" else "USD/kWh"

    def objective(self, price: float) -> PlanObjective:
        """What is minimised at a price, in dollars an hour.

        Raises:
            ConfigError: The price is no number from 0, or carbon has no intensity.
        """
        if not 0 <= price < math.inf:
            raise ConfigError(f"a price of {self.what} is a number from 0", got=str(price), expected=self.unit)
        free = price == 0 and self.rent == 0 and self.per_kwh == 0
        energy = self.per_kwh + (price if self.what == "energy" else 0.0)
        carbon = price if self.what == "carbon" else 0.0
        weights = {"cost": 1.0 if free else self.rent, "energy": energy, "carbon": carbon}
        found = objective_of(weights, self.g_per_kwh, self.pue, self.embodied_g_per_hour)
        return replace(found, per_usd=self.rent) if free else found


class EnvelopePlan(NamedTuple):
    """A plan of an envelope.

    Attributes:
        name: Its name within the envelope.
        load: The highest load that it serves, as a ratio of the site's rates.
        price: The price at which it was found.
        bound: What no plan costs less than at the load it was made for, at that price.
        gpus: The plan, at the highest load.
        made_load: The load it was made for, where that is lower than the highest that it serves; 0 for the highest.
    """

    name: str
    load: float
    price: float
    bound: float
    gpus: tuple[PlannedGpu, ...]
    made_load: float = 0.0

    @property
    def usd_per_hour(self) -> float:
        """Rent."""
        return math.fsum(gpu.usd_per_hour for gpu in self.gpus)

    @property
    def requests_w(self) -> float:
        """Power that follows the load, at the plan's own."""
        return math.fsum(each.requests_w for gpu in self.gpus for each in gpu.instances)

    @property
    def power_w(self) -> float:
        """Power at the plan's own load, hosts included."""
        return math.fsum(gpu.power_w for gpu in self.gpus)

    @property
    def accuracy_ratio(self) -> float:
        """Mean accuracy of the answers of the services that state one; NaN where none does."""
        known = [e for gpu in self.gpus for e in gpu.instances if not math.isnan(e.accuracy_ratio)]
        rate = math.fsum(each.rate_rps for each in known)
        return math.fsum(each.rate_rps * each.accuracy_ratio for each in known) / rate if rate > 0 else math.nan

    def power_at_w(self, load: float) -> float:
        """Power at a lower load."""
        return self.power_w - self.requests_w * (1 - load / self.load)

    def at(self, load: float) -> tuple[PlannedGpu, ...]:
        """The GPUs at a lower load: every instance gets as many fewer requests."""
        ratio = load / self.load
        return tuple(_scaled(gpu, ratio) for gpu in self.gpus)


def _scaled(gpu: PlannedGpu, ratio: float) -> PlannedGpu:
    instances = tuple(
        replace(each, rate_rps=ratio * each.rate_rps, requests_w=ratio * each.requests_w) for each in gpu.instances
    )
    saved_w = (1 - ratio) * math.fsum(each.requests_w for each in gpu.instances)
    return replace(gpu, power_w=gpu.power_w - saved_w, instances=instances)


class EnvelopeError(NamedTuple):
    """How far a look-up may be above the best plan, between two loads.

    Attributes:
        from_load, to_load: Above the one, up to the other.
        price: Where it is farthest.
        error_ratio: Cost of a look-up over the least that a plan may cost, less 1, where that is greatest.
        above_load: The load just above which that is, or from which it rises up to there.
    """

    from_load: float
    to_load: float
    price: float
    error_ratio: float
    above_load: float = math.nan


@dataclass(frozen=True)
class Envelope:
    """Plans over a price and a load.

    Attributes:
        axis: What is priced.
        plans: The plans.
        prices: Prices for which it was made, from the lowest to the highest.
        loads: Loads for which it was made, in increasing order.
        site: What it was made for, in words that a later run compares.
        quality: How well the coefficients behind it are known.
        least_requests_w: Watts that the requests of load 1 take at least, whatever the plan.
    """

    axis: PriceAxis
    plans: tuple[EnvelopePlan, ...]
    prices: tuple[float, ...]
    loads: tuple[float, ...]
    site: str = ""
    quality: Quality = Quality.MODELLED
    least_requests_w: float = 0.0
    _order: IntArray = field(init=False, repr=False, compare=False)
    _rows: FloatArray = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.plans:
            raise ConfigError("an envelope has no plan", expected="at least one")
        zero, one = self.axis.objective(0.0), self.axis.objective(1.0)
        rows = []
        for each in self.plans:
            gpus, standing_w = len(each.gpus), each.power_w - each.requests_w
            per_load_w = each.requests_w / each.load
            rent = zero.value(0.0, each.usd_per_hour, gpus)
            rows.append(
                (
                    each.load * (1 + _SAME),
                    rent + zero.per_w * standing_w,
                    zero.per_w * per_load_w,
                    (one.per_w - zero.per_w) * standing_w + (one.per_gpu - zero.per_gpu) * gpus,
                    (one.per_w - zero.per_w) * per_load_w,
                )
            )
        order = np.argsort([-row[0] for row in rows], kind="stable")
        object.__setattr__(self, "_order", order)
        object.__setattr__(self, "_rows", np.array(rows, np.float64)[order].T.copy())

    def costs(self, price: float, load: float) -> tuple[IntArray, FloatArray]:
        """Indices and costs of the plans that serve a load, at a price, in dollars an hour."""
        fit = int(np.searchsorted(-self._rows[0], -load, side="right"))
        _, fixed, per_load, per_price, per_both = self._rows[:, :fit]
        return self._order[:fit], fixed + per_load * load + price * (per_price + per_both * load)

    def lookup(self, price: float, load: float) -> tuple[EnvelopePlan, float]:
        """The best known plan for a price and a load, and its cost there, in dollars an hour.

        Raises:
            ConfigError: The price or the load is no number from 0.
            InfeasibleError: The load is above all that it was made for.
        """
        if not (0 <= price < math.inf and 0 < load < math.inf):
            raise ConfigError("a look-up needs a price from 0 and a load above 0", got=f"price {price}, load {load}")
        order, costs = self.costs(price, load)
        if not len(costs):
            most = max(each.load for each in self.plans)
            raise InfeasibleError(
                f"the envelope was made for loads up to {most:g}",
                binding="load",
                nearest={"load": most},
                hint="make it again with a higher load, or plan afresh",
            )
        best = int(np.argmin(costs))
        return self.plans[int(order[best])], float(costs[best])

    @property
    def gaps(self) -> tuple[float, ...]:
        """How far each plan's bound is below a look-up at its own load and price, as a ratio; the nearest first."""
        found = []
        for each in self.plans:
            cost = float(self.costs(each.price, each.made_load or each.load)[1].min())
            found.append(max(0.0, 1 - each.bound / cost) if cost > 0 else 0.0)
        return tuple(sorted(found))

    @property
    def gap_ratio(self) -> float:
        """The greatest of the gaps."""
        return self.gaps[-1]

    def errors(self) -> tuple[EnvelopeError, ...]:
        """Between each two loads, how far a look-up may be above the best plan known; the farthest first.

        A plan for a higher load serves a lower one for the same less the watts of its requests. So from one load to a
        higher one the least cost rises by at least the watts that the requests between them take.
        """
        return tuple(sorted((self.error(*pair) for pair in itertools.pairwise(self.loads)), key=_farthest))

    def error(self, from_load: float, to_load: float) -> EnvelopeError:
        """How far a look-up may be above the best plan between two loads.

        Between two highest loads of plans the same plans serve. The cost of each is a line in the load, and so is the
        least cost: their ratio is greatest at one of the ends.
        """
        prices = np.array(self.prices, np.float64)
        least = self._lines(prices, from_load, from_load).min(axis=1)
        rise = np.array([self.axis.objective(price).per_w for price in self.prices]) * self.least_requests_w
        inside = sorted({each.load for each in self.plans if from_load * (1 + 2 * _SAME) < each.load < to_load})
        worst = EnvelopeError(from_load, to_load, self.prices[0], -math.inf, from_load)
        for low, high in itertools.pairwise([from_load, *inside, to_load]):
            serving = high * (1 - _SAME)
            ends = [(self._lines(prices, serving, load).T, least + rise * (load - from_load)) for load in (low, high)]
            if not ends[0][0].size:
                return worst._replace(error_ratio=math.inf, above_load=low)
            with np.errstate(divide="ignore", invalid="ignore"):
                ratios = np.maximum(*(np.where(floor > 0, cost / floor, 1.0) for cost, floor in ends)).min(axis=0)
            at = int(np.argmax(ratios))
            if ratios[at] - 1 > worst.error_ratio:
                worst = worst._replace(price=self.prices[at], error_ratio=float(ratios[at] - 1), above_load=low)
        return worst

    def _lines(self, prices: FloatArray, serving: float, load: float) -> FloatArray:
        """Costs at a load of the plans that serve another, float64[prices, plans]."""
        fit = int(np.searchsorted(-self._rows[0], -serving, side="right"))
        _, fixed, per_load, per_price, per_both = self._rows[:, :fit]
        costs = fixed + per_load * load + prices[:, None] * (per_price + per_both * load)
        return np.asarray(costs, np.float64)

    def frontier(self, load: float) -> tuple[tuple[EnvelopePlan, float, float], ...]:
        """Plans that are best at some price for a load, each with the prices from and up to which it is."""
        prices = _breaks(self, load)
        found: list[tuple[EnvelopePlan, float, float]] = []
        for low, high in itertools.pairwise(prices):
            plan = self.lookup((low + high) / 2, load)[0]
            if found and found[-1][0] is plan:
                found[-1] = (plan, found[-1][1], high)
            else:
                found.append((plan, low, high))
        return tuple(found)


def _farthest(error: EnvelopeError) -> tuple[float, float]:
    return (-error.error_ratio, error.from_load)


def _breaks(envelope: Envelope, load: float) -> list[float]:
    """Prices between which one plan is best, found by cutting in two where the best plans of both ends differ."""
    ends = [envelope.prices[0], envelope.prices[-1]]
    if ends[1] <= ends[0]:
        return [ends[0], ends[0] * (1 + _SAME) + _SAME]
    found = set(ends)

    def line(price: float) -> tuple[int, float, float]:
        order, costs = envelope.costs(price, load)
        more = envelope.costs(price + 1.0, load)[1]
        best = int(np.argmin(costs))
        slope = float(more[best] - costs[best])
        return int(order[best]), float(costs[best]) - price * slope, slope

    def cut(low: float, high: float) -> None:
        one, other = line(low), line(high)
        if one[0] == other[0] or one[2] - other[2] <= 1e-12:
            return
        at = (other[1] - one[1]) / (one[2] - other[2])
        if not low < at < high:
            return
        found.add(at)
        if line(at)[0] not in (one[0], other[0]):
            cut(low, at)
            cut(at, high)

    cut(ends[0], ends[1])
    return sorted(found)
