"""Joules and grams of ended jobs, modelled from the resources that they held and a stated power of these."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from joulery.domain.arrays import FloatArray
from joulery.domain.cluster import PastJob
from joulery.domain.energy.carbon import JOULES_PER_KWH, CarbonSeries
from joulery.domain.errors import ConfigError
from joulery.domain.quality import Quality


@dataclass(frozen=True, slots=True)
class HeldPower:
    """Power of the resources that a job holds.

    Attributes:
        gpu_w: Power of a GPU.
        cpu_w: Power of a core.
        node_w: Power of the rest of a node, for a job that holds it; 0 to leave it out.
        pue: Facility energy per IT energy.
    """

    gpu_w: float
    cpu_w: float = 0.0
    node_w: float = 0.0
    pue: float = 1.0

    def __post_init__(self) -> None:
        if not all(0 <= watts < math.inf for watts in (self.gpu_w, self.cpu_w, self.node_w)):
            raise ConfigError("powers are finite and not negative", got=f"{self.gpu_w}, {self.cpu_w}, {self.node_w} W")
        if not 1 <= self.pue < math.inf:
            raise ConfigError("PUE is at least 1", got=f"{self.pue}")

    def watts(self, job: PastJob) -> float:
        """Power of one job."""
        return job.gpus * self.gpu_w + job.cpus * self.cpu_w + job.nodes * self.node_w


@dataclass(frozen=True, slots=True)
class PastUse:
    """Total use of some jobs.

    Attributes:
        key: Value of the grouping key.
        jobs: Number of jobs; one that ran several times counts once.
        gpu_s, cpu_s: GPU- and core-seconds held.
        energy_j: Joules of all these jobs.
        measured_j: Joules among them that the cluster measured itself.
        carbon_g: Grams of ``carbon_covered_j`` joules, facility overhead included.
        carbon_covered_j: Joules whose intensity is known all along.
    """

    key: str
    jobs: int
    gpu_s: float
    cpu_s: float
    energy_j: float
    measured_j: float
    carbon_g: float
    carbon_covered_j: float

    @property
    def quality(self) -> Quality:
        """Measured only where the cluster measured everything."""
        return Quality.MEASURED if self.measured_j == self.energy_j > 0 else Quality.MODELLED


def within(jobs: Sequence[PastJob], since_s: float) -> tuple[PastJob, ...]:
    """The jobs that ran after a time, cut to their time after it; measured energy is scaled by the share of the time.

    A job submitted before the window counts as submitted at its start.
    """
    kept = []
    for job in jobs:
        share = (job.end_s - max(job.start_s, since_s)) / job.elapsed_s
        if share >= 1.0:
            kept.append(job if not job.submit_s < since_s else replace(job, submit_s=since_s))
        elif share > 0.0:
            kept.append(_cut(job, since_s, share))
    return tuple(kept)


def split_at(jobs: Sequence[PastJob], next_edge_s: Callable[[float], float]) -> tuple[PastJob, ...]:
    """The jobs split at edges such as the end of each month, with measured energy in proportion to time.

    The pieces of a job add up to it; a piece begins where the one before ends.

    Args:
        jobs: Past jobs.
        next_edge_s: The first edge after a time, Unix seconds.
    """
    pieces: list[PastJob] = []
    for job in jobs:
        begin_s = job.start_s
        while (edge_s := next_edge_s(begin_s)) < job.end_s:
            pieces.append(_piece(job, begin_s, edge_s))
            begin_s = edge_s
        pieces.append(job if begin_s == job.start_s else _piece(job, begin_s, job.end_s))
    return tuple(pieces)


def past_use(
    jobs: Sequence[PastJob], power: HeldPower, carbon: CarbonSeries | None, by: Callable[[PastJob], str]
) -> tuple[PastUse, ...]:
    """The use of the jobs by key, most energy first. A job that held no resource with a stated power used no energy.

    Args:
        jobs: Past jobs.
        power: Power of what they held; where the cluster measured a job, the measurement counts instead.
        carbon: Intensity; a job whose time is not wholly covered has no grams.
        by: The key of a job.
    """
    modelled = np.array([power.watts(job) * job.elapsed_s for job in jobs])
    measured = np.array([job.measured_j for job in jobs], np.float64)
    energy = np.where(np.isnan(measured), modelled, measured)
    start, end = np.array([job.start_s for job in jobs]), np.array([job.end_s for job in jobs])
    mean = mean_intensity(carbon, start, end) if carbon is not None else np.full(len(jobs), math.nan)
    grams = energy * mean * power.pue / JOULES_PER_KWH
    groups: dict[str, list[int]] = {}
    for at, job in enumerate(jobs):
        groups.setdefault(by(job), []).append(at)
    uses = [
        _use(key, [jobs[at] for at in rows], energy[rows], measured[rows], grams[rows]) for key, rows in groups.items()
    ]
    return tuple(sorted(uses, key=lambda use: (-use.energy_j, use.key)))


def mean_intensity(carbon: CarbonSeries, start_s: npt.ArrayLike, end_s: npt.ArrayLike) -> FloatArray:
    """Mean intensity over each of many intervals, g/kWh; NaN unless all of it is covered."""
    start, end = np.asarray(start_s, np.float64), np.asarray(end_s, np.float64)
    gaps = np.isnan(carbon.g_per_kwh)
    length = np.diff(carbon.edges_s)
    total = np.concatenate(([0.0], np.cumsum(np.where(gaps, 0.0, carbon.g_per_kwh) * length)))
    unknown = np.concatenate(([0.0], np.cumsum(np.where(gaps, length, 0.0))))

    def between(running: FloatArray) -> FloatArray:
        return np.asarray(np.interp(end, carbon.edges_s, running) - np.interp(start, carbon.edges_s, running))

    covered = (start >= carbon.start_s) & (end <= carbon.end_s) & (between(unknown) <= 1e-6) & (end > start)
    return np.where(covered, between(total) / np.where(end > start, end - start, 1.0), math.nan)


def _use(key: str, jobs: Sequence[PastJob], energy: FloatArray, measured: FloatArray, grams: FloatArray) -> PastUse:
    known = ~np.isnan(grams)
    return PastUse(
        key=key,
        jobs=len({job.identity for job in jobs}),
        gpu_s=math.fsum(job.gpus * job.elapsed_s for job in jobs),
        cpu_s=math.fsum(job.cpus * job.elapsed_s for job in jobs),
        energy_j=math.fsum(energy),
        measured_j=math.fsum(measured[~np.isnan(measured)]),
        carbon_g=math.fsum(grams[known]),
        carbon_covered_j=math.fsum(energy[known]),
    )


def _cut(job: PastJob, since_s: float, share: float) -> PastJob:
    measured_j, submit_s = job.measured_j * share, job.submit_s if math.isnan(job.submit_s) else since_s
    return replace(job, submit_s=submit_s, start_s=since_s, elapsed_s=job.end_s - since_s, measured_j=measured_j)


def _piece(job: PastJob, begin_s: float, end_s: float) -> PastJob:
    elapsed_s = end_s - begin_s
    measured_j = job.measured_j * (elapsed_s / job.elapsed_s)
    return replace(job, start_s=begin_s, end_s=end_s, elapsed_s=elapsed_s, measured_j=measured_j)
