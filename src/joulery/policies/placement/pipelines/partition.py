"""A model as clusters of operators, and as stages and shards for each shape of a group (μ-Serve, ATC'24, section 3).

Operators of like clock sensitivity are grouped in model order (Alg. 1). Consecutive units are split into stages so that
the slowest stage is as fast as possible (AlpaServe, section 4.1).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from joulery.domain.arrays import FloatArray
from joulery.domain.errors import ConfigError, InfeasibleError
from joulery.domain.gpu.clock_profile import ClockProfile, ScoredOperator
from joulery.policies.placement.pipelines.device_groups import Shape
from joulery.policies.placement.pipelines.sharding import Link, Sharding, shard


def cluster_operators(scores: Sequence[float], threshold: float) -> list[list[int]]:
    """Consecutive operators whose score stays within ``threshold`` of the running mean of their cluster.

    Four slips of the pseudo-code are fixed: head added twice, ``abs`` closed early, mean not reset, last cluster
    dropped.

    Args:
        scores: Sensitivity score of each operator in topological order, finite.
        threshold: Largest distance from the cluster's mean, > 0.

    Returns:
        Indices of each cluster; concatenated they are ``0 … n-1``. Empty for an empty model.

    Raises:
        ConfigError: The threshold is not positive or a score is not finite.
    """
    if not threshold > 0:
        raise ConfigError("the clustering threshold must be positive", got=str(threshold))
    clusters: list[list[int]] = []
    mean = 0.0
    for index, score in enumerate(scores):
        if not np.isfinite(score):
            raise ConfigError(f"operator {index} has no sensitivity score", got=str(score), expected="a finite number")
        if clusters and abs(score - mean) < threshold:
            clusters[-1].append(index)
            mean += (score - mean) / len(clusters[-1])
        else:
            clusters.append([index])
            mean = score
    return clusters


def segment_operators(scores: Sequence[float], weights: Sequence[float], cut_costs: Sequence[float]) -> list[list[int]]:
    """The contiguous segmentation of least weighted variance plus cut costs, by dynamic programming.

    Minimises ``sum over segments of sum w (s - mean)^2 + sum of cut_costs at the boundaries``; exact, O(n²). Where
    Alg. 1 looks one operator ahead, this weighs every boundary against what crossing it costs.

    Args:
        scores: Sensitivity score of each operator.
        weights: Positive weight of each operator (its time at full clock).
        cut_costs: Cost of a boundary between operators ``i`` and ``i + 1``; n - 1 of them.

    Raises:
        ConfigError: Lengths differ or a weight is not positive.
    """
    n = len(scores)
    if len(weights) != n or len(cut_costs) != max(n - 1, 0):
        raise ConfigError(
            "scores, weights and cut costs do not fit",
            got=f"{n} scores, {len(weights)} weights, {len(cut_costs)} cut costs",
            expected="n, n and n - 1",
        )
    if n == 0:
        return []
    s, w = np.asarray(scores, float), np.asarray(weights, float)
    if not bool(np.all(w > 0)):
        raise ConfigError("operator weights must be positive", got=str(float(w.min())))
    cumulative = [np.concatenate(([0.0], np.cumsum(column))) for column in (w, w * s, w * s * s)]
    best = np.full(n + 1, np.inf)
    best[0] = 0.0
    start = np.zeros(n + 1, np.int64)
    entry = np.concatenate(([0.0], np.asarray(cut_costs, float)))
    for end in range(1, n + 1):
        w0, w1, w2 = (column[end] - column[:end] for column in cumulative)
        cost = best[:end] + entry[:end] + np.maximum(w2 - w1 * w1 / w0, 0.0)
        start[end] = int(np.argmin(cost))
        best[end] = cost[start[end]]
    bounds = [n]
    while bounds[-1] > 0:
        bounds.append(int(start[bounds[-1]]))
    bounds.reverse()
    return [list(range(a, b)) for a, b in itertools.pairwise(bounds)]


@dataclass(frozen=True, slots=True)
class Stages:
    """A split of units into stages.

    Attributes:
        bounds: First unit of each stage, and the number of units at the end.
        latency_s: Time of each stage, including the transfer of its input.
    """

    bounds: tuple[int, ...]
    latency_s: tuple[float, ...]


def split_stages(latency_s: Sequence[float], stages: int, transfer_s: Sequence[float] = ()) -> Stages:
    """The split of units into non-empty stages that minimises the time of the slowest stage.

    ``F(s, k) = min_i max(F(s-1, i), receive(i) + lat(i..k))``, exactly, in O(stages · units²).

    Args:
        latency_s: Time of each unit, >= 0, in order.
        stages: How many stages, >= 1.
        transfer_s: Time to receive what unit ``i + 1`` needs when a stage begins there, one fewer than units; free when
            empty.

    Raises:
        ConfigError: No units, a time below 0, or lengths that do not fit.
        InfeasibleError: More stages than units.
    """
    times = np.asarray(latency_s, np.float64)
    n = len(times)
    receive = np.zeros(max(n - 1, 0)) if not len(transfer_s) else np.asarray(transfer_s, np.float64)
    if n == 0 or stages < 1 or len(receive) != n - 1 or not bool(np.all(times >= 0) and np.all(receive >= 0)):
        raise ConfigError(
            "units cannot be cut into stages",
            got=f"{n} units, {len(receive)} transfers, {stages} stages",
            expected="one unit or more, a transfer between neighbours, one stage or more, no time below 0",
        )
    if stages > n:
        raise InfeasibleError(
            f"{n} units cannot fill {stages} stages", binding="units", nearest=n, hint="ask for fewer stages"
        )
    enter = np.concatenate(([0.0], receive))
    total = np.concatenate(([0.0], np.cumsum(times)))
    # cost[i, k]: a stage of the units i .. k - 1
    cost = total[None, :] - total[:n, None] + enter[:, None]
    cost[np.arange(n)[:, None] >= np.arange(n + 1)[None, :]] = np.inf
    best = np.full(n + 1, np.inf)
    best[0] = 0.0
    starts = []
    for _ in range(stages):
        slowest = np.maximum(best[:n, None], cost)
        starts.append(slowest.argmin(axis=0))
        best = slowest.min(axis=0)
    bounds = [n]
    for start in reversed(starts):
        bounds.append(int(start[bounds[-1]]))
    bounds.reverse()
    return Stages(tuple(bounds), tuple(float(cost[a, b]) for a, b in itertools.pairwise(bounds)))


_UNITS = 64
"""A unit of several operators takes at most one part in this many of a model's time."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of a model that runs on one device, or on a few that share its operators.

    Attributes:
        first, last: Its operators, by position among the merged ones; both inclusive.
        latency_s: Time of one pass at the highest clock, including the transfer of its input.
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
    """Rules for splitting models.

    Attributes:
        threshold: Distance from a cluster's mean score at which Alg. 1 begins a new one.
        segmentation: Form clusters by exact segmentation instead of Alg. 1: in-cluster variance weighted by time, and
            the transfers that a boundary would cost.
        link: What connects the devices.
        launch_s: Least time of one call.
    """

    threshold: float = 0.5
    segmentation: bool = False
    link: Link = field(default_factory=Link)
    launch_s: float = 10e-6


@dataclass(frozen=True, slots=True, eq=False)
class CutModel:
    """A model ready to be split into stages.

    Attributes:
        profile: Its clock profile.
        operators: Its operators, with the phases of each merged.
        clusters: First operator of each cluster, ascending from 0.
        rules: Rules for splitting it.
    """

    profile: ClockProfile
    operators: tuple[ScoredOperator, ...]
    clusters: tuple[int, ...]
    rules: PartitionRules

    def stages(self, shape: Shape) -> tuple[Stage, ...] | None:
        """The stages for a shape; None where there are fewer units than stages.

        A unit is a cluster, or a part of a long one.
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
    """Merge the phases of a model and cluster its operators.

    Args:
        profile: Its clock profile.
        rules: Rules for splitting models.
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
