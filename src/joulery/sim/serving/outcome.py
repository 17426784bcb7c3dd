"""Outcome of a scheme of Clover's study: grams, accuracy, objective and the cost of its trials.

Savings are reported in two accountings, always both. ``consolidated``: the service runs on few GPUs and the others
are off, against the baseline on all of them. ``same GPUs``: all GPUs stay powered, and only what runs on them changes.
The difference between the two is the saving of switching GPUs off; it is most of the published saving.

The published accounting counts a trial as 30 s. As published, a trial answers a thousand requests at the service's own
demand, and every change stops and starts all instances: :func:`trial_cost` adds that up. How long models take to load
was not published and is left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from joulery.domain.arrays import FloatArray
from joulery.domain.errors import InfeasibleError
from joulery.domain.serving.service import Slo
from joulery.domain.serving.variant_table import VariantTable
from joulery.policies.serving.objective import Objective, ReplanTrigger, ServiceObjectives
from joulery.policies.serving.search.annealing import TrialMetrics
from joulery.sim.serving.trial_table import REQUESTS, Bench

HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class StudySettings:
    """Settings that the user fixes.

    Attributes:
        lambda_ratio: Weight of carbon against accuracy, 0 to 1.
        max_loss_ratio: Instead of that weight, the relative loss of accuracy never to exceed; then carbon alone counts.
        base_g_per_kwh: Intensity of the baseline.
        pue: Facility energy per IT energy; cancels in every saving.
        replan_ratio: Optimise again when the intensity has moved by this share of the base.
        replan_of_previous: Take that share of the intensity planned for instead, as the paper states it.
        trial_s: Seconds a trial is taken to last in the accounting.
        period_s: Seconds between two readings of the grid's intensity.
    """

    lambda_ratio: float = 0.1
    base_g_per_kwh: float = 250.0
    pue: float = 1.5
    replan_ratio: float = 0.05
    trial_s: float = 30.0
    period_s: float = HOUR_S
    max_loss_ratio: float | None = None
    replan_of_previous: bool = False

    @property
    def trigger(self) -> ReplanTrigger:
        """Thresholds at which a scheme optimises again; nothing needs time to settle in the study."""
        return ReplanTrigger(
            base_g_per_kwh=self.base_g_per_kwh * self.pue,
            pue=self.pue,
            intensity_ratio=self.replan_ratio,
            of_previous=self.replan_of_previous,
            settle_s=1.0,
        )

    def calls_for_a_plan(self, g_per_kwh: float, planned_g: float) -> bool:
        """Whether to optimise again; always at first, when nothing (NaN) was planned for."""
        return math.isnan(planned_g) or self.trigger.intensity_moved(g_per_kwh, planned_g)

    def goals(self, table: VariantTable) -> ServiceObjectives:
        """Weight of carbon, latency limit and least accuracy."""
        weight = self.lambda_ratio if self.max_loss_ratio is None else 1.0
        return ServiceObjectives(weight, Slo(table.base_latency_s), self.least_accuracy_ratio(table))

    def least_accuracy_ratio(self, table: VariantTable) -> float:
        """Accuracy never to go below; 0 where accuracy is weighed instead."""
        return 0.0 if self.max_loss_ratio is None else table.base_accuracy_ratio * (1.0 - self.max_loss_ratio)


Period = tuple[tuple[float, int | None], ...]
"""Rows that ran in one period: parts of it and rows of the space, the settled one last; None is the baseline."""


@dataclass(frozen=True, slots=True)
class Timetable:
    """Periods, trials and optimiser runs of a scheme.

    Attributes:
        periods: What ran in each period of the grid.
        trials: Rows tried, in order.
        invocations: How often the optimiser ran.
        beyond: Metrics of rows from ``len(space)`` on: pools that are not in the space, with joules a request
            consolidated and with every GPU powered.
        trials_at: Trials in each period.
        infeasible: The error if no configuration keeps every limit, with the nearest feasible; otherwise None.
    """

    periods: tuple[Period, ...]
    trials: tuple[int, ...] = ()
    invocations: int = 0
    beyond: tuple[tuple[TrialMetrics, float], ...] = ()
    trials_at: tuple[int, ...] = ()
    infeasible: InfeasibleError | None = None


_STOP_S, _CUT_S, _START_S, _POLL_S, _BETWEEN_S, _SETTLE_S = 0.5, 1.0, 0.1, 2.0, 3.0, 20.0
"""The published pauses: stopping, destroying and creating slices, starting an instance, waiting until it answers,
between two trials, after the last change (repository boringlee24/sc23-clover, v1.0, ``system/``)."""


@dataclass(frozen=True, slots=True)
class TrialCost:
    """The cost of all trials of a run.

    Attributes:
        seconds: Time they and the changes between them take.
        energy_j: Joules of the requests they answer.
        reslices: How often GPUs are repartitioned.
    """

    seconds: float
    energy_j: float
    reslices: int


@dataclass(frozen=True, slots=True)
class SchemeOutcome:
    """Outcome of a scheme on one service under one grid; all of it simulated.

    Attributes:
        scheme: Name.
        saving_ratio: Grams saved against the baseline on all GPUs, the others switched off.
        saving_same_gpus_ratio: The same with all GPUs powered.
        loss_points: Accuracy lost, percentage points.
        loss_ratio: Accuracy lost, relative.
        objective: Eq. 3, mean over periods, as a ratio.
        trials: Configurations tried.
        trials_meeting_limit_ratio: Share of them that kept the latency limit; 1 when none was tried.
        settled_violations: Periods that ran a configuration above the limit.
        fallbacks: Periods that ran the baseline on all GPUs because no configuration was found.
        invocations: How often the optimiser ran.
        optimise_time_ratio: Share of the time spent in trials, at the duration that the settings assume.
        cost: Real cost of the trials.
        optimise_time_true_ratio: Share of the time spent in trials, at their real cost.
        infeasible: The error that made it fall back, with the nearest feasible; None if it did not fall back, or did
            not search everything.
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
    """Compute the outcome of a scheme from its timetable, trials included.

    Args:
        scheme: Its name.
        bench: Accuracy, joules and latency of every configuration.
        objective: Clover's objective (SC'23, Eqs. 1-3).
        intensities: Grid intensity of each period, g/kWh.
        settings: Lengths of a period and of a trial, seconds.
        timetable: Which configuration ran for which share of each period.
    """
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


def by_hour(
    bench: Bench, objective: Objective, intensities: Sequence[float], timetable: Timetable
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Accuracy, joules a request and Clover's Eq. 3 of each period, trials included; float64[periods] each.

    The arguments are those of :func:`outcome`.
    """
    accuracy, energy = (_means(bench, timetable, each) for each in ("accuracy", "energy"))
    triples = zip(accuracy.tolist(), energy.tolist(), intensities, strict=True)
    return accuracy, energy, np.array([objective.score(*triple) for triple in triples])


def _shown(bench: Bench, timetable: Timetable, row: int) -> tuple[TrialMetrics, float]:
    """Metrics of a row, and its joules a request with every GPU powered."""
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


def trial_cost(bench: Bench, trials: Sequence[int], invocations: int) -> TrialCost:
    """Add up the cost of trials, in order.

    Args:
        bench: The service.
        trials: Rows tried.
        invocations: How often a search ended and the service changed to what it settled on.
    """
    if not trials:
        return TrialCost(0.0, 0.0, 0)
    cut = bench.space.graphs.reshape(len(bench.space), len(bench.space.variants), -1).sum(axis=1)
    seconds, energy_j, reslices = invocations * _SETTLE_S, 0.0, 0
    before = cut[bench.base_row]
    for row in trials:
        changed = bool((cut[row] != before).any())
        before = cut[row]
        # Where every GPU has a configuration of its own, all are assumed to change.
        reslices += changed * bench.table.gpus
        instances = bench.copies * int(cut[row].sum())
        seconds += REQUESTS * bench.interarrival_s + _STOP_S + _START_S * instances + _POLL_S + _BETWEEN_S
        seconds += _CUT_S * changed
        energy_j += REQUESTS * bench.metrics[row].energy_j
    return TrialCost(seconds, energy_j, reslices)
