"""A search by expected gain: fits a model of the service to its trials and tries only what may be better.

The paper's annealer treats a configuration as a point in a graph. Here each trial improves the prediction of every
configuration (:mod:`~joulery.policies.serving.search.learned_service`). The next trial has the greatest expected gain:
improvement times the chance to keep the limit. The search ends when no trial is worth making, and settles on the best
configuration ever measured that keeps the limit. It uses no random number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from joulery.domain.arrays import FloatArray, IntArray
from joulery.policies.serving.search.annealing import TrialMetrics
from joulery.policies.serving.search.learned_service import LearnedService, PredictedTrial

_CENTRES = 3
"""Best rows so far whose neighbours are considered in a large space."""


@dataclass(frozen=True, slots=True)
class LearningBudget:
    """Stopping rules of a search.

    Attributes:
        least_gain: Expected gain of the objective that a trial must have ...
        least_gain_ratio: ... and as a share of the best score so far.
        new_trials: Trials an invocation may spend.
        desperate_trials: Trials it may spend while nothing measured keeps the limit.
        least_chance: While nothing measured keeps the limit, a trial must have at least this chance to keep it.
        shortlist: Candidates whose uncertainty is computed before each trial.
    """

    least_gain: float = 5e-5
    least_gain_ratio: float = 1e-3
    new_trials: int = 10
    desperate_trials: int = 40
    least_chance: float = 0.02
    shortlist: int = 64


class LearningSearch:
    """One invocation: ``ask`` for a row of the space, try it, ``tell`` its metrics; until ``ask`` returns None.

    Attributes:
        trials: Rows asked for, in order.

    Args:
        service: Model fitted by earlier invocations; fitted further.
        rows: Rows of the space.
        known: Trials so far, by row.
        score: Eq. 3 at the present intensity, of one trial.
        scores: The same for arrays of accuracies and joules, float64[n].
        limit_s: The latency limit.
        budget: Stopping rules.
        least_accuracy_ratio: A less accurate configuration is not settled on.
        among: For a large space: the rows to consider, given the best tried so far.
    """

    def __init__(
        self,
        service: LearnedService,
        rows: int,
        known: Mapping[int, TrialMetrics],
        score: Callable[[TrialMetrics], float],
        scores: Callable[[FloatArray, FloatArray], FloatArray],
        limit_s: float,
        budget: LearningBudget | None = None,
        least_accuracy_ratio: float = 0.0,
        among: Callable[[Sequence[int]], IntArray] | None = None,
    ) -> None:
        self.trials: list[int] = []
        self._service, self._rows, self._limit_s = service, rows, limit_s
        self._score, self._scores = score, scores
        self._known, self._budget = dict(known), budget or LearningBudget()
        self._least_accuracy_ratio, self._among = least_accuracy_ratio, among

    @property
    def settled(self) -> int | None:
        """The best row ever measured that keeps the limit; None while there is none."""
        least = self._least_accuracy_ratio - 1e-9
        within = [
            row
            for row, metrics in self._known.items()
            if metrics.latency_s <= self._limit_s and metrics.accuracy_ratio >= least
        ]
        return max(within, key=lambda row: (self._score(self._known[row]), -row), default=None)

    def ask(self) -> int | None:
        """The row with the greatest expected gain; None when none is worth a trial."""
        settled, budget = self.settled, self._budget
        rows = self._candidates()
        if len(rows) == 0 or len(self.trials) >= (budget.desperate_trials if settled is None else budget.new_trials):
            return None
        self._service.learn(self._known)
        if settled is None:
            row, _, chance = self._best_row(rows, None)
            return row if chance >= budget.least_chance else None
        best = self._score(self._known[settled])
        row, gain, _ = self._best_row(rows, best)
        return row if gain >= max(budget.least_gain, budget.least_gain_ratio * abs(best)) else None

    def _candidates(self) -> IntArray:
        """Rows to consider that were not tried yet."""
        if self._among is None:
            return np.array([row for row in range(self._rows) if row not in self._known], np.int64)
        best = sorted(self._known, key=self._place)
        rows = self._among(best[:_CENTRES])
        return rows[~np.isin(rows, list(self._known))]

    def _place(self, row: int) -> tuple[bool, float, int]:
        metrics = self._known[row]
        return metrics.latency_s > self._limit_s, -self._score(metrics), row

    def tell(self, candidate: int, metrics: TrialMetrics, /) -> None:
        """Record the metrics of ``candidate``."""
        self.trials.append(candidate)
        self._known[candidate] = metrics

    def _best_row(self, rows: IntArray, best: float | None) -> tuple[int, float, float]:
        """The row to try, its expected gain, and its chance to keep the limit."""
        rough = self._service.predict_roughly(rows)
        floor = float(self._scores(rough.accuracy_ratio, rough.energy_j).min()) if best is None else best
        first, _ = self._gain(rough, floor)
        short = rows[np.argsort(-first, kind="stable")[: self._budget.shortlist]]
        gain, chance = self._gain(self._service.predict(short), floor)
        chosen = int(np.argmax(gain))
        return int(short[chosen]), float(gain[chosen]), float(chance[chosen])

    def _gain(self, trial: PredictedTrial, floor: float) -> tuple[FloatArray, FloatArray]:
        """Expected gain over ``floor``, and the chance to keep the limit, of each configuration."""
        score = self._scores(trial.accuracy_ratio, trial.energy_j)
        dearer = self._scores(trial.accuracy_ratio, trial.energy_j * np.exp(trial.energy_doubt))
        doubt = np.abs(dearer - score) + 1e-6
        chance = _normal((math.log(self._limit_s) - trial.log_latency) / trial.latency_doubt)
        # Shares of requests are predicted well: 0.005 points of accuracy stay uncertain.
        if self._least_accuracy_ratio > 0:
            chance = chance * _normal((trial.accuracy_ratio - self._least_accuracy_ratio) / 5e-5)
        ahead = (score - floor) / doubt
        density = np.exp(-(np.minimum(np.abs(ahead), 30.0) ** 2) / 2) / math.sqrt(2 * math.pi)
        return chance * doubt * (ahead * _normal(ahead) + density), chance


def _normal(x: FloatArray) -> FloatArray:
    """The normal distribution function."""
    from scipy.special import ndtr

    return np.asarray(ndtr(x), np.float64)
