"""Decides which jobs wait for cleaner hours within the deadlines of their owners.

A job with a deadline runs in the hours that cost it least: of all ends before the deadline the one is chosen with the
least sum of the grams of its cheapest hours until then and the price of the delay. It waits or is suspended in the
other hours (:func:`wants_to_wait`).

No job is late because it waited. A waiting job has a reservation: GPUs from its latest start to its deadline
(:class:`Reservations`), made only while all reservations fit the cluster. At its latest start the job runs, whatever
else runs, and is not stopped again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from joulery.domain.arrays import BoolArray, FloatArray, IntArray
from joulery.policies.training.allocation import ClusterView

_HOUR_S = 3600.0
_FARTHEST_S = 90 * 24 * _HOUR_S
"""A deadline further ahead counts as one at this distance: no forecast reaches it, and every hour of it is booked."""
_FASTER = 1.25
"""GPUs times efficiency, against the fewest GPUs, from which on more GPUs are surely no slower."""
_STARTS = 2.0
"""Starts that a job may still pay for: one to resume, and one where it is made narrower while it resumes."""


@dataclass(frozen=True, slots=True)
class WaitingJobs:
    """Jobs that wait in this round.

    Attributes:
        held: Rows that wait for a cleaner hour.
        due: Rows that must run from now on, the earliest deadline first.
        reserved: Rows whose GPUs are reserved.
        room: GPUs that are free of reservations at all times.
    """

    held: frozenset[int] = frozenset()
    due: tuple[int, ...] = ()
    reserved: frozenset[int] = frozenset()
    room: int = 0


def need_s(view: ClusterView) -> FloatArray:
    """Time each job needs at most from its start to its end, on the fewest GPUs it can use; NaN where unknown.

    It includes the slowdown by its power limit and the time of its starts. float64[n].
    """
    least = np.ones(len(view)) if view.min_gpus is None else view.min_gpus
    slowdown = np.ones(len(view)) if view.slowdown is None else view.slowdown
    starts_s = _STARTS * max(view.restart_s, view.wake_s)
    return np.asarray(_left_s(view) * slowdown / least + starts_s, np.float64)


def _left_s(view: ClusterView) -> FloatArray:
    """Work left of each job, else the most that its owner states for the whole job; NaN where neither is known."""
    if view.longest_s is None:
        return view.remaining_s
    return np.asarray(np.where(np.isnan(view.remaining_s), view.longest_s, view.remaining_s), np.float64)


def decide_waiting(
    view: ClusterView, gpus: Sequence[int], reserved: BoolArray, new: BoolArray, delay_ratio: float
) -> WaitingJobs:
    """Decide which jobs wait, and which have to run.

    Args:
        view: The cluster.
        gpus: Number of GPUs that each job is to have.
        reserved: Jobs with a reservation from an earlier round, bool[n].
        new: Jobs that came since the last round, bool[n].
        delay_ratio: Price of a delay, as in :func:`wants_to_wait`.
    """
    if view.deadline_s is None or not bool(np.any(np.isfinite(view.deadline_s))):
        return WaitingJobs(room=view.gpus)
    need = need_s(view)
    ahead_s = np.maximum(_FARTHEST_S, 2.0 * need)
    deadline_s = np.where(np.isfinite(view.deadline_s), np.minimum(view.deadline_s, view.now_s + ahead_s), math.inf)
    latest_s = deadline_s - need
    known = np.isfinite(latest_s)
    due = known & reserved & (latest_s < view.now_s + view.round_s)
    patient = known & (latest_s >= view.now_s + view.round_s)
    # A job that ran and reports no progress may save none: it is not suspended.
    saves = ~np.isnan(view.remaining_s) | (view.executed_s == 0)
    wishes = patient & saves & wants_to_wait(view, gpus, latest_s, delay_ratio)
    least = np.ones(len(view), np.int64) if view.min_gpus is None else view.min_gpus
    bookings = Reservations(view.now_s, view.gpus)
    begin_s = latest_s - view.round_s
    for row in np.flatnonzero(known & reserved).tolist():
        bookings.add(begin_s[row], deadline_s[row], int(least[row]))
    # Jobs that came since the last round may have waited for it: their GPUs are reserved before those of others.
    arrived = patient & new & (view.running == 0) & ~reserved
    asks = [*np.flatnonzero(arrived).tolist(), *np.flatnonzero(wishes & ~reserved & ~arrived).tolist()]
    kept = reserved & known
    for row in asks:
        if bookings.fits(begin_s[row], deadline_s[row], int(least[row])):
            bookings.add(begin_s[row], deadline_s[row], int(least[row]))
            kept[row] = True
    urgent = np.flatnonzero(due)
    order = urgent[np.argsort(view.deadline_s[urgent], kind="stable")]
    held = frozenset(np.flatnonzero(wishes & kept).tolist())
    return WaitingJobs(held, tuple(order.tolist()), frozenset(np.flatnonzero(kept).tolist()), bookings.room())


def wants_to_wait(view: ClusterView, gpus: Sequence[int], latest_s: FloatArray, delay_ratio: float) -> BoolArray:
    """Whether each job saves more by waiting now than the delay is worth.

    Args:
        view: The cluster, with the intensity expected in the hours ahead.
        gpus: Number of GPUs that each job is to have.
        latest_s: Latest start of each job, float64[n]; not finite where it has none.
        delay_ratio: Price of an hour of delay: this share of what a GPU of the median job emits in an hour at the
            mean intensity ahead.

    Returns:
        bool[n]; False where nothing is known of the hours ahead.
    """
    ahead = view.ahead_g_per_kwh
    rows = np.flatnonzero(np.isfinite(latest_s) & (latest_s >= view.now_s + view.round_s))
    wait = np.zeros(len(view), np.bool_)
    if ahead is None or len(ahead) < 2 or not len(rows):
        return wait
    hours = len(ahead)
    slack_h = np.minimum(np.floor((latest_s[rows] - view.now_s) / _HOUR_S), hours - 1).astype(np.int64)
    work_h, price = _work_and_price(view, rows, np.asarray(gpus, np.float64)[rows], delay_ratio * float(ahead.mean()))
    # Of a job that is longer than the hours that are known, so much of it as fits beside its slack.
    work_h = np.minimum(work_h, np.maximum(hours - slack_h, 1))
    whole = np.maximum(np.ceil(work_h - 1e-9).astype(np.int64), 1)
    cheapest, dearest = _cheapest(ahead)
    delays = np.arange(int(slack_h.max()) + 1)
    ends = np.minimum(whole[:, None] + delays, hours)
    most, fewer = cheapest[ends, whole[:, None]], cheapest[ends, whole[:, None] - 1]
    grams = fewer + (most - fewer) * (work_h - (whole - 1))[:, None]
    # A job of unknown progress may save none: it is not suspended, so its hours follow one another.
    at_once = np.isnan(view.remaining_s[rows])
    total = np.concatenate(([0.0], np.cumsum(ahead)))
    grams[at_once] = (total[ends] - total[ends - whole[:, None]])[at_once]
    cost = grams + price[:, None] * delays
    cost[delays[None, :] > slack_h[:, None]] = math.inf
    delay = np.argmin(cost, axis=1)
    limit = np.where(at_once, 0.0, dearest[ends[np.arange(len(rows)), delay], whole])
    # A running job stops only for hours that are cleaner by more than its restart emits.
    stop_h = np.where(view.running[rows] > 0, view.restart_s / _HOUR_S, 0.0)
    wait[rows] = (delay > 0) & (view.expected_g_per_kwh * (1.0 - stop_h) > limit)
    return wait


def _work_and_price(
    view: ClusterView, rows: IntArray, width: FloatArray, gpu_price: float
) -> tuple[FloatArray, FloatArray]:
    """Hours of work left on ``width`` GPUs, and the price of an hour's delay against the job's own power, float64[n].

    A job whose power is unknown counts as the median one.
    """
    known = ~np.isnan(view.gpu_w)
    median_w = float(np.median(view.gpu_w[known])) if known.any() else 1.0
    power_w = np.where(known[rows], view.gpu_w[rows], median_w) * width
    efficiency = np.where(np.isnan(view.degradation[rows]), 1.0, view.degradation[rows])
    slowdown = 1.0 if view.slowdown is None else view.slowdown[rows]
    work_h = _left_s(view)[rows] * slowdown / np.maximum(width * efficiency, 1.0) / _HOUR_S
    return work_h, gpu_price * median_w / power_w


def _cheapest(ahead: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Of the first e hours the w cheapest: their sum and the dearest of them, each ``[e, w]``; infinite for w > e."""
    hours = len(ahead)
    beyond = np.arange(hours)[None, :] >= np.arange(hours + 1)[:, None]
    ordered = np.sort(np.where(beyond, math.inf, ahead[None, :]), axis=1)
    sums = np.concatenate((np.zeros((hours + 1, 1)), np.cumsum(ordered, axis=1)), axis=1)
    return sums, np.concatenate((np.zeros((hours + 1, 1)), ordered), axis=1)


class Reservations:
    """GPUs reserved for jobs by the hour; an hour that a job needs in part counts in full.

    Args:
        now_s: Earlier hours do not count.
        gpus: GPUs of the cluster.
    """

    def __init__(self, now_s: float, gpus: int) -> None:
        self._first, self._gpus = math.floor(now_s / _HOUR_S), gpus
        self._used: IntArray = np.zeros(64, np.int64)

    def _hours(self, begin_s: float, end_s: float) -> IntArray:
        """GPUs reserved in each hour, as a writable view of the table."""
        first = max(math.floor(begin_s / _HOUR_S) - self._first, 0)
        end = max(math.ceil(end_s / _HOUR_S) - self._first, first + 1)
        if end > len(self._used):
            self._used = np.concatenate((self._used, np.zeros(end, np.int64)))
        return self._used[first:end]

    def fits(self, begin_s: float, end_s: float, gpus: int) -> bool:
        """Whether ``gpus`` GPUs are free of reservations from ``begin_s`` to ``end_s``."""
        return int(self._hours(begin_s, end_s).max()) + gpus <= self._gpus

    def add(self, begin_s: float, end_s: float, gpus: int) -> None:
        """Reserve ``gpus`` GPUs from ``begin_s`` to ``end_s``."""
        hours = self._hours(begin_s, end_s)
        hours += gpus

    def room(self) -> int:
        """GPUs that are free of reservations at all times."""
        return max(0, self._gpus - int(self._used.max()))


def due_first(due: Sequence[int], view: ClusterView) -> dict[int, int]:
    """GPUs of the jobs that have to run: their present number where that makes them faster, else the fewest.

    The fewest are reserved for each, so they always fit; more are kept while the others' fewest still fit.
    """
    least = [1] * len(view) if view.min_gpus is None else view.min_gpus.tolist()
    run: dict[int, int] = {}
    free, owed = view.gpus, sum(least[row] for row in due)
    for row in due:
        owed -= least[row]
        want = int(view.running[row])
        if not want * view.degradation[row] >= _FASTER * least[row]:
            want = least[row]
        want = want if want <= free - owed else least[row]
        if want <= free:
            run[int(view.job[row])], free = want, free - want
    return run
