"""Making an envelope: plans at the prices and loads where the ones known so far are farthest from the best.

At a load the prices come first. The plans of the lowest and the highest price are two lines; where they cross, a third
plan is sought, and so on until none is better (Cohon, 1978). Each plan is kept at the greatest load that its layouts
serve. Then loads: of all stretches between two of them the one that adds most to the error of look-ups, by its width
and by how far they may be from the best known plan, is cut in two above the load at which that error begins, and
planned for at prices between those at which its neighbours' plans change.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from joulery.domain.errors import InfeasibleError
from joulery.domain.gpu.plan_envelope import Envelope, EnvelopeError, EnvelopePlan, PriceAxis
from joulery.domain.gpu.provisioning import ProvisionPlan
from joulery.policies.placement.joint.divisions import grouped
from joulery.policies.placement.joint.generation import JointEffort
from joulery.policies.placement.joint.plan import patterns_of, plan_problem
from joulery.policies.placement.joint.problem import JointProblem, JointRequest, problem_of
from joulery.policies.placement.joint.stretched import stretched

LOADS = (0.2, 1.2)
"""Loads between which an envelope is made."""
_PRICES = 24
"""Prices at which errors are looked for, between the lowest and the highest."""
_APART = 1.15
"""Prices closer to one another, as a ratio, are planned for once."""
_RENT_FEW, _RENT_MOST = 1 / 30, 100.0
"""Lowest and highest price: what the price adds to the cheapest plan, as a ratio of its rent."""


@dataclass(frozen=True, slots=True)
class EnvelopeEffort:
    """How hard to try.

    Attributes:
        joint: Of each plan.
        first: Loads to begin with.
        loads: Loads at most.
        error_ratio: How far look-ups may be above the best known plan.
        better_ratio: A plan at a price between two others counts if it costs less than both by more than this.
        narrowest_ratio: Loads closer to one another are not cut apart: a further GPU is needed somewhere in between.
    """

    joint: JointEffort = field(
        default_factory=lambda: JointEffort(gaps=(0.1, 0.03), near=150, nodes=20_000, wide_ratio=0.01)
    )
    first: int = 7
    loads: int = 400
    error_ratio: float = 0.004
    better_ratio: float = 0.0015
    narrowest_ratio: float = 0.0005


def make_envelope(
    request: JointRequest,
    axis: PriceAxis,
    loads: tuple[float, float] = LOADS,
    effort: EnvelopeEffort | None = None,
    proceed: Callable[[], bool] = lambda: True,
    progress: Callable[[int, float], None] = lambda loads, error_ratio: None,
) -> Envelope:
    """Plans over a price and a load.

    Args:
        request: What is asked at load 1; its objective is not looked at.
        axis: What is priced.
        loads: The lowest and the highest load.
        effort: How hard to try.
        proceed: Asked before each further load; no ends the search.
        progress: Called with how many loads are planned for, and the greatest error ratio left.

    Returns:
        The envelope. Loads for which the GPUs or the power cap do not suffice are left out of it.

    Raises:
        InfeasibleError: Not even the lowest load can be served.
        ConfigError: As :func:`joulery.policies.placement.joint.plan.plan_joint`.
    """
    effort = effort or EnvelopeEffort()
    search = _Search(request, axis, effort, loads[1])
    search.add(loads[0], everywhere=True)
    for load in np.geomspace(loads[0], loads[1], effort.first).tolist()[1:]:
        try:
            search.add(load, everywhere=True)
        except InfeasibleError:
            break
        progress(len(search.loads), math.inf)
    while len(search.loads) < effort.loads and proceed():
        wide = [
            each
            for each in search.envelope().errors()
            if each.error_ratio > effort.error_ratio and each.to_load > each.above_load * (1 + effort.narrowest_ratio)
        ]
        if not wide:
            break
        progress(len(search.loads), wide[0].error_ratio)
        worst = max(wide, key=_weight)
        search.add(math.sqrt(worst.above_load * worst.to_load), everywhere=False)
    return search.envelope()


def _weight(error: EnvelopeError) -> float:
    """What a stretch adds to the error of a look-up anywhere."""
    return min(error.error_ratio, 1.0) * (error.to_load - error.above_load)


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


class _Search:
    """Plans found so far.

    Attributes:
        loads: Loads planned for.
    """

    def __init__(self, request: JointRequest, axis: PriceAxis, effort: EnvelopeEffort, highest: float) -> None:
        self._request, self._axis, self._effort, self._highest = request, axis, effort, highest
        self.loads: list[float] = []
        self._least_w = math.inf
        self._plans: dict[float, list[EnvelopePlan]] = {}
        self._ends: tuple[float, float] | None = None

    def envelope(self) -> Envelope:
        """All of them."""
        assert self._ends is not None
        low, high = self._ends
        prices = tuple(np.geomspace(low, high, _PRICES).tolist()) if high > low else (low,)
        plans = [each for load in sorted(self.loads) for each in self._plans[load]]
        named = tuple(each._replace(name=f"P{at + 1}") for at, each in enumerate(plans))
        return Envelope(self._axis, named, prices, tuple(sorted(self.loads)), least_requests_w=self._least_w)

    def add(self, load: float, *, everywhere: bool) -> None:
        """Plan for a load: at every price where the best plan changes, or where those of its neighbours do.

        Raises:
            InfeasibleError: The GPUs or the power cap do not suffice.
        """
        solve = self._solver(load)
        if self._ends is None:
            self._ends = self._price_ends(solve)
        low, high = self._ends
        prices = [low] if high <= low else [high, low] if everywhere else self._neighbours_prices(load)
        found = self._supported(load, solve, [solve(price) for price in prices])
        best = [each for each, _, _ in self._frontier(load, found)]
        self._plans[load] = [stretched(self._request, each, self._highest) for each in best]
        self.loads.append(load)

    def _solver(self, load: float) -> Callable[[float], EnvelopePlan]:
        """Plans for one load; each begins with the patterns of the plans before it and of the loads beside it."""
        services = tuple(
            replace(each, workload=replace(each.workload, rate_rps=load * each.workload.rate_rps))
            for each in self._request.services
        )
        request = replace(self._request, services=services, objective=self._axis.objective(1.0))
        problem = problem_of(grouped(request, self._effort.joint.alike_from))
        self._least_w = min(self._least_w, least_requests_w(problem) / load)
        beside = sorted(self.loads, key=lambda other: abs(math.log(other / load)))[:2]
        known = {
            pattern: None
            for other in beside
            for each in self._plans[other]
            for pattern in patterns_of(problem, ProvisionPlan("joint", each.gpus))
        }

        def solve(price: float) -> EnvelopePlan:
            priced = replace(problem, request=replace(problem.request, objective=self._axis.objective(price)))
            plan, _ = plan_problem(priced, self._effort.joint, list(known))
            known.update(dict.fromkeys(patterns_of(problem, plan)))
            assert plan.certificate is not None
            return EnvelopePlan("", load, price, plan.certificate.bound, plan.gpus)

        return solve

    def _price_ends(self, solve: Callable[[float], EnvelopePlan]) -> tuple[float, float]:
        """Prices below and above which the plan hardly changes; one price where nothing stands against it."""
        plan = solve(1.0)
        rent = self._axis.rent * plan.usd_per_hour
        added = self._cost(plan, 1.0) - self._cost(plan, 0.0)
        if rent <= 0 or added <= 0:
            return 1.0, 1.0
        return rent / added * _RENT_FEW, rent / added * _RENT_MOST

    def _supported(
        self, load: float, solve: Callable[[float], EnvelopePlan], found: list[EnvelopePlan]
    ) -> list[EnvelopePlan]:
        """Plans that are best at some price: where the lines of two of them cross, a third is sought below."""
        tried = set[tuple[int, int]]()
        while True:
            best = [each for each, _, _ in self._frontier(load, found)]
            pairs = [(one, other) for one, other in itertools.pairwise(best) if (id(one), id(other)) not in tried]
            price = next((price for pair in pairs if (price := self._crossing(*pair)) is not None), None)
            if price is None:
                return found
            one, other = next(pair for pair in pairs if self._crossing(*pair) == price)
            tried.add((id(one), id(other)))
            between = solve(price)
            if self._cost(between, price) < self._cost(one, price) * (1 - self._effort.better_ratio):
                found.append(between)

    def _frontier(self, load: float, plans: Sequence[EnvelopePlan]) -> tuple[tuple[EnvelopePlan, float, float], ...]:
        """Which of some plans for a load is best at which prices."""
        assert self._ends is not None
        return Envelope(self._axis, tuple(plans), self._ends, (load,)).frontier(load)

    def _crossing(self, one: EnvelopePlan, other: EnvelopePlan) -> float | None:
        """The price at which two plans for one load cost the same; None where they are never apart."""
        at0 = self._cost(one, 0.0) - self._cost(other, 0.0)
        slope = self._cost(one, 1.0) - self._cost(other, 1.0) - at0
        return None if slope == 0 else -at0 / slope

    def _cost(self, plan: EnvelopePlan, price: float) -> float:
        return self._axis.objective(price).value(plan.power_w, plan.usd_per_hour, len(plan.gpus))

    def _neighbours_prices(self, load: float) -> Sequence[float]:
        """A price within each stretch in which the plans of the loads beside are best; the lowest and the highest."""
        assert self._ends is not None
        low, high = self._ends
        below = max((each for each in self.loads if each < load), default=None)
        above = min((each for each in self.loads if each > load), default=None)
        prices = {low, high}
        for other in (below, above):
            if other is None:
                continue
            for _, begin, end in self._frontier(other, self._plans[other]):
                if begin > low and end < high:
                    prices.add(math.sqrt(begin * end))
        return _apart(sorted(prices, reverse=True))


def _apart(prices: Sequence[float]) -> list[float]:
    """Prices, the highest first, without those that nearly repeat one before."""
    found: list[float] = []
    for price in prices:
        if not found or price < found[-1] / _APART:
            found.append(price)
    return found
