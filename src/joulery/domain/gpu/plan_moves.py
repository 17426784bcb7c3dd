"""Moves from one plan of shares to the next: which instances are started, stopped, or change their share or batch.

A move restarts a process: 5 to 20 s behind a standby. A change of the clock is not a move. GPUs of both plans are
paired so that the fewest moves result. An instance that changes its GPU is stopped on one and started on the other,
which counts as two moves.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from joulery.domain.gpu.provisioning import PlannedGpu, PlannedInstance


class InstanceShape(NamedTuple):
    """Properties of an instance whose change restarts a process."""

    service: str
    model: str
    share_ratio: float
    batch: int
    slice: str = ""
    processes: int = 1


@dataclass(frozen=True, slots=True)
class PlanMoves:
    """Changes from one plan of shares to the next.

    Attributes:
        started, stopped, changed: Numbers of instances.
        same_gpu: For each GPU of the new plan the index of the old GPU it continues; None for a further GPU.
        opened, closed: Numbers of GPUs.
        reclocked: Number of GPUs that continue at another clock.
    """

    started: int
    stopped: int
    changed: int
    same_gpu: tuple[int | None, ...]
    opened: int
    closed: int
    reclocked: int

    @property
    def moves(self) -> int:
        """Instances started, stopped or changed."""
        return self.started + self.stopped + self.changed


def shape_of(each: PlannedInstance) -> InstanceShape:
    """The properties that a process of an instance is started with."""
    return InstanceShape(each.workload, each.model, round(each.share_ratio, 9), each.batch, each.slice, each.processes)


def gpu_moves(old: Sequence[InstanceShape], new: Sequence[InstanceShape]) -> tuple[int, int, int]:
    """Numbers of instances of one GPU that are started, stopped and changed."""
    before, after = Counter(old), Counter(new)
    left = Counter((each.service, each.model) for each in (before - after).elements())
    come = Counter((each.service, each.model) for each in (after - before).elements())
    changed = (left & come).total()
    return come.total() - changed, left.total() - changed, changed


def moves_between(old: Sequence[PlannedGpu], new: Sequence[PlannedGpu]) -> PlanMoves:
    """Compute the fewest moves from one plan to the next; a GPU only continues an old GPU of its type."""
    before = [[shape_of(each) for each in gpu.instances] for gpu in old]
    after = [[shape_of(each) for each in gpu.instances] for gpu in new]
    same = _paired(old, new, before, after)
    pairs = [(before[source] if source is not None else [], after[at]) for at, source in enumerate(same)]
    pairs += [(before[source], []) for source in set(range(len(old))) - set(same)]
    counts = [gpu_moves(was, now) for was, now in pairs]
    started, stopped, changed = (sum(each[at] for each in counts) for at in range(3))
    kept = [(old[source], gpu) for source, gpu in zip(same, new, strict=True) if source is not None]
    reclocked = sum(was.clock_set_mhz != now.clock_set_mhz for was, now in kept)
    return PlanMoves(started, stopped, changed, same, len(new) - len(kept), len(old) - len(kept), reclocked)


def _paired(
    old: Sequence[PlannedGpu],
    new: Sequence[PlannedGpu],
    before: Sequence[Sequence[InstanceShape]],
    after: Sequence[Sequence[InstanceShape]],
) -> tuple[int | None, ...]:
    if not old or not new:
        return (None,) * len(new)
    import numpy as np
    from scipy.optimize import linear_sum_assignment

    saved = np.full((len(new), len(old)), -1e6)
    for at, gpu in enumerate(new):
        for source, was in enumerate(old):
            if gpu.type == was.type:
                # Without a common instance a GPU of the type goes on too: it need not sleep and wake.
                spent = sum(gpu_moves(before[source], after[at]))
                saved[at, source] = len(before[source]) + len(after[at]) - spent + 1e-3
    rows, columns = linear_sum_assignment(saved, maximize=True)
    found: list[int | None] = [None] * len(new)
    for row, column in zip(rows.tolist(), columns.tolist(), strict=True):
        if saved[row, column] > 0:
            found[row] = column
    return tuple(found)


def continued(old: Sequence[PlannedGpu], new: Sequence[PlannedGpu]) -> tuple[PlannedGpu, ...]:
    """The new plan in the order of the GPUs it continues, with the replica numbers of the instances it continues."""
    same = moves_between(old, new).same_gpu
    order = sorted(range(len(new)), key=lambda at: (same[at] is None, same[at] or 0, at))
    taken: dict[str, set[int]] = defaultdict(set)
    for each in (one for gpu in old for one in gpu.instances):
        taken[each.workload].add(each.replica)  # the number of one that stops stays free: it is another process
    numbers: dict[tuple[int, int], int] = {}
    for at in order:
        source = same[at]
        for index, was in _instances_that_go_on(old[source] if source is not None else None, new[at]):
            numbers[at, index] = was.replica
    gpus = []
    for at in order:
        instances = []
        for index, each in enumerate(new[at].instances):
            number = numbers.get((at, index))
            if number is None:
                used = taken[each.workload]
                number = next(free for free in range(len(used) + 1) if free not in used)
                used.add(number)
            instances.append(replace(each, replica=number))
        gpus.append(replace(new[at], instances=tuple(instances)))
    return tuple(gpus)


def _instances_that_go_on(old: PlannedGpu | None, new: PlannedGpu) -> list[tuple[int, PlannedInstance]]:
    """Indices of a GPU's instances that continue an old one, with that one: equal ones first, then of one model."""
    if old is None:
        return []
    left, found = list(old.instances), list[tuple[int, PlannedInstance]]()
    waiting = list(enumerate(new.instances))
    for closely in (True, False):
        for index, each in list(waiting):
            was = next((one for one in left if _alike(one, each, closely)), None)
            if was is not None:
                left.remove(was)
                waiting.remove((index, each))
                found.append((index, was))
    return found


def _alike(one: PlannedInstance, other: PlannedInstance, closely: bool) -> bool:
    if closely:
        return shape_of(one) == shape_of(other)
    return (one.workload, one.model) == (other.workload, other.model)
