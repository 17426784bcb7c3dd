"""Clover's study with the live policy: the kernel drives a :class:`ServicePolicy` over a table of trials.

The policy observes a new intensity each period and the outcome of each trial when its time is over. A trial's metrics
come from the table; its accuracy and joules are the service's while it lasts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from joulery.domain.decisions import Decision
from joulery.domain.gpu.layout import Instance, Layout
from joulery.domain.ports import Policy
from joulery.domain.serving.service import Slice
from joulery.policies.serving.observation import TRY_LAYOUT, Observation, Sample
from joulery.policies.serving.policy import ServicePolicy
from joulery.policies.serving.search.annealing import TrialMetrics
from joulery.policies.serving.search.trial_search import Reference, TrialSearch
from joulery.policies.serving.search.trials import TrialBudget
from joulery.sim.core.driver import Driver
from joulery.sim.core.kernel import Kernel, Rank
from joulery.sim.serving.outcome import StudySettings, Timetable
from joulery.sim.serving.trial_table import REQUESTS, Bench

BUDGET = TrialBudget(
    count=10, count_infeasible=40, clock_s=math.inf, longest_s=math.inf, min_requests=REQUESTS, retry_s=math.inf
)
"""The published budget: ten trials an invocation, forty while nothing keeps the limit, no clock."""
_IDLE_RATIO = 0.65
"""Assumed part of the baseline's joules that idle GPUs take."""


def baseline_of(bench: Bench) -> Layout:
    """BASE: the most accurate variant on every whole GPU there is."""
    return Layout([Instance(bench.largest, Slice.parse(bench.menu.profiles[0].name))] * bench.pool_gpus)


def clover_policy(bench: Bench, settings: StudySettings, method: str, seed: tuple[int, ...]) -> ServicePolicy:
    """The live policy with the paper's budget and trigger, and the baseline measured on all GPUs.

    Args:
        bench: The service.
        settings: The study's settings.
        method: ``clover``, ``random`` (BLOVER) or ``learning``.
        seed: Of the random draws.
    """
    table = bench.table
    base = TrialMetrics(table.base_accuracy_ratio, table.base_latency_s, table.base_energy_j)
    baseline = baseline_of(bench)
    search = TrialSearch(
        accuracy_ratio=dict(zip(bench.space.variants, bench.accuracy_ratio, strict=True)),
        menu=bench.menu,
        devices=table.gpus,
        baseline=baseline,
        base_g_per_kwh=settings.base_g_per_kwh,
        base_pue=settings.pue,
        pue=settings.pue,
        method=method,
        seed=seed,
        budget=BUDGET,
        alike=bench.copies == table.gpus,
        as_published=True,
        reference=Reference(baseline, base, 1.0 / table.loads_s[0], _IDLE_RATIO),
        space=bench.layouts,
    )
    return ServicePolicy(table.service, search, settings.goals(table), 1.0 / bench.interarrival_s, settings.trigger)


@dataclass(slots=True)
class TableService:
    """A service whose trial results are read from a table; records the layouts that its policy runs.

    Attributes:
        bench: The table.
        baseline: The layout that represents the baseline on all GPUs.
        g_per_kwh: Intensity now.
        running: The layout that runs; None before the first decision.
        sample: The outcome of the trial that has just ended; None otherwise.
        spent: Rows tried, by period.
        settled: Row that each period ended with; None is the baseline.
        searches: Searches that ended.
    """

    bench: Bench
    baseline: Layout
    g_per_kwh: float = math.nan
    running: Layout | None = None
    sample: Sample | None = None
    spent: list[list[int]] = field(default_factory=list)
    settled: list[int | None] = field(default_factory=list)
    searches: int = 0
    _named: dict[tuple[str, ...], Layout] = field(default_factory=dict)

    def layout(self, names: Sequence[str]) -> Layout:
        """The layout of a decision: the table's own object if it has one, which is found without a comparison."""
        key = tuple(names)
        if key not in self._named:
            layout = Layout.parse(key)
            row = self.bench.layouts.row(layout)
            self._named[key] = layout if row is None else self.bench.layouts.layout(row)
        return self._named[key]

    def begin_period(self, g_per_kwh: float) -> None:
        """Begin a period of the grid; the layout that ran before stays."""
        self.g_per_kwh = g_per_kwh
        self.spent.append([])
        self.settled.append(self.settled[-1] if self.settled else None)

    def observe(self, now_s: float) -> Observation:
        """The policy's observation."""
        nan = math.nan
        return Observation(now_s, self.g_per_kwh, nan, nan, 0, {}, nan, self.running, self.sample)

    def run(self, layout: Layout, *, trial: bool) -> None:
        """Run a layout, settled on or for a trial."""
        row = self.bench.layouts.row(layout)
        self.running, self.sample = layout, None
        if trial:
            assert row is not None, "a trial is of a row of the table"
            self.spent[-1].append(row)
        else:
            self.searches += 1
            self.settled[-1] = None if layout == self.baseline else row

    def end_trial(self, since_s: float) -> None:
        """End the running trial; its row of the table is its outcome."""
        assert self.running is not None
        row = self.bench.layouts.row(self.running)
        assert row is not None
        shown, count = self.bench.metrics[row], len(self.running.instances)
        self.sample = Sample(
            layout=self.running,
            since_s=since_s,
            requests=REQUESTS,
            failed=0,
            latency_s=shown.latency_s,
            latency_low_s=shown.latency_s,
            latency_high_s=shown.latency_s,
            energy_j=shown.energy_j,
            energy_band_j=0.0,
            served={name: max(1, REQUESTS * each // count) for name, each in self.running.counts.items()},
            accuracy_ratio=shown.accuracy_ratio,
        )


def run_policy(
    policy: Policy[Any, Observation],
    bench: Bench,
    baseline: Layout,
    intensities: Sequence[float],
    settings: StudySettings,
) -> Timetable:
    """The timetable of a policy on a service while the grid changes.

    Args:
        policy: Any policy that decides on layouts.
        bench: The service.
        baseline: The layout that represents the baseline on all GPUs.
        intensities: g/kWh in each period.
        settings: Lengths of trials and periods.
    """
    kernel, service = Kernel(), TableService(bench, baseline)

    def act(now_s: float, decision: Decision) -> None:
        trial = decision.kind == TRY_LAYOUT
        service.run(service.layout(decision.value), trial=trial)
        if trial:
            kernel.at(now_s + settings.trial_s, "trial over", now_s)

    def period(_: float, g_per_kwh: float) -> None:
        service.begin_period(g_per_kwh)
        driver.poke()

    def over(_: float, since_s: float) -> None:
        service.end_trial(since_s)
        driver.poke()

    kernel.on("period", Rank.TELEMETRY, period)
    kernel.on("trial over", Rank.COMPLETION, over)
    for number, g_per_kwh in enumerate(intensities):
        kernel.at(number * settings.period_s, "period", g_per_kwh)
    driver: Driver[Any, Observation] = Driver(kernel, "service", policy, service.observe, act, period_s=None)
    kernel.run()
    return _timetable(service, settings)


def _timetable(service: TableService, settings: StudySettings) -> Timetable:
    part = settings.trial_s / settings.period_s
    periods = tuple(
        (*((part, row) for row in spent), (1.0 - part * len(spent), settled))
        for spent, settled in zip(service.spent, service.settled, strict=True)
    )
    trials = tuple(row for spent in service.spent for row in spent)
    return Timetable(periods, trials, service.searches, trials_at=tuple(len(spent) for spent in service.spent))
