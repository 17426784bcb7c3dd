"""A model as clusters of operators, and as stages and shards for each shape of a group (μ-Serve, ATC'24, section 3)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from joulery.domain.arrays import FloatArray
from joulery.domain.gpu.clock_profile import ClockProfile, ScoredOperator
from joulery.policies.placement.pipelines.clustering import cluster_operators, segment_operators
from joulery.policies.placement.pipelines.device_groups import Shape
from joulery.policies.placement.pipelines.sharding import Link, Sharding, shard
from joulery.policies.placement.pipelines.stages import split_stages

_UNITS = 64
"""No unit of the stages takes more than one in so many of the time of a model, but a single operator."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of a model that runs on one device, or on a few that share its operators.

    Attributes:
        first, last: Its operators, by position among the merged ones; both inclusive.
        latency_s: Time of one pass at the highest clock, what it receives included.
        score: Sensitivity to the clock, weighted by time.
        memory_bytes: Weights and activations on each of its devices.
    """

    first: int
    last: int
    latency_s: float
    score: float
    memory_bytes: float


@dataclass(frozen=True, slots=True)
class PartitionRules:
    """How models are cut.

    Attributes:
        threshold: Distance from a cluster's mean score at which Alg. 1 begins a new one.
        segmentation: Cut clusters by exact segmentation instead of Alg. 1: in-cluster variance weighted by time, and
            the transfers that a cut would cost.
        link: What connects the devices.
        launch_s: Least time of one call.
    """

    threshold: float = 0.5
    segmentation: bool = False
    link: Link = field(default_factory=Link)
    launch_s: float = 10e-6


@dataclass(frozen=True, slots=True, eq=False)
class CutModel:
    """A model ready to be cut.

    Attributes:
        profile: Its clock profile.
        operators: Its operators, the phases of one put together.
        clusters: First operator of each cluster, ascending from 0.
        rules: How it is cut.
    """

    profile: ClockProfile
    operators: tuple[ScoredOperator, ...]
    clusters: tuple[int, ...]
    rules: PartitionRules

    def stages(self, shape: Shape) -> tuple[Stage, ...] | None:
        """The stages for a shape; None where there are fewer units than stages.

        A unit is a cluster; one that takes long is several.
        """
        launch_s = self.rules.launch_s * self.profile.calibration_ratio
        cut = shard(self.operators, shape.shards, launch_s, self.rules.link)
        ends = [*self._units(), len(self.operators)]
        if shape.stages >= len(ends):
            return None
        times = [math.fsum(cut.time_s[a:b]) for a, b in itertools.pairwise(ends)]
        split = split_stages(times, shape.stages, [self._receive_s(at) for at in ends[1:-1]])
        return tuple(
            self._stage(ends[a], ends[b] - 1, latency_s, cut)
            for (a, b), latency_s in zip(itertools.pairwise(split.bounds), split.latency_s, strict=True)
        )

    def slowdown(self, score: float, clocks_mhz: FloatArray) -> FloatArray:
        """Time at each clock relative to the highest, of a part with some score, float64[clocks].

        The curve of the model, stretched to the score of the part.
        """
        curve = np.interp(clocks_mhz, self.profile.clocks_mhz, self.profile.latency_s) / self.profile.latency_s[-1]
        whole = self.profile.score
        if not whole > 0:
            return np.ones_like(curve)
        return np.asarray(np.maximum(1.0 + (curve - 1.0) * score / whole, 1.0), np.float64)

    def _units(self) -> list[int]:
        """First operator of each unit."""
        longest_s = math.fsum(each.time_s for each in self.operators) / _UNITS
        starts, time_s = list[int](), 0.0
        clusters = set(self.clusters)
        for at, operator in enumerate(self.operators):
            if at in clusters or time_s + operator.time_s > longest_s:
                starts.append(at)
                time_s = 0.0
            time_s += operator.time_s
        return starts

    def _stage(self, first: int, last: int, latency_s: float, cut: Sharding) -> Stage:
        mine = self.operators[first : last + 1]
        held = math.fsum(
            each.cost.parameter_bytes * choice.weight_ratio
            for each, choice in zip(mine, cut.choices[first : last + 1], strict=True)
        )
        time_s = math.fsum(each.time_s for each in mine)
        score = math.fsum(each.score * each.time_s for each in mine) / time_s
        return Stage(first, last, latency_s, score, held + 2.0 * max(each.cost.output_bytes for each in mine))

    def _receive_s(self, position: int) -> float:
        before = self.operators[position - 1].cost
        return before.count * self.rules.link.send_s(before.output_bytes)


def cut_model(profile: ClockProfile, rules: PartitionRules) -> CutModel:
    """Put the phases of a model together and cluster its operators.

    Args:
        profile: Its clock profile.
        rules: How models are cut.
    """
    operators = merged_phases(profile.operators)
    scores = [operator.score for operator in operators]
    if rules.segmentation:
        link, total_s = rules.link, math.fsum(operator.time_s for operator in operators)
        transfers = [each.cost.count * link.send_s(each.cost.output_bytes) / total_s for each in operators[:-1]]
        clusters = segment_operators(scores, [each.time_s / total_s for each in operators], transfers)
    else:
        clusters = cluster_operators(scores, rules.threshold)
    return CutModel(profile, operators, tuple(cluster[0] for cluster in clusters), rules)


def merged_phases(operators: Sequence[ScoredOperator]) -> tuple[ScoredOperator, ...]:
    """Operators of the same name in several phases (prefill, decode) as one, in the order of the first phase.

    They share their weights, so they are placed together.
    """
    groups: dict[str, list[ScoredOperator]] = {}
    phases = len({operator.cost.phase for operator in operators})
    for index, operator in enumerate(operators):
        groups.setdefault(operator.cost.name if phases > 1 else str(index), []).append(operator)
    return tuple(_merged(members) for members in groups.values())


def _merged(members: Sequence[ScoredOperator]) -> ScoredOperator:
    if len(members) == 1:
        return members[0]
    time_s = math.fsum(each.time_s for each in members)
    count = math.fsum(each.cost.count for each in members)
    cost = replace(
        members[0].cost,
        flops=math.fsum(each.cost.count * each.cost.flops for each in members) / count,
        traffic_bytes=math.fsum(each.cost.count * each.cost.traffic_bytes for each in members) / count,
        output_bytes=math.fsum(each.cost.count * each.cost.output_bytes for each in members) / count,
        parameter_bytes=math.fsum(each.cost.parameter_bytes for each in members),
        count=count,
        phase="+".join(dict.fromkeys(each.cost.phase for each in members)),
    )
    return ScoredOperator(cost, math.fsum(each.score * each.time_s for each in members) / time_s, time_s)
