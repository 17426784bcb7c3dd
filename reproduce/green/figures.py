"""Simulates every comparison of GREEN's evaluation (NSDI'25, section 8, appendix A) and the frontier.

The paper's figures show ratios to GREEN. This module returns the results of the runs behind each figure, so that a page
can draw them and a test can check them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from joulery.domain.arrays import FloatArray
from joulery.domain.decisions import Step
from joulery.perf.power.training_power import RTX3090_CLASSES
from joulery.policies.training.allocation import ClusterView
from joulery.policies.training.green import GreenState
from joulery.sim.core.hourly_intensity import Intensity
from joulery.sim.training.cluster import TrainingRun
from joulery.sim.training.plant import Jobs
from joulery.sim.training.study import Setting, run_scheme
from reproduce.green.bound import BoundPoint, least_grams

DAY = ("green", "green-paper", "green-paper:mu=1", "tiresias", "tiresias-requested", "gaia", "ecovisor", "green-lean")
SMALL = ("green-paper", "pollux", "zeus", "green-lean")
YEAR = ("green", "green-paper", "tiresias", "tiresias-requested", "pollux", "green-lean", "lean")
TIMELINES = ("green-paper", "tiresias", "gaia", "ecovisor", "green-lean")
ABLATIONS = ("green", "green:fixed_gpus=1", "green:fixed_gpus=2", "green:las=1", "green:mu=1")
MUS = ("green:mu=1", "green:mu=1.5", "green:mu=2", "green:mu=3")
QUANTA_MIN = (15, 30, 60)
FRONTIER = (
    "tiresias", "tiresias-sleep", "tiresias-requested", "gaia", "pollux", "pollux:sleep=1:eta=0.5", "zeus",
    "zeus:sleep=1", "fifo", "green-paper", "green", "green-sleep", "green-swift", "green-lean",
    "green-frugal", "green-swift:gamma_low=0.6:theta=1.0:gamma_from=1.5:eta=0.4", "swift", "lean", "frugal",
    "lean:price_ratio=0.05", "lean:price_ratio=0.1", "lean:price_ratio=0.3", "lean:price_ratio=0.6",
    "lean:price_ratio=1.2",
)  # fmt: skip
PRICES_KG_PER_H = (0.0, 0.002, 0.004, 0.006, 0.01, 0.015, 0.02, 0.03, 0.05, 0.08, 0.12)
SIZES_S = (0.0, 600.0, 3600.0, 36_000.0, float("inf"))
"""Edges of the sizes of jobs in Tables 2 and 3: extra small, small, medium, large."""
SMALL_JOBS = 150


@dataclass(frozen=True, slots=True, eq=False)
class PolicyOutcome:
    """Results of one policy in one region, means over seeds.

    Attributes:
        policy, region: Names of the policy and of the region.
        mean_jct_s, p99_jct_s: Completion times.
        job_kg, cluster_kg, cluster_kwh, peak_w: Carbon of jobs and of all, energy, highest power.
        size_mean_s, size_p99_s: Completion times by size of job, float64[4]; NaN where no job has that size.
    """

    policy: str
    region: str
    mean_jct_s: float
    p99_jct_s: float
    job_kg: float
    cluster_kg: float
    cluster_kwh: float
    peak_w: float
    size_mean_s: FloatArray
    size_p99_s: FloatArray


@dataclass(frozen=True, slots=True, eq=False)
class PowerTimeline:
    """Power and carbon of a run over time, at every half hour.

    Attributes:
        policy: Name of the policy.
        t_s: Times, float64[m].
        power_w: Power of the cluster, float64[m].
        carbon_kg: Carbon so far, float64[m].
    """

    policy: str
    t_s: FloatArray
    power_w: FloatArray
    carbon_kg: FloatArray


@dataclass(frozen=True, slots=True, eq=False)
class Queues:
    """Running jobs by queue over time under GREEN, at every round.

    Attributes:
        t_s: Times, float64[m].
        upper, low_power, high_power: Running jobs of the upper queue, and of the lower one by power, float64[m].
        g_per_kwh: Intensity, float64[m].
        mean_g_per_kwh: Threshold between green and dirty hours, float64[m].
    """

    t_s: FloatArray
    upper: FloatArray
    low_power: FloatArray
    high_power: FloatArray
    g_per_kwh: FloatArray
    mean_g_per_kwh: FloatArray


@dataclass(frozen=True, slots=True, eq=False)
class Experiment:
    """A workload, the grids and the cluster that it runs on.

    Attributes:
        jobs: One workload per seed.
        grids: Intensities by region.
        setting: The cluster and the conditions common to all schemes.
    """

    jobs: Sequence[Jobs]
    grids: Mapping[str, Intensity]
    setting: Setting


@dataclass(frozen=True, slots=True, eq=False)
class GreenFigures:
    """Results of GREEN's evaluation.

    Attributes:
        day: Fig. 8 and Table 2: the testbed day, four regions.
        timelines, queues: Fig. 9 and 10, in the first region.
        small: Fig. 11: 150 jobs beside Pollux and Zeus.
        year: Fig. 12 and Table 3.
        mus, quanta: Fig. 13: strength of the shift, interval of the rounds in minutes.
        ablations: Table 4.
        frontier: Carbon against completion time on the year's jobs, in the first region.
        bound, bound_at_once: Lower bound of any schedule, with waits of up to 12 h and without waits.
    """

    day: tuple[PolicyOutcome, ...]
    timelines: tuple[PowerTimeline, ...]
    queues: Queues
    small: tuple[PolicyOutcome, ...]
    year: tuple[PolicyOutcome, ...]
    mus: tuple[PolicyOutcome, ...]
    quanta: tuple[tuple[int, PolicyOutcome], ...]
    ablations: tuple[PolicyOutcome, ...]
    frontier: tuple[PolicyOutcome, ...]
    bound: tuple[BoundPoint, ...]
    bound_at_once: tuple[BoundPoint, ...]


Progress = Callable[[int, int], None]


def figures(day: Experiment, year: Experiment, frontier: Experiment, progress: Progress) -> GreenFigures:
    """Run the evaluation.

    Args:
        day: The burst of one day.
        year: The long trace; its first seed is used.
        frontier: The jobs of the frontier, usually the beginning of the year.
        progress: Called with the number of runs done and the number of all runs.
    """
    first = next(iter(day.grids))
    alone = in_region(day, first)
    small = Experiment([_head(jobs, SMALL_JOBS) for jobs in day.jobs], day.grids, day.setting)
    steps = _Steps(progress, day, year, frontier)
    return GreenFigures(
        day=tuple(steps.compare(day, DAY)),
        timelines=tuple(steps.power_timeline(alone, name) for name in TIMELINES),
        queues=queues(alone.jobs[0], alone.grids[first], day.setting),
        small=tuple(steps.compare(small, SMALL)),
        year=tuple(steps.compare(year, YEAR)),
        mus=tuple(steps.compare(alone, MUS)),
        quanta=tuple(
            (minutes, next(steps.compare(_every(alone, 60.0 * minutes), ("green-paper",)))) for minutes in QUANTA_MIN
        ),
        ablations=tuple(steps.compare(alone, ABLATIONS)),
        frontier=tuple(steps.compare(frontier, FRONTIER)),
        bound=_bound(frontier, 12),
        bound_at_once=_bound(frontier, 0),
    )


class _Steps:
    """Runs the simulations and reports the number of those done."""

    def __init__(self, progress: Progress, day: Experiment, year: Experiment, frontier: Experiment) -> None:
        seeds, regions = len(day.jobs), len(day.grids)
        self._progress, self._done = progress, 0
        self._all = seeds * (regions * (len(DAY) + len(SMALL)) + len(MUS) + len(QUANTA_MIN) + len(ABLATIONS))
        self._all += len(TIMELINES) + len(year.jobs) * len(year.grids) * len(YEAR) + len(frontier.jobs) * len(FRONTIER)

    def compare(self, part: Experiment, policies: Sequence[str]) -> Iterator[PolicyOutcome]:
        """Run every policy in every region and yield the means over seeds."""
        for region, carbon in part.grids.items():
            for policy in policies:
                runs = []
                for jobs in part.jobs:
                    runs.append((jobs, run_scheme(policy, part.setting, jobs, carbon)))
                    self._count()
                yield outcome(policy, region, runs)

    def power_timeline(self, part: Experiment, policy: str) -> PowerTimeline:
        """Run one policy and return its power and carbon over time."""
        (carbon,) = part.grids.values()
        run = run_scheme(policy, part.setting, part.jobs[0], carbon, lambda t_s, view, step: None)
        self._count()
        return power_timeline(policy, run, carbon)

    def _count(self) -> None:
        self._done += 1
        self._progress(self._done, self._all)


def outcome(policy: str, region: str, runs: Sequence[tuple[Jobs, TrainingRun]]) -> PolicyOutcome:
    """Average the runs of one policy in one region."""

    def mean(of: Callable[[TrainingRun], float]) -> float:
        return float(np.mean([of(run) for _, run in runs]))

    sizes = np.array([[_by_size(jobs, run, at) for at in range(len(SIZES_S) - 1)] for jobs, run in runs]).mean(axis=0)
    return PolicyOutcome(
        policy,
        region,
        mean(lambda run: float(np.mean(run.jct_s))),
        mean(lambda run: float(np.quantile(run.jct_s, 0.99))),
        mean(lambda run: float(np.sum(run.job_kg))),
        mean(lambda run: run.cluster_kg),
        mean(lambda run: run.cluster_kwh),
        mean(lambda run: run.peak_w),
        size_mean_s=sizes[:, 0],
        size_p99_s=sizes[:, 1],
    )


def _by_size(jobs: Jobs, run: TrainingRun, at: int) -> tuple[float, float]:
    rows = (jobs.work_s >= SIZES_S[at]) & (jobs.work_s < SIZES_S[at + 1])
    if not rows.any():
        return float("nan"), float("nan")
    return float(np.mean(run.jct_s[rows])), float(np.quantile(run.jct_s[rows], 0.99))


def power_timeline(policy: str, run: TrainingRun, carbon: Intensity) -> PowerTimeline:
    """Sample a watched run every half hour until its last job ends; its carbon is exact at every change of power."""
    from_s, power_w = run.power_timeline[:, 0], run.power_timeline[:, 1]
    ends_s = np.append(from_s[1:], run.makespan_s)
    kg = power_w * (carbon.integrals(ends_s) - carbon.integrals(from_s)) / 3.6e9
    so_far = np.concatenate(([0.0], np.cumsum(kg)))
    t_s = np.append(np.arange(0.0, run.makespan_s, 1800.0), run.makespan_s)
    at = np.searchsorted(from_s, t_s, "right") - 1
    since = power_w[at] * (carbon.integrals(t_s) - carbon.integrals(from_s[at])) / 3.6e9
    return PowerTimeline(policy, t_s, power_w[at], so_far[at] + since)


def queues(jobs: Jobs, carbon: Intensity, setting: Setting) -> Queues:
    """Run GREEN as published and count the running jobs of each queue at every round."""
    rows: list[tuple[float, ...]] = []
    single_w = np.array([job.gpu_w for job in RTX3090_CLASSES])
    median_w = float(np.median(single_w))

    def watch(t_s: float, view: ClusterView, step: Step[GreenState]) -> None:
        run = step.decisions[0].value.run
        counts = [0.0, 0.0, 0.0]
        for job, kind in zip(view.job.tolist(), view.kind.tolist(), strict=True):
            if job in run:
                high = single_w[kind] >= median_w
                counts[0 if step.state.jobs[job].upper else 2 if high else 1] += 1
        rows.append((t_s, *counts, view.g_per_kwh, view.mean_g_per_kwh))

    run_scheme("green-paper", setting, jobs, carbon, watch)
    columns = np.array(rows).T
    return Queues(*columns)


def in_region(part: Experiment, region: str) -> Experiment:
    """The experiment restricted to one region."""
    return Experiment(part.jobs, {region: part.grids[region]}, part.setting)


def _every(part: Experiment, quantum_s: float) -> Experiment:
    return Experiment(part.jobs, part.grids, replace(part.setting, quantum_s=quantum_s))


def _head(jobs: Jobs, count: int) -> Jobs:
    """Select ``count`` jobs at even spacing: the same day with fewer jobs."""
    rows = np.unique(np.linspace(0, len(jobs) - 1, min(count, len(jobs))).astype(np.int64))
    return Jobs(jobs.submit_s[rows], jobs.work_s[rows], jobs.kind[rows], jobs.requested[rows], jobs.max_gpus[rows])


def _bound(part: Experiment, wait_h: int) -> tuple[BoundPoint, ...]:
    (carbon,) = part.grids.values()
    cluster = (part.setting.nodes, part.setting.node)
    return least_grams(part.jobs[0], RTX3090_CLASSES, cluster, carbon, PRICES_KG_PER_H, wait_h)
