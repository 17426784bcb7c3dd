"""The schemes of Clover's study: what runs in each period of a grid.

CLOVER, BLOVER and the learning search are the live policy (:mod:`joulery.sim.serving.policy_run`). The evaluator is a
table, so a trial costs nothing to compute; its cost to the service is accounted for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from joulery.domain.errors import InfeasibleError
from joulery.domain.format import latency
from joulery.policies.serving.objective import Objective
from joulery.policies.serving.search.annealing import TrialMetrics
from joulery.policies.serving.search.trial_search import CLOVER, LEARNING, RANDOM
from joulery.sim.core.streams import Streams
from joulery.sim.serving.outcome import Period, SchemeOutcome, StudySettings, Timetable, objective_of, outcome
from joulery.sim.serving.policy_run import baseline_of, clover_policy, run_policy
from joulery.sim.serving.pool_scheme import envelope
from joulery.sim.serving.trial_table import Bench


def run_variants(
    scheme: str, bench: Bench, trace: str, intensities: Sequence[float], settings: StudySettings, streams: Streams
) -> SchemeOutcome:
    """Simulate one scheme on one service, one grid and one seed.

    Args:
        scheme: A name in ``SCHEMES``.
        bench: The service.
        trace: Name of the grid; with the service and the scheme it names the random stream.
        intensities: g/kWh in each period.
        settings: The study's settings.
        streams: Randomness of the searches.
    """
    timetable = timetable_of(scheme, bench, trace, intensities, settings, streams)
    return outcome(scheme, bench, objective_of(bench.table, settings), intensities, settings, timetable)


def timetable_of(
    scheme: str, bench: Bench, trace: str, intensities: Sequence[float], settings: StudySettings, streams: Streams
) -> Timetable:
    """The timetable of a scheme; the arguments are those of :func:`run_variants`."""
    seed = streams.entropy("search", bench.table.service, trace, scheme)
    return SCHEMES[scheme](bench, intensities, settings, seed)


def fixed(row: int | None, intensities: Sequence[float]) -> Timetable:
    """The timetable of one row throughout: CO2OPT, or BASE (no row: the baseline)."""
    return Timetable(tuple(((1.0, row),) for _ in intensities))


def co2opt_row(bench: Bench) -> int:
    """The least accurate variant on the finest partition."""
    finest = max(bench.menu.multisets, key=len)
    return bench.space.index(bench.space.vector([(bench.smallest, profile) for profile in finest]))


def oracle(
    bench: Bench, objective: Objective, intensities: Sequence[float], least_accuracy_ratio: float = 0.0
) -> Timetable:
    """ORACLE: in each period the best of every configuration that keeps the limits."""
    rows = range(len(bench.space)) if bench.shortlist is None else bench.shortlist
    timely = [row for row in rows if bench.metrics[row].latency_s <= bench.table.base_latency_s]
    within = [row for row in timely if bench.metrics[row].accuracy_ratio >= least_accuracy_ratio - 1e-9]
    if not within:
        error = _infeasible(bench, timely, rows, least_accuracy_ratio)
        return replace(fixed(None, intensities), invocations=len(intensities), infeasible=error)

    def best(g_per_kwh: float) -> int:
        return max(within, key=lambda row: _score(objective, bench.metrics[row], g_per_kwh))

    return Timetable(tuple(((1.0, best(g_per_kwh)),) for g_per_kwh in intensities))


def _infeasible(
    bench: Bench, timely: Sequence[int], rows: Sequence[int], least_accuracy_ratio: float
) -> InfeasibleError:
    """The error that no configuration keeps both limits; nearest is the most accurate in time, else the fastest."""
    table, metrics = bench.table, bench.metrics
    row = max(timely, key=lambda one: (metrics[one].accuracy_ratio, -metrics[one].energy_j), default=None)
    if row is None:
        row = min(rows, key=lambda one: metrics[one].latency_s)
    shown = metrics[row]
    lost, saved = 1.0 - shown.accuracy_ratio / table.base_accuracy_ratio, 1.0 - shown.energy_j / table.base_energy_j
    configuration = bench.space.describe(bench.space.graphs[row])
    allowed = 1.0 - least_accuracy_ratio / table.base_accuracy_ratio
    return InfeasibleError(
        f"no configuration keeps {latency(table.base_latency_s)} and loses at most {100 * allowed:.3g} % of its "
        f"accuracy; the least bad, {configuration}, loses {100 * lost:.2g} % and saves {100 * saved:.1f} % "
        f"(p95 {latency(shown.latency_s)})",
        binding="minimum accuracy" if timely else "latency",
        nearest={
            "configuration": configuration,
            "accuracy_ratio": shown.accuracy_ratio,
            "loss_ratio": lost,
            "saving_ratio": saved,
            "latency_s": shown.latency_s,
        },
        hint="allow a greater loss of accuracy or a longer latency, or any number of GPUs: --policy columns",
    )


def searched(method: str) -> Scheme:
    """A scheme that searches whenever the grid has moved: the live policy with one of its searches by trials.

    A search that finds nothing within the limit falls back to the baseline on all GPUs.
    """

    def scheme(bench: Bench, intensities: Sequence[float], settings: StudySettings, seed: tuple[int, ...]) -> Timetable:
        policy = clover_policy(bench, settings, method, seed)
        return run_policy(policy, bench, baseline_of(bench), intensities, settings)

    return scheme


def columns(
    bench: Bench, intensities: Sequence[float], settings: StudySettings, seed: tuple[int, ...] = ()
) -> Timetable:
    """COLUMNS: whenever the grid has moved, the best pool of any number of GPUs, each with a layout of its own.

    Planned from what requests cost, without trials on the service; uses no randomness.
    """
    objective = objective_of(bench.table, settings)
    try:
        pools = envelope(bench, objective, intensities, settings.least_accuracy_ratio(bench.table))
    except InfeasibleError as error:
        return replace(fixed(None, intensities), invocations=1, infeasible=error)
    periods: list[Period] = []
    planned_g, row, invocations = math.nan, None, 0
    for g_per_kwh in intensities:
        if settings.calls_for_a_plan(g_per_kwh, planned_g):
            best = max(range(len(pools)), key=lambda at: _score(objective, pools[at][0], g_per_kwh))
            row = len(bench.space) + best
            planned_g, invocations = g_per_kwh, invocations + 1
        periods.append(((1.0, row),))
    return Timetable(tuple(periods), (), invocations, pools)


def _score(objective: Objective, metrics: TrialMetrics, g_per_kwh: float) -> float:
    return objective.score(metrics.accuracy_ratio, metrics.energy_j, g_per_kwh)


Scheme = Callable[[Bench, Sequence[float], StudySettings, tuple[int, ...]], Timetable]

SCHEMES: Mapping[str, Scheme] = MappingProxyType(
    {
        "base": lambda bench, intensities, settings, seed: fixed(None, intensities),
        "co2opt": lambda bench, intensities, settings, seed: fixed(co2opt_row(bench), intensities),
        "blover": searched(RANDOM),
        "clover": searched(CLOVER),
        "learning": searched(LEARNING),
        "oracle": lambda bench, intensities, settings, seed: oracle(
            bench, objective_of(bench.table, settings), intensities, settings.least_accuracy_ratio(bench.table)
        ),
        "columns": columns,
    }
)
"""Schemes that can be compared, by name."""
SEARCHING = frozenset({"blover", "clover"})
"""Schemes whose outcome depends on the seed; ``learning`` uses no randomness."""
