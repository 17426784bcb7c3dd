"""A service on two cores as a policy of live trials sees it: what a layout would show, and what happens to it."""

from dataclasses import dataclass, field
from functools import cache
from typing import Any

from joulery.domain.decisions import Decision
from joulery.domain.gpu.layout import Layout
from joulery.domain.serving.service import Slo
from joulery.policies.serving.objective import ReplanTrigger, ServiceObjectives
from joulery.policies.serving.observation import Observation, Sample
from joulery.policies.serving.policy import ServicePolicy
from joulery.policies.serving.search.layout_space import core_partitions, cpu_slices, slice_menu
from joulery.policies.serving.search.trial_search import TrialSearch
from joulery.policies.serving.search.trials import TrialBudget
from tests.policies.serving.test_predictive_policy import ACCURACY
from tests.policies.serving.test_predictive_policy import policy as predicting

RATE = 60.0
TRUTH = predicting(requests=1500)
SPACE = [cpu_slices(cut) for cut in core_partitions(2)]
BASE = Layout.parse(["lite2 on cpu:1", "lite2 on cpu:1"])


def trying(
    search: str = "learning",
    slo_s: float = 0.1,
    lambda_ratio: float = 0.055,
    *,
    minimum_accuracy_ratio: float = 0.0,
    budget: TrialBudget | None = None,
    **changes: Any,
) -> ServicePolicy:
    """A policy of live trials; ``changes`` are those of its search."""
    made = TrialSearch(
        ACCURACY,
        slice_menu(SPACE),
        1,
        BASE,
        200.0,
        method=search,
        budget=budget or TrialBudget(min_requests=100, longest_s=10.0),
        **changes,
    )
    goals = ServiceObjectives(lambda_ratio, Slo(slo_s), minimum_accuracy_ratio)
    return ServicePolicy("photos", made, goals, RATE, ReplanTrigger(200.0))


@cache
def truth(layout: Layout):
    return TRUTH.search.predictor.predict(layout, RATE)


@dataclass
class World:
    """Runs a policy, a second a step; whatever it decides runs at once unless it is refused."""

    policy: ServicePolicy
    g_per_kwh: float = 150.0
    rate_rps: float = RATE
    refuse: set[Layout] = field(default_factory=set)
    deaths: dict[Layout, int] = field(default_factory=dict)
    latency_ratio: float = 1.0
    spread: float = 0.02
    requests_a_s: int = 60
    waits_for: str = ""

    def __post_init__(self) -> None:
        self.now_s, self.running, self.since_s = 1000.0, None, 1000.0
        self.state = self.policy.initial()
        self.decisions: list[Decision] = []
        self.seen: list[Observation] = []

    def sample(self) -> Sample | None:
        if self.running is None or self.now_s <= self.since_s:
            return None
        met = truth(self.running)
        requests = int((self.now_s - self.since_s) * self.requests_a_s)
        latency_s = min(met.latency_s, 60.0) * self.latency_ratio
        band = self.spread * (1.0 if requests >= 72 else float("inf"))
        return Sample(
            self.running,
            self.since_s,
            requests,
            0,
            latency_s,
            latency_s * (1 - self.spread),
            latency_s * (1 + band),
            met.energy_j,
            met.energy_j * self.spread,
            {name: round(share * requests) for name, share in met.shares.items()},
            self.deaths.get(self.running, 0),
        )

    def look(self) -> Observation:
        sample = self.sample()
        served = {} if sample is None else sample.served
        return Observation(
            self.now_s,
            self.g_per_kwh,
            self.rate_rps,
            float("nan"),
            0,
            served,
            float("nan"),
            self.running,
            sample,
            self.waits_for,
        )

    def second(self) -> tuple[Decision, ...]:
        self.now_s += 1.0
        seen = self.look()
        step = self.policy.step(self.state, seen)
        self.state = step.state
        self.seen.append(seen)
        for decision in step.decisions:
            self.decisions.append(decision)
            layout = Layout.parse(decision.value)
            if layout not in self.refuse and layout != self.running:
                self.running, self.since_s = layout, self.now_s
        return step.decisions

    def until_settled(self, limit: int = 600) -> Decision:
        """Go on until a search ends; the decision that ended it."""
        for _ in range(limit):
            for decision in self.second():
                if decision.kind != "try_layout":
                    return decision
        raise AssertionError(f"nothing was settled on in {limit} s")
