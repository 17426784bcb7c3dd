"""What live trials choose from, by which measure, and what to try next: pure functions of what is remembered."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from joulery.domain.errors import DataError
from joulery.domain.gpu.layout import Layout
from joulery.domain.gpu.mig import MigMenu, MigProfile
from joulery.policies.serving.annealing import Neighbourhood, Schedule, TrialMetrics, VariantSearch
from joulery.policies.serving.configuration_graph import Edge, published_odds
from joulery.policies.serving.learned_service import Baseline, LearnedService, Setting
from joulery.policies.serving.learning_search import LearningSearch, SearchBudget
from joulery.policies.serving.objective import Objective
from joulery.policies.serving.trial_sample import Tried
from joulery.policies.serving.trial_space import TrialSpace
from joulery.policies.serving.trial_state import TrialState, TrialTerms

CLOVER, LEARNING = "clover", "learning"
_OFF_TARGET = -10.0
"""What a configuration below the accuracy asked for scores, less what it lacks: never more than one that has it."""
_ABOVE_IDLE = 0.02
"""Live joules are counted above idle: hardly any of them are idle's."""


@dataclass(frozen=True, slots=True)
class TrialProblem:
    """What there is to choose from and what it is compared with.

    Attributes:
        accuracy_ratio: Accuracy of each variant.
        menu: How a device is cut.
        devices: How many there are, all cut and filled alike.
        base: The yardstick: the most accurate variant on every slice of one cut, on all devices.
        base_g_per_kwh: Intensity of the yardstick.
        disabled: Edges (variant, slice) that are known not to fit.
        base_pue, pue: Facility energy per IT energy of the yardstick, and now.
        search: ``clover`` (the paper's annealer) or ``learning``.
        seed: Of the annealer's draws.

    Raises:
        InfeasibleError: However a device is cut, some slice stays empty.
    """

    accuracy_ratio: Mapping[str, float]
    menu: MigMenu
    devices: int
    base: Layout
    base_g_per_kwh: float
    disabled: tuple[Edge, ...] = ()
    base_pue: float = 1.0
    pue: float = 1.0
    search: str = LEARNING
    seed: int = 0
    space: TrialSpace = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        ordered = sorted(self.accuracy_ratio, key=lambda name: (self.accuracy_ratio[name], name))
        object.__setattr__(self, "space", TrialSpace.of(self.menu, ordered, self.disabled, self.devices))

    @property
    def best_accuracy_ratio(self) -> float:
        """Accuracy of the most accurate variant."""
        return max(self.accuracy_ratio.values())

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            **{name: getattr(self, name) for name in _PLAIN},
            "accuracy_ratio": dict(self.accuracy_ratio),
            "menu": asdict(self.menu),
            "base": self.base.names(),
            "disabled": [list(edge) for edge in self.disabled],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TrialProblem:
        """The inverse of :meth:`as_dict`.

        Raises:
            KeyError, TypeError, ValueError: It is not what ``as_dict`` writes.
        """
        menu = dict(data["menu"])
        menu["profiles"] = tuple(MigProfile(**profile) for profile in menu["profiles"])
        menu["partitions"] = tuple(tuple(partition) for partition in menu["partitions"])
        return cls(
            **{name: data[name] for name in _PLAIN},
            accuracy_ratio=dict(data["accuracy_ratio"]),
            menu=MigMenu(**menu),
            base=Layout.parse(data["base"]),
            disabled=tuple((str(variant), str(profile)) for variant, profile in data["disabled"]),
        )

    def objective(self, lambda_ratio: float, yardstick: Tried) -> Objective:
        """Eqs. 1-3 against the measured yardstick."""
        return Objective(
            lambda_ratio=lambda_ratio,
            base_accuracy_ratio=self.best_accuracy_ratio,
            base_energy_j=yardstick.metrics.energy_j,
            base_g_per_kwh=self.base_g_per_kwh,
            base_pue=self.base_pue,
            pue=self.pue,
        )

    def scorer(self, terms: TrialTerms, yardstick: Tried, g_per_kwh: float) -> Callable[[TrialMetrics], float]:
        """Eq. 3 at an intensity; accuracy alone where that is unknown. Too little accuracy is worth nothing."""
        objective, least = self.objective(terms.lambda_ratio, yardstick), terms.minimum_accuracy_ratio
        known_g = g_per_kwh if math.isfinite(g_per_kwh) else 0.0

        def score(metrics: TrialMetrics) -> float:
            if metrics.accuracy_ratio < least - 1e-9:
                return _OFF_TARGET + metrics.accuracy_ratio - least
            return objective.score(metrics.accuracy_ratio, metrics.energy_j, known_g)

        return score


_PLAIN = ("devices", "base_g_per_kwh", "base_pue", "pue", "search", "seed")


def choice(
    problem: TrialProblem, terms: TrialTerms, state: TrialState, g_per_kwh: float, among: Sequence[Tried] | None = None
) -> Tried | None:
    """The best of what was tried that surely keeps all that is asked for; None while nothing does."""
    if state.yardstick is None:
        return None
    score = problem.scorer(terms, state.yardstick, g_per_kwh)
    found = [
        item
        for item in (state.known if among is None else among)
        if item.keeps(terms.slo.latency_s)
        and item.metrics.accuracy_ratio >= terms.minimum_accuracy_ratio - 1e-9
        and item.layout not in state.skipped
    ]
    # Equal scores go to the one with fewer joules, then to the one tried first.
    return max(found, key=lambda item: (round(score(item.metrics), 9), -item.metrics.energy_j), default=None)


def propose(problem: TrialProblem, terms: TrialTerms, state: TrialState, most: int) -> Layout | None:
    """What to try next in a search of at most so many trials; None when nothing is worth one."""
    yardstick = state.yardstick
    if yardstick is None:
        return _next_yardstick(problem, state)
    if math.isnan(state.g_per_kwh) and choice(problem, terms, state, state.g_per_kwh) == yardstick:
        return None  # no carbon can be weighed, and nothing is more accurate
    ask = _ask_clover if problem.search == CLOVER else _ask_learning
    return ask(problem, terms, state, yardstick, most)


def _next_yardstick(problem: TrialProblem, state: TrialState) -> Layout | None:
    """The most accurate layout of one variant that can be run, the base before all others."""
    pure = sorted(
        (layout for layout in problem.space.layouts if len(layout.counts) == 1),
        key=lambda layout: (layout != problem.base, -problem.accuracy_ratio[layout.instances[0].variant]),
    )
    return next((layout for layout in pure if layout not in state.skipped | state.excluded), None)


def _ask_clover(
    problem: TrialProblem, terms: TrialTerms, state: TrialState, yardstick: Tried, most: int
) -> Layout | None:
    """The paper's search, led through what it asked for so far, asks on."""
    space, limit_s = problem.space.without(state.excluded), terms.slo.latency_s
    rows, earlier = space.rows(), state.known[: state.before]
    told = {item.layout: item.told(limit_s) for item in state.known}
    start = choice(problem, terms, state, state.g_per_kwh, earlier)
    search = VariantSearch(
        Neighbourhood(space.graph, published_odds(space.graph, problem.menu)),
        rows[yardstick.layout if start is None or start.layout not in rows else start.layout],
        {rows[item.layout]: told[item.layout] for item in earlier if item.layout in rows},
        problem.scorer(terms, yardstick, state.g_per_kwh),
        limit_s,
        np.random.default_rng([problem.seed, state.searches]),
        Schedule(new_trials=most, desperate_trials=most),
    )
    hopeless = TrialMetrics(0.0, math.inf, math.inf)
    for layout in state.asked:
        row = search.ask()
        if row is None or space.layouts[row] != layout:
            raise DataError(f"the search asked for another layout than {layout} when it was made again")
        search.tell(row, told.get(layout, hopeless))
    row = search.ask()
    return None if row is None else space.layouts[row]


def _ask_learning(
    problem: TrialProblem, terms: TrialTerms, state: TrialState, yardstick: Tried, most: int
) -> Layout | None:
    """Our search, with everything that is known."""
    space, limit_s = problem.space.without(state.excluded | state.skipped), terms.slo.latency_s
    rows = space.rows()
    if yardstick.layout not in rows:
        return None  # what everything is compared with does not run any more
    newest = next((item for item in state.known if item.layout == yardstick.layout), None)
    if newest is None:
        return yardstick.layout  # forgotten, because no trial had settled what it does: everything is learned from it
    known = {rows[item.layout]: item.told(limit_s) for item in state.known if item.layout in rows}
    if len(known) == len(rows):
        return None
    setting = Setting(
        space.graph,
        problem.menu,
        np.array([problem.accuracy_ratio[name] for name in space.graph.variants]),
        problem.devices,
        state.planned_rps,
        Baseline(newest.metrics, newest.rate_rps, rows[newest.layout], _ABOVE_IDLE),
    )
    service = LearnedService(setting)
    for part in (len(known) // 2, len(known)):  # a fit goes on from the last: two are enough, from wherever it began
        service.learn(dict(list(known.items())[:part]))
    thrift = SearchBudget(new_trials=most, desperate_trials=most)
    score = problem.scorer(terms, yardstick, state.g_per_kwh)
    row = LearningSearch(service, len(space.layouts), known, score, limit_s, thrift).ask()
    return None if row is None else space.layouts[row]
