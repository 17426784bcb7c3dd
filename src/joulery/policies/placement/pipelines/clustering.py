"""Operators of like clock sensitivity, grouped in model order (μ-Serve, ATC'24, section 3.1, Alg. 1)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from joulery.domain.errors import ConfigError


def cluster_operators(scores: Sequence[float], threshold: float) -> list[list[int]]:
    """Consecutive operators whose score stays within ``threshold`` of the running mean of their cluster.

    Four slips of the pseudo-code are mended: head added twice, ``abs`` closed early, mean not reset, last cluster
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
