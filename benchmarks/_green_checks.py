"""Comparisons of GREEN's checks: table rows with bars, and changes of one run against another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from joulery.sim.core.hourly_intensity import Intensity
from joulery.sim.training.cluster import TrainingRun
from joulery.sim.training.plant import Jobs
from joulery.sim.training.study import Setting, run_scheme

Change = dict[str, float]
"""Relative changes: mean and 99th percentile of completion times, carbon of jobs and cluster, energy, peak."""


@dataclass
class Checks:
    """Lines of the table, and whether each bar was met."""

    rows: list[list[str]]
    held: list[tuple[str, bool]]

    def add(self, number: str, what: str, bar: str, ours: str, held: bool | None = None) -> None:
        """Add one row; ``held`` is None if it has no bar."""
        self.rows.append([number, what, bar, ours, "" if held is None else "yes" if held else "**no**"])
        if held is not None:
            self.held.append((f"check {number}: {what} {bar}", held))


def compare(
    bursts: Sequence[Jobs], grids: dict[str, Intensity], setting: Setting, mine: str, other: str
) -> list[Change]:
    """Change of one scheme against another in each region, means over workloads."""
    found = []
    for carbon in grids.values():
        each = [
            change(run_scheme(mine, setting, jobs, carbon), run_scheme(other, setting, jobs, carbon)) for jobs in bursts
        ]
        found.append({key: mean(each, key) for key in each[0]})
    return found


def change(run: TrainingRun, base: TrainingRun) -> Change:
    """Relative changes of one run against another."""
    measures: dict[str, Callable[[TrainingRun], float]] = {
        "jct": lambda one: float(one.jct_s.mean()),
        "p99": lambda one: float(np.quantile(one.jct_s, 0.99)),
        "job": lambda one: float(one.job_kg.sum()),
        "co2": lambda one: one.cluster_kg,
        "kwh": lambda one: one.cluster_kwh,
        "peak": lambda one: one.peak_w,
    }
    return {name: of(run) / of(base) - 1.0 for name, of in measures.items()}


def by_size(jobs: Jobs, run: TrainingRun, base: TrainingRun) -> list[float]:
    """Change of the mean completion time of jobs below 10 min, 1 h, 10 h and beyond; NaN where there are none."""
    edges = (0.0, 600.0, 3600.0, 36_000.0, np.inf)
    found = []
    for low, high in pairwise(edges):
        rows = (jobs.work_s >= low) & (jobs.work_s < high)
        found.append(float(run.jct_s[rows].mean() / base.jct_s[rows].mean() - 1) if rows.any() else np.nan)
    return found


def mean(found: Sequence[Change], key: str) -> float:
    """The mean change of one measure."""
    return float(np.mean([one[key] for one in found]))


def span(found: Sequence[Change], key: str) -> str:
    """The mean change of one measure and its range, as text."""
    values = [one[key] for one in found]
    between = f" ({percent(min(values))} to {percent(max(values))})" if len(values) > 1 else ""
    return percent(float(np.mean(values))) + between


def percent(ratio: float) -> str:
    """A ratio as a signed percentage."""
    return f"{100 * ratio:+.1f} %"
