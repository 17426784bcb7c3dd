"""The time of a decoding step from first principles: weights and KV cache read, arithmetic, overhead.

A step of ``n`` requests reads the weights that some request needs and the KV cache of all, multiplies each active
parameter once a request, and pays an overhead a layer (launches, and synchronisation where several GPUs share the
layer). The four parts are sums of catalog facts; a fit gives each a factor of at least zero (1 / efficiency).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations

import numpy as np

from joulery.domain.arrays import FloatArray
from joulery.perf.llm.runs import LlmPoint

DEFAULT_FACTORS = (1.6, 2.5, 4.0, 1.6)
"""Factors of the parts without measurements; those of the measured runs of vLLM on H100 and B200 are close to them."""
_PROMPT_TOKENS, _OUTPUT_TOKENS = 512.0, 600.0
"""Lengths that are assumed where they are unknown."""
_LAYER_S = 6e-5
"""Overhead of one layer, s: a few kernel launches; 50 % more where GPUs synchronise."""


def context_tokens(point: LlmPoint) -> float:
    """Tokens in the KV cache of a request, averaged over the time it runs: its prompt and half its answer."""
    prompt = _PROMPT_TOKENS if point.input_tokens is None else point.input_tokens
    answer = _OUTPUT_TOKENS if point.output_tokens is None else point.output_tokens
    return prompt + answer / 2


def step_parts_s(point: LlmPoint) -> tuple[float, float, float, float]:
    """Reading weights, reading KV cache, arithmetic and overhead of one step at catalog peaks, s."""
    facts, gpus = point.facts, point.num_gpus
    bandwidth = point.gpu.bandwidth_bytes_s * gpus
    weights_s = facts.touched_ratio(point.batch) * facts.weights_bytes(point.precision) / bandwidth
    cache_s = point.batch * facts.kv_bytes * context_tokens(point) / bandwidth
    width = {"bfloat16": "bf16", "fp8": "fp8"}.get(point.precision, "bf16")
    arithmetic_s = 2 * facts.active_parameters * point.batch / (point.gpu.peak_flops(width) * gpus)
    overhead_s = facts.layers * _LAYER_S * (1.5 if gpus > 1 else 1.0)
    return weights_s, cache_s, arithmetic_s, overhead_s


def step_times_s(points: Sequence[LlmPoint], factors: Sequence[float] = DEFAULT_FACTORS) -> FloatArray:
    """Time of one step of each point, s, shape (points,)."""
    parts = np.array([step_parts_s(point) for point in points], np.float64).reshape(len(points), 4)
    return np.asarray(parts @ np.asarray(factors, np.float64), np.float64)


def fit_factors(points: Sequence[LlmPoint], times_s: Sequence[float]) -> tuple[float, float, float, float]:
    """Fit the factors of the four parts, none below zero, to measured times by least relative squares.

    One weak observation of each default factor is added to the measurements, so that a few runs change only the factors
    that they determine.
    """
    parts = np.array([step_parts_s(point) for point in points], np.float64)
    scaled = parts / np.asarray(times_s, np.float64)[:, None]
    default = np.asarray(DEFAULT_FACTORS)
    prior = np.diag(1.0 / default)
    matrix, target = np.vstack([scaled, prior]), np.ones(len(scaled) + 4)
    best, least = default, math.inf
    for size in (4, 3, 2, 1):
        for kept in combinations(range(4), size):
            columns = list(kept)
            found = np.zeros(4)
            found[columns] = np.linalg.lstsq(matrix[:, columns], target, rcond=None)[0]
            residual = float(((matrix @ found - target) ** 2).sum())
            if found.min() >= 0 and residual < least:
                best, least = found, residual
    return tuple(float(each) for each in best)  # type: ignore[return-value]


def memory_limit(point: LlmPoint, usable_ratio: float = 0.9) -> float:
    """Requests whose KV cache fits beside the weights; 0 where the weights alone do not fit.

    Args:
        point: The configuration; ``batch`` is ignored.
        usable_ratio: Share of the memory the engine takes (vLLM: ``--gpu-memory-utilization``).
    """
    free = usable_ratio * point.gpu.memory_bytes * point.num_gpus - point.facts.weights_bytes(point.precision)
    return max(free, 0.0) / (point.facts.kv_bytes * context_tokens(point))


def fits(point: LlmPoint) -> bool:
    """Whether weights and the KV cache of one request fit into the memory of the GPUs."""
    return memory_limit(point) >= 1.0
