"""Whole numbers by branching on how many GPUs there are in all.

Where a GPU costs much beside its requests (rent, host watts), fractions of GPUs are far below whole ones, and a solver
that branches on single patterns hardly raises its bound: another pattern stands in for each. With the number of all
GPUs fixed, the rest is close to its relaxation. That relaxation is convex in the number, so the numbers worth solving
for lie side by side.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from joulery.domain.arrays import FloatArray
from joulery.policies.placement.master import SolveStatus, add_row, new_model, run

_COUNTS_MAX = 16
"""Numbers of GPUs solved for, at most."""
_FEW = 10
"""Part of the branchings that each number of GPUs has at least."""


class WholeNumbers(NamedTuple):
    """The best solution in whole numbers.

    Attributes:
        values: Of all columns; none where there is no solution.
        value: Its objective; infinite without one.
        proven: No solution has less.
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


def solve_by_count(model: Any, columns: Sequence[int], gap_ratio: float, branchings: int) -> WholeNumbers:
    """Solve a model in whole numbers for each number of GPUs that could be best.

    Args:
        model: The model, its columns whole where they have to be; a row is added to it.
        columns: Those whose sum is the number of GPUs.
        branchings: In all; each further number of GPUs has a few at least.
        gap_ratio: A number of GPUs is left out where its relaxation is no further below the best solution, as a ratio.
    """
    relaxed = _Relaxed(model, columns)
    row = model.getNumRow()
    add_row(model, 0.0, math.inf, columns, [1.0] * len(columns))
    best = WholeNumbers(np.zeros(0), math.inf, math.inf, SolveStatus.INFEASIBLE)
    start = math.floor(relaxed.gpus + 1e-9)
    sides, sure, left = {-1: start, 1: start + 1}, True, branchings
    for solved in range(_COUNTS_MAX + 1):
        sides = {step: count for step, count in sides.items() if count >= 0}
        if not sides:
            break
        least, step = min((relaxed.value(count), step) for step, count in sides.items())
        count = sides[step]
        enough = best.value - gap_ratio * abs(best.value) if math.isfinite(best.value) else math.inf
        if not least < enough or solved == _COUNTS_MAX:
            # The relaxation only grows further out: neither this side nor the other one holds anything better.
            best = best._replace(proven=min(best.proven, least))
            sure = sure and (solved < _COUNTS_MAX or not least < best.value)
            break
        model.changeRowBounds(row, float(count), float(count))
        model.setOptionValue("mip_max_nodes", max(left, branchings // _FEW))
        status = run(model)
        info, values = model.getInfo(), np.array(model.getSolution().col_value, np.float64)
        left -= int(info.mip_node_count)
        found = (
            float(info.objective_function_value) if len(values) and status is not SolveStatus.INFEASIBLE else math.inf
        )
        sure = sure and status is not SolveStatus.OPEN
        proven = min(best.proven, math.inf if status is SolveStatus.INFEASIBLE else float(info.mip_dual_bound))
        best = best._replace(proven=proven)
        if math.isfinite(found) and found < best.value:
            best = WholeNumbers(values, found, proven, status)
        sides[step] = count + step
    if not len(best.values):
        return best._replace(status=SolveStatus.INFEASIBLE if sure else SolveStatus.OPEN)
    return best._replace(status=SolveStatus.OPTIMAL if sure else SolveStatus.OPEN)


class _Relaxed:
    """The relaxation at each number of GPUs.

    Attributes:
        gpus: How many there are where the number is free.
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
        self._values: dict[int, float] = {}

    def value(self, count: int) -> float:
        """The least objective with so many GPUs, in fractions of patterns; infinite where there is none."""
        if count not in self._values:
            self._model.changeRowBounds(self._row, float(count), float(count))
            solved = run(self._model) is SolveStatus.OPTIMAL
            self._values[count] = float(self._model.getInfo().objective_function_value) if solved else math.inf
        return self._values[count]
