"""Compare traced runs: their similarity, and their changes layer by layer.

Source: Smaragdine (ICSE'24), section 6.1 and Figure 9: correlation (PCC) and mean difference (MED) of the summarised
footprints, joules and watts. Where every run states its number of recorded steps, joules are per step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scipy.special import stdtrit

from joulery.accounting.operations.precision import matrix, mean_difference, pearson
from joulery.accounting.operations.rows import TRANSFORMERS, Fold, folded, rolled_up
from joulery.app.runs.anatomies import RunAnatomy, stef, stpf
from joulery.domain.errors import DataError
from joulery.domain.json_numbers import known_number


@dataclass(frozen=True, slots=True)
class Change:
    """One row of the table: a layer, module, operation or phase.

    Attributes:
        name: Name of the layer, module, operation or phase.
        energy_j: Energy of each run; NaN where the run has no such row.
        error_j: Standard error of each over its steps; NaN where not known.
        significant_j: Smallest change of each run against the first that is significant; NaN where not known.
    """

    name: str
    energy_j: tuple[float, ...]
    error_j: tuple[float, ...] = ()
    significant_j: tuple[float, ...] = ()

    def change_j(self, run: int) -> float:
        """Change of a run's energy against the first run, J; NaN where one of the two has no such row."""
        return self.energy_j[run] - self.energy_j[0]

    def significant(self, run: int) -> bool | None:
        """Whether the change exceeds the variation of the steps; None where that is not known."""
        least = self.significant_j[run] if self.significant_j else math.nan
        change = self.change_j(run)
        return None if math.isnan(least) or math.isnan(change) else abs(change) > least


@dataclass(frozen=True, slots=True)
class Comparison:
    """Runs compared.

    Attributes:
        names: Names of the runs.
        per_step: Whether joules are per step.
        common: Summarised operations that all runs have.
        energy_pcc, energy_med_j: Every run against every other; MED is the row's run minus the column's.
        power_pcc, power_med_w: The same of watts.
        by: Grouping of the changes.
        changes: Rows of the table, by energy of the first run.
    """

    names: tuple[str, ...]
    per_step: bool
    common: int
    energy_pcc: list[list[float]]
    energy_med_j: list[list[float]]
    power_pcc: list[list[float]]
    power_med_w: list[list[float]]
    by: str
    changes: tuple[Change, ...]


def compare(runs: Sequence[RunAnatomy], *, by: str = "layer", folds: Sequence[Fold] = ()) -> Comparison:
    """Compare traced runs.

    Args:
        runs: At least two.
        by: ``module``, ``layer``, ``op`` or ``phase``: the grouping of the table of changes.
        folds: Rules that unify the names of different models; for correlation and mean difference self-similar layers
            are folded too.

    Raises:
        DataError: There are fewer than two runs, or two of them share fewer than two operations.
    """
    if len(runs) < 2:
        raise DataError("one run cannot be compared", hint="name two runs or more")
    steps = [float(run.run.manifest.get("tracing", {}).get("steps", 0)) for run in runs]
    per_step = all(steps)
    scale = [1 / count if per_step else 1.0 for count in (steps if per_step else [1.0] * len(runs))]
    alike = [*folds, *TRANSFORMERS]
    energies = [_scaled(stef(run.footprint, alike), factor) for run, factor in zip(runs, scale, strict=True)]
    powers = [stpf(run.footprint, alike) for run in runs]
    return Comparison(
        tuple(run.name for run in runs),
        per_step,
        len(set(energies[0]).intersection(*energies[1:])),
        matrix(energies, pearson),
        matrix(energies, mean_difference),
        matrix(powers, pearson),
        matrix(powers, mean_difference),
        by,
        _changes(
            [_grouped(run, by, folds, factor) for run, factor in zip(runs, scale, strict=True)],
            [_freedom(run) for run in runs],
        ),
    )


def as_object(comparison: Comparison) -> dict[str, Any]:
    """The object that ``joulery compare --json`` prints."""

    def clean(rows: list[list[float]]) -> list[list[float | None]]:
        return [[known_number(v) for v in row] for row in rows]

    return {
        "schema": "joulery.comparison/1",
        "runs": list(comparison.names),
        "per_step": comparison.per_step,
        "operations": comparison.common,
        "energy": {"pcc": clean(comparison.energy_pcc), "med_j": clean(comparison.energy_med_j)},
        "power": {"pcc": clean(comparison.power_pcc), "med_w": clean(comparison.power_med_w)},
        "by": comparison.by,
        "rows": [
            {
                "name": change.name,
                "energy_j": [known_number(value) for value in change.energy_j],
                "change_j": [known_number(change.change_j(run)) for run in range(len(comparison.names))],
                "error_j": [known_number(value) for value in change.error_j],
                "significant": [change.significant(run) for run in range(len(comparison.names))],
            }
            for change in comparison.changes
        ],
    }


def _grouped(run: RunAnatomy, by: str, folds: Sequence[Fold], factor: float) -> dict[str, tuple[float, float]]:
    """Joules of each row and their standard error; rows of one run vary together, so their errors add up."""
    rows = rolled_up(folded(run.footprint, folds), by)
    summed: dict[str, tuple[float, float]] = {}
    for name, joules, error in zip(rows.op, rows.energy_j.tolist(), rows.error_j.tolist(), strict=True):
        if not math.isnan(joules):
            energy_j, error_j = summed.get(name, (0.0, 0.0))
            summed[name] = energy_j + joules * factor, error_j + error * factor
    return summed


def _freedom(run: RunAnatomy) -> int:
    """Degrees of freedom of the standard errors of a run: its steps, less one per session."""
    sessions = run.run.manifest.get("tracing", {}).get("sessions", ())
    return sum(max(0, int(session["steps"]) - 1) for session in sessions)


def _changes(groups: Sequence[Mapping[str, tuple[float, float]]], freedom: Sequence[int]) -> tuple[Change, ...]:
    """Every row of any run. A change is significant at 5 % for all rows of the table together (Bonferroni, Student)."""
    names = set[str]().union(*groups)
    missing = (math.nan, math.nan)
    rows = []
    for name in names:
        cells = [group.get(name, missing) for group in groups]
        least = [
            float(stdtrit(freedom[0] + freedom[run], 1 - 0.025 / len(names))) * math.hypot(cells[0][1], error)
            if freedom[0] and freedom[run]
            else math.nan
            for run, (_, error) in enumerate(cells)
        ]
        energy_j, error_j = zip(*cells, strict=True)
        rows.append(Change(name, energy_j, error_j, tuple(least)))
    return tuple(sorted(rows, key=lambda row: (-max(v for v in row.energy_j if not math.isnan(v)), row.name)))


def _scaled(values: Mapping[str, float], factor: float) -> dict[str, float]:
    return {name: value * factor for name, value in values.items()}
