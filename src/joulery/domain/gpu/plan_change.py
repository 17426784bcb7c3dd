"""Two plans compared: the processes that run now, and what changes from one plan to the next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class RunningProcess(NamedTuple):
    """A process of a running plan.

    Attributes:
        workload, replica: Which replica of which service.
        share_percent: Its share of the GPU.
        batch: Its batch size.
    """

    workload: str
    replica: int
    share_percent: float
    batch: int


class RunningGpu(NamedTuple):
    """A GPU of a running plan: its type, and the processes on it."""

    type: str
    processes: tuple[RunningProcess, ...]


class ProcessChange(NamedTuple):
    """One process that differs between two plans.

    Attributes:
        workload, replica: Which replica of which service.
        what: ``start``, ``stop``, ``move`` (migration to another GPU) or ``resize`` (in place).
        source, target: Index of its GPU in the old and in the new plan; None where it does not run.
        before, after: Share in percent and batch; None where it does not run.
    """

    workload: str
    replica: int
    what: str
    source: int | None
    target: int | None
    before: tuple[float, int] | None
    after: tuple[float, int] | None


@dataclass(frozen=True, slots=True)
class PlanDifference:
    """Changes from a running plan to a new one.

    Attributes:
        changes: Every process that differs.
        same_gpu: For each GPU of the new plan the index of the old GPU it continues; None for a GPU to rent.
        opened, closed: Numbers of GPUs to rent and to release.
    """

    changes: tuple[ProcessChange, ...]
    same_gpu: tuple[int | None, ...]
    opened: int
    closed: int

    def count(self, what: str) -> int:
        """Number of changes of one kind."""
        return sum(change.what == what for change in self.changes)

    @property
    def migrations(self) -> int:
        """Number of processes that run in both plans, on different GPUs."""
        return self.count("move")
