"""Construction of an envelope: plans at the prices and loads where the plans known so far are farthest from the best.

At a load the search varies the price. The plans of the lowest and the highest price are two lines; where they cross, a
third plan is sought, and so on until none is better (Cohon, 1978). Each plan is kept at the greatest load that its
layouts serve. Then the search varies the load: at each price there are zones, ranges of loads in which look-ups may be
farther from the best known plan than allowed. The zone that adds most to the errors, by its width and by its error, is
split in two. Its middle is planned for only at the prices at which look-ups are off there. Narrow zones mostly begin
where the greatest load of a plan is set too low: that load is first sought more finely, which takes a fraction of
another plan's time.

The first loads are planned for with every part and batch, and their bounds are proven. Loads that are close to others
on both sides begin with the patterns found there, and choose among the parts and batches of the best of them: that
takes a fraction of the time. It proves no bound; the bounds of the loads beside it hold there too.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from joulery.domain.arrays import BoolArray, FloatArray
from joulery.domain.errors import InfeasibleError
from joulery.domain.gpu.envelope_floors import PlannedPoint
from joulery.domain.gpu.optimum import PlanObjective
from joulery.domain.gpu.plan_envelope import Envelope, EnvelopePlan, ErrorTable, PriceAxis
from joulery.domain.gpu.provisioning import ProvisionPlan
from joulery.policies.placement.joint.divisions import grouped
from joulery.policies.placement.joint.following.warm import Sizes, narrowed_to, sizes_of
from joulery.policies.placement.joint.generation import JointEffort
from joulery.policies.placement.joint.planner import patterns_of, plan_joint, plan_problem
from joulery.policies.placement.joint.problem import JointProblem, JointRequest, problem_of
from joulery.policies.placement.joint.stretched import COARSE_RATIO, FINE_RATIO, stretched
from joulery.policies.placement.provisioning.random_limits import KnownLimits

LOADS = (0.2, 1.2)
"""Loads between which an envelope is made."""
_PRICES = 40
"""Prices at which errors are looked for, between the lowest and the highest."""
_AT_ONCE = 6
"""Most zones that are split before errors are computed again."""
_LIGHT = 0.3
"""Least weight of a further zone that is split at the same time, relative to the first zone's."""
_FAR = 0.03
"""Greatest error that counts: a look-up that is farther off counts as this much."""
_BESIDE = 4
"""Number of nearest loads from which a new load takes its first patterns, or its parts and batches."""
_RENT_FEW, _RENT_MOST = 1 / 30, 100.0
"""Lowest and highest price: what the price adds to the cheapest plan, as a ratio of its rent."""


@dataclass(frozen=True, slots=True)
class EnvelopeEffort:
    """Limits on the work of an envelope.

    Attributes:
        joint: Effort of each plan.
        close: Effort of each plan whose parts and batches are those of loads beside it.
        close_ratio: Greatest distance of such loads on either side, as a ratio.
        first: Number of loads to begin with.
        loads: Most loads.
        error_ratio: How far look-ups may be above the best known plan.
        better_ratio: A plan at a price between two others counts if it costs less than both by more than this.
        narrowest_ratio: Zones narrower than this are not split: a further GPU is needed somewhere in them.
    """

    joint: JointEffort = field(
        default_factory=lambda: JointEffort(gaps=(0.1, 0.03, 0.01), near=150, nodes=20_000, wide_ratio=0.03)
    )
    close: JointEffort = field(
        default_factory=lambda: JointEffort(patience=2, gaps=(), near=150, nodes=20_000, wide_ratio=0.03)
    )
    close_ratio: float = 0.045
    first: int = 7
    loads: int = 1000
    error_ratio: float = 0.004
    better_ratio: float = 0.0015
    narrowest_ratio: float = 0.0001


def make_envelope(
    request: JointRequest,
    axis: PriceAxis,
    loads: tuple[float, float] = LOADS,
    effort: EnvelopeEffort | None = None,
    proceed: Callable[[], bool] = lambda: True,
    progress: Callable[[int, float], None] = lambda loads, error_ratio: None,
) -> Envelope:
    """Make an envelope of plans over a price and a load.

    Args:
        request: The request at load 1; its objective is ignored.
        axis: What is priced.
        loads: The lowest and the highest load.
        effort: Limits on the work.
        proceed: Called before each load beside the lowest and the highest, and before plans are stretched finely;
            False ends the search.
        progress: Called with the number of loads planned for, and the greatest error ratio left.

    Returns:
        The envelope. Loads for which the GPUs or the power cap do not suffice are left out of it.

    Raises:
        InfeasibleError: Not even the lowest load can be served.
        ConfigError: As :func:`joulery.policies.placement.joint.planner.plan_joint`.
    """
    effort = effort or EnvelopeEffort()
    search = _Search(request, axis, effort, loads[1])
    search.add(loads[0])
    too_high = math.inf
    for load in _farthest_first(np.geomspace(loads[0], loads[1], effort.first).tolist()):
        if load >= too_high:
            continue
        if len(search.loads) > 1 and not proceed():
            break
        try:
            search.add(load)
        except InfeasibleError:
            too_high = load
        progress(len(search.loads), math.inf)
    while True:
        envelope = search.envelope()
        table = envelope.error_table()
        ending = search.ending(envelope, table)
        if ending and proceed():
            search.refine_load(ending)
            continue  # fewer zones are left
        zones = _zones(table, search.loads, search.prices, effort)
        for zone in zones:
            if len(search.loads) >= effort.loads or not proceed():
                return search.envelope()
            progress(len(search.loads), float(table.ratios.max()))
            search.add(zone.load, zone.prices)
        if not zones:
            return search.envelope()


def _farthest_first(loads: Sequence[float]) -> list[float]:
    """The loads but the first: the last, then each time the one farthest from those before it. A search that ends early
    covers the range."""
    done: set[int] = {0}
    order: list[float] = []
    while len(order) < len(loads) - 1:
        far = max(range(len(loads)), key=lambda at: (min(abs(at - each) for each in done), at))
        done.add(far)
        order.append(loads[far])
    return order


def planned_again(request: JointRequest, envelope: Envelope, price: float, load: float) -> ProvisionPlan:
    """A plan for one price and load, no worse than the envelope's plans for loads beside it.

    Args:
        request: The request at load 1; its objective is ignored.
        envelope: Plans for it.
        price, load: The price and the load to plan for.

    Raises:
        InfeasibleError: The GPUs or the power cap do not suffice.
    """
    beside = set(_nearest({each.made_load or each.load for each in envelope.plans}, load))
    known = [
        ProvisionPlan("joint", each.provided_at(load))
        for each in envelope.plans
        if (each.made_load or each.load) in beside
    ]
    return plan_joint(_at_load(request, load, envelope.axis.objective(price)), others=known)


def _at_load(request: JointRequest, load: float, objective: PlanObjective) -> JointRequest:
    services = tuple(
        replace(each, workload=replace(each.workload, rate_rps=load * each.workload.rate_rps))
        for each in request.services
    )
    return replace(request, services=services, objective=objective)


class _Zone(NamedTuple):
    """A zone in which look-ups are too far off: a load in its middle, and its lowest and highest price."""

    load: float
    prices: tuple[float, float]


def _zones(table: ErrorTable, loads: Sequence[float], prices: Sequence[float], effort: EnvelopeEffort) -> list[_Zone]:
    """The zones to split, those that add most to the errors of look-ups first."""
    ratios = table.ratios.copy()
    found: list[_Zone] = []
    first = 0.0
    while len(found) < _AT_ONCE:
        zone = _heaviest(table.edges, ratios, loads, effort)
        if zone is None or zone.weight < _LIGHT * first:
            break
        first = max(first, zone.weight)
        found.append(_Zone(zone.load, (prices[zone.begin], prices[zone.end])))
        ratios[zone.low : zone.high, zone.begin : zone.end + 1] = -math.inf
    return found


class _Found(NamedTuple):
    """A zone: its weight in the errors, a load in its middle, and the indices of its first and last edge and price."""

    weight: float
    load: float
    low: int
    high: int
    begin: int
    end: int


def _between(low: float, high: float, loads: Sequence[float], narrowest_ratio: float) -> float:
    """The middle between two loads; if a load next to it is planned for, the middle of the widest gap between loads."""
    middle = math.sqrt(low * high)
    if not any(abs(each / middle - 1) < narrowest_ratio / 4 or each == middle for each in loads):
        return middle
    edges = [low, *sorted(each for each in loads if low < each < high), high]
    _, begin, end = max((end / begin, begin, end) for begin, end in itertools.pairwise(edges))
    return math.sqrt(begin * end)


def _runs(off: BoolArray) -> list[tuple[int, int]]:
    """Runs of true values: the index of the first of each, and of the first after it."""
    turns = np.flatnonzero(np.diff(np.concatenate([[False], off, [False]]).astype(np.int8)))
    return list(zip(turns[::2].tolist(), turns[1::2].tolist(), strict=True))


def _heaviest(edges: FloatArray, ratios: FloatArray, loads: Sequence[float], effort: EnvelopeEffort) -> _Found | None:
    """The zone that adds most to the errors of look-ups, over its loads and the prices off in the middle of it."""
    off = ratios > effort.error_ratio
    adds = np.where(off, np.minimum(ratios, _FAR), 0.0) * np.diff(edges)[:, None]
    below = np.pad(adds, ((1, 0), (1, 0))).cumsum(axis=0).cumsum(axis=1)
    best: _Found | None = None
    for at in range(ratios.shape[1]):
        for low, high in _runs(off[:, at]):
            if edges[high] <= edges[low] * (1 + effort.narrowest_ratio):
                continue
            middle = math.sqrt(edges[low] * edges[high])
            here = off[int(np.searchsorted(edges, middle, side="right")) - 1]
            others = np.flatnonzero(~here)
            side = int(np.searchsorted(others, at))
            begin = int(others[side - 1]) + 1 if side > 0 else 0
            end = int(others[side]) - 1 if side < len(others) else len(here) - 1
            weight = below[high, end + 1] - below[low, end + 1] - below[high, begin] + below[low, begin]
            if best is None or weight > best.weight:
                load = _between(float(edges[low]), float(edges[high]), loads, effort.narrowest_ratio)
                best = _Found(float(weight), load, low, high, begin, end)
    return best


def _ending(envelope: Envelope, table: ErrorTable, effort: EnvelopeEffort) -> set[int]:
    """Plans, by their index, after whose greatest load there is a narrow zone in which look-ups are off."""
    off, found = table.ratios > effort.error_ratio, set[int]()
    for at, price in enumerate(envelope.prices):
        for low, high in _runs(off[:, at]):
            edge = float(table.edges[low])
            if table.edges[high] > edge * (1 + COARSE_RATIO):
                continue
            indices, costs = envelope.costs(price, edge)
            best = int(indices[int(np.argmin(costs))])
            if envelope.plans[best].load <= edge * (1 + FINE_RATIO):
                found.add(best)
    return found


def _found_by(plan: EnvelopePlan) -> tuple[float, float]:
    """The load and the price that a plan was made for."""
    return plan.made_load or plan.load, plan.price


def least_requests_w(problem: JointProblem) -> float:
    """Watts that the requests of all services take at least: each with the variant and machine of fewest joules."""
    least = [math.inf] * len(problem.services)
    for at, item in enumerate(problem.items):
        fitting = [m for m in range(len(problem.machines)) if problem.options[at][m]]
        joules = min((float(problem.request_j[m, at]) for m in fitting), default=math.inf)
        least[item.service] = min(least[item.service], joules)
    for one in problem.slices:
        least[one.service] = min(least[one.service], one.request_j)
    return math.fsum(joules * rate for joules, rate in zip(least, problem.rates_rps.tolist(), strict=True))


def _nearest(loads: Iterable[float], load: float) -> list[float]:
    """The loads nearest to a load, at most ``_BESIDE``."""
    return sorted(loads, key=lambda other: abs(math.log(other / load)))[:_BESIDE]


class _Search:
    """The search for an envelope, with the plans found so far.

    Attributes:
        loads: Loads planned for.
    """

    def __init__(self, request: JointRequest, axis: PriceAxis, effort: EnvelopeEffort, highest: float) -> None:
        self._request, self._axis, self._effort, self._highest = request, axis, effort, highest
        self.loads: list[float] = []
        self._least_w, self._limits = math.inf, KnownLimits()
        self._plans: list[EnvelopePlan] = []
        self._points: list[PlannedPoint] = []
        self._sizes: dict[float, list[Sizes]] = defaultdict(list)
        self._ends: tuple[float, float] | None = None
        self._fine = set[tuple[float, float]]()

    @property
    def prices(self) -> tuple[float, ...]:
        """Prices at which errors are looked for."""
        assert self._ends is not None
        low, high = self._ends
        return (low, *np.geomspace(low, high, _PRICES).tolist()[1:-1], high) if high > low else (low,)

    def envelope(self) -> Envelope:
        """The envelope of all plans found so far."""
        loads = tuple(sorted(self.loads))
        self._plans.sort(key=lambda each: (each.load, -each.price))
        named = tuple(each._replace(name=f"P{at + 1}") for at, each in enumerate(self._plans))
        points = tuple(sorted(self._points))
        return Envelope(self._axis, named, self.prices, loads, least_requests_w=self._least_w, points=points)

    def add(self, load: float, prices: tuple[float, float] | None = None) -> None:
        """Plan for a load at every price, of some or all, where the best plan changes.

        Raises:
            InfeasibleError: The GPUs or the power cap do not suffice.
        """
        solve = self._solver(load)
        if self._ends is None:
            self._ends = self._price_ends(solve)
        low, high = prices or self._ends
        found = [solve(high), *([solve(low)] if high > low else [])]
        for each, _, _ in self._frontier(load, self._supported(load, solve, found, (low, high)), (low, high)):
            self._plans.append(stretched(self._request, each, self._highest, self._limits))
        if load not in self.loads:
            self.loads.append(load)

    def ending(self, envelope: Envelope, table: ErrorTable) -> list[int]:
        """Plans that end where a narrow zone begins, by their index; those that were stretched finely are left out.

        Args:
            envelope: All plans found so far.
            table: Its errors.
        """
        found = _ending(envelope, table, self._effort)
        return sorted(at for at in found if _found_by(self._plans[at]) not in self._fine)

    def refine_load(self, ending: Sequence[int]) -> None:
        """Determine the greatest load of some plans finely."""
        for at in ending:
            plan = self._plans[at]
            most = min(self._highest, plan.load * (1 + COARSE_RATIO))
            self._plans[at] = stretched(self._request, plan, most, self._limits, FINE_RATIO)
            self._fine.add(_found_by(self._plans[at]))

    def _solver(self, load: float) -> Callable[[float], EnvelopePlan]:
        """A function that plans one load at a price; it begins with the known patterns of this load and near ones."""
        request = _at_load(self._request, load, self._axis.objective(1.0))
        request = grouped(request, self._effort.joint.alike_from)
        problem, effort = self._close(request, load), self._effort.close
        proven = problem is None
        if problem is None:
            problem, effort = problem_of(request, self._limits), self._effort.joint
            self._least_w = min(self._least_w, least_requests_w(problem) / load)
        beside = set(_nearest(self.loads, load))
        known = {
            pattern: None
            for each in self._plans
            if (each.made_load or each.load) in beside
            for pattern in patterns_of(problem, ProvisionPlan("joint", each.provided_at(load)))
        }

        def solve(price: float) -> EnvelopePlan:
            priced = replace(problem, request=replace(problem.request, objective=self._axis.objective(price)))
            plan, _ = plan_problem(priced, effort, list(known))
            known.update(dict.fromkeys(patterns_of(problem, plan)))
            assert plan.certificate is not None
            if proven:
                self._sizes[load].append(sizes_of(plan.certificate))
            bound = plan.certificate.bound if proven else 0.0
            self._points.append(PlannedPoint(load, price, bound))
            return EnvelopePlan("", load, price, bound, plan.gpus)

        return solve

    def _close(self, request: JointRequest, load: float) -> JointProblem | None:
        """The problem with the parts and batches of loads beside it; None where there are none close on both sides."""
        close = [each for each in self._sizes if abs(math.log(each / load)) < math.log1p(self._effort.close_ratio)]
        if not close or not min(close) < load < max(close):
            return None
        sizes = (each for other in _nearest(self._sizes, load) for each in self._sizes[other])
        try:
            return problem_of(narrowed_to(request, *sizes), self._limits)
        except InfeasibleError:  # a service needs other batches here
            return None

    def _price_ends(self, solve: Callable[[float], EnvelopePlan]) -> tuple[float, float]:
        """Prices below and above which the plan hardly changes; one price where the rent or the priced cost is 0."""
        plan = solve(1.0)
        rent = self._axis.rent * plan.usd_per_hour
        added = self._cost(plan, 1.0) - self._cost(plan, 0.0)
        if rent <= 0 or added <= 0:
            return 1.0, 1.0
        return rent / added * _RENT_FEW, rent / added * _RENT_MOST

    def _supported(
        self,
        load: float,
        solve: Callable[[float], EnvelopePlan],
        found: list[EnvelopePlan],
        prices: tuple[float, float],
    ) -> list[EnvelopePlan]:
        """Plans that are best at some price: where the lines of two of them cross, a third is sought below."""
        tried = set[tuple[int, int]]()
        while True:
            best = [each for each, _, _ in self._frontier(load, found, prices)]
            pairs = [(one, other) for one, other in itertools.pairwise(best) if (id(one), id(other)) not in tried]
            crossings = ((pair, self._crossing(*pair)) for pair in pairs)
            pair, price = next((each for each in crossings if each[1] is not None), (None, None))
            if pair is None or price is None:
                return found
            tried.add((id(pair[0]), id(pair[1])))
            least = self._cost(pair[0], price) * (1 - self._effort.better_ratio)
            if self._above_chord(found, price) >= least:
                continue  # what costs least is concave in the price, so no plan can be that much better
            between = solve(price)
            if self._cost(between, price) < least:
                found.append(between)

    def _above_chord(self, found: Sequence[EnvelopePlan], price: float) -> float:
        """Lower bound of a plan's cost at a price, by the best plans at the prices beside it that were planned for."""
        planned = sorted({each.price for each in found})
        costs = [min(self._cost(each, other) for each in found) for other in planned]
        return float(np.interp(price, planned, costs))

    def _frontier(
        self, load: float, plans: Sequence[EnvelopePlan], prices: tuple[float, float]
    ) -> tuple[tuple[EnvelopePlan, float, float], ...]:
        """The best of some plans for a load, by price."""
        return Envelope(self._axis, tuple(plans), prices, (load,)).frontier(load)

    def _crossing(self, one: EnvelopePlan, other: EnvelopePlan) -> float | None:
        """The price at which two plans for one load cost the same; None where they are never apart."""
        at0 = self._cost(one, 0.0) - self._cost(other, 0.0)
        slope = self._cost(one, 1.0) - self._cost(other, 1.0) - at0
        return None if slope == 0 else -at0 / slope

    def _cost(self, plan: EnvelopePlan, price: float) -> float:
        return self._axis.objective(price).value(plan.power_w, plan.usd_per_hour, len(plan.gpus))
