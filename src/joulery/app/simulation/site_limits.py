"""Effects of power limits on a site's own jobs, measured by agents while they learned the limits of running jobs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from joulery.domain.arrays import IntArray
from joulery.domain.cluster import PastJob
from joulery.domain.errors import ConfigError
from joulery.store.jobs import JobLimitBook, LimitPoints

_KIND = re.compile(r"(.*) on (\d{1,6}) × (.*) at [\d.]+ W(?: on each of (\d{1,6}) nodes)?")
"""Agents' name for a kind whose work is measured by reported progress; others end ``by busy cycles`` (assumed)."""


@dataclass(frozen=True, slots=True, eq=False)
class SiteLimits:
    """Known effects of power limits on past jobs.

    Attributes:
        responses: Limit, step time and power relative to full power, of each kind with known effects.
        response_of: Index of each job's response, int64[n]; -1 where none is known.
        measured, assumed: Number of jobs of a kind whose effects were measured by reported progress, and the rest.
    """

    responses: tuple[LimitPoints, ...] = ()
    response_of: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))
    measured: int = 0
    assumed: int = 0


def known_limits(jobs: Sequence[PastJob], meters: Path | None) -> SiteLimits:
    """Effects of limits that agents measured on jobs of the same owner and name on GPUs of the same type.

    Where nothing is known of a job's number of GPUs, the nearest number counts.

    Args:
        jobs: Jobs that held GPUs.
        meters: The agents' folder (``jobs.slurm.meters``), of which ``limits`` is used; None for none.

    Raises:
        ConfigError: ``meters`` is not a folder.
    """
    if meters is not None and not meters.is_dir():
        raise ConfigError(
            "is not a folder", pointer="--meters", got=str(meters), expected="the one of jobs.slurm.meters"
        )
    found: dict[str, list[tuple[int, str, LimitPoints]]] = {}
    for kind, points in ({} if meters is None else JobLimitBook(meters / "limits").kinds()).items():
        if (match := _KIND.fullmatch(kind)) and points:
            gpus = int(match[2]) * int(match[4] or 1)
            found.setdefault(match[1], []).append((gpus, match[3].lower(), points))
    several = len({model for kinds in found.values() for _, model, _ in kinds}) > 1
    index: dict[LimitPoints, int] = {}
    rows = np.full(len(jobs), -1, np.int64)
    for at, job in enumerate(jobs):
        points = _nearest(found, job, several=several)
        if points:
            rows[at] = index.setdefault(points, len(index))
    measured = int(np.sum(rows >= 0))
    return SiteLimits(tuple(index), rows, measured, len(jobs) - measured)


def _nearest(found: Mapping[str, list[tuple[int, str, LimitPoints]]], job: PastJob, *, several: bool) -> LimitPoints:
    """The points of a job's kind; with several GPU models, those of the job's type."""
    named = job.gpu_type.lower()
    fitting = [
        (abs(gpus - job.gpus), gpus, points)
        for gpus, model, points in found.get(f"{job.owner}/{job.name}", ())
        if not several or (named and named in re.sub(r"[\s-]", "", model)) or (named and named in model)
    ]
    return min(fitting)[2] if fitting else ()
