"""GREEN's two queues: hands out GPUs to jobs, within a budget for the restarts that this causes.

GPUs go to the upper queue, where jobs are sized, within its share, and to the lower one in its order of service; or to
all jobs in the order of submission.

Where some jobs are far wider than others, old ones stop younger ones, or the widest would never find room. An order by
age does not shorten the mean completion time, it bounds the longest. Each of its stops costs a restart, and the
restarts make all jobs wait longer: the mean wait of a queue goes with ``1 / (1 - load)``, so restarts that take a share
``e`` of the idle GPU time lengthen it by ``e / (1 - e)``, at any load. Their budget is a share of the idle GPU time.
Where no GPU idles, the queue could not recover from the time lost, so only enough is spent that no job waits for ever.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from joulery.policies.training.allocation import ClusterView

Filling = tuple[dict[int, int], dict[int, "TrackedJob"], tuple[tuple[int, int], ...]]
"""GPUs of each job that runs; the jobs with their skip counts; jobs that wait, in order, with their GPUs."""
RESTART_SHARE = 0.1
"""Restart budget as a share of the idle GPU time: waits get longer by a ninth at most."""
LEAST_RESTART_SHARE = 0.002
"""Least restart budget as a share of all GPU time: the oldest job waits at most as long as 500 restarts take."""
_BLOCKING_ROUNDS = 3
_KEPT = 0.5
"""Share of a full budget that is kept for the oldest jobs: stops by rank do not use it."""


@dataclass(frozen=True, slots=True)
class TrackedJob:
    """The policy's record of one job.

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
            jobs[job] = known = replace(jobs[job], skipped=jobs[job].skipped + 1)
            blocked = blocking and (blocked or known.skipped > _BLOCKING_ROUNDS)
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

    The jobs in ``first`` come first, then the oldest, running jobs with the GPUs that they have, and waiting ones. GPUs
    that are left go to running jobs that grow, if no job waits.

    Args:
        view: The cluster.
        jobs: The jobs with their targets.
        first: GPUs of the jobs that go first.
        rows: Rows of the other jobs in the view, in order of submission.
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
            jobs[job] = known = replace(jobs[job], skipped=jobs[job].skipped + 1)
            blocked = blocking and (blocked or known.skipped > _BLOCKING_ROUNDS)
    for row in rows:
        job = number[row]
        more = jobs[job].gpus - run.get(job, jobs[job].gpus)
        if more > 0 and more <= free and not left:
            run[job], free = jobs[job].gpus, free - more
        elif more > 0:
            jobs[job] = replace(jobs[job], gpus=run[job])
    return run, jobs, tuple((number[row], jobs[number[row]].gpus) for row in left)


@dataclass(frozen=True, slots=True)
class RestartBudget:
    """Budget of GPU time that may still be lost to restarts.

    Attributes:
        gpu_s: GPU-seconds saved up; at most a round, or a restart, of the whole cluster. It is full at first.
        seen_s: Time of the last observation of the cluster; NaN for none.
    """

    gpu_s: float = math.inf
    seen_s: float = math.nan

    def grown(self, view: ClusterView) -> RestartBudget:
        """The budget plus a share of the GPUs that idle now, assumed idle since the last observation."""
        idle = max(0, view.gpus - int(view.running.sum()))
        past_s = 0.0 if math.isnan(self.seen_s) else max(0.0, view.now_s - self.seen_s)
        saved_gpu_s = max(RESTART_SHARE * idle, LEAST_RESTART_SHARE * view.gpus) * past_s
        return RestartBudget(min(self.gpu_s + saved_gpu_s, _full_gpu_s(view)), view.now_s)

    def spent(self, gpu_s: float) -> RestartBudget:
        """The budget after a loss; it does not fall below 0."""
        return RestartBudget(max(0.0, self.gpu_s - gpu_s), self.seen_s)

    def remember(self) -> dict[str, float]:
        """The budget as a JSON-ready dictionary; empty before the first observation."""
        return {} if math.isnan(self.seen_s) else {"gpu_s": self.gpu_s, "seen_s": self.seen_s}

    @classmethod
    def recall(cls, document: Mapping[str, float]) -> RestartBudget:
        """The budget that :meth:`remember` wrote."""
        return cls(float(document["gpu_s"]), float(document["seen_s"])) if document else cls()


def within_budget(
    budget: RestartBudget,
    view: ClusterView,
    oldest: Sequence[int],
    others: Sequence[int],
    filled: Callable[[Sequence[int], Collection[int] | None], Filling],
) -> tuple[Filling, RestartBudget]:
    """Hand out GPUs to the oldest jobs first, as far as the budget covers the stops.

    Stops by rank are allowed too, if they leave enough for the oldest. Otherwise only the oldest stop others, on as few
    GPUs as suffice; while that exceeds the budget, half as many of those that wait do, and in the end none.

    Args:
        budget: The budget before this round.
        view: The cluster.
        oldest: Rows that go first for their age, oldest first.
        others: Rows that may be stopped for them.
        filled: Hands out GPUs to the given oldest rows first; then by rank, or, if running rows to stop are given, to
            all other running jobs before waiting ones.

    Returns:
        The filling, and the budget after it.
    """
    budget = budget.grown(view)
    filling = filled(oldest, None)
    lost_gpu_s = _lost_gpu_s(view, filling)
    if lost_gpu_s <= max(0.0, budget.gpu_s - _KEPT * _full_gpu_s(view)):
        return filling, budget.spent(lost_gpu_s)
    waits = [row for row in oldest if not view.running[row]]
    few = len(waits)
    while True:
        ahead = set(waits[:few])
        rows = [row for row in oldest if view.running[row] or row in ahead]
        filling = filled(rows, _stopped(view, rows, others))
        lost_gpu_s = _lost_gpu_s(view, filling)
        if lost_gpu_s <= budget.gpu_s or not few:
            return filling, budget.spent(lost_gpu_s)
        few //= 2


def _full_gpu_s(view: ClusterView) -> float:
    """Largest budget that is saved up."""
    return max(view.round_s, view.restart_s) * view.gpus


def _stopped(view: ClusterView, ahead: Sequence[int], others: Sequence[int]) -> set[int]:
    """Running rows to stop for those that go ahead: the fewest GPUs that suffice, of equal ones the youngest."""
    least = view.running if view.min_gpus is None else view.min_gpus
    need = sum(int(least[row]) for row in ahead if not view.running[row]) - view.gpus + int(view.running.sum())
    kept = set(ahead)
    left = {row: int(view.running[row]) for row in others if view.running[row] and row not in kept}
    stopped: set[int] = set()
    while need > 0 and left:
        enough = [gpus for gpus in left.values() if gpus >= need]
        gpus = min(enough) if enough else max(left.values())
        row = max(row for row, held in left.items() if held == gpus)
        stopped.add(row)
        need -= left.pop(row)
    return stopped


def _lost_gpu_s(view: ClusterView, filling: Filling) -> float:
    """GPU time that the stopped jobs lose."""
    run, rows = filling[0], zip(view.job.tolist(), view.running.tolist(), strict=True)
    return view.restart_s * float(sum(gpus for job, gpus in rows if gpus and job not in run))
