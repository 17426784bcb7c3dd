"""Replicas on devices: as a search found them, as Alg. 2 places them by sensitivity, or improved by moves and swaps."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from joulery.domain.errors import InfeasibleError
from joulery.policies.placement.pipelines.by_sensitivity import (
    Partition,
    PlacementLimits,
    improve_placement,
    place_partitions,
)
from joulery.policies.placement.pipelines.device_groups import Grouping, Shape
from joulery.policies.placement.pipelines.partition import Stage
from joulery.policies.placement.pipelines.search import Hosting
from joulery.policies.placement.pipelines.static_clocks import Fleet, Replica
from joulery.policies.placement.pipelines.task import Cuts, Task


@dataclass(frozen=True, slots=True, eq=False)
class PlacedStages:
    """Replicas on devices. A device is a slot of a group: one GPU, or the few that share a stage's operators.

    Attributes:
        grouping: The division of the fleet into groups.
        replicas: Every copy of a model, with its devices.
        parts: Stages of each replica.
        shards: GPUs of each device.
    """

    grouping: Grouping
    replicas: tuple[Replica, ...]
    parts: tuple[tuple[Stage, ...], ...]
    shards: tuple[int, ...]

    @classmethod
    def of(cls, hosting: Hosting, stages: Mapping[Shape, Cuts], task: Task) -> PlacedStages:
        """The result of a search, stage k of every model on device k of its group."""
        clocks = task.cuts[0].profile.clocks_mhz
        replicas: list[Replica] = []
        parts: list[tuple[Stage, ...]] = []
        shards: list[int] = []
        for group, shape in enumerate(hosting.grouping.shapes):
            first = len(shards)
            shards += [shape.shards] * shape.stages
            for model in np.flatnonzero(hosting.hosts[group]):
                own = stages[shape][model]
                if own is None:
                    continue
                factor = 1.0 + task.rules.overheads.stage_ratio * shape.stages
                slowdown = np.array([task.cuts[model].slowdown(part.score, clocks) for part in own])
                devices = tuple(first + stage for stage in range(shape.stages))
                times = tuple(factor * part.latency_s for part in own)
                replicas.append(Replica(int(model), devices, times, slowdown))
                parts.append(own)
        return cls(hosting.grouping, tuple(replicas), tuple(parts), tuple(shards))

    def fleet(self, task: Task) -> Fleet:
        """The devices, and their power at each clock: the mean over the models, whose measured power may differ."""
        profiles = [cut.profile for cut in task.cuts]
        busy_w = np.mean([profile.power_w for profile in profiles], axis=0)
        idle_w = np.mean([profile.idle_w for profile in profiles], axis=0)
        return Fleet(len(self.shards), profiles[0].clocks_mhz, busy_w, idle_w, np.array(self.shards))

    def partitions(self, task: Task) -> list[Partition]:
        """Alg. 2's input: every stage of every replica; its weight is the load it brings."""
        copies = np.bincount([each.model for each in self.replicas], minlength=len(task.workloads))
        return [
            Partition(
                key=(at, stage),
                model=at,
                score=part.score,
                memory_bytes=part.memory_bytes,
                weight=task.workloads[each.model].rate_rps / copies[each.model] * each.stage_s[stage],
            )
            for at, each in enumerate(self.replicas)
            for stage, part in enumerate(self.parts[at])
        ]

    def assignment(self) -> dict[Hashable, int]:
        """Device of each partition."""
        return {(at, stage): d for at, each in enumerate(self.replicas) for stage, d in enumerate(each.devices)}

    def moved(self, assignment: Mapping[Hashable, int]) -> PlacedStages:
        """The same parts on other devices."""
        replicas: list[Replica] = []
        parts: list[tuple[Stage, ...]] = []
        seen: set[tuple[int, tuple[int, ...]]] = set()
        for at, each in enumerate(self.replicas):
            devices = tuple(assignment[at, stage] for stage in range(len(each.devices)))
            if (each.model, devices) not in seen:  # a second copy on the same devices would serve no request
                seen.add((each.model, devices))
                replicas.append(replace(each, devices=devices))
                parts.append(self.parts[at])
        return replace(self, replicas=tuple(replicas), parts=tuple(parts))

    @property
    def boards(self) -> list[list[int]]:
        """GPUs of each device."""
        boards: list[list[int]] = []
        for shards in self.shards:
            start = boards[-1][-1] + 1 if boards else 0
            boards.append(list(range(start, start + shards)))
        return boards

    def alternatives(self, task: Task) -> list[tuple[str, PlacedStages]]:
        """Placements to judge, the preferred first: Alg. 2's (improved, for best), and the search's own."""
        own = [("the search's own groups", self)]
        if len(set(self.shards)) > 1 or len(self.shards) < 2:
            return own
        limits = PlacementLimits(
            (task.device.memory_bytes,) * len(self.shards), task.rules.devices_per_model // self.shards[0] or 1
        )
        partitions = self.partitions(task)
        found = list(own)
        if task.improved:
            better = improve_placement(partitions, self.assignment(), limits, max_rounds=200)
            found.insert(0, ("the groups, improved by moves and swaps", self.moved(better)))
        try:
            greedy = place_partitions(partitions, limits)
        except InfeasibleError:
            return found  # the search's placement fits; a greedy by sensitivity need not
        if task.improved:
            greedy = improve_placement(partitions, greedy, limits, max_rounds=200)
            return [("Alg. 2, improved by moves and swaps", self.moved(greedy)), *found]
        return [("Alg. 2", self.moved(greedy)), *found]
