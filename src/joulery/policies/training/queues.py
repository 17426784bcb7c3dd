"""GREEN's two queues: how footprints are counted, and which jobs get GPUs."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from joulery.domain.arrays import BoolArray, FloatArray
from joulery.policies.training.allocation import ClusterView

Filling = tuple[dict[int, int], dict[int, "TrackedJob"], tuple[tuple[int, int], ...]]
"""GPUs of each job that runs; the jobs with their skip counts; jobs that wait, in order, with their GPUs."""
_BLOCKING_ROUNDS = 3
_LEVEL_RATIO = 4.0
_LEFT_WEIGHT = 0.25
_WIDEST = 2
_AVERAGE = 4


@dataclass(frozen=True, slots=True)
class TrackedJob:
    """What the policy remembers of one job.

    Attributes:
        upper: Whether it is still being sized.
        gpus: How many GPUs it is to have.
        degradation: Efficiency of its GPUs relative to one, as last measured.
        skipped: Rounds in a row in which it did not fit.
        reserved: Whether GPUs are reserved for it, so that it may wait and still meet its deadline.
    """

    upper: bool
    gpus: int
    degradation: float = 1.0
    skipped: int = 0
    reserved: bool = False


def ceiling_kg(footprint_kg: FloatArray, attained_gpu_s: FloatArray, ceiling_gpu_s: float | None) -> float:
    """The footprint of so much service of the average job, beyond which none counts for more.

    Args:
        footprint_kg: Footprints, float64[n]; or service, where that is what is counted.
        attained_gpu_s: Service of the same jobs, float64[n].
        ceiling_gpu_s: None for no ceiling.

    Returns:
        Infinite where there is none, or no job has had any service.
    """
    total_s = float(attained_gpu_s.sum())
    if ceiling_gpu_s is None or total_s <= 0:
        return math.inf
    return ceiling_gpu_s * float(footprint_kg.sum()) / total_s


def in_levels(footprint_kg: FloatArray, ceiling: float, levels: int | None) -> FloatArray:
    """Footprints up to the ceiling, and below it rounded down to a quarter of it, a sixteenth …, the lowest of
    ``levels`` for whatever is less; every gram without levels or without a ceiling.

    Returns:
        float64[n], a new array.
    """
    counted = np.minimum(footprint_kg, ceiling)
    if levels is None or ceiling == math.inf:
        return counted
    edges = ceiling * _LEVEL_RATIO ** -np.arange(levels, -1.0, -1.0)
    return np.asarray(edges[np.maximum(np.searchsorted(edges, counted, side="right") - 1, 0)], np.float64)


def lesser_kg(
    footprint_kg: FloatArray, attained_gpu_s: FloatArray, remaining_gpu_s: FloatArray, reported: BoolArray
) -> FloatArray:
    """What each job has caused, or a quarter of what it has still to cause at its own rate, where it reports progress
    and that is less.

    Args:
        footprint_kg, attained_gpu_s: So far, float64[n].
        remaining_gpu_s: Left, float64[n]; used where reported.
        reported: Which jobs report progress, bool[n]; their service is above zero.

    Returns:
        float64[n], a new array.
    """
    lesser = np.array(footprint_kg, np.float64)
    left_kg = footprint_kg[reported] * remaining_gpu_s[reported] / attained_gpu_s[reported]
    lesser[reported] = np.minimum(lesser[reported], _LEFT_WEIGHT * left_kg)
    return lesser


def uppermost(counted: FloatArray, ceiling: float, levels: int | None) -> BoolArray:
    """Which jobs are in the highest level that any job is in, unless that is the lowest there is.

    Returns:
        bool[n].
    """
    lowest = 0.0 if levels is None or ceiling == math.inf else ceiling * _LEVEL_RATIO**-levels
    return np.asarray((counted >= counted.max(initial=0.0)) & (counted > lowest), np.bool_)


def oldest_first(
    age_s: FloatArray, counted_kg: FloatArray, submit_s: FloatArray, wants: Sequence[int], gpus: int
) -> dict[int, None]:
    """Which jobs go before all others for their age: the oldest, as many as fit.

    Args:
        age_s: float64[n]; among equally old jobs the one with the smaller footprint goes first, then the earlier one.
        counted_kg: What counts of their footprints, float64[n].
        submit_s: float64[n].
        wants: GPUs of each; 0 for a job that may not be one of them.
        gpus: How many GPUs they may have in all; a job that does not fit is passed over.

    Returns:
        Positions, first to run first, as keys.
    """
    chosen: dict[int, None] = {}
    for at in np.lexsort((submit_s, counted_kg, -age_s)).tolist() if gpus else ():
        if 0 < wants[at] <= gpus:
            chosen[at], gpus = None, gpus - wants[at]
        if not gpus:
            break
    return chosen


def oldest_gpus(share: float, gpus: int, least: Sequence[int]) -> tuple[int, bool]:
    """How many GPUs go to the oldest jobs first.

    Their share; or what several average jobs need, where jobs need different numbers of GPUs and the share does not
    hold two of the widest. Footprints alone put the widest last: it would never find room behind the others.

    Args:
        share: Of the GPUs; 0 for none.
        gpus: Of the cluster.
        least: Fewest GPUs that each job can use.

    Returns:
        How many, and whether jobs are wide: the last of the oldest then gets all it needs, even beyond these.
    """
    plain, widest = int(share * gpus), max(least, default=0)
    if share == 0 or _WIDEST * widest <= plain or widest == min(least, default=0):
        return plain, False
    return min(max(plain, _AVERAGE * sum(least) // len(least)), gpus), True


def fill(
    view: ClusterView,
    jobs: dict[int, TrackedJob],
    first: Mapping[int, int],
    upper: Sequence[int],
    lower: Sequence[int],
    theta: float,
    blocking: bool = True,
) -> Filling:
    """Hand out GPUs: to those that go first, to the upper queue within its share, then to the lower one, then what is
    left to the upper queue.

    A job is tested before it is added and skipped when it does not fit; a job of several GPUs that was skipped for
    ``_BLOCKING_ROUNDS`` rounds blocks the smaller ones behind it, unless ``blocking`` is off.

    Returns:
        GPUs of each job that runs; the jobs with their skip counts; jobs that wait, in order, with their GPUs.
    """
    number, running = view.job.tolist(), view.running.tolist()
    run: dict[int, int] = dict(first)
    free = view.gpus - sum(run.values())
    budget = min(int(theta * view.gpus), free)
    spare: list[int] = []
    for row in upper:
        # Growing comes after keeping: a job that runs is first given what it has.
        job = number[row]
        want = min(jobs[job].gpus, running[row]) if running[row] else jobs[job].gpus
        if want <= budget:
            run[job], budget, free = want, budget - want, free - want
        else:
            spare.append(row)
    growing = [row for row in upper if run.get(number[row], jobs[number[row]].gpus) < jobs[number[row]].gpus]
    for row in sorted(growing, key=lambda row: (-jobs[number[row]].degradation, row)):
        job = number[row]
        more = jobs[job].gpus - run[job]
        if more <= budget:
            run[job], budget, free = jobs[job].gpus, budget - more, free - more
        else:
            jobs[job] = replace(jobs[job], gpus=run[job])
    blocked = False
    left: list[int] = []
    for row in (*lower, *spare):
        job = number[row]
        want = jobs[job].gpus
        if not blocked and want <= free:
            run[job], free = want, free - want
            if jobs[job].skipped:
                jobs[job] = replace(jobs[job], skipped=0)
            continue
        left.append(row)
        if want > 1:
            jobs[job] = replace(jobs[job], skipped=jobs[job].skipped + 1)
            blocked = blocking and (blocked or jobs[job].skipped > _BLOCKING_ROUNDS)
    return run, jobs, tuple((number[row], jobs[number[row]].gpus) for row in left)


def fill_in_order(
    view: ClusterView,
    jobs: dict[int, TrackedJob],
    first: Mapping[int, int],
    rows: Sequence[int],
    oldest: Collection[int],
    stopped: Collection[int] = (),
    blocking: bool = True,
) -> Filling:
    """Hand out GPUs in the order of submission.

    Those that go first come first, then the oldest, running jobs with what they have, and waiting ones. What is left
    goes to running ones that grow, if none waits.

    Args:
        view: The cluster.
        jobs: The jobs with their targets.
        first: GPUs of those that go first.
        rows: Of the view, the others, in order of submission.
        oldest: Those of the rows that go before running ones.
        stopped: Running ones that count as waiting.
        blocking: Whether a job that was skipped for ``_BLOCKING_ROUNDS`` rounds blocks those that wait behind it.

    Returns:
        As :func:`fill`. No running job stops while it fits.
    """
    number, running = view.job.tolist(), view.running.tolist()
    run: dict[int, int] = dict(first)
    free, blocked = view.gpus - sum(run.values()), False
    left: list[int] = []
    # A stable sort: each part stays in order of submission.
    oldest, stopped = frozenset(oldest), frozenset(stopped)
    for row in sorted(rows, key=lambda row: 0 if row in oldest else 1 if running[row] and row not in stopped else 2):
        job = number[row]
        want = min(jobs[job].gpus, running[row]) if running[row] else jobs[job].gpus
        if not blocked and want <= free:
            run[job], free = want, free - want
            jobs[job] = replace(jobs[job], skipped=0) if jobs[job].skipped else jobs[job]
            continue
        left.append(row)
        if want > 1:
            jobs[job] = replace(jobs[job], skipped=jobs[job].skipped + 1)
            blocked = blocking and (blocked or jobs[job].skipped > _BLOCKING_ROUNDS)
    for row in rows:
        job = number[row]
        more = jobs[job].gpus - run.get(job, jobs[job].gpus)
        if more > 0 and more <= free and not left:
            run[job], free = jobs[job].gpus, free - more
        elif more > 0:
            jobs[job] = replace(jobs[job], gpus=run[job])
    return run, jobs, tuple((number[row], jobs[number[row]].gpus) for row in left)
