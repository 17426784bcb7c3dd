"""Clover's study in virtual time: schemes that choose configurations hour by hour, judged on one table and one grid.

The evaluator is a table, so a trial costs nothing to compute; what it would cost the service is accounted for: while
a configuration is tried, its accuracy and its joules are the service's.

Savings are reported in two accountings, always both. ``consolidated``: the service runs on few GPUs and the others
are off, against the yardstick on all of them. ``same GPUs``: all GPUs stay powered, and only what runs on them changes.
The difference between the two is what switching GPUs off is worth, and it is most of the published saving.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Protocol

import numpy as np

from joulery.domain.arrays import FloatArray
from joulery.domain.variant_table import VariantTable
from joulery.policies.variants.annealing import Guesses, Neighbourhood, TrialMetrics, VariantSearch
from joulery.policies.variants.learned_service import LearnedService, Setting, Yardstick
from joulery.policies.variants.learning import LearningSearch
from joulery.policies.variants.objective import Objective, has_moved
from joulery.sim.column_scheme import envelope
from joulery.sim.mixed_bench import surroundings
from joulery.sim.streams import Streams
from joulery.sim.trial_cost import TrialCost, trial_cost
from joulery.sim.variant_bench import Bench, bench

__all__ = [
    "SCHEMES",
    "SEARCHING",
    "Bench",
    "SchemeOutcome",
    "StudySettings",
    "Timetable",
    "bench",
    "blover",
    "clover",
    "co2opt_row",
    "fixed",
    "hourly",
    "learning",
    "objective_of",
    "oracle",
    "outcome",
    "run",
    "searched",
    "timetable_of",
]
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
    """

    periods: tuple[Period, ...]
    trials: tuple[int, ...] = ()
    invocations: int = 0
    beyond: tuple[tuple[TrialMetrics, float], ...] = ()
    trials_at: tuple[int, ...] = ()


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


class Settling(Protocol):
    """A search over rows of a space that ends on one of them, or on none."""

    @property
    def settled(self) -> int | None:
        """The best row found that keeps the limit."""
        ...

    def ask(self) -> int | None:
        """The next row to try; None when the search is over."""
        ...

    def tell(self, candidate: int, metrics: TrialMetrics, /) -> None:
        """What the trial showed."""
        ...


NewSearch = Callable[
    [int, Mapping[int, TrialMetrics], Callable[[TrialMetrics], float], np.random.Generator],
    Settling,
]
"""Makes the search of one invocation: from the row that runs now, with what earlier ones measured, a score to raise
and a source of randomness."""


def clover(bench: Bench, least_accuracy_ratio: float = 0.0) -> NewSearch:
    """CLOVER: annealing over the configuration graph."""
    near, limit_s = Neighbourhood(bench.space, bench.odds), bench.table.base_latency_s
    return lambda start, known, score, rng: VariantSearch(
        near, start, known, score, limit_s, rng, least_accuracy_ratio=least_accuracy_ratio
    )


def blover(bench: Bench, least_accuracy_ratio: float = 0.0) -> NewSearch:
    """BLOVER: the same loop over random configurations."""
    limit_s = bench.table.base_latency_s
    return lambda start, known, score, rng: VariantSearch(
        Guesses(bench.space, bench.menu),
        start,
        known,
        score,
        limit_s,
        rng,
        least_accuracy_ratio=least_accuracy_ratio,
    )


def learning(bench: Bench, least_accuracy_ratio: float = 0.0) -> NewSearch:
    """LEARNING: what each trial teaches about the service chooses the next; nothing is forgotten."""
    table = bench.table
    base = TrialMetrics(table.base_accuracy_ratio, table.base_latency_s, table.base_energy_j)
    setting = Setting(
        space=bench.space,
        menu=bench.menu,
        accuracy_ratio=np.array(bench.accuracy_ratio),
        gpus=table.gpus,
        rate_rps=1.0 / bench.interarrival_s,
        yardstick=Yardstick(base, 1.0 / table.loads_s[0], row=bench.base_row),
        copies=bench.copies,
    )
    service, among = LearnedService(setting), None if bench.promising is None else partial(surroundings, bench)
    return lambda start, known, score, rng: LearningSearch(
        service, len(bench.space), known, score, table.base_latency_s, None, least_accuracy_ratio, among
    )


def fixed(row: int | None, intensities: Sequence[float]) -> Timetable:
    """BASE (no row: the yardstick) and CO2OPT (one row for ever)."""
    return Timetable(tuple(((1.0, row),) for _ in intensities))


def co2opt_row(bench: Bench) -> int:
    """The least accurate variant on the finest partition."""
    finest = max(bench.menu.multisets, key=len)
    return bench.space.index(bench.space.vector([(bench.smallest, profile) for profile in finest]))


def oracle(
    bench: Bench, objective: Objective, intensities: Sequence[float], least_accuracy_ratio: float = 0.0
) -> Timetable:
    """ORACLE: in each period the best of every configuration that keeps the limits."""
    within = [
        row
        for row in (range(len(bench.space)) if bench.promising is None else bench.promising)
        if bench.metrics[row].latency_s <= bench.table.base_latency_s
        and bench.metrics[row].accuracy_ratio >= least_accuracy_ratio - 1e-9
    ]

    def best(g_per_kwh: float) -> int | None:
        return max(within, key=lambda row: _score(objective, bench.metrics[row], g_per_kwh), default=None)

    # It is asked at every intensity, so that a period on the yardstick counts as one for want of a configuration.
    periods: tuple[Period, ...] = tuple(((1.0, best(g_per_kwh)),) for g_per_kwh in intensities)
    return Timetable(periods, invocations=len(intensities) if not within else 0)


def searched(
    bench: Bench,
    objective: Objective,
    intensities: Sequence[float],
    settings: StudySettings,
    new_search: NewSearch,
    rng: np.random.Generator,
) -> Timetable:
    """A scheme that searches whenever the grid has moved, and runs what it settled on until it moves again.

    A search that finds nothing within the limit falls back to the yardstick on all GPUs.
    """
    known: dict[int, TrialMetrics] = {}
    running, planned_g, invocations = bench.base_row, math.nan, 0
    settled: int | None = None
    trials: list[int] = []
    trials_at: list[int] = []
    periods: list[Period] = []
    for g_per_kwh in intensities:
        spent: list[int] = []
        if settings.calls_for_a_plan(objective, g_per_kwh, planned_g):
            search = new_search(running, known, partial(_score, objective, g_per_kwh=g_per_kwh), rng)
            while (row := search.ask()) is not None:
                known[row] = bench.metrics[row]
                search.tell(row, known[row])
                spent.append(row)
            settled, planned_g, invocations = search.settled, g_per_kwh, invocations + 1
            running = bench.base_row if settled is None else settled
        trials += spent
        trials_at.append(len(spent))
        part = settings.trial_s / settings.period_s
        periods.append((*((part, row) for row in spent), (1.0 - part * len(spent), settled)))
    return Timetable(tuple(periods), tuple(trials), invocations, trials_at=tuple(trials_at))


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
    )


Scheme = Callable[[Bench, Objective, Sequence[float], StudySettings, np.random.Generator], Timetable]


def _searching(make: Callable[[Bench, float], NewSearch]) -> Scheme:
    return lambda bench, objective, intensities, settings, rng: searched(
        bench, objective, intensities, settings, make(bench, settings.least_accuracy_ratio(bench.table)), rng
    )


def columns(
    bench: Bench, objective: Objective, intensities: Sequence[float], settings: StudySettings, rng: np.random.Generator
) -> Timetable:
    """COLUMNS: whenever the grid has moved, the best pool of any number of GPUs, each with a layout of its own.

    Planned from what requests cost, without trials on the service; draws nothing.
    """
    pools = envelope(bench, objective, intensities, settings.least_accuracy_ratio(bench.table))
    periods: list[Period] = []
    planned_g, row, invocations = math.nan, None, 0
    for g_per_kwh in intensities:
        if settings.calls_for_a_plan(objective, g_per_kwh, planned_g):
            best = max(range(len(pools)), key=lambda at: _score(objective, pools[at][0], g_per_kwh), default=None)
            row = None if best is None else len(bench.space) + best
            planned_g, invocations = g_per_kwh, invocations + 1
        periods.append(((1.0, row),))
    return Timetable(tuple(periods), (), invocations, pools)


SCHEMES: Mapping[str, Scheme] = MappingProxyType(
    {
        "base": lambda bench, objective, intensities, settings, rng: fixed(None, intensities),
        "co2opt": lambda bench, objective, intensities, settings, rng: fixed(co2opt_row(bench), intensities),
        "blover": _searching(blover),
        "clover": _searching(clover),
        "learning": _searching(learning),
        "oracle": lambda bench, objective, intensities, settings, rng: oracle(
            bench, objective, intensities, settings.least_accuracy_ratio(bench.table)
        ),
        "columns": columns,
    }
)
"""What can be compared, by name."""
SEARCHING = frozenset({"blover", "clover"})
"""Schemes whose outcome depends on the seed; ``learning`` draws nothing."""


def run(
    scheme: str, bench: Bench, trace: str, intensities: Sequence[float], settings: StudySettings, streams: Streams
) -> SchemeOutcome:
    """One scheme, one service, one grid, one seed.

    Args:
        scheme: A name in ``SCHEMES``.
        bench: The service.
        trace: Name of the grid; with the service and the scheme it names the random stream.
        intensities: g/kWh in each period.
        settings: What the user fixes.
        streams: Randomness of the searches.
    """
    timetable = timetable_of(scheme, bench, trace, intensities, settings, streams)
    return outcome(scheme, bench, objective_of(bench.table, settings), intensities, settings, timetable)


def timetable_of(
    scheme: str, bench: Bench, trace: str, intensities: Sequence[float], settings: StudySettings, streams: Streams
) -> Timetable:
    """What a scheme runs; the arguments are those of :func:`run`."""
    rng = streams("search", bench.table.service, trace, scheme)
    return SCHEMES[scheme](bench, objective_of(bench.table, settings), intensities, settings, rng)


def hourly(
    bench: Bench, objective: Objective, intensities: Sequence[float], timetable: Timetable
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Accuracy, joules a request and Eq. 3 of each period, trials included; float64[periods] each."""
    accuracy, energy = (_means(bench, timetable, each) for each in ("accuracy", "energy"))
    triples = zip(accuracy.tolist(), energy.tolist(), intensities, strict=True)
    return accuracy, energy, np.array([objective.score(*triple) for triple in triples])


def _score(objective: Objective, metrics: TrialMetrics, g_per_kwh: float) -> float:
    return objective.score(metrics.accuracy_ratio, metrics.energy_j, g_per_kwh)


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
