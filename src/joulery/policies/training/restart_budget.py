"""GPU time that restarts may take where some jobs are far wider than others: a share of what nothing used.

There, old jobs stop younger ones, or the widest would never find room. An order by age does not shorten the mean
completion time, it bounds the longest. Its stops cost a restart each, and what they cost makes everything wait longer:
the mean wait of a queue goes with ``1 / (1 - load)``, so restarts that take a share ``e`` of the idle GPU time lengthen
it by ``e / (1 - e)``, at any load. Where nothing idles, the queue could not recover from the time lost: only so much is
spent then that no job waits for ever.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from joulery.policies.training.allocation import ClusterView
from joulery.policies.training.queues import Filling

SHARE = 0.1
"""Of the idle GPU time: waits get longer by a ninth at most."""
LEAST_SHARE = 0.002
"""Of all GPU time: the job that is first for its age waits at most as long as 500 restarts take."""
_KEPT = 0.5
"""Of a full budget, for the oldest jobs: stops by rank do not touch it."""


@dataclass(frozen=True, slots=True)
class RestartBudget:
    """What may still be lost to restarts.

    Attributes:
        gpu_s: GPU-seconds saved up; at most a round, or a restart, of the whole cluster. It is full at first.
        seen_s: When the cluster was last looked at; NaN for never.
    """

    gpu_s: float = math.inf
    seen_s: float = math.nan

    def grown(self, view: ClusterView) -> RestartBudget:
        """With a share of what idles now, taken to have idled since the last look."""
        idle = max(0, view.gpus - int(view.running.sum()))
        past_s = 0.0 if math.isnan(self.seen_s) else max(0.0, view.now_s - self.seen_s)
        saved_gpu_s = max(SHARE * idle, LEAST_SHARE * view.gpus) * past_s
        return RestartBudget(min(self.gpu_s + saved_gpu_s, _full_gpu_s(view)), view.now_s)

    def spent(self, gpu_s: float) -> RestartBudget:
        """After a loss; what could not be avoided is not owed."""
        return RestartBudget(max(0.0, self.gpu_s - gpu_s), self.seen_s)

    def remember(self) -> dict[str, float]:
        """What is known, JSON-ready; nothing where the cluster was never looked at."""
        return {} if math.isnan(self.seen_s) else {"gpu_s": self.gpu_s, "seen_s": self.seen_s}

    @classmethod
    def recall(cls, document: Mapping[str, float]) -> RestartBudget:
        """What :meth:`remember` wrote."""
        return cls(float(document["gpu_s"]), float(document["seen_s"])) if document else cls()


def within_budget(
    budget: RestartBudget,
    view: ClusterView,
    oldest: Sequence[int],
    others: Sequence[int],
    filled: Callable[[Sequence[int], Collection[int] | None], Filling],
) -> tuple[Filling, RestartBudget]:
    """Hand out GPUs to the oldest jobs first, as far as the stops that takes can be afforded.

    At first also by rank, if that leaves enough for the oldest. Then only they stop others, and as few GPUs as will do;
    fewer and fewer of those that wait, and at last none.

    Args:
        budget: Before this round.
        view: The cluster.
        oldest: Rows that go first for their age, oldest first.
        others: Rows that may be stopped for them.
        filled: Hands out GPUs, to some of the oldest first; then by rank, or, if it is given some running rows, to all
            other running ones before those that wait.

    Returns:
        What was handed out, and the budget after it.
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
    """The most that is saved up."""
    return max(view.round_s, view.restart_s) * view.gpus


def _stopped(view: ClusterView, ahead: Sequence[int], others: Sequence[int]) -> set[int]:
    """Which running rows to stop for those that go ahead: the fewest GPUs that will do, of equal ones the youngest."""
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
    """GPU time that the jobs lose that are stopped."""
    run, rows = filling[0], zip(view.job.tolist(), view.running.tolist(), strict=True)
    return view.restart_s * float(sum(gpus for job, gpus in rows if gpus and job not in run))
