"""The schemes of Clover's study: what runs in each period of a grid.

The evaluator is a table, so a trial costs nothing to compute; what it would cost the service is accounted for: while
a configuration is tried, its accuracy and its joules are the service's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Protocol

import numpy as np

from joulery.domain.errors import InfeasibleError
from joulery.policies.serving.annealing import Guesses, Neighbourhood, TrialMetrics, VariantSearch
from joulery.policies.serving.learned_service import Baseline, LearnedService, Setting
from joulery.policies.serving.learning_search import LearningSearch
from joulery.policies.serving.objective import Objective
from joulery.sim.serving.mixed_table import surroundings
from joulery.sim.serving.outcome import Period, StudySettings, Timetable
from joulery.sim.serving.pool_scheme import envelope
from joulery.sim.serving.trial_table import Bench


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
        yardstick=Baseline(base, 1.0 / table.loads_s[0], row=bench.base_row),
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
    rows = range(len(bench.space)) if bench.promising is None else bench.promising
    timely = [row for row in rows if bench.metrics[row].latency_s <= bench.table.base_latency_s]
    within = [row for row in timely if bench.metrics[row].accuracy_ratio >= least_accuracy_ratio - 1e-9]
    if not within:
        error = _nothing_within(bench, timely, rows, least_accuracy_ratio)
        return replace(fixed(None, intensities), invocations=len(intensities), infeasible=error)

    def best(g_per_kwh: float) -> int:
        return max(within, key=lambda row: _score(objective, bench.metrics[row], g_per_kwh))

    return Timetable(tuple(((1.0, best(g_per_kwh)),) for g_per_kwh in intensities))


def _nothing_within(
    bench: Bench, timely: Sequence[int], rows: Sequence[int], least_accuracy_ratio: float
) -> InfeasibleError:
    """That none keeps both limits, and the least bad: as accurate as can be in time, else the soonest."""
    table, metrics = bench.table, bench.metrics
    row = max(timely, key=lambda one: (metrics[one].accuracy_ratio, -metrics[one].energy_j), default=None)
    if row is None:
        row = min(rows, key=lambda one: metrics[one].latency_s)
    shown = metrics[row]
    lost, saved = 1.0 - shown.accuracy_ratio / table.base_accuracy_ratio, 1.0 - shown.energy_j / table.base_energy_j
    words = bench.space.describe(bench.space.graphs[row])
    allowed = 1.0 - least_accuracy_ratio / table.base_accuracy_ratio
    return InfeasibleError(
        f"no configuration keeps {1e3 * table.base_latency_s:.0f} ms and loses at most {100 * allowed:.3g} % of its "
        f"accuracy; the least bad, {words}, loses {100 * lost:.2g} % and saves {100 * saved:.1f} % "
        f"(p95 {1e3 * shown.latency_s:.0f} ms)",
        binding="minimum accuracy" if timely else "latency",
        nearest={
            "configuration": words,
            "accuracy_ratio": shown.accuracy_ratio,
            "loss_ratio": lost,
            "saving_ratio": saved,
            "latency_s": shown.latency_s,
        },
        hint="allow a greater loss of accuracy, a longer latency, or GPUs of any number: --policy columns",
    )


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


def _score(objective: Objective, metrics: TrialMetrics, g_per_kwh: float) -> float:
    return objective.score(metrics.accuracy_ratio, metrics.energy_j, g_per_kwh)


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
    try:
        pools = envelope(bench, objective, intensities, settings.least_accuracy_ratio(bench.table))
    except InfeasibleError as error:
        return replace(fixed(None, intensities), invocations=1, infeasible=error)
    periods: list[Period] = []
    planned_g, row, invocations = math.nan, None, 0
    for g_per_kwh in intensities:
        if settings.calls_for_a_plan(objective, g_per_kwh, planned_g):
            best = max(range(len(pools)), key=lambda at: _score(objective, pools[at][0], g_per_kwh))
            row = len(bench.space) + best
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
