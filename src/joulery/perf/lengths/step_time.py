"""Time of one step of continuous batching: learned from tokens as they arrive, used to predict when answers end.

An engine with continuous batching (vLLM, SGLang, llama.cpp with slots) generates one token of every running sequence a
step. A step costs a constant (weights are read once), a time per sequence and a time per token of the KV cache; all of
them grow with the elasticity where the clock is lowered. A request that joins a batch with room does not wait for
another one to end: slots are not servers.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from joulery.domain.arrays import FloatArray
from joulery.domain.errors import DataError

_SAMPLES = 256
"""Number of samples that are kept; older ones are dropped, for the engine may be restarted, or share its device."""
_REFIT_AFTER = 8
_ELASTICITIES = np.linspace(0.0, 1.0, 21)
_COST_WEIGHT, _ELASTICITY_WEIGHT = 1e-4, 0.02
"""Weights of the prior relative to one sample; the elasticity is often observed at one clock only."""
_KV_SCALE = 1e4
"""Tokens of the KV cache in the unit of the fit, so that the three costs are of one magnitude."""


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of one step at the highest clock.

    Attributes:
        fixed_s: Seconds of every step.
        per_sequence_s: Seconds for each running sequence.
        per_kv_token_s: Seconds for each token of prompt and answer that the cache holds.
        elasticity_ratio: Relative slowdown per relative loss of clock: 1 for work bound by arithmetic, 0 for work that
            does not depend on the clock (:func:`joulery.perf.power.clock_scaling.slowdown_ratio`).
    """

    fixed_s: float
    per_sequence_s: float = 0.0
    per_kv_token_s: float = 0.0
    elasticity_ratio: float = 1.0

    def step_s(self, sequences: float, kv_tokens: float) -> float:
        """Seconds of a step at the highest clock."""
        return self.fixed_s + self.per_sequence_s * sequences + self.per_kv_token_s * kv_tokens


@dataclass(frozen=True, slots=True)
class BatchedRequest:
    """A request in an engine with continuous batching.

    Attributes:
        left_tokens: Tokens of its answer that are predicted to be left.
        kv_tokens: Tokens of prompt and answer so far.
        read_s: Seconds that reading its prompt still takes at the highest clock.
        running: Whether its answer has begun.
    """

    left_tokens: float
    kv_tokens: float = 0.0
    read_s: float = 0.0
    running: bool = False


def batch_finish_s(cost: StepCost, sequences: Sequence[BatchedRequest], capacity: int) -> FloatArray:
    """Seconds until each request ends at the highest clock, float64[n].

    Args:
        cost: Cost of a step.
        sequences: Running requests first, then waiting ones in the order in which they start.
        capacity: Sequences that fit into one batch, at least 1.
    """
    finish_s = np.zeros(len(sequences))
    now_s = steps = kv = 0.0
    active: list[tuple[float, int]] = []
    waiting = deque(enumerate(sequences))
    while active or waiting:
        while waiting and (len(active) < capacity or waiting[0][1].running):
            number, one = waiting.popleft()
            now_s += one.read_s
            kv += one.kv_tokens
            heapq.heappush(active, (steps + max(one.left_tokens, 0.0), number))
        taken, running = active[0][0] - steps, len(active)
        now_s += taken * cost.step_s(running, kv + running * taken / 2)
        kv, steps = kv + running * taken, active[0][0]
        while active and active[0][0] <= steps:
            _, number = heapq.heappop(active)
            kv -= sequences[number].kv_tokens + max(sequences[number].left_tokens, 0.0)
            finish_s[number] = now_s
    return finish_s


class StepTimes:
    """Learns the cost of a step, including the effect of the clock, from observed steps.

    Args:
        prior: The cost that is used until steps are observed.
    """

    def __init__(self, prior: StepCost) -> None:
        self._prior = self.cost = prior
        self._rows: deque[tuple[float, float, float, float]] = deque(maxlen=_SAMPLES)
        self._new = 0

    @property
    def observed(self) -> int:
        """Steps that the cost is learned from."""
        return len(self._rows)

    def observe(self, step_s: float, sequences: float, kv_tokens: float, slowdown_ratio: float = 1.0) -> None:
        """Add an observed step of a batch.

        Args:
            step_s: Seconds, > 0.
            sequences: Running sequences.
            kv_tokens: Tokens of prompt and answer that they held.
            slowdown_ratio: Highest clock over the clock in force, >= 1.

        Raises:
            DataError: A number that is not finite or out of range.
        """
        row = (step_s, sequences, kv_tokens, slowdown_ratio)
        if not all(np.isfinite(row)) or step_s <= 0 or sequences < 1 or kv_tokens < 0 or slowdown_ratio < 1 - 1e-9:
            raise DataError(f"a step of {step_s} s with {sequences} sequences, {kv_tokens} tokens, {slowdown_ratio} x")
        self._rows.append(row)
        self._new += 1
        if self._new >= min(_REFIT_AFTER, len(self._rows)):
            self._new = 0
            self.cost = self._fitted()

    def _fitted(self) -> StepCost:
        """Fit by least relative squares; each elasticity is tried, because the rest is linear for a given one."""
        took_s, sequences, kv, slowdown = np.array(self._rows).T
        features = np.column_stack([np.ones(len(kv)), sequences, kv / _KV_SCALE]) / took_s[:, None]
        prior = self._prior
        known = np.array([prior.fixed_s, prior.per_sequence_s, prior.per_kv_token_s * _KV_SCALE])
        grown = 1.0 + _ELASTICITIES[:, None] * (slowdown - 1.0)
        costs, missed = _least(grown[:, :, None] * features, known)
        missed += _ELASTICITY_WEIGHT * (_ELASTICITIES - prior.elasticity_ratio) ** 2
        best = int(np.argmin(missed))
        fixed_s, per_sequence_s, per_kv_s = costs[best].tolist()
        return StepCost(fixed_s, per_sequence_s, per_kv_s / _KV_SCALE, float(_ELASTICITIES[best]))


def _least(rows: FloatArray, known: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Non-negative costs ``x`` of least ``|rows x - 1|^2`` plus a weight on their distance from ``known``.

    With three costs at most, the optimum is the best solution over the few sets of positive costs, each of which has a
    closed form (Lawson and Hanson, "Solving Least Squares Problems", 1974, chapter 23, by enumeration).

    Args:
        rows: float64[problems, steps, 3].
        known: Prior costs, float64[3].

    Returns:
        The costs, float64[problems, 3], and the least sums of squares, float64[problems].
    """
    pull = _COST_WEIGHT / max(float(known.sum()), 1e-9) ** 2
    normal = rows.transpose(0, 2, 1) @ rows + pull * np.eye(3)
    target = rows.sum(axis=1) + pull * known
    whole = rows.shape[1] + pull * float(known @ known)
    costs, missed = np.zeros(target.shape), np.full(len(rows), whole)
    for count in (1, 2, 3):
        for some in itertools.combinations(range(3), count):
            tried = np.zeros(target.shape)
            tried[:, some] = np.linalg.solve(normal[:, some][:, :, some], target[:, some][..., None])[..., 0]
            miss = whole - 2.0 * np.sum(tried * target, axis=1) + np.einsum("pi,pij,pj->p", tried, normal, tried)
            better = np.all(tried >= 0, axis=1) & (miss < missed)
            costs[better], missed[better] = tried[better], miss[better]
    return costs, missed
