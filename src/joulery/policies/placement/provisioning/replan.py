"""Plans that follow a change of services with few migrations from the running plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from joulery.domain.errors import InfeasibleError
from joulery.domain.gpu.plan_change import RunningGpu
from joulery.domain.gpu.provisioning import Workload
from joulery.policies.placement.provisioning.gpu_shares import GpuType, Placed, ReplicaLoad, Share
from joulery.policies.placement.provisioning.options import Rules
from joulery.policies.placement.provisioning.packing import Problem, problem_of


def follow(
    running: Sequence[RunningGpu],
    workloads: Sequence[Workload],
    types: Sequence[GpuType],
    rules: Rules,
    max_migrations: int = 0,
) -> tuple[Placed, ...]:
    """A plan for the new services that leaves running processes where they are, as far as SLOs allow.

    Shares and batches change in place. A process migrates only when its GPU can no longer keep every service
    within its SLO, or, within ``max_migrations``, when that empties a GPU.

    Args:
        running: The running GPUs.
        workloads: The services to be served from now on.
        types: GPU types; those of the running plan are found by name.
        rules: Constraints and choices.
        max_migrations: Most migrations for releasing GPUs.

    Returns:
        The GPUs that are kept, in their order, then those to be rented.

    Raises:
        InfeasibleError: A service can be served on none of the types, or there are too few GPUs.
        ConfigError: No GPU types, two services of one name, or a model unknown to all types.
    """
    fleet = _Fleet(problem_of(workloads, types, rules), running)
    fleet.evict()
    fleet.place_waiting()
    fleet.consolidate(max_migrations)
    return fleet.placed()


class _Process(NamedTuple):
    """A replica of the new plan: the index of its item, and its part of a service."""

    item: int
    part: ReplicaLoad


class _Fleet:
    """The GPUs of a plan while it is being changed.

    Attributes:
        types: Type of each GPU.
        gpus: Processes of each GPU.
        waiting: Processes without a GPU.
    """

    def __init__(self, problem: Problem, running: Sequence[RunningGpu]) -> None:
        self.problem = problem
        names = [gpu_type.name for gpu_type in problem.types]
        self.types = [names.index(gpu.type) for gpu in running if gpu.type in names]
        known = [gpu for gpu in running if gpu.type in names]
        self.gpus: list[list[_Process]] = [[] for _ in known]
        self.waiting: list[_Process] = []
        place = {(p.workload, p.replica): index for index, gpu in enumerate(known) for p in gpu.processes}
        count = Counter(workload for workload, _ in place)
        indices = {(item.kind, item.replicas): index for index, item in enumerate(problem.items)}
        for number, kind in enumerate(problem.kinds):
            for member in kind.members:
                workload = problem.workloads[member]
                counts = [item.replicas for item in kind.items]
                replicas = next((many for many in counts if many >= count[workload.id]), counts[-1])
                for replica in range(replicas):
                    part = ReplicaLoad(member, replica, replicas, workload.rate_rps / replicas)
                    process = _Process(indices[number, replicas], part)
                    gpu = place.get((workload.id, replica))
                    (self.waiting if gpu is None else self.gpus[gpu]).append(process)

    def fits(self, gpu: int, processes: Sequence[_Process]) -> int | None:
        """Units the processes take together on a GPU; None when they do not fit."""
        if not processes:
            return 0
        layout = self.problem.packings[self.types[gpu]].fit(tuple(sorted(p.item for p in processes)))
        return None if layout is None else layout.total

    def evict(self) -> None:
        """Take processes off GPUs that can no longer keep every service within its SLO, as few as possible."""
        for gpu, processes in enumerate(self.gpus):
            alone = self.problem.packings[self.types[gpu]].alone
            for process in sorted(processes, key=lambda p: int(alone[p.item])):
                if self.fits(gpu, processes) is not None:
                    break
                others = [each for each in processes if each != process]
                if len(processes) == 1 or self.fits(gpu, others) is not None:
                    self.waiting.append(process)
                    processes.remove(process)
            while self.fits(gpu, processes) is None:
                largest = max(processes, key=lambda p: int(alone[p.item]))
                self.waiting.append(largest)
                processes.remove(largest)

    def place_waiting(self) -> None:
        """Place every waiting process where shares grow least, those that need most first; rent a GPU if none fits."""
        need = [
            min(int(packing.alone[item]) for packing in self.problem.packings)
            for item in range(len(self.problem.items))
        ]
        for process in sorted(self.waiting, key=lambda p: -need[p.item]):
            gpu = self.best_gpu(process, range(len(self.gpus)))
            if gpu is None:
                self.types.append(self._cheapest(process))
                self.gpus.append([])
                gpu = len(self.gpus) - 1
            self.gpus[gpu].append(process)
        self.waiting = []

    def best_gpu(self, process: _Process, among: Sequence[int]) -> int | None:
        """The GPU that takes a process with the least growth of shares; None when none does."""
        best: tuple[int, int] | None = None
        for gpu in among:
            if not self.gpus[gpu]:
                continue
            after = self.fits(gpu, [*self.gpus[gpu], process])
            before = self.fits(gpu, self.gpus[gpu])
            if after is not None and before is not None and (best is None or after - before < best[0]):
                best = after - before, gpu
        if best is None:
            empty = [gpu for gpu in among if not self.gpus[gpu] and self.fits(gpu, [process]) is not None]
            return min(empty, key=lambda gpu: self.problem.types[self.types[gpu]].usd_per_hour, default=None)
        return best[1]

    def _cheapest(self, process: _Process) -> int:
        """The type to rent for a process.

        Raises:
            InfeasibleError: There are no more GPUs of any type it fits on.
        """
        rented = Counter(kind for kind, gpu in zip(self.types, self.gpus, strict=True) if gpu)
        possible = [
            (packing.gpu_type.usd_per_hour, index)
            for index, packing in enumerate(self.problem.packings)
            if packing.alone[process.item] <= packing.capacity
            and (packing.gpu_type.available is None or rented[index] < packing.gpu_type.available)
        ]
        if not possible:
            name = self.problem.workloads[process.part.workload].id
            raise InfeasibleError(
                f"no GPU is left for service {name}",
                binding="number of GPUs",
                nearest={"unserved": [name]},
                hint="raise `available` in the fleet, or relax its SLO",
            )
        return min(possible)[1]

    def consolidate(self, max_migrations: int) -> None:
        """Release GPUs whose processes find room elsewhere, those with the fewest first, within ``max_migrations``."""
        left = max_migrations
        for gpu in sorted(range(len(self.gpus)), key=lambda gpu: len(self.gpus[gpu])):
            if not 0 < len(self.gpus[gpu]) <= left:
                continue
            before = [list(processes) for processes in self.gpus]
            leaving, self.gpus[gpu] = self.gpus[gpu], []
            others = [other for other in range(len(self.gpus)) if self.gpus[other]]
            for process in leaving:
                target = self.best_gpu(process, others)
                if target is None:
                    self.gpus = before
                    break
                self.gpus[target].append(process)
            else:
                left -= len(leaving)

    def placed(self) -> tuple[Placed, ...]:
        """The changed plan, with the tightest shares."""
        result = []
        for kind, processes in zip(self.types, self.gpus, strict=True):
            if not processes:
                continue
            ordered = sorted(processes, key=lambda p: (p.item, p.part))
            layout = self.problem.packings[kind].tightest(tuple(p.item for p in ordered))
            assert layout is not None  # every change was checked
            unit = self.problem.types[kind].profile.gpu.unit_percent
            shares = [
                Share(p.part, units * unit, option.process.batch)
                for p, units, option in zip(ordered, layout.units, layout.options, strict=True)
            ]
            result.append(Placed(kind, tuple(sorted(shares, key=lambda share: (-share.share_percent, share.part)))))
        return tuple(result)
