"""Whole numbers by branching on the total number of GPUs.

Where a GPU costs much beside its requests (rent, host watts), fractions of GPUs are far below whole ones, and a solver
that branches on single patterns hardly raises its bound: another pattern replaces each. With the number of all GPUs
fixed, the rest is close to its relaxation. That relaxation is convex in the number, so the numbers worth solving for
are consecutive. A pattern is left out where its cost beyond its worth exceeds what a better solution can have.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from joulery.domain.arrays import FloatArray
from joulery.policies.placement.master import SolveStatus, add_row, new_model, run

_COUNTS_MAX = 16
"""Numbers of GPUs solved for, at most."""
_FEW = 10
"""Divisor of the branchings: each number of GPUs has at least this part of them."""

_SEARCHES = ("feasibility_jump", "rens", "rins", "root_reduced_cost")
"""The solver's searches for solutions: most of its time where one is known and none is better."""
_WITHOUT = 100
"""Branchings without them, at most, where a solution is known."""


class WholeNumbers(NamedTuple):
    """The best solution in whole numbers.

    Attributes:
        values: Values of all columns; empty where there is no solution.
        value: Its objective; infinite without one.
        proven: Lower bound on the objective of any solution.
        status: Whether it is optimal to the solver's gap.
    """

    values: FloatArray
    value: float
    proven: float
    status: SolveStatus


def solve_at_once(model: Any) -> WholeNumbers:
    """Solve a model in whole numbers, whatever the number of GPUs."""
    status = run(model)
    info, values = model.getInfo(), np.array(model.getSolution().col_value, np.float64)
    if not len(values) or not math.isfinite(info.objective_function_value):
        return WholeNumbers(np.zeros(0), math.inf, math.inf, status)
    return WholeNumbers(values, float(info.objective_function_value), float(info.mip_dual_bound), status)


def solve_by_count(
    model: Any, columns: Sequence[int], gap_ratio: float, branchings: int, beat: float = math.inf
) -> WholeNumbers:
    """Solve a model in whole numbers for each number of GPUs that could be best.

    Args:
        model: The model, its columns whole where they have to be; a row is added to it.
        columns: Columns whose sum is the number of GPUs.
        branchings: Branchings in all; each further number of GPUs has a few at least.
        gap_ratio: A solution that is no further below the best known one, as a ratio, is not sought.
        beat: The objective of the best one known: without a better one there is no solution.
    """
    relaxed = _Relaxed(model, columns)
    row = model.getNumRow()
    add_row(model, 0.0, math.inf, columns, [1.0] * len(columns))
    best = WholeNumbers(np.zeros(0), beat, beat, SolveStatus.INFEASIBLE)
    start = math.floor(relaxed.gpus + 1e-9)
    sides, sure, left = {-1: start, 1: start + 1}, True, branchings
    for solved in range(_COUNTS_MAX + 1):
        sides = {step: count for step, count in sides.items() if count >= 0}
        if not sides:
            break
        least, step = min((relaxed.at(count).value, step) for step, count in sides.items())
        count = sides[step]
        enough = best.value - gap_ratio * abs(best.value) if math.isfinite(best.value) else math.inf
        if not least < enough or solved == _COUNTS_MAX:
            # The relaxation only grows further out: neither this side nor the other one holds anything better.
            best = best._replace(proven=min(best.proven, least))
            sure = sure and (solved < _COUNTS_MAX or not least < best.value)
            break
        model.changeRowBounds(row, float(count), float(count))
        found, used = _solve_below(model, columns, relaxed.at(count), enough, max(left, branchings // _FEW))
        left -= used
        sure = sure and found.status is not SolveStatus.OPEN
        better = found if found.value < best.value else best
        best = better._replace(proven=min(best.proven, found.proven))
        sides[step] = count + step
    if not len(best.values):
        return best._replace(value=math.inf, status=SolveStatus.INFEASIBLE if sure else SolveStatus.OPEN)
    return best._replace(status=SolveStatus.OPTIMAL if sure else SolveStatus.OPEN)


def _solve_below(
    model: Any, columns: Sequence[int], at: _AtCount, enough: float, branchings: int
) -> tuple[WholeNumbers, int]:
    """The best solution with less than ``enough``, and the branchings used; its proven bound is at most ``enough``.

    A solution that has one GPU of a pattern costs at least the relaxation and what that pattern costs beyond its worth.
    Where a solution is known, branching alone mostly proves that there is no better one.
    """
    dear = np.asarray(columns, np.int32)[at.reduced > enough - at.value]
    _limit(model, dear, 0.0)
    model.setOptionValue("objective_bound", enough)
    nothing = WholeNumbers(np.zeros(0), math.inf, -math.inf, SolveStatus.OPEN), 0
    found, used = _run(model, min(branchings, _WITHOUT), searching=False) if math.isfinite(enough) else nothing
    if found.status is SolveStatus.OPEN:
        again, more = _run(model, branchings, searching=True)
        better = again if again.value <= found.value else found
        found = better._replace(proven=max(found.proven, again.proven), status=again.status)
        used += more
    _limit(model, dear, model.inf)
    return found._replace(proven=min(found.proven, enough)), used


def _run(model: Any, branchings: int, *, searching: bool) -> tuple[WholeNumbers, int]:
    model.setOptionValue("mip_max_nodes", branchings)
    model.setOptionValue("mip_allow_restart", searching)
    for each in _SEARCHES:
        model.setOptionValue(f"mip_heuristic_run_{each}", searching)
    status, info = run(model), model.getInfo()
    if status is SolveStatus.INFEASIBLE:
        return WholeNumbers(np.zeros(0), math.inf, math.inf, status), int(info.mip_node_count)
    values = np.array(model.getSolution().col_value, np.float64)
    value = float(info.objective_function_value) if len(values) else math.inf
    return WholeNumbers(values, value, float(info.mip_dual_bound), status), int(info.mip_node_count)


def _limit(model: Any, columns: npt.NDArray[np.int32], most: float) -> None:
    if len(columns):
        model.changeColsBounds(len(columns), columns, np.zeros(len(columns)), np.full(len(columns), most))


class _AtCount(NamedTuple):
    """The relaxation at one number of GPUs.

    Attributes:
        value: The least objective, in fractions of patterns; infinite where there is none.
        reduced: What one GPU of each pattern costs beyond its worth, float64[columns].
    """

    value: float
    reduced: FloatArray


class _Relaxed:
    """The relaxation at each number of GPUs.

    Attributes:
        gpus: Number of GPUs where it is not fixed.
    """

    def __init__(self, model: Any, columns: Sequence[int]) -> None:
        import highspy

        held = model.getLp()
        held.integrality_ = [highspy.HighsVarType.kContinuous] * model.getNumCol()
        self._model = new_model()
        self._model.passModel(held)
        run(self._model)
        values = np.array(self._model.getSolution().col_value, np.float64)
        self.gpus = float(values[list(columns)].sum()) if len(values) else 0.0
        self._row = self._model.getNumRow()
        add_row(self._model, 0.0, math.inf, columns, [1.0] * len(columns))
        self._columns = list(columns)
        self._found: dict[int, _AtCount] = {}

    def at(self, count: int) -> _AtCount:
        """The relaxation with ``count`` GPUs."""
        if count not in self._found:
            self._model.changeRowBounds(self._row, float(count), float(count))
            found = _AtCount(math.inf, np.zeros(len(self._columns)))
            if run(self._model) is SolveStatus.OPTIMAL:
                reduced = np.array(self._model.getSolution().col_dual, np.float64)[self._columns]
                found = _AtCount(float(self._model.getInfo().objective_function_value), reduced)
            self._found[count] = found
        return self._found[count]
