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
from joulery.domain.errors import DataError
from joulery.domain.mig import MigMenu
from joulery.domain.variant_table import VariantTable
from joulery.policies.annealing import Guesses, Neighbourhood, TrialMetrics, VariantSearch
from joulery.policies.learned_service import LearnedService, Setting, Yardstick
from joulery.policies.learning_search import LearningSearch
from joulery.policies.objective import Objective
from joulery.policies.variants_graph import GraphSpace, one_gpu, published_odds
from joulery.sim.streams import Streams

HOUR_S = 3600.0


@dataclass(frozen=True, slots=True, eq=False)
class Bench:
    """A service's table, indexed by the rows of its configuration space.

    Attributes:
        table: The table.
        space: Configurations that can run; edges that appear nowhere in the table do not exist.
        menu: How a GPU is cut.
        metrics: What each row does under the load served, by row.
        same_gpus_j: Joules a request of each row with every GPU powered, float64[len(space)].
        interarrival_s: The load served.
        accuracy_ratio: Accuracy of each variant of the space alone, least first.
    """

    table: VariantTable
    space: GraphSpace
    menu: MigMenu
    metrics: tuple[TrialMetrics, ...]
    same_gpus_j: FloatArray
    interarrival_s: float
    accuracy_ratio: tuple[float, ...]

    @property
    def smallest(self) -> str:
        """The least accurate variant."""
        return self.space.variants[0]

    @property
    def largest(self) -> str:
        """The most accurate variant."""
        return self.space.variants[-1]

    @property
    def base_row(self) -> int:
        """The most accurate variant on the whole GPU."""
        return self.space.index(self.space.vector([(self.largest, self.menu.profiles[0].name)]))


def bench(table: VariantTable, menu: MigMenu, interarrival_s: float | None = None) -> Bench:
    """Index a table.

    Args:
        table: What every configuration does.
        menu: How a GPU is cut.
        interarrival_s: The load served; the heaviest of the table when None.

    Raises:
        DataError: The table lacks a load, or a configuration of the space.
    """
    loads = table.loads_s
    served = loads[-1] if interarrival_s is None else interarrival_s
    if served not in loads:
        raise DataError(f"the table of {table.service!r} has no load of {served} s between requests; it has {loads}")
    accuracy = _accuracies(table)
    edges = {(variant, profile.name) for variant in accuracy for profile in menu.profiles}
    space = one_gpu(menu, tuple(accuracy), edges - {edge for entry in table.entries for edge in entry.instances})
    return Bench(
        table=table,
        space=space,
        menu=menu,
        metrics=_at_load(table, space, served),
        same_gpus_j=np.array([metrics.energy_j for metrics in _at_load(table, space, loads[0])]),
        interarrival_s=served,
        accuracy_ratio=tuple(accuracy.values()),
    )


def _accuracies(table: VariantTable) -> dict[str, float]:
    """Accuracy of each variant alone, least accurate first."""
    alone = {
        entry.instances[0][0]: entry.accuracy_ratio
        for entry in table.entries
        if len({variant for variant, _ in entry.instances}) == 1
    }
    return dict(sorted(alone.items(), key=lambda item: (item[1], item[0])))


def _at_load(table: VariantTable, space: GraphSpace, interarrival_s: float) -> tuple[TrialMetrics, ...]:
    """What each row of the space does under one load."""
    row_of = {tuple(row): number for number, row in enumerate(space.graphs.tolist())}
    found: dict[int, TrialMetrics] = {}
    for entry in table.entries:
        if entry.interarrival_s == interarrival_s:
            row = row_of.get(space.vector(entry.instances))
            if row is None:
                raise DataError(f"the table of {table.service!r} holds {entry.instances}, which no partition carries")
            found[row] = TrialMetrics(entry.accuracy_ratio, entry.latency_s, entry.energy_j)
    for row in range(len(space)):
        if row not in found:
            missing = space.describe(space.graphs[row])
            raise DataError(f"the table of {table.service!r} lacks {missing} at {interarrival_s} s between requests")
    return tuple(found[row] for row in range(len(space)))


@dataclass(frozen=True, slots=True)
class StudySettings:
    """What the user fixes.

    Attributes:
        lambda_ratio: Weight of carbon against accuracy, 0 to 1.
        base_g_per_kwh: Intensity of the yardstick.
        pue: Facility energy per IT energy; cancels in every saving.
        replan_ratio: Optimise again when the intensity moved by this share of the base.
        trial_s: Seconds a trial is taken to last in the accounting.
        period_s: Seconds between two looks at the grid.
    """

    lambda_ratio: float = 0.1
    base_g_per_kwh: float = 250.0
    pue: float = 1.5
    replan_ratio: float = 0.05
    trial_s: float = 30.0
    period_s: float = HOUR_S


Period = tuple[tuple[float, int | None], ...]
"""What ran in one period: parts of the period and rows of the space, the settled one last; None is the yardstick."""


@dataclass(frozen=True, slots=True)
class Timetable:
    """What a scheme ran.

    Attributes:
        periods: What ran in each period of the grid.
        trials: Rows tried, in order.
        invocations: How often the optimiser ran.
    """

    periods: tuple[Period, ...]
    trials: tuple[int, ...] = ()
    invocations: int = 0


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
        optimise_time_ratio: Part of the time spent in trials.
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


def objective_of(table: VariantTable, settings: StudySettings) -> Objective:
    """Eqs. 1-3 for a service."""
    return Objective(
        lambda_ratio=settings.lambda_ratio,
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


def clover(bench: Bench) -> NewSearch:
    """CLOVER: annealing over the configuration graph."""
    near = Neighbourhood(bench.space, published_odds(bench.space, bench.menu))
    return lambda start, known, score, rng: VariantSearch(near, start, known, score, bench.table.base_latency_s, rng)


def blover(bench: Bench) -> NewSearch:
    """BLOVER: the same loop over random configurations."""
    return lambda start, known, score, rng: VariantSearch(
        Guesses(bench.space, bench.menu), start, known, score, bench.table.base_latency_s, rng
    )


def learning(bench: Bench) -> NewSearch:
    """LEARNING: what each trial teaches about the service chooses the next; nothing is forgotten."""
    table = bench.table
    base = TrialMetrics(table.base_accuracy_ratio, table.base_latency_s, table.base_energy_j)
    setting = Setting(
        space=bench.space,
        menu=bench.menu,
        accuracy_ratio=np.array(bench.accuracy_ratio),
        gpus=table.gpus,
        rate_rps=1.0 / bench.interarrival_s,
        yardstick=Yardstick(base, 1.0 / table.loads_s[0]),
    )
    service = LearnedService(setting)
    return lambda start, known, score, rng: LearningSearch(
        service, len(bench.space), known, score, table.base_latency_s
    )


def fixed(row: int | None, intensities: Sequence[float]) -> Timetable:
    """BASE (no row: the yardstick) and CO2OPT (one row for ever)."""
    return Timetable(tuple(((1.0, row),) for _ in intensities))


def co2opt_row(bench: Bench) -> int:
    """The least accurate variant on the finest partition."""
    finest = max(bench.menu.multisets, key=len)
    return bench.space.index(bench.space.vector([(bench.smallest, profile) for profile in finest]))


def oracle(bench: Bench, objective: Objective, intensities: Sequence[float]) -> Timetable:
    """ORACLE: in each period the best of every configuration that keeps the limit."""
    within = [row for row, metrics in enumerate(bench.metrics) if metrics.latency_s <= bench.table.base_latency_s]

    def best(g_per_kwh: float) -> int | None:
        return max(within, key=lambda row: _score(objective, bench.metrics[row], g_per_kwh), default=None)

    return Timetable(tuple(((1.0, best(g_per_kwh)),) for g_per_kwh in intensities))


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
    periods: list[Period] = []
    for g_per_kwh in intensities:
        spent: list[int] = []
        if math.isnan(planned_g) or objective.calls_for_a_plan(g_per_kwh, planned_g, settings.replan_ratio):
            search = new_search(running, known, partial(_score, objective, g_per_kwh=g_per_kwh), rng)
            while (row := search.ask()) is not None:
                known[row] = bench.metrics[row]
                search.tell(row, known[row])
                spent.append(row)
            settled, planned_g, invocations = search.settled, g_per_kwh, invocations + 1
            running = bench.base_row if settled is None else settled
        trials += spent
        part = settings.trial_s / settings.period_s
        periods.append((*((part, row) for row in spent), (1.0 - part * len(spent), settled)))
    return Timetable(tuple(periods), tuple(trials), invocations)


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
    accuracy, energy, same = (_means(bench, timetable.periods, each) for each in ("accuracy", "energy", "same"))
    grid = np.asarray(intensities, np.float64)
    base_j = float(grid.sum()) * table.base_energy_j
    limit_s = table.base_latency_s
    settled = [period[-1][1] for period in timetable.periods]
    within = sum(bench.metrics[row].latency_s <= limit_s for row in timetable.trials)
    lost = table.base_accuracy_ratio - float(accuracy.mean())
    scores = [objective.score(a, e, g) for a, e, g in zip(accuracy.tolist(), energy.tolist(), intensities, strict=True)]
    return SchemeOutcome(
        scheme=scheme,
        saving_ratio=1.0 - float(grid @ energy) / base_j,
        saving_same_gpus_ratio=1.0 - float(grid @ same) / base_j,
        loss_points=100.0 * lost,
        loss_ratio=lost / table.base_accuracy_ratio,
        objective=math.fsum(scores) / len(scores),
        trials=len(timetable.trials),
        trials_meeting_limit_ratio=within / len(timetable.trials) if timetable.trials else 1.0,
        settled_violations=sum(row is not None and bench.metrics[row].latency_s > limit_s for row in settled),
        fallbacks=sum(row is None for row in settled) if timetable.invocations else 0,
        invocations=timetable.invocations,
        optimise_time_ratio=len(timetable.trials) * settings.trial_s / (len(settled) * settings.period_s),
    )


Scheme = Callable[[Bench, Objective, Sequence[float], StudySettings, np.random.Generator], Timetable]


def _searching(make: Callable[[Bench], NewSearch]) -> Scheme:
    return lambda bench, objective, intensities, settings, rng: searched(
        bench, objective, intensities, settings, make(bench), rng
    )


SCHEMES: Mapping[str, Scheme] = MappingProxyType(
    {
        "base": lambda bench, objective, intensities, settings, rng: fixed(None, intensities),
        "co2opt": lambda bench, objective, intensities, settings, rng: fixed(co2opt_row(bench), intensities),
        "blover": _searching(blover),
        "clover": _searching(clover),
        "learning": _searching(learning),
        "oracle": lambda bench, objective, intensities, settings, rng: oracle(bench, objective, intensities),
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
    objective = objective_of(bench.table, settings)
    rng = streams("search", bench.table.service, trace, scheme)
    timetable = SCHEMES[scheme](bench, objective, intensities, settings, rng)
    return outcome(scheme, bench, objective, intensities, settings, timetable)


def _score(objective: Objective, metrics: TrialMetrics, g_per_kwh: float) -> float:
    return objective.score(metrics.accuracy_ratio, metrics.energy_j, g_per_kwh)


def _means(bench: Bench, periods: Sequence[Period], what: str) -> FloatArray:
    """Time-weighted mean of one quantity in each period."""
    table = bench.table
    if what == "accuracy":
        values = [metrics.accuracy_ratio for metrics in bench.metrics] + [table.base_accuracy_ratio]
    elif what == "energy":
        values = [metrics.energy_j for metrics in bench.metrics] + [table.base_energy_j]
    else:
        values = [*bench.same_gpus_j.tolist(), table.base_energy_j]
    return np.array(
        [math.fsum(part * values[-1 if row is None else row] for part, row in period) for period in periods]
    )
