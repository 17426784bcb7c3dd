"""What a scheme of Clover's study ran, and what that did: grams, accuracy, objective, trials included.

Savings are reported in two accountings, always both. ``consolidated``: the service runs on few GPUs and the others
are off, against the yardstick on all of them. ``same GPUs``: all GPUs stay powered, and only what runs on them changes.
The difference between the two is what switching GPUs off is worth, and it is most of the published saving.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from joulery.domain.arrays import FloatArray
from joulery.domain.errors import InfeasibleError
from joulery.domain.serving.variant_table import VariantTable
from joulery.policies.serving.annealing import TrialMetrics
from joulery.policies.serving.objective import Objective, has_moved
from joulery.sim.serving.trial_cost import TrialCost, trial_cost
from joulery.sim.serving.trial_table import Bench

HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class StudySettings:
    """What the user fixes.

    Attributes:
        lambda_ratio: Weight of carbon against accuracy, 0 to 1.
        max_loss_ratio: Instead of that weight, the relative loss of accuracy never to exceed; then carbon alone counts.
        base_g_per_kwh: Intensity of the yardstick.
        pue: Facility energy per IT energy; cancels in every saving.
        replan_ratio: Optimise again when the intensity moved by this share of the base ...
        replan_of_previous: ... or, as the paper words it, of the intensity planned for.
        trial_s: Seconds a trial is taken to last in the accounting.
        period_s: Seconds between two looks at the grid.
    """

    lambda_ratio: float = 0.1
    base_g_per_kwh: float = 250.0
    pue: float = 1.5
    replan_ratio: float = 0.05
    trial_s: float = 30.0
    period_s: float = HOUR_S
    max_loss_ratio: float | None = None
    replan_of_previous: bool = False

    def calls_for_a_plan(self, objective: Objective, g_per_kwh: float, planned_g: float) -> bool:
        """Whether to optimise again; always at first, when nothing (NaN) was planned for."""
        if math.isnan(planned_g):
            return True
        if self.replan_of_previous:
            return has_moved(g_per_kwh, planned_g, planned_g, self.replan_ratio)
        return objective.calls_for_a_plan(g_per_kwh, planned_g, self.replan_ratio)

    def least_accuracy_ratio(self, table: VariantTable) -> float:
        """Accuracy never to go below; 0 where accuracy is weighed instead."""
        return 0.0 if self.max_loss_ratio is None else table.base_accuracy_ratio * (1.0 - self.max_loss_ratio)


Period = tuple[tuple[float, int | None], ...]
"""What ran in one period: parts of the period and rows of the space, the settled one last; None is the yardstick."""


@dataclass(frozen=True, slots=True)
class Timetable:
    """What a scheme ran.

    Attributes:
        periods: What ran in each period of the grid.
        trials: Rows tried, in order.
        invocations: How often the optimiser ran.
        beyond: What rows from ``len(space)`` on do: pools that are not in the space, with joules a request consolidated
            and with every GPU powered.
        trials_at: How many trials each period began with.
        infeasible: Why nothing keeps every limit, with the least bad there is; None where something does.
    """

    periods: tuple[Period, ...]
    trials: tuple[int, ...] = ()
    invocations: int = 0
    beyond: tuple[tuple[TrialMetrics, float], ...] = ()
    trials_at: tuple[int, ...] = ()
    infeasible: InfeasibleError | None = None


@dataclass(frozen=True, slots=True)
class SchemeOutcome:
    """What a scheme made of a service under one grid; all of it simulated.

    Attributes:
        scheme: Name.
        saving_ratio: Grams saved against the yardstick on all GPUs, the others switched off.
        saving_same_gpus_ratio: The same with all GPUs powered.
        loss_points: Accuracy lost, percentage points.
        loss_ratio: Accuracy lost, relative.
        objective: Eq. 3, mean over periods, as a ratio.
        trials: Configurations tried.
        trials_meeting_limit_ratio: Part of them that kept the latency limit; 1 when none was tried.
        settled_violations: Periods that ran a configuration above the limit.
        fallbacks: Periods that ran the yardstick on all GPUs because no configuration was found.
        invocations: How often the optimiser ran.
        optimise_time_ratio: Part of the time spent in trials, as long as the settings take them to be.
        cost: What the trials really take.
        optimise_time_true_ratio: Part of the time that is.
        infeasible: Why it fell back, with the least bad there is; None where it had no reason to, or did not look at
            everything.
    """

    scheme: str
    saving_ratio: float
    saving_same_gpus_ratio: float
    loss_points: float
    loss_ratio: float
    objective: float
    trials: int
    trials_meeting_limit_ratio: float
    settled_violations: int
    fallbacks: int
    invocations: int
    optimise_time_ratio: float
    cost: TrialCost
    optimise_time_true_ratio: float
    infeasible: InfeasibleError | None = None


def objective_of(table: VariantTable, settings: StudySettings) -> Objective:
    """Eqs. 1-3 for a service."""
    return Objective(
        lambda_ratio=settings.lambda_ratio if settings.max_loss_ratio is None else 1.0,
        base_accuracy_ratio=table.base_accuracy_ratio,
        base_energy_j=table.base_energy_j,
        base_g_per_kwh=settings.base_g_per_kwh,
        base_pue=settings.pue,
        pue=settings.pue,
    )


def outcome(
    scheme: str,
    bench: Bench,
    objective: Objective,
    intensities: Sequence[float],
    settings: StudySettings,
    timetable: Timetable,
) -> SchemeOutcome:
    """Account for what a scheme ran, trials included."""
    table = bench.table
    accuracy, energy, same = (_means(bench, timetable, each) for each in ("accuracy", "energy", "same"))
    grid = np.asarray(intensities, np.float64)
    base_j = float(grid.sum()) * table.base_energy_j
    limit_s = table.base_latency_s
    settled = [period[-1][1] for period in timetable.periods]
    within = sum(bench.metrics[row].latency_s <= limit_s for row in timetable.trials)
    over = sum(row is not None and _shown(bench, timetable, row)[0].latency_s > limit_s for row in settled)
    lost = table.base_accuracy_ratio - float(accuracy.mean())
    scores = [objective.score(a, e, g) for a, e, g in zip(accuracy.tolist(), energy.tolist(), intensities, strict=True)]
    cost, span_s = trial_cost(bench, timetable.trials, timetable.invocations), len(settled) * settings.period_s
    return SchemeOutcome(
        scheme=scheme,
        saving_ratio=1.0 - float(grid @ energy) / base_j,
        saving_same_gpus_ratio=1.0 - float(grid @ same) / base_j,
        loss_points=100.0 * lost,
        loss_ratio=lost / table.base_accuracy_ratio,
        objective=math.fsum(scores) / len(scores),
        trials=len(timetable.trials),
        trials_meeting_limit_ratio=within / len(timetable.trials) if timetable.trials else 1.0,
        settled_violations=over,
        fallbacks=sum(row is None for row in settled) if timetable.invocations else 0,
        invocations=timetable.invocations,
        optimise_time_ratio=len(timetable.trials) * settings.trial_s / span_s,
        cost=cost,
        optimise_time_true_ratio=cost.seconds / span_s,
        infeasible=timetable.infeasible,
    )


def hourly(
    bench: Bench, objective: Objective, intensities: Sequence[float], timetable: Timetable
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Accuracy, joules a request and Eq. 3 of each period, trials included; float64[periods] each."""
    accuracy, energy = (_means(bench, timetable, each) for each in ("accuracy", "energy"))
    triples = zip(accuracy.tolist(), energy.tolist(), intensities, strict=True)
    return accuracy, energy, np.array([objective.score(*triple) for triple in triples])


def _shown(bench: Bench, timetable: Timetable, row: int) -> tuple[TrialMetrics, float]:
    """What a row does, and its joules a request with every GPU powered."""
    beyond = row - len(bench.space)
    return timetable.beyond[beyond] if beyond >= 0 else (bench.metrics[row], bench.same_gpus_j[row])


def _means(bench: Bench, timetable: Timetable, what: str) -> FloatArray:
    """Time-weighted mean of one quantity in each period."""
    table = bench.table
    base = {"accuracy": table.base_accuracy_ratio, "energy": table.base_energy_j, "same": table.base_energy_j}[what]

    def value(row: int | None) -> float:
        if row is None:
            return base
        metrics, same_j = _shown(bench, timetable, row)
        return {"accuracy": metrics.accuracy_ratio, "energy": metrics.energy_j, "same": same_j}[what]

    return np.array([math.fsum(part * value(row) for part, row in period) for period in timetable.periods])
