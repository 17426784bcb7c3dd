"""The figures of Clover's evaluation (SC'23, Figs. 9 to 16), recomputed from a table of trials.

This module computes the results; :mod:`reproduce.clover.page` draws them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from joulery.domain.arrays import FloatArray
from joulery.policies.serving.objective import Objective
from joulery.policies.serving.search.annealing import TrialMetrics
from joulery.sim.core.streams import Streams
from joulery.sim.serving.outcome import SchemeOutcome, StudySettings, Timetable, by_hour, objective_of, outcome
from joulery.sim.serving.schemes import SEARCHING, run_variants, timetable_of
from joulery.sim.serving.trial_table import Bench, bench

SCHEMES = ("base", "co2opt", "blover", "clover", "learning", "oracle")
WEIGHTS = tuple(number / 10 for number in range(1, 10))
LOSSES = (0.002, 0.004, 0.006, 0.008, 0.01, 0.02, 0.04)
SWEEP_G_PER_KWH = 100.0
"""Intensity at which Fig. 14 varies the weight."""
WINDOWS = 6
_MIXTURES: Mapping[str, tuple[int, int]] = {"yolo": (0, 1), "efficientnet": (1, 1), "albert": (0, 1)}
"""The published mixtures: accuracy ranks of the variants on 3g and 4g (boringlee24/sc23-clover, 90a3945)."""


@dataclass(frozen=True, slots=True)
class Mean:
    """A scheme on one service and grid: means over seeds, violations summed; ratios except where named otherwise."""

    service: str
    trace: str
    scheme: str
    saving_ratio: float
    saving_same_gpus_ratio: float
    loss_points: float
    loss_ratio: float
    objective: float
    p95_ratio: float
    trials: float
    meeting_ratio: float
    optimise_time_ratio: float
    optimise_time_true_ratio: float
    violations: int


@dataclass(frozen=True, slots=True)
class TriedConfiguration:
    """One configuration tried (Fig. 13): changes in percent, whether it kept the latency limit and was chosen."""

    accuracy_percent: float
    carbon_percent: float
    within: bool
    settled: bool


@dataclass(frozen=True, slots=True, eq=False)
class Fewer:
    """A service on fewer GPUs (Fig. 15): p95 and saving against the baseline, by equivalent number of GPUs."""

    service: str
    gpus: tuple[int, ...]
    base_p95_ratio: FloatArray
    mixture_p95_ratio: FloatArray
    base_saving_ratio: FloatArray
    mixture_saving_ratio: FloatArray


@dataclass(frozen=True, slots=True)
class Allowed:
    """Savings at one limit on the loss of accuracy (Fig. 14b); NaN where no configuration keeps both limits."""

    service: str
    loss_ratio: float
    standard_saving_ratio: float
    columns_saving_ratio: float


@dataclass(frozen=True, slots=True, eq=False)
class CloverFigures:
    """The results that Figs. 9 to 16 show.

    Attributes:
        grids: Intensities by name; the first is the one of Figs. 9 to 13.
        means: Figs. 9, 10, 12 and 16.
        objective: Fig. 11, Eq. 3 in percent by hour, by service and scheme.
        windows: Fig. 12a, share of the time spent in optimisation in each of six windows, by scheme.
        invocations: Fig. 13, for each service the first, second and last invocation.
        weights: Fig. 14a, saving and relative loss by service, float64[weights, 2].
        allowed: Fig. 14b.
        fewer: Fig. 15.
    """

    grids: Mapping[str, Sequence[float]]
    means: tuple[Mean, ...]
    objective: Mapping[tuple[str, str], FloatArray]
    windows: Mapping[str, FloatArray]
    invocations: Mapping[str, tuple[tuple[TriedConfiguration, ...], ...]]
    weights: Mapping[str, FloatArray]
    allowed: tuple[Allowed, ...]
    fewer: tuple[Fewer, ...]

    def mean(self, service: str, scheme: str, trace: str | None = None) -> Mean:
        """The mean of a scheme on a service, for the first grid unless another is named."""
        where = next(iter(self.grids)) if trace is None else trace
        return next(one for one in self.means if (one.service, one.scheme, one.trace) == (service, scheme, where))

    @property
    def services(self) -> tuple[str, ...]:
        """Names of the services, in the order of ``means``."""
        return tuple(dict.fromkeys(one.service for one in self.means))


def figures(
    benches: Mapping[str, Bench], grids: Mapping[str, Sequence[float]], settings: StudySettings, seeds: int
) -> CloverFigures:
    """Compute the results of every figure.

    Args:
        benches: The services with their tables of trials; Fig. 15 shows the loads in these tables.
        grids: Intensities by name.
        settings: Settings that the user fixes.
        seeds: How often each searching scheme runs.
    """
    main = next(iter(grids))
    means, objective, spent = [], {}, {name: np.zeros(WINDOWS) for name in ("blover", "clover")}
    invocations = {}
    for service, made in benches.items():
        goal = objective_of(made.table, settings)
        for trace, grid in grids.items():
            for scheme in SCHEMES:
                tables = [
                    timetable_of(scheme, made, trace, grid, settings, Streams(seed))
                    for seed in range(seeds if scheme in SEARCHING else 1)
                ]
                found = [outcome(scheme, made, goal, grid, settings, table) for table in tables]
                means.append(_mean(made, trace, scheme, found, tables))
                if trace == main:
                    objective[service, scheme] = 100 * by_hour(made, goal, grid, tables[0])[2]
                    if scheme in spent:
                        spent[scheme] += _windows(tables, settings) / len(benches)
                    if scheme == "clover":
                        invocations[service] = _invocations(made, grid, settings, tables[0])
    return CloverFigures(
        grids=grids,
        means=tuple(means),
        objective=objective,
        windows=spent,
        invocations=invocations,
        weights={service: _weights(made, settings) for service, made in benches.items()},
        allowed=tuple(_allowed(made, loss, settings) for made in benches.values() for loss in LOSSES),
        fewer=tuple(_fewer(made) for made in benches.values()),
    )


def _mean(made: Bench, trace: str, scheme: str, found: Sequence[SchemeOutcome], tables: Sequence[Timetable]) -> Mean:
    def over(name: str) -> float:
        return float(np.mean([getattr(one, name) for one in found]))

    settled = [period[-1][1] for table in tables for period in table.periods]
    p95 = [1.0 if row is None else made.metrics[row].latency_s / made.table.base_latency_s for row in settled]
    return Mean(
        service=made.table.service,
        trace=trace,
        scheme=scheme,
        saving_ratio=over("saving_ratio"),
        saving_same_gpus_ratio=over("saving_same_gpus_ratio"),
        loss_points=over("loss_points"),
        loss_ratio=over("loss_ratio"),
        objective=over("objective"),
        p95_ratio=float(np.mean(p95)),
        trials=over("trials"),
        meeting_ratio=over("trials_meeting_limit_ratio"),
        optimise_time_ratio=over("optimise_time_ratio"),
        optimise_time_true_ratio=over("optimise_time_true_ratio"),
        violations=sum(one.settled_violations for one in found),
    )


def _windows(tables: Sequence[Timetable], settings: StudySettings) -> FloatArray:
    """Share of the time spent in trials in each of six windows, mean over runs."""
    each = np.array([table.trials_at for table in tables], np.float64).mean(axis=0)
    edges = np.linspace(0, len(each), WINDOWS + 1).round().astype(int)
    parts = [each[begin:end] for begin, end in pairwise(edges.tolist())]
    return np.array([part.mean() * settings.trial_s / settings.period_s if len(part) else 0.0 for part in parts])


def _invocations(
    made: Bench, grid: Sequence[float], settings: StudySettings, table: Timetable
) -> tuple[tuple[TriedConfiguration, ...], ...]:
    """Configurations that the first, the second and the last invocation tried."""
    goal, begin, found = objective_of(made.table, settings), 0, []
    for hour, count in enumerate(table.trials_at):
        rows = table.trials[begin : begin + count]
        begin += count
        settled = table.periods[hour][-1][1]
        if rows:
            shown = dict.fromkeys((*rows, settled)) if settled is not None else dict.fromkeys(rows)
            found.append(tuple(_trial(made.metrics[row], made, goal, grid[hour], row == settled) for row in shown))
    chosen = (0, 1, len(found) - 1) if len(found) > 2 else range(len(found))
    return tuple(found[at] for at in chosen)


def _trial(metrics: TrialMetrics, made: Bench, goal: Objective, g_per_kwh: float, settled: bool) -> TriedConfiguration:
    return TriedConfiguration(
        accuracy_percent=100 * goal.accuracy_change(metrics.accuracy_ratio),
        carbon_percent=100 * goal.carbon_change(metrics.energy_j, g_per_kwh),
        within=metrics.latency_s <= made.table.base_latency_s,
        settled=settled,
    )


def _weights(made: Bench, settings: StudySettings) -> FloatArray:
    """Saving and relative loss of the best configuration at each weight."""
    rows = []
    for weight in WEIGHTS:
        one = replace(settings, lambda_ratio=weight, max_loss_ratio=None)
        best = run_variants("oracle", made, "sweep", [SWEEP_G_PER_KWH], one, Streams(0))
        rows.append((best.saving_ratio, best.loss_ratio))
    return np.array(rows)


def _allowed(made: Bench, loss: float, settings: StudySettings) -> Allowed:
    """Savings of the best standardised configuration and of the best pool that lose at most ``loss`` of accuracy."""
    one = replace(settings, max_loss_ratio=loss)
    standard = run_variants("oracle", made, "sweep", [SWEEP_G_PER_KWH], one, Streams(0))
    pools = math.nan
    if made.costs is not None:
        found = run_variants("columns", made, "sweep", [SWEEP_G_PER_KWH], one, Streams(0))
        pools = math.nan if found.fallbacks else found.saving_ratio
    return Allowed(made.table.service, loss, math.nan if standard.fallbacks else standard.saving_ratio, pools)


def _fewer(made: Bench) -> Fewer:
    table, space = made.table, made.space
    low, high = _MIXTURES.get(table.service, (0, 1))
    mixture = space.index(space.vector([(space.variants[low], "3g.20gb"), (space.variants[high], "4g.20gb")]))
    loads = [bench(table, made.menu, load_s) for load_s in table.loads_s]
    base, mixed = [at.metrics[at.base_row] for at in loads], [at.metrics[mixture] for at in loads]
    return Fewer(
        service=table.service,
        gpus=tuple(round(made.pool_gpus * load_s / table.loads_s[0]) for load_s in table.loads_s),
        base_p95_ratio=np.array([one.latency_s for one in base]) / table.base_latency_s,
        mixture_p95_ratio=np.array([one.latency_s for one in mixed]) / table.base_latency_s,
        base_saving_ratio=1.0 - np.array([one.energy_j for one in base]) / table.base_energy_j,
        mixture_saving_ratio=1.0 - np.array([one.energy_j for one in mixed]) / table.base_energy_j,
    )
