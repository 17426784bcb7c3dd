"""Speed of a site's own jobs by number and type of GPUs: from reported progress, else from similar ended jobs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from joulery.app.simulation.site_power import logged_jobs, measured_w
from joulery.domain.arrays import FloatArray, IntArray
from joulery.domain.cluster import PastJob
from joulery.perf.job_speed import (
    EndedRun,
    IntervalCheck,
    LearnedRatio,
    SpeedUps,
    backtest,
    learned_speedups,
    measured_speedups,
    type_ratios,
)
from joulery.perf.power.training_power import NodePower

_ENDED_WELL = "COMPLETED"


@dataclass(frozen=True, slots=True, eq=False)
class KnownSpeed:
    """Known speed of past jobs.

    Attributes:
        profiles: Speed-ups by number of GPUs, one profile for each kind with known speed-ups.
        profile: Index of each job's profile, int64[n]; -1 where none is known.
        measured, learned, assumed: Number of jobs with a profile from reported progress, with one from similar ended
            jobs, and without one.
        kinds: Number of kinds with a profile.
        types: Speed of each GPU type over that of the reference, as far as learned; empty where only one is named.
        type_watts: Power of a GPU of each type over that of the reference, for the same kinds, as far as learned.
        run_times, powers: Number of jobs whose run time, and power, was as predicted from earlier jobs.
    """

    profiles: tuple[SpeedUps, ...]
    profile: IntArray
    measured: int
    learned: int
    assumed: int
    kinds: int
    types: Mapping[str, LearnedRatio] = field(default_factory=dict)
    type_watts: Mapping[str, LearnedRatio] = field(default_factory=dict)
    run_times: IntervalCheck = field(default_factory=lambda: IntervalCheck(0, 0))
    powers: IntervalCheck = field(default_factory=lambda: IntervalCheck(0, 0))

    def speed_of(self, gpu_type: str) -> float:
        """Speed of a type relative to the reference; 1 where it is not known."""
        return self.types[gpu_type].ratio if gpu_type in self.types else 1.0

    def watts_of(self, gpu_type: str) -> float:
        """Power of a type relative to the reference; 1 where it is not known."""
        return self.type_watts[gpu_type].ratio if gpu_type in self.type_watts else 1.0

    def movable(self, job: PastJob) -> bool:
        """Whether a job may run on another type than it did: its owner named none, and the types' speeds are known."""
        return job.any_type and len(self.types) > 1 and job.gpu_type in self.types

    def of(self, jobs: Sequence[PastJob]) -> tuple[FloatArray, FloatArray]:
        """Speed and power of the type that each job ran on, relative to the reference, float64[n] each."""
        types = [job.gpu_type for job in jobs]
        return np.array([self.speed_of(name) for name in types]), np.array([self.watts_of(name) for name in types])

    def speedup(self, job: int) -> Mapping[int, float]:
        """Speed of a job by number of GPUs, relative to the smallest known number; empty where nothing is known."""
        at = int(self.profile[job])
        return {} if at < 0 else {gpus: known.ratio for gpus, known in self.profiles[at].items()}


def known_speed(jobs: Sequence[PastJob], folder: Path | None = None) -> KnownSpeed:
    """Known speed of past jobs.

    Args:
        jobs: Jobs that held GPUs.
        folder: State folder of a scheduler, whose log has the progress that jobs reported; None for none.

    Raises:
        ConfigError: The folder is not the state folder of a scheduler.
    """
    several = len({job.gpu_type for job in jobs}) > 1
    ended = [job for job in jobs if job.state == _ENDED_WELL and job.elapsed_s > 0]
    runs = [_run(job, job.elapsed_s) for job in ended]
    powered = [_run(job, watts) for job in jobs if (watts := measured_w(job)) > 0]
    # A scheduler's log says no types.
    measured = {} if several else measured_speedups(_rates(folder))
    learned = {key: ups for key, ups in learned_speedups(runs).items() if key[0] not in measured}
    names: list[Any] = [*measured, *learned]
    index = {name: at for at, name in enumerate(names)}
    rows = [index.get(_kind(job), index.get((_kind(job), job.gpu_type), -1)) for job in jobs]
    counts = [sum(0 <= row < len(measured) for row in rows), sum(row >= len(measured) for row in rows)]
    node = NodePower()
    share_w = node.cpu_w + node.static_w / node.gpus
    gpu_w = [run._replace(value=max(run.value - share_w, node.idle_gpu_w)) for run in powered]
    return KnownSpeed(
        (*measured.values(), *learned.values()),
        np.array(rows, np.int64),
        counts[0],
        counts[1],
        len(jobs) - sum(counts),
        len({name if isinstance(name, str) else name[0] for name in names}),
        type_ratios(runs) if several else {},
        type_ratios(gpu_w, faster_is_more=False) if several else {},
        backtest(runs),
        backtest(powered),
    )


def _kind(job: PastJob) -> str:
    return f"{job.owner}/{job.name}"


def _run(job: PastJob, value: float) -> EndedRun:
    return EndedRun(_kind(job), job.gpu_type, job.gpus, value, job.start_s, job.end_s)


def _rates(folder: Path | None) -> list[tuple[str, Mapping[int, float]]]:
    """Kind and progress a second by number of slots, of ended jobs that reported progress on several numbers."""
    found: list[tuple[str, Mapping[int, float]]] = []
    for entry in logged_jobs(folder):
        rates = entry.get("rates")
        if isinstance(rates, Mapping) and len(rates) > 1:
            known = {int(n): float(rate) for n, rate in rates.items() if str(n).isdigit() and _is_number(rate)}
            found.append((f"{entry.get('owner', '')}/{entry.get('name', '')}", known))
    return found


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
