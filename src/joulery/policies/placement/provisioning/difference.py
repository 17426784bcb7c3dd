"""Changes from one plan to the next.

A *move* is a process that runs in both plans and would run on another GPU. Starting a new process, stopping one, and
changing a share or batch in place are counted apart: they interrupt no request.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from joulery.domain.gpu.plan_change import PlanDifference, ProcessChange, RunningGpu, RunningProcess
from joulery.domain.gpu.provisioning import PlannedGpu


def running_of(gpus: Sequence[PlannedGpu]) -> tuple[RunningGpu, ...]:
    """The GPUs of a plan as running GPUs."""
    return tuple(
        RunningGpu(
            gpu.type,
            tuple(
                RunningProcess(each.workload, each.replica, 100 * each.share_ratio, each.batch)
                for each in gpu.instances
            ),
        )
        for gpu in gpus
    )


def difference(old: Sequence[RunningGpu], new: Sequence[RunningGpu]) -> PlanDifference:
    """Changes from one plan to another, GPUs matched so that the fewest processes move."""
    same_gpu = _matched(old, new)
    was = {(p.workload, p.replica): (index, p) for index, gpu in enumerate(old) for p in gpu.processes}
    changes: list[ProcessChange] = []
    for index, gpu in enumerate(new):
        for process in gpu.processes:
            after = (round(process.share_percent, 9), process.batch)
            source, before = was.pop((process.workload, process.replica), (None, None))
            had = None if before is None else (round(before.share_percent, 9), before.batch)
            what = "start" if source is None else "move" if same_gpu[index] != source else "resize"
            if what != "resize" or had != after:
                changes.append(ProcessChange(process.workload, process.replica, what, source, index, had, after))
    changes += [
        ProcessChange(p.workload, p.replica, "stop", source, None, (round(p.share_percent, 9), p.batch), None)
        for source, p in was.values()
    ]
    kept = sum(index is not None for index in same_gpu)
    return PlanDifference(tuple(changes), same_gpu, len(new) - kept, len(old) - kept)


def _matched(old: Sequence[RunningGpu], new: Sequence[RunningGpu]) -> tuple[int | None, ...]:
    """For each new GPU an old one of its type, so that as many processes as possible stay where they are."""
    if not old or not new:
        return (None,) * len(new)
    from scipy.optimize import linear_sum_assignment

    there = {(p.workload, p.replica): index for index, gpu in enumerate(old) for p in gpu.processes}
    gain = np.zeros((len(new), len(old)))
    for index, gpu in enumerate(new):
        for process in gpu.processes:
            source = there.get((process.workload, process.replica))
            if source is not None:
                gain[index, source] += 1
    same_type = np.array([[one.type == other.type for other in old] for one in new])
    rows, columns = linear_sum_assignment(np.where(same_type, gain + 1e-3, -1e6), maximize=True)
    found: list[int | None] = [None] * len(new)
    for row, column in zip(rows.tolist(), columns.tolist(), strict=True):
        if same_type[row, column]:
            found[row] = column
    return tuple(found)
