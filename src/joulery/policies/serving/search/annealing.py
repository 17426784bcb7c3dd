"""Clover's search (SC'23, section 4.3) in ask/tell form: which configuration to try next, and when to stop.

One search is one invocation of the optimiser, at one carbon intensity. It asks for a configuration, gets the metrics of
its trial, moves its centre by simulated annealing, and asks for a neighbour of the centre. A configuration measured in
an earlier invocation is not tried again: its accuracy, latency and energy are known, only its grams changed with the
grid. The search ends when trials stop helping or the budget is spent, and settles on the best configuration that keeps
the latency limit; on none if it found none.

Three points differ from the published code. The penalty for a violation is corrected for negative scores (there it
rewards the violation). Exhausted neighbours are found by enumeration, not from 400 rejections; the odds of each
proposal are the published ones. And a search without any feasible trial is bounded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from joulery.domain.arrays import FloatArray
from joulery.domain.errors import DataError
from joulery.policies.serving.search.configuration_graph import GraphSpace, published_partitions
from joulery.policies.serving.search.layout_space import LayoutSpace


@dataclass(frozen=True, slots=True)
class TrialMetrics:
    """The outcome of one trial: from a table, a simulation or the live service.

    Attributes:
        accuracy_ratio: Mean accuracy over requests.
        latency_s: The SLO's quantile of the latency.
        energy_j: Joules a request, idle included.
    """

    accuracy_ratio: float
    latency_s: float
    energy_j: float


@dataclass(frozen=True, slots=True)
class AnnealingSchedule:
    """Length and temperature of a search (the paper's values; scores are ratios, not percent).

    Attributes:
        start: First temperature.
        step: Temperature lost with each configuration considered.
        floor: Lowest temperature.
        patience: Configurations in a row without a better one before the search ends.
        new_trials: Trials an invocation may spend.
        desperate_trials: Trials, earlier invocations' included, while nothing within the limit has been found;
            ``new_trials`` more in each invocation after that.
    """

    start: float = 1e-2
    step: float = 5e-4
    floor: float = 1e-3
    patience: int = 5
    new_trials: int = 10
    desperate_trials: int = 40


def penalised(score: float, latency_s: float, limit_s: float) -> float:
    """Eq. 6 with its sign corrected: a configuration above the limit scores less by the factor it exceeds it by."""
    if latency_s <= limit_s:
        return score
    excess = latency_s / limit_s
    return score / excess if score > 0 else score * excess


class Proposer(Protocol):
    """Proposes rows of a space."""

    def propose(self, centre: int, seen: frozenset[int] | set[int], rng: np.random.Generator) -> int | None:
        """An unseen row near ``centre``; None when none is left."""
        ...

    def anything(self, seen: frozenset[int] | set[int], rng: np.random.Generator) -> int | None:
        """An unseen row from anywhere in the space; None when every row has been seen."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class LayoutNeighbourhood:
    """Clover's proposals: unseen neighbours of the centre, with given odds.

    Attributes:
        space: The configurations.
        odds: Relative odds of each row, float64[len(space)], above 0.
    """

    space: GraphSpace
    odds: FloatArray

    def propose(self, centre: int, seen: frozenset[int] | set[int], rng: np.random.Generator) -> int | None:
        """An unseen neighbour of ``centre``."""
        return self._draw([row for row in self.space.neighbours(centre).tolist() if row not in seen], rng)

    def anything(self, seen: frozenset[int] | set[int], rng: np.random.Generator) -> int | None:
        """An unseen row."""
        return self._draw([row for row in range(len(self.space)) if row not in seen], rng)

    def _draw(self, rows: list[int], rng: np.random.Generator) -> int | None:
        if not rows:
            return None
        weight = np.cumsum(self.odds[rows])
        return rows[int(np.searchsorted(weight, rng.random() * weight[-1], "right"))]


class RandomProposals:
    """BLOVER's proposals: a random partition, then a random variant for each slice; only equal strings are recognised.

    Two strings may spell one configuration: the baseline wastes patience on them, as the published one does.
    """

    def __init__(self, space: LayoutSpace) -> None:
        self._space = space.graph
        self._partitions = published_partitions(space.menu)
        self._spelled: set[tuple[int, tuple[int, ...]]] = set()
        self._row = space.row_of_vector
        self._strings = sum(len(self._space.variants) ** len(partition) for partition in self._partitions)

    def propose(self, centre: int, seen: frozenset[int] | set[int], rng: np.random.Generator) -> int | None:
        """The configuration of a string not sampled before."""
        return self.anything(seen, rng)

    def anything(self, seen: frozenset[int] | set[int], rng: np.random.Generator) -> int | None:
        """As :meth:`propose`: there is no neighbourhood."""
        variants = self._space.variants
        while len(self._spelled) < self._strings:
            number = int(rng.integers(len(self._partitions)))
            partition = self._partitions[number]
            string = tuple(rng.integers(len(variants), size=len(partition)).tolist())
            if (number, string) in self._spelled:
                continue
            self._spelled.add((number, string))
            edges = [(variants[letter], profile) for letter, profile in zip(string, partition, strict=True)]
            row = self._row(self._space.vector(edges))
            if row is not None:
                return row
        return None


class AnnealingSearch:
    """One invocation: ``ask`` for a row of the space, try it, ``tell`` its metrics; until ``ask`` returns None.

    Attributes:
        settled: The best row found that keeps the limit; None while there is none.
        looked_at: Rows considered in this invocation, in order, known ones included.
        trials: Rows asked for, in order.

    Args:
        proposer: Source of candidates.
        start: The configuration that runs now, considered first.
        known: Metrics measured by earlier invocations, by row.
        score: Eq. 3 at the present intensity.
        limit_s: The latency limit.
        rng: Source of proposals and acceptances.
        schedule: Length and temperature.
        least_accuracy_ratio: A less accurate configuration is never settled on; it ranks as one that exceeds the limit
            by a hundred times the share of accuracy it lacks.
    """

    def __init__(
        self,
        proposer: Proposer,
        start: int,
        known: Mapping[int, TrialMetrics],
        score: Callable[[TrialMetrics], float],
        limit_s: float,
        rng: np.random.Generator,
        schedule: AnnealingSchedule | None = None,
        least_accuracy_ratio: float = 0.0,
    ) -> None:
        self.settled: int | None = None
        self.looked_at: list[int] = []
        self.trials: list[int] = []
        self._proposer, self._known, self._score = proposer, dict(known), score
        self._limit_s, self._rng, self._schedule = limit_s, rng, schedule or AnnealingSchedule()
        self._least_accuracy_ratio = least_accuracy_ratio
        self._next: int | None = start
        self._centre, self._centre_score = start, -math.inf
        self._best_score, self._stale = -math.inf, 0
        self._seen: set[int] = set()
        self._temperature = self._schedule.start

    @property
    def random(self) -> np.random.Generator:
        """The generator that proposals and acceptances draw from."""
        return self._rng

    def ask(self) -> int | None:
        """The next row to try; None when the search is over."""
        while self._next is not None:
            row = self._next
            metrics = self._known.get(row)
            if metrics is None:
                return row
            self._learn(row, metrics)
        return None

    def tell(self, candidate: int, metrics: TrialMetrics, /) -> None:
        """Record the metrics of ``candidate``, the row last asked for."""
        self.trials.append(candidate)
        self._learn(candidate, metrics)

    def _learn(self, row: int, metrics: TrialMetrics) -> None:
        self.looked_at.append(row)
        self._seen.add(row)
        score = self._score(metrics)
        latency_s = max(metrics.latency_s, self._limit_s * (1.0 + 100.0 * self._lacks(metrics)))
        if latency_s <= self._limit_s and score > self._best_score:
            self.settled, self._best_score, self._stale = row, score, 0
        else:
            self._stale += 1
        self._move(row, penalised(score, latency_s, self._limit_s))
        self._next = self._choose()

    def _lacks(self, metrics: TrialMetrics) -> float:
        """Accuracy below the least one, relative; 0 when none is missing."""
        least = self._least_accuracy_ratio
        return max(0.0, 1.0 - metrics.accuracy_ratio / least - 1e-9) if least > 0 else 0.0

    def _move(self, row: int, score: float) -> None:
        loss = self._centre_score - score
        if loss <= 0 or self._rng.random() < math.exp(-loss / self._temperature):
            self._centre, self._centre_score = row, score
        self._temperature = max(self._schedule.floor, self._temperature - self._schedule.step)

    def _choose(self) -> int | None:
        plan = self._schedule
        if self.settled is not None:
            if self._stale >= plan.patience or len(self.trials) >= plan.new_trials:
                return None
            return self._proposer.propose(self._centre, self._seen, self._rng)
        if len(self.trials) >= max(plan.new_trials, plan.desperate_trials - len(self._known)):
            return None
        near = self._proposer.propose(self._centre, self._seen, self._rng)
        return near if near is not None else self._proposer.anything(self._seen, self._rng)


@dataclass(slots=True, eq=False)
class AnnealingMemo:
    """Cache of the search in progress, so that a policy without state of its own need not replay it.

    A search depends on its setting and on the outcomes of its trials alone. A cached search therefore continues exactly
    as a rebuilt one.
    """

    _setting: object = None
    _outcomes: tuple[tuple[int, TrialMetrics], ...] = ()
    _search: AnnealingSearch | None = None

    def continued(
        self,
        setting: object,
        outcomes: tuple[tuple[int, TrialMetrics], ...],
        begin: Callable[[], AnnealingSearch],
    ) -> AnnealingSearch:
        """The search after these trials.

        Args:
            setting: Compared with ``==``: everything that ``begin`` depends on.
            outcomes: The rows asked for so far, in order, and their metrics.
            begin: Builds the search in its state before the first trial.

        Raises:
            DataError: The search does not ask for these rows.
        """
        count = len(self._outcomes)
        if self._search is None or self._setting != setting or outcomes[:count] != self._outcomes:
            self._setting, self._search, count = setting, begin(), 0
        search = self._search
        self._search = None  # until it has taken everything in: one that fails half-way is made again
        for wanted, metrics in outcomes[count:]:
            row = search.ask()
            if row is None or row != wanted:
                raise DataError(f"the search asked for row {row} instead of {wanted} when it was made again")
            search.tell(row, metrics)
        self._outcomes, self._search = outcomes, search
        return search


def annealing_search(
    space: LayoutSpace,
    start: int,
    known: Mapping[int, TrialMetrics],
    score: Callable[[TrialMetrics], float],
    limit_s: float,
    rng: np.random.Generator,
    schedule: AnnealingSchedule | None = None,
    *,
    least_accuracy_ratio: float = 0.0,
    at_random: bool = False,
) -> AnnealingSearch:
    """Clover's search over a space of layouts; the arguments are those of :class:`AnnealingSearch`.

    Args:
        space: The layouts.
        start, known, score, limit_s, rng, schedule, least_accuracy_ratio: See :class:`AnnealingSearch`.
        at_random: Whether proposals ignore the neighbourhood (BLOVER).
    """
    proposer: Proposer = RandomProposals(space) if at_random else LayoutNeighbourhood(space.graph, space.odds)
    return AnnealingSearch(proposer, start, known, score, limit_s, rng, schedule, least_accuracy_ratio)
