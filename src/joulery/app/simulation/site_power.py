"""Power of a site's own jobs: measured by the cluster, else learned from jobs of the same owner and name."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from joulery.domain.arrays import FloatArray
from joulery.domain.cluster import PastJob
from joulery.domain.errors import ConfigError
from joulery.domain.quality import Quality
from joulery.runtime.schedule.usage import ended_jobs

_PLAUSIBLE_W = (10.0, 3000.0)
"""Plausible power per GPU with its share of the node; values outside are not measurements of a job."""


@dataclass(frozen=True, slots=True, eq=False)
class KnownPower:
    """Power per GPU of each job, with its share of the node.

    Attributes:
        job_w: Power, W, float64[n]; NaN where unknown.
        measured, learned, assumed: Number of jobs whose power the cluster measured, of jobs with the power of others of
            the same owner and name on the same GPU type, and of the rest.
        implausible: Number of measurements below 10 or above 3000 W per GPU, which are not used.
    """

    job_w: FloatArray
    measured: int
    learned: int
    assumed: int
    implausible: int


def known_power(jobs: Sequence[PastJob], folder: Path | None = None) -> KnownPower:
    """Known power of past jobs.

    Args:
        jobs: Jobs that held GPUs.
        folder: State folder of a scheduler, whose log has the energy of ended jobs from agents; None for none.

    Raises:
        ConfigError: The folder is not the state folder of a scheduler.
    """
    low_w, high_w = _PLAUSIBLE_W
    own_w = np.array([measured_w(job) for job in jobs], np.float64)
    implausible = sum(math.isnan(own) and not math.isnan(_watts(job)) for own, job in zip(own_w, jobs, strict=True))
    # Jobs of one name take another power on another type of GPU. A scheduler's log says no types.
    several = len({job.gpu_type for job in jobs}) > 1
    kinds = [(job.owner, job.name, job.gpu_type if several else "") for job in jobs]
    seen: dict[tuple[str, str, str], list[tuple[float, float]]] = {}
    for job, kind, watts in zip(jobs, kinds, own_w.tolist(), strict=True):
        if not math.isnan(watts):
            seen.setdefault(kind, []).append((watts * job.elapsed_s * job.gpus, job.elapsed_s * job.gpus))
    for (owner, name), joules, slot_s in _ended(folder):
        if low_w <= joules / slot_s <= high_w:
            seen.setdefault((owner, name, ""), []).append((joules, slot_s))
    mean_w = {kind: sum(j for j, _ in rows) / sum(s for _, s in rows) for kind, rows in seen.items()}
    kind_w = np.array([mean_w.get(kind, math.nan) for kind in kinds], np.float64)
    learned = np.isnan(own_w) & ~np.isnan(kind_w)
    job_w = np.where(np.isnan(own_w), kind_w, own_w)
    measured = int(np.sum(~np.isnan(own_w)))
    assumed = int(np.sum(np.isnan(job_w)))
    return KnownPower(job_w, measured, int(np.sum(learned)), assumed, implausible)


def measured_w(job: PastJob) -> float:
    """Power per GPU as measured by the cluster, W; NaN where it is not measured or not plausible."""
    low_w, high_w = _PLAUSIBLE_W
    watts = _watts(job)
    return watts if low_w <= watts <= high_w else math.nan


def _watts(job: PastJob) -> float:
    """Measured joules per GPU-second of a job; NaN where none were measured."""
    gpu_s = job.elapsed_s * job.gpus
    return job.measured_j / gpu_s if gpu_s > 0 and job.measured_j > 0 else math.nan


def _ended(folder: Path | None) -> list[tuple[tuple[str, str], float, float]]:
    """Owner and name, joules and slot-seconds of jobs whose energy was measured all the time."""
    return [
        ((str(entry.get("owner", "")), str(entry.get("name", ""))), float(entry["energy_j"]), float(entry["slot_s"]))
        for entry in logged_jobs(folder)
        if _is_measured(entry)
    ]


def logged_jobs(folder: Path | None) -> Iterable[Mapping[str, Any]]:
    """Jobs that ended, from a scheduler's log; nothing without a folder.

    Raises:
        ConfigError: The folder is not the state folder of a scheduler.
    """
    if folder is None:
        return ()
    if not (folder / "runs").is_dir():
        raise ConfigError("no scheduler wrote to this folder", pointer="--jobs", got=str(folder))
    return ended_jobs(folder)


def _is_measured(entry: Mapping[str, object]) -> bool:
    whole = not entry.get("unmetered_s") and entry.get("quality") == str(Quality.MEASURED)
    return whole and all(isinstance(entry.get(key), int | float) and entry[key] for key in ("energy_j", "slot_s"))
