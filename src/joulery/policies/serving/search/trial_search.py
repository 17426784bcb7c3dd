"""Searches by live trials: chooses the layout of a service to try next, and the measured layout to settle on.

A :class:`TrialSearch` holds no state: the trials so far are in the policy's
:class:`~joulery.policies.serving.state.ServiceState`, and the search is rebuilt from that state for each call, so that
a log replays exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from joulery.domain.arrays import FloatArray
from joulery.domain.format import latency
from joulery.domain.gpu.layout import Layout
from joulery.domain.gpu.mig import MigMenu, MigProfile
from joulery.perf.layouts import Predictor
from joulery.policies.serving.messages import quantile
from joulery.policies.serving.objective import Objective, ServiceObjectives
from joulery.policies.serving.observation import Observation
from joulery.policies.serving.search.annealing import (
    AnnealingMemo,
    AnnealingSchedule,
    AnnealingSearch,
    TrialMetrics,
    annealing_search,
)
from joulery.policies.serving.search.configuration_graph import Edge
from joulery.policies.serving.search.layout_space import LayoutSpace
from joulery.policies.serving.search.learned_service import Baseline, FittedServices, ServiceSetting
from joulery.policies.serving.search.learning_search import LearningBudget, LearningSearch
from joulery.policies.serving.search.predictive_search import LeanestMemo
from joulery.policies.serving.search.trials import MeasuredLayout, TrialBudget
from joulery.policies.serving.state import RandomState, ServiceState

CLOVER, RANDOM, LEARNING = "clover", "random", "learning"
_ABOVE_IDLE = 0.02
"""Idle part of live joules, which are counted above idle."""
_LARGE_SPACE = 4000
"""Number of layouts beyond which the learning search considers only a part of them before each trial."""
_FAILED = TrialMetrics(0.0, math.inf, 1e12)
"""Metrics given to a search for a layout that failed to start or gave no data."""


@dataclass(frozen=True, slots=True)
class Reference:
    """A baseline that was measured elsewhere: the service needs no trial of its own for it.

    Attributes:
        layout: The layout that runs where no candidate keeps the objectives.
        metrics: Its measured metrics.
        rate_rps: Demand during that measurement, on as many devices as the search has.
        idle_ratio: Part of its joules that idle devices take.
    """

    layout: Layout
    metrics: TrialMetrics
    rate_rps: float
    idle_ratio: float

    @property
    def measured(self) -> MeasuredLayout:
        """The baseline as the outcome of a trial."""
        latency_s = self.metrics.latency_s
        return MeasuredLayout(self.layout, self.metrics, latency_s, latency_s, 0, self.rate_rps)


@dataclass(frozen=True, slots=True)
class TrialSearch:
    """Chooses layouts by trials: Clover's annealer, random proposals, or a model learned from the trials.

    Attributes:
        accuracy_ratio: Accuracy of each variant.
        menu: Partitions of a device.
        devices: Number of devices.
        baseline: The layout compared with: the most accurate variant on every slice of one partition, on all devices.
        base_g_per_kwh: Carbon intensity of the baseline.
        disabled: Edges (variant, slice) that do not fit.
        base_pue, pue: Facility energy per IT energy of the baseline, and now.
        method: ``clover`` (the paper's annealer), ``learning``, or ``random`` (the paper's BLOVER).
        seed: Seed of the random draws: one number or several.
        budget: Trial budget of one search.
        alike: Whether all devices are partitioned and filled alike; else each has a configuration of its own.
        as_published: Whether the annealer settles on the best layout that its own search considered, and tries layouts
            below the minimum accuracy; else it settles on the best of all measured layouts, and does not try those.
        reference: The measured baseline; None to measure it in the first trial.
        predictor: Predicts layouts from the measured profile; None for no profile.
        space: The layouts; built from the other fields when None.

    Raises:
        InfeasibleError: Every partition has a slice that no variant fits.
    """

    accuracy_ratio: Mapping[str, float]
    menu: MigMenu
    devices: int
    baseline: Layout
    base_g_per_kwh: float
    disabled: tuple[Edge, ...] = ()
    base_pue: float = 1.0
    pue: float = 1.0
    method: str = LEARNING
    seed: int | tuple[int, ...] = 0
    budget: TrialBudget = field(default_factory=TrialBudget)
    alike: bool = True
    as_published: bool = False
    reference: Reference | None = None
    predictor: Predictor | None = None
    space: LayoutSpace = field(default=None, repr=False, compare=False)  # type: ignore[assignment]
    _fits: FittedServices = field(default_factory=FittedServices, repr=False, compare=False)
    _annealing: AnnealingMemo = field(default_factory=AnnealingMemo, repr=False, compare=False)
    _leanest: LeanestMemo = field(default_factory=LeanestMemo, init=False, repr=False, compare=False)
    _measured: bool = field(default=False, init=False, repr=False, compare=False)

    name = "trials"

    def __post_init__(self) -> None:
        if self.space is None:
            ordered = sorted(self.accuracy_ratio, key=lambda name: (self.accuracy_ratio[name], name))
            space = LayoutSpace.of(self.menu, ordered, self.disabled, self.devices, alike=self.alike)
            object.__setattr__(self, "space", space)
        object.__setattr__(self, "_measured", self._profiled(self.space)[0] is not None)

    @property
    def candidates(self) -> tuple[Layout, ...]:
        """Every layout there is to try."""
        return self.space.layouts

    @property
    def best_accuracy_ratio(self) -> float:
        """Accuracy of the most accurate variant."""
        return max(self.accuracy_ratio.values())

    def as_dict(self) -> dict[str, Any]:
        """The search as a JSON-ready dictionary."""
        return {
            "kind": self.name,
            **{name: getattr(self, name) for name in _PLAIN},
            "seed": self.seed if isinstance(self.seed, int) else list(self.seed),
            "budget": asdict(self.budget),
            "accuracy_ratio": dict(self.accuracy_ratio),
            "menu": asdict(self.menu),
            "baseline": self.baseline.names(),
            "disabled": [list(edge) for edge in self.disabled],
            "predictor": None if self.predictor is None else self.predictor.as_dict(),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TrialSearch:
        """The inverse of :meth:`as_dict`.

        Raises:
            KeyError, TypeError, ValueError: ``data`` is not what ``as_dict`` writes.
        """
        menu, seed = dict(data["menu"]), data["seed"]
        menu["profiles"] = tuple(MigProfile(**profile) for profile in menu["profiles"])
        menu["partitions"] = tuple(tuple(partition) for partition in menu["partitions"])
        return cls(
            **{name: data[name] for name in _PLAIN},
            seed=seed if isinstance(seed, int) else tuple(seed),
            budget=TrialBudget(**data["budget"]),
            accuracy_ratio=dict(data["accuracy_ratio"]),
            menu=MigMenu(**menu),
            baseline=Layout.parse(data["baseline"]),
            disabled=tuple((str(variant), str(profile)) for variant, profile in data["disabled"]),
            predictor=None if data["predictor"] is None else Predictor.from_dict(data["predictor"]),
        )

    def over(
        self, accuracy_ratio: Mapping[str, float], disabled: tuple[Edge, ...], predictor: Predictor
    ) -> TrialSearch:
        """The same search over other variants, or with another profile of them; it starts without earlier fits.

        Args:
            accuracy_ratio: Accuracy of each variant to choose from.
            disabled: Edges (variant, slice) that do not fit.
            predictor: Predicts layouts from the profile.

        Raises:
            InfeasibleError: Every partition has a slice that no variant fits.
        """
        fresh: dict[str, Any] = {"space": None, "_fits": FittedServices(), "_annealing": AnnealingMemo()}
        return replace(self, accuracy_ratio=accuracy_ratio, disabled=disabled, predictor=predictor, **fresh)

    def baseline_of(self, state: ServiceState) -> MeasuredLayout | None:
        """The measured baseline; None before its trial."""
        return self.reference.measured if self.reference is not None else state.baseline

    def objective(self, lambda_ratio: float, baseline: MeasuredLayout) -> Objective:
        """Eqs. 1-3 against the measured baseline."""
        known = self.reference is not None
        return Objective(
            lambda_ratio=lambda_ratio,
            base_accuracy_ratio=baseline.metrics.accuracy_ratio if known else self._base_accuracy_ratio,
            base_energy_j=baseline.metrics.energy_j,
            base_g_per_kwh=self.base_g_per_kwh,
            base_pue=self.base_pue,
            pue=self.pue,
        )

    @property
    def _base_accuracy_ratio(self) -> float:
        """Accuracy of the baseline: of the most accurate variant of the service's start."""
        return max(self.accuracy_ratio[name] for name in self.baseline.counts)

    def propose(self, goals: ServiceObjectives, state: ServiceState) -> tuple[Layout | None, ServiceState]:
        """The next layout to try, None when nothing is worth a trial; and the state with the random numbers used."""
        baseline = self.baseline_of(state)
        if baseline is None:
            return self._next_baseline(state), state
        if math.isnan(state.g_per_kwh) and self.best(goals, state, state.g_per_kwh) == baseline:
            return None, state  # no carbon can be weighed, and nothing is more accurate
        if self.method == LEARNING:
            return self._ask_learning(goals, state, baseline), state
        search, space = self._annealed(goals, state, baseline)
        row = search.ask()
        return None if row is None else space.layout(row), replace(state, random_after=RandomState.of(search.random))

    def choose(self, goals: ServiceObjectives, state: ServiceState, g_per_kwh: float) -> MeasuredLayout | None:
        """The layout that a search settles on; None where nothing that was measured keeps the objectives."""
        baseline = self.baseline_of(state)
        if not self.as_published or self.method == LEARNING or baseline is None:
            return self.best(goals, state, g_per_kwh)
        search, space = self._annealed(goals, state, baseline)
        search.ask()
        if search.settled is None:
            return None
        settled = space.layout(search.settled)
        return next(item for item in state.known if item.layout == settled)

    def best(
        self,
        goals: ServiceObjectives,
        state: ServiceState,
        g_per_kwh: float,
        among: tuple[MeasuredLayout, ...] | None = None,
    ) -> MeasuredLayout | None:
        """The best measured layout that is sure to keep the objectives; None while none is."""
        baseline = self.baseline_of(state)
        if baseline is None:
            return None
        score = self._score(goals, baseline, g_per_kwh)
        found = [
            item
            for item in (state.known if among is None else among)
            if item.within(goals.slo.latency_s)
            and item.metrics.accuracy_ratio >= goals.minimum_accuracy_ratio - 1e-9
            and not (state.skipped and item.layout in state.skipped)
        ]
        # Equal scores go to the one with fewer joules, then to the one tried first.
        return max(found, key=lambda item: (round(score(item.metrics), 9), -item.metrics.energy_j), default=None)

    def least_bad(self, goals: ServiceObjectives, state: ServiceState) -> Layout:
        """The layout to run where nothing measured keeps the objectives.

        A baseline measured elsewhere serves there. Else the leanest layout of the profile, unless it was measured or
        failed; else the measured layout with the lowest latency among those that are accurate enough.
        """
        if self.reference is not None:
            return self.reference.layout
        if state.baseline is None:
            return state.layout or self.baseline
        known = {item.layout for item in state.known}
        leanest = self.leanest(goals)
        if leanest is not None and leanest not in known | state.skipped | state.excluded:
            return leanest
        least = goals.minimum_accuracy_ratio - 1e-9
        found = [item for item in state.known if item.layout not in state.skipped]
        if not found:
            return state.baseline.layout
        return min(
            found, key=lambda item: (item.metrics.accuracy_ratio < least, item.metrics.latency_s, item.metrics.energy_j)
        ).layout

    def cause(self, goals: ServiceObjectives, state: ServiceState, seen: Observation) -> tuple[str, str] | None:
        """Cause of a new search, as a word and a phrase: enough requests for a first one, or a violated objective."""
        sample, budget = seen.sample, self.budget
        if self.baseline_of(state) is None:
            if state.deferred or sample is None or not sample.suffices(budget.min_requests):
                return None  # a deferred search measures what runs when its turn has come
            return "measured", "enough requests ended to begin with"
        if sample is None or sample.layout != state.layout or sample.requests < budget.min_requests:
            return None
        if not state.feasible and seen.now_s - state.decided_s < budget.retry_s:
            return None
        slo, least = goals.slo, goals.minimum_accuracy_ratio
        if sample.latency_low_s > slo.latency_s:
            return "latency", f"{quantile(slo)} {latency(sample.latency_s)} above the SLO of {latency(slo.latency_s)}"
        mean, error = sample.accuracy(self.accuracy_ratio)
        if mean + _ACCURACY_ERRORS * error < least - 1e-9:
            return "accuracy", f"accuracy {mean:.2%} below the minimum of {least:.2%}"
        return None

    def leanest(self, goals: ServiceObjectives, unknown: Collection[str] = ()) -> Layout | None:
        """The layout with the largest profiled capacity that is accurate enough; None without a profile.

        Args:
            goals: The objectives.
            unknown: Variants of unknown times; their layouts are left out where there are others.
        """
        if self.predictor is None or not self._measured:
            return None
        return self._leanest.layout(self.candidates, self.predictor, goals.minimum_accuracy_ratio, unknown)

    def _score(
        self, goals: ServiceObjectives, baseline: MeasuredLayout, g_per_kwh: float
    ) -> Callable[[TrialMetrics], float]:
        """Eq. 3 at an intensity; accuracy alone where that is unknown."""
        objective = self.objective(goals.lambda_ratio, baseline)
        known_g = g_per_kwh if math.isfinite(g_per_kwh) else 0.0
        return lambda metrics: objective.score(metrics.accuracy_ratio, metrics.energy_j, known_g)

    def _scores(
        self, goals: ServiceObjectives, baseline: MeasuredLayout, g_per_kwh: float
    ) -> Callable[[FloatArray, FloatArray], FloatArray]:
        """As :meth:`_score`, of many predicted trials at once."""
        objective = self.objective(goals.lambda_ratio, baseline)
        known_g = g_per_kwh if math.isfinite(g_per_kwh) else 0.0
        return lambda accuracy_ratio, energy_j: objective.scores(accuracy_ratio, energy_j, known_g)

    def _allowed(self, goals: ServiceObjectives, excluded: frozenset[Layout]) -> LayoutSpace:
        """The layouts to try: neither excluded nor below the minimum accuracy whichever instance answers."""
        space = self.space
        if not self.as_published and goals.minimum_accuracy_ratio > 0:
            space = space.as_accurate(self.accuracy_ratio, goals.minimum_accuracy_ratio)
        return space.without(excluded)

    def _next_baseline(self, state: ServiceState) -> Layout | None:
        """The most accurate layout of one variant that starts, the baseline before all others."""
        if state.spent >= self.budget.while_infeasible:
            return None
        pure = sorted(
            (layout for layout in self.space.layouts if len(layout.counts) == 1),
            key=lambda layout: (layout != self.baseline, -self.accuracy_ratio[layout.instances[0].variant]),
        )
        return next((layout for layout in pure if layout not in state.skipped | state.excluded), None)

    def _annealed(
        self, goals: ServiceObjectives, state: ServiceState, baseline: MeasuredLayout
    ) -> tuple[AnnealingSearch, LayoutSpace]:
        """The search of this invocation, replayed through the trials that it asked for so far."""
        space, limit_s = self._allowed(goals, state.excluded), goals.slo.latency_s
        before = state.known[: state.known_before]
        random = state.random or RandomState.seeded(*((self.seed,) if isinstance(self.seed, int) else self.seed))
        start, first = self._start(goals, state, space, baseline), state.spent - len(state.asked)

        def begin() -> AnnealingSearch:
            return annealing_search(
                space,
                start,
                self._shown(space, before, limit_s),
                self._score(goals, baseline, state.g_per_kwh),
                limit_s,
                random.generator(),
                AnnealingSchedule(
                    new_trials=self.budget.count - first, desperate_trials=self.budget.while_infeasible - first
                ),
                least_accuracy_ratio=goals.minimum_accuracy_ratio,
                at_random=self.method == RANDOM,
            )

        rows = [space.row(layout) for layout in state.asked]
        shown = self._shown(space, state.known[state.known_before :], limit_s)
        outcomes = tuple((-1, _FAILED) if row is None else (row, shown.get(row, _FAILED)) for row in rows)
        objective = self.objective(goals.lambda_ratio, baseline)
        setting = (self.method, self.budget, goals, objective, state.g_per_kwh, state.excluded, random, start, first)
        return self._annealing.continued((*setting, before), outcomes, begin), space

    @staticmethod
    def _shown(space: LayoutSpace, known: Sequence[MeasuredLayout], limit_s: float) -> dict[int, TrialMetrics]:
        """Metrics of measured layouts for a search, by row; layouts that it may not try are left out."""
        return {row: item.for_search(limit_s) for item in known if (row := space.row(item.layout)) is not None}

    def _start(
        self, goals: ServiceObjectives, state: ServiceState, space: LayoutSpace, baseline: MeasuredLayout
    ) -> int:
        """The row a search begins at: the layout that ran, else the best known, else the baseline or its variant."""
        row = None if state.start is None else space.row(state.start)
        if row is not None:
            return row
        best = self.best(goals, state, state.g_per_kwh, state.known[: state.known_before])
        for layout in (None if best is None else best.layout, baseline.layout):
            row = None if layout is None else space.row(layout)
            if row is not None:
                return row
        return space.whole(space.graph.variants[-1])

    def _ask_learning(self, goals: ServiceObjectives, state: ServiceState, baseline: MeasuredLayout) -> Layout | None:
        """The layout with the largest expected gain in the learned model; None when none is worth a trial."""
        space, limit_s = self._allowed(goals, state.excluded | state.skipped), goals.slo.latency_s
        newest, row = baseline, space.row(baseline.layout)
        if self.reference is None:
            if row is None:
                return None  # the baseline does not start any more
            found = next((item for item in state.known if item.layout == baseline.layout), None)
            if found is None:
                return baseline.layout  # dropped because no trial was sure about it; the model starts from it
            newest = found
        whole = space.whole(space.graph.variants[-1]) if self.reference is not None else row
        idle_ratio = _ABOVE_IDLE if self.reference is None else self.reference.idle_ratio
        known = {at: item.for_search(limit_s) for item in state.known if (at := space.row(item.layout)) is not None}
        feasible = self.best(goals, state, state.g_per_kwh) is not None
        spent_all = state.spent >= (self.budget.count if feasible else self.budget.while_infeasible)
        if spent_all or len(known) == len(space):
            return None
        setting = ServiceSetting(
            space.graph,
            self.menu,
            np.array([self.accuracy_ratio[name] for name in space.graph.variants]),
            self.devices,
            state.planned_rps,
            Baseline(newest.for_search(limit_s), newest.rate_rps, whole, idle_ratio),
            space.copies,
            *self._profiled(space),
        )
        key = (state.planned_rps, newest.metrics, newest.rate_rps, row, state.excluded | state.skipped)
        service = self._fits.fitted(key, setting, known)
        search = LearningSearch(
            service,
            len(space),
            known,
            self._score(goals, baseline, state.g_per_kwh),
            self._scores(goals, baseline, state.g_per_kwh),
            limit_s,
            LearningBudget(new_trials=self.budget.count, desperate_trials=self.budget.while_infeasible),
            goals.minimum_accuracy_ratio,
            space.candidate_rows if len(space) > _LARGE_SPACE else None,
        )
        asked = search.ask()
        return None if asked is None else space.layout(asked)

    def _profiled(self, space: LayoutSpace) -> tuple[FloatArray | None, FloatArray | None]:
        """Profiled service times by variant and slice, and joules by variant; None for no profile of all variants."""
        if self.predictor is None:
            return None, None
        names, pieces = space.graph.variants, space.graph.profiles
        times, joules = np.full((len(names), len(pieces)), np.nan), np.full(len(names), np.nan)
        for entry in self.predictor.profile.entries:
            if entry.variant in names and str(entry.slice) in pieces:
                at = names.index(entry.variant)
                times[at, pieces.index(str(entry.slice))] = entry.loaded.mean_s
                joules[at] = entry.energy_j if math.isnan(joules[at]) else min(joules[at], entry.energy_j)
        return (None, None) if np.isnan(joules).any() else (times, joules)


_ACCURACY_ERRORS = 3.0
"""Standard errors by which a mean accuracy must lie below the minimum to count as below it."""
_PLAIN = ("devices", "base_g_per_kwh", "base_pue", "pue", "method", "alike", "as_published")
