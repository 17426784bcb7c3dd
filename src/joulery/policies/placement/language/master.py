"""Number of replicas of each kind and their shares of the requests: an integer program with a bound.

The objective of a replica over its rate is replaced by a line below it: the chord from no requests to its greatest
rate, lowered until it lies below the objective on a grid of rates. So the optimum of the program is no more than the
objective of any plan of these candidates; counts are whole numbers, shares of requests are not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from joulery.policies.placement.language.candidates import ReplicaCandidate
from joulery.policies.placement.language.task import LanguageRules
from joulery.policies.placement.master import SolveStatus, add_row, make_whole, new_model, run

_GRID = 16
_SECONDS = 10.0
_TIE = 1e-8
"""Dollars an hour for each watt, small enough to decide only between plans of equal cost."""


class ReplicaLine(NamedTuple):
    """A line below the objective of a replica.

    Attributes:
        candidate: The replica.
        fixed: Value of the line for a replica without requests.
        slope: Objective a request a second.
    """

    candidate: ReplicaCandidate
    fixed: float
    slope: float


@dataclass(frozen=True, slots=True)
class ReplicaShare:
    """Count and rate of a candidate in the program's solution.

    Attributes:
        candidate: The replica.
        count: Number of replicas.
        rate_rps: Requests a second of all of them.
    """

    candidate: ReplicaCandidate
    count: int
    rate_rps: float


class SolvedShares(NamedTuple):
    """The optimum of the program.

    Attributes:
        shares: The chosen candidates; empty where the solver found none.
        bound: Lower bound on the objective.
        infeasible: Whether it is proven that no plan serves all requests.
    """

    shares: tuple[ReplicaShare, ...]
    bound: float
    infeasible: bool = False


def line_below(candidate: ReplicaCandidate, rules: LanguageRules) -> ReplicaLine:
    """The line of a candidate."""
    if rules.objective == "cost":
        return ReplicaLine(candidate, candidate.usd_per_hour, 0.0)
    rates = candidate.rate_rps * np.linspace(0.0, 1.0, _GRID)
    costs = np.array([candidate.cost(float(rate), rules) for rate in rates])
    slope = max(float(costs[-1] - costs[0]) / candidate.rate_rps, 0.0)
    return ReplicaLine(candidate, float((costs - slope * rates).min()), slope)


def undominated(lines: Sequence[ReplicaLine]) -> list[ReplicaLine]:
    """Lines without dominated ones: another of the same service, GPU type and GPUs costs no more and serves no less."""
    kept: list[ReplicaLine] = []
    for line in sorted(lines, key=lambda each: (-each.candidate.rate_rps, each.fixed, each.slope)):
        group = line.candidate.group
        if not any(
            (other.candidate.group.service.name, other.candidate.group.gpu.name, other.candidate.group.gpus)
            == (group.service.name, group.gpu.name, group.gpus)
            and other.fixed <= line.fixed
            and other.slope <= line.slope
            for other in kept
        ):
            kept.append(line)
    return kept


def solve_replicas(
    lines: Sequence[ReplicaLine], rates_rps: Mapping[str, float], available: Mapping[str, int], rules: LanguageRules
) -> SolvedShares:
    """The counts and shares of least objective.

    Args:
        lines: Candidates of every service, with their lines.
        rates_rps: Requests a second by service.
        available: GPUs there are, by type, without the types that have no limit.
        rules: The objective, for ties.
    """
    cost = rules.objective == "cost"
    ties = [_TIE * line.candidate.power_w(line.candidate.rate_rps) if cost else 0.0 for line in lines]
    model, many = _program(lines, rates_rps, available, ties), len(lines)
    make_whole(model, range(many))
    status = run(model)
    if status is SolveStatus.INFEASIBLE:
        return SolvedShares((), np.inf, True)
    info = model.getInfo()
    values = np.asarray(model.getSolution().col_value, np.float64)
    found = len(values) == 2 * many and (status is SolveStatus.OPTIMAL or np.isfinite(info.objective_function_value))
    shares = tuple(
        ReplicaShare(line.candidate, round(values[at]), float(values[many + at]))
        for at, line in enumerate(lines)
        if found and round(values[at]) > 0 and values[many + at] > 1e-9
    )
    return SolvedShares(shares, float(info.mip_dual_bound))


def pool_prices(
    lines: Sequence[ReplicaLine], rates_rps: Mapping[str, float], available: Mapping[str, int]
) -> dict[str, float]:
    """Saving of one more GPU of each type if fractions of replicas were allowed; 0 or more.

    Args:
        lines, rates_rps, available: As for :func:`solve_replicas`.
    """
    if not available:
        return {}
    model = _program(lines, rates_rps, available, [0.0] * len(lines))
    if run(model) is not SolveStatus.OPTIMAL:
        return dict.fromkeys(available, 0.0)
    duals = np.asarray(model.getSolution().row_dual, np.float64)[-len(available) :]
    return {name: max(0.0, -float(dual)) for name, dual in zip(available, duals, strict=True)}


def _program(
    lines: Sequence[ReplicaLine], rates_rps: Mapping[str, float], available: Mapping[str, int], ties: Sequence[float]
) -> Any:
    """The program in fractions of replicas: their numbers first, then their rates; the rows of GPU types last."""
    model = new_model(gap_ratio=1e-6, seconds=_SECONDS)
    for line, tie in zip(lines, ties, strict=True):
        _column(model, line.fixed + tie, 0.0)
    for line in lines:
        _column(model, line.slope, 0.0)
    many = len(lines)
    for name, rate in rates_rps.items():
        mine = [at for at, line in enumerate(lines) if line.candidate.group.service.name == name]
        add_row(model, rate, rate, [many + at for at in mine], [1.0] * len(mine))
    for at, line in enumerate(lines):
        add_row(model, 0.0, np.inf, [at, many + at], [line.candidate.rate_rps, -1.0])
    for name, most in available.items():
        mine = [at for at, line in enumerate(lines) if line.candidate.group.gpu.name == name]
        add_row(model, 0.0, float(most), mine, [float(lines[at].candidate.group.gpus) for at in mine])
    return model


def _column(model: object, cost: float, low: float) -> None:
    """Add a variable that is not in any row yet."""
    empty = (np.empty(0, np.int32), np.empty(0, np.float64))
    model.addCol(cost, low, model.inf, 0, *empty)  # type: ignore[attr-defined]
