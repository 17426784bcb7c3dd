"""HiGHS for the master problems of placement: one set-up, and a status that separates a proof from a limit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Any

import numpy as np


class SolveStatus(Enum):
    """What a run of the solver proved."""

    OPTIMAL = "optimal"
    """The solution is optimal, within the gap asked for."""
    INFEASIBLE = "infeasible"
    """Proven: there is no solution."""
    OPEN = "open"
    """A limit on time or nodes ended the run: its best solution, if any, proves nothing."""


def new_model(*, gap_ratio: float = 1e-9, seconds: float | None = None, nodes: int | None = None) -> Any:
    """An empty single-threaded model that prints nothing.

    Args:
        gap_ratio: Relative gap at which a solution in whole numbers is optimal.
        seconds, nodes: Limits of the run; None for none.
    """
    import highspy

    model = highspy.Highs()
    model.setOptionValue("output_flag", False)
    model.setOptionValue("threads", 1)
    model.setOptionValue("mip_rel_gap", gap_ratio)
    if seconds is not None:
        model.setOptionValue("time_limit", seconds)
    if nodes is not None:
        model.setOptionValue("mip_max_nodes", nodes)
    return model


def add_row(model: Any, low: float, high: float, columns: Sequence[int], values: Sequence[float]) -> None:
    """Add ``low <= values @ x[columns] <= high``; infinite limits are allowed."""
    low, high = max(-model.inf, low), min(model.inf, high)
    model.addRow(low, high, len(columns), np.asarray(columns, np.int32), np.asarray(values, np.float64))


def make_whole(model: Any, columns: Iterable[int]) -> None:
    """Require whole numbers of some columns."""
    import highspy

    indices = np.fromiter(columns, np.int32)
    model.changeColsIntegrality(len(indices), indices, np.full(len(indices), highspy.HighsVarType.kInteger))


def run(model: Any) -> SolveStatus:
    """Solve the model."""
    import highspy

    model.run()
    status = model.getModelStatus()
    if status == highspy.HighsModelStatus.kOptimal:
        return SolveStatus.OPTIMAL
    return SolveStatus.INFEASIBLE if status == highspy.HighsModelStatus.kInfeasible else SolveStatus.OPEN
