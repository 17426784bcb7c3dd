"""Envelopes: joint plans over a price and a load that are made once, and the look-up of the best one.

At one load a plan's cost is a line in the price, and the lowest of all lines belongs to the best known plan. A plan for
a higher load also serves a lower one, with its requests in proportion, so a look-up takes the lowest line among the
plans for the requested load and above. The plan found can be run, so its cost is never below that of the best plan
there is. The cost rises with the load and is concave in the price.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from joulery.domain.arrays import FloatArray, IntArray
from joulery.domain.errors import ConfigError, InfeasibleError
from joulery.domain.gpu.envelope_floors import Floors, PlannedPoint
from joulery.domain.gpu.optimum import PlanObjective, objective_of
from joulery.domain.gpu.provisioning import PlannedGpu
from joulery.domain.quality import Quality

_SAME = 1e-9
"""Loads that differ by a smaller ratio count as equal."""


class PriceAxis(NamedTuple):
    """The quantity that has a price, and the other costs of a plan.

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
        """The objective at a price, in dollars an hour.

        Raises:
            ConfigError: The price is not a number from 0, or carbon has no intensity.
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
        bound: Lower bound of the cost of any plan, at that price and the load it was made for.
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
        """Power that is proportional to the load, at the plan's own load."""
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
        """The GPUs at a lower load: every instance gets proportionally fewer requests."""
        ratio = load / self.load
        return tuple(_scaled(gpu, ratio) for gpu in self.gpus)

    def provided_at(self, load: float) -> tuple[PlannedGpu, ...]:
        """The GPUs at another load, with every instance provided for the same share of its service's rate."""
        ratio = load / self.load
        return tuple(
            replace(
                gpu,
                instances=tuple(
                    replace(each, rate_rps=ratio * each.rate_rps, provided_rps=ratio * each.provided_rps)
                    for each in gpu.instances
                ),
            )
            for gpu in self.gpus
        )


def _scaled(gpu: PlannedGpu, ratio: float) -> PlannedGpu:
    instances = tuple(
        replace(each, rate_rps=ratio * each.rate_rps, requests_w=ratio * each.requests_w) for each in gpu.instances
    )
    saved_w = (1 - ratio) * math.fsum(each.requests_w for each in gpu.instances)
    return replace(gpu, power_w=gpu.power_w - saved_w, instances=instances)


class EnvelopeError(NamedTuple):
    """Largest excess cost of a look-up over the best plan, between two loads.

    Attributes:
        from_load, to_load: The loads: above the first, up to the second.
        price: Price at which the error is greatest.
        error_ratio: Greatest ratio of a look-up's cost to the least that a plan may cost, minus 1.
    """

    from_load: float
    to_load: float
    price: float
    error_ratio: float


class ErrorTable(NamedTuple):
    """Largest excess cost of look-ups over the best plan known.

    Attributes:
        edges: Loads between which the same plans serve, in increasing order, float64[n + 1].
        ratios: Between each two of them, cost over the least that a plan may cost, minus 1, float64[n, prices].
    """

    edges: FloatArray
    ratios: FloatArray

    def part_within(self, ratio: float) -> float:
        """Share of all loads and prices, each weighted evenly, at which no look-up exceeds an error ratio."""
        widths = np.diff(self.edges)
        return float((widths @ (self.ratios <= ratio)).sum() / (widths.sum() * self.ratios.shape[1]))


class Regret(NamedTuple):
    """Bounds of a look-up's excess cost over the best plan there is, as a ratio of that plan's cost.

    Attributes:
        known_ratio: The bound if the plans made at the points of the envelope are the best there are.
        proven_ratio: The bound that is proven there: it is never exceeded, within the predictor and the choices.
    """

    known_ratio: float
    proven_ratio: float


@dataclass(frozen=True)
class Envelope:
    """Plans over a price and a load.

    Attributes:
        axis: The priced quantity.
        plans: The plans.
        prices: Prices for which it was made, from the lowest to the highest.
        loads: Loads for which it was made, in increasing order.
        site: Text that identifies what it was made for; a later run compares it.
        quality: How well the coefficients behind it are known.
        least_requests_w: Watts that the requests of load 1 take at least, whatever the plan.
        points: The points where plans were made, including those of plans that are best nowhere.
    """

    axis: PriceAxis
    plans: tuple[EnvelopePlan, ...]
    prices: tuple[float, ...]
    loads: tuple[float, ...]
    site: str = ""
    quality: Quality = Quality.MODELLED
    least_requests_w: float = 0.0
    points: tuple[PlannedPoint, ...] = ()
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
            ConfigError: The price is not a number from 0, or the load is not a number above 0.
            InfeasibleError: The load is above every load that the envelope was made for.
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
        """Gaps between the look-up and the bound at each point with a bound above 0, as ratios; the smallest first."""
        found = []
        for load, price, bound in self.planned:
            if bound <= 0:
                continue
            cost = float(self.costs(price, load)[1].min())
            found.append(max(0.0, 1 - bound / cost) if cost > 0 else 0.0)
        return tuple(sorted(found))

    @property
    def gap_ratio(self) -> float:
        """The greatest of the gaps."""
        return max(self.gaps, default=0.0)

    @property
    def planned(self) -> tuple[PlannedPoint, ...]:
        """The points where plans were made; those of the plans where an older file names no points."""
        return self.points or tuple(
            PlannedPoint(each.made_load or each.load, each.price, each.bound) for each in self.plans
        )

    @cached_property
    def _known(self) -> Floors:
        """Least cost of plans, if the best plans known at the points are the best there are."""
        return self._floors({point: float(self.costs(point.price, point.load)[1].min()) for point in self.planned})

    @cached_property
    def _proven(self) -> Floors:
        """Least cost of plans, from the proven bounds."""
        return self._floors({point: point.bound for point in self.planned})

    def _floors(self, least: Mapping[PlannedPoint, float]) -> Floors:
        found: dict[float, dict[float, float]] = {}
        for (load, price, _), cost in least.items():
            known = found.setdefault(load, {})
            known[price] = max(cost, known.get(price, 0.0))
        return Floors({load: sorted(known.items()) for load, known in found.items()})

    def _rises(self, prices: FloatArray) -> FloatArray:
        """Least cost of the requests of load 1 at each price, float64[prices]."""
        per_w = [self.axis.objective(price).per_w for price in prices.tolist()]
        return np.array(per_w, np.float64) * self.least_requests_w

    def regret(self, price: float, load: float) -> Regret:
        """Bounds of a look-up's excess cost over the best plan there is.

        Raises:
            ConfigError, InfeasibleError: As :meth:`lookup`.
        """
        cost = self.lookup(price, load)[1]
        prices, loads = np.array([price]), np.array([load])
        known, proven = (
            float(floors.at(prices, self._rises(prices), loads)[0, 0]) for floors in (self._known, self._proven)
        )
        return Regret(_above(cost, known), _above(cost, proven))

    def errors(self) -> tuple[EnvelopeError, ...]:
        """Largest excess cost of a look-up over the best plan known, between each two loads; the largest first."""
        table = self.error_table()
        found = []
        for low, high in itertools.pairwise(self.loads):
            inside = np.flatnonzero(
                (table.edges[:-1] >= low * (1 - 4 * _SAME)) & (table.edges[1:] <= high * (1 + 4 * _SAME))
            )
            ratios = table.ratios[inside]
            piece, at = np.unravel_index(int(np.argmax(ratios)), ratios.shape)
            found.append(EnvelopeError(low, high, self.prices[int(at)], float(ratios[piece, at])))
        return tuple(sorted(found, key=_farthest))

    def error_table(self) -> ErrorTable:
        """Largest excess cost of look-ups over the best plan known, at each price, between loads where plans change.

        Between two such loads the same plans serve. The cost of each is a line in the load, and so is the least cost:
        their ratio is greatest at one of the ends.
        """
        first, last = self.loads[0], self.loads[-1]
        ends = {each.load for each in self.plans} | {each.load for each in self.planned} | set(self.loads)
        edges = np.array(_apart(sorted(each for each in ends if first <= each <= last)), np.float64)
        prices = np.array(self.prices, np.float64)
        _, fixed, per_load, per_price, per_both = self._rows
        standing = fixed + prices[:, None] * per_price
        slopes = per_load + prices[:, None] * per_both
        rises = self._rises(prices)
        floors = self._known.at(prices, rises, edges)
        ratios = np.full((len(edges) - 1, len(prices)), math.inf)
        for at, (low, high) in enumerate(itertools.pairwise(edges.tolist())):
            fit = int(np.searchsorted(-self._rows[0], -high * (1 - _SAME), side="right"))
            if not fit:
                continue
            costs = [standing[:, :fit] + slopes[:, :fit] * load for load in (low, high)]
            least = floors[at], floors[at] + rises * (high - low)
            with np.errstate(divide="ignore", invalid="ignore"):
                above = [
                    np.where(floor[:, None] > 0, cost / floor[:, None], 1.0)
                    for cost, floor in zip(costs, least, strict=True)
                ]
            ratios[at] = np.maximum(*above).min(axis=1) - 1
        return ErrorTable(edges, ratios)

    def frontier(self, load: float) -> tuple[tuple[EnvelopePlan, float, float], ...]:
        """Plans that are best at some price for a load, each with the lowest and highest price at which it is best."""
        prices = _breaks(self, load)
        found: list[tuple[EnvelopePlan, float, float]] = []
        for low, high in itertools.pairwise(prices):
            plan = self.lookup((low + high) / 2, load)[0]
            if found and found[-1][0] is plan:
                found[-1] = (plan, found[-1][1], high)
            else:
                found.append((plan, low, high))
        return tuple(found)


def _above(cost: float, least: float) -> float:
    """Excess of a cost over its lower bound, as a ratio; infinite for a cost above a bound of 0."""
    if least > 0:
        return max(0.0, cost / least - 1)
    return 0.0 if cost <= 0 else math.inf


def _apart(loads: Sequence[float]) -> list[float]:
    """Loads in increasing order, without those that count as equal to the one before."""
    found: list[float] = []
    for load in loads:
        if not found or load > found[-1] * (1 + 2 * _SAME):
            found.append(load)
    return found


def _farthest(error: EnvelopeError) -> tuple[float, float]:
    return (-error.error_ratio, error.from_load)


def _breaks(envelope: Envelope, load: float) -> list[float]:
    """Prices between which one plan is best, found by dividing intervals whose ends have different best plans."""
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

    def split(low: float, high: float) -> None:
        one, other = line(low), line(high)
        if one[0] == other[0] or one[2] - other[2] <= 1e-12:
            return
        at = (other[1] - one[1]) / (one[2] - other[2])
        if not low < at < high:
            return
        found.add(at)
        if line(at)[0] not in (one[0], other[0]):
            split(low, at)
            split(at, high)

    split(ends[0], ends[1])
    return sorted(found)
