"""Splits a service's requests among its variants by stated shares: a canary, or one variant beside another.

The partition is chosen as for a fixed policy: the one that keeps the SLO with the fewest joules, with service times and
joules blended by the shares. Every replica keeps all variants of the split loaded, and the shares are kept to within
one request. Neither the grid nor a threat to the SLO changes them, unless a variant of a smaller share is the reason:
where one takes longer for a request than the SLO, and the variant of the largest share does not, the latter answers all
requests for a minute.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from joulery.domain.decisions import Decision, Step
from joulery.domain.errors import DataError
from joulery.domain.gpu.layout import Layout
from joulery.domain.serving.dispatch import QueueLimit
from joulery.domain.serving.mix import OWN, MixStep, VariantMix, Weights
from joulery.policies.serving.messages import short
from joulery.policies.serving.observation import SET_LAYOUT, SET_WEIGHTS, Observation
from joulery.policies.serving.policy import ServicePolicy
from joulery.policies.serving.state import ServiceState
from joulery.policies.serving.variants.newcomers import slow

SHARES = "shares"
_PAUSE_S = 60.0
"""Seconds in which a variant that was slower than the SLO answers nothing."""
_AGAIN_S = 60.0
"""Seconds after which variants that could not be loaded are loaded once more."""


@dataclass(frozen=True, slots=True)
class SplitState:
    """State of a split.

    Attributes:
        service: The state of the policy that chooses the partition.
        asked: Variants whose loading was decided on last.
        asked_s: Time of that decision, Unix seconds.
        slow: Evidence that a variant of a smaller share is slower than the SLO, as a phrase; empty for none.
        slow_s: Time of the latest evidence, Unix seconds.
    """

    service: ServiceState = field(default_factory=ServiceState)
    asked: tuple[str, ...] = ()
    asked_s: float = -math.inf
    slow: str = ""
    slow_s: float = -math.inf


@dataclass(frozen=True, slots=True)
class TrafficSplit:
    """Gives each variant of a service a stated share of its requests.

    Attributes:
        policy: Chooses the partition, with the variant of the largest share on every slice.
        shares: Share of the requests of each variant, above 0, by variant; they sum to 1.

    Raises:
        DataError: A share is not above 0, or they do not sum to 1.
    """

    policy: ServicePolicy
    shares: Weights

    def __post_init__(self) -> None:
        parts = [share for _, share in self.shares]
        if not all(share > 0 for share in parts) or abs(math.fsum(parts) - 1.0) > 1e-9:
            raise DataError(f"shares of a split are above 0 and sum to 1, got {dict(self.shares)}")

    @property
    def name(self) -> str:
        """Name of the policy in logs: that of its search."""
        return self.policy.name

    @property
    def service(self) -> str:
        """The service."""
        return self.policy.service

    @property
    def main(self) -> str:
        """The variant of the largest share, the first among equals."""
        return max(self.shares, key=lambda one: one[1])[0]

    def as_dict(self) -> dict[str, Any]:
        """The policy as a JSON-ready dictionary with all that is needed to repeat its decisions."""
        return {**self.policy.as_dict(), SHARES: dict(self.shares)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TrafficSplit:
        """The inverse of :meth:`as_dict`.

        Raises:
            DataError: ``data`` is not what ``as_dict`` writes.
        """
        rest = {name: value for name, value in data.items() if name != SHARES}
        try:
            shares = tuple((str(name), float(share)) for name, share in data[SHARES].items())
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(f"not a split: {error!r}") from error
        return cls(ServicePolicy.from_dict(rest), shares)

    def initial(self) -> SplitState:
        """The state before the first decision."""
        return SplitState()

    def step(self, state: SplitState, observation: Observation, /) -> Step[SplitState]:
        """Choose the partition, have the variants loaded, and steer the requests by the shares."""
        seen = observation
        inner = self.policy.step(state.service, self._as_one(seen))
        state, decisions = replace(state, service=inner.state), inner.decisions
        names = tuple(sorted(name for name, _ in self.shares))
        if any(one.kind == SET_LAYOUT for one in decisions):
            state = replace(state, asked=names, asked_s=seen.now_s)
        elif seen.running is not None and self._to_load(state, seen, names):
            state = replace(state, asked=names, asked_s=seen.now_s)
            decisions = (*decisions, self._load(seen.running, seen.loaded, names))
        state = self._judged(state, seen)
        wanted = OWN if state.slow else self._mix(seen)
        if seen.running is not None and wanted != seen.mix:
            reason = "split: " + ", ".join(f"{name} answers {100 * share:.4g} %" for name, share in self.shares)
            if state.slow:
                reason = f"split: {state.slow}, longer than the SLO; {self.main} answers all for {_PAUSE_S:g} s"
            decisions = (Decision(SET_WEIGHTS, self.service, wanted.as_list(), self.name, reason, "split"), *decisions)
        return Step(state, decisions, inner.wake_s)

    def queue_limit(self, state: SplitState, seen: Observation) -> QueueLimit | None:
        """Queue limit as of a service with one variant; None for no limit."""
        return self.policy.queue_limit(state.service, self._as_one(seen))

    def _judged(self, state: SplitState, seen: Observation) -> SplitState:
        """The state with the present evidence that a variant of a smaller share is too slow; cleared after a pause."""
        slo, main_s = self.policy.objectives.slo, seen.occupied_s.get(self.main, 0.0)
        others = [name for name, _ in self.shares if name != self.main and name in seen.loaded]
        phrase = slow(seen, others, slo) if main_s <= slo.latency_s else ""
        if phrase:
            return replace(state, slow=phrase, slow_s=seen.now_s)
        return replace(state, slow="") if seen.now_s - state.slow_s >= _PAUSE_S else state

    def _as_one(self, seen: Observation) -> Observation:
        """The observation as one of a service whose answers all come from one variant, blended by their answers."""
        counts = {name: count for name, count in seen.served.items() if name in seen.occupied_s}
        answers = sum(counts.values())
        busy_s = math.fsum(count * seen.occupied_s[name] for name, count in counts.items())
        return replace(
            seen,
            loaded=(),
            mix=OWN,
            served={self.main: sum(seen.served.values())} if seen.served else {},
            occupied_s={self.main: busy_s / answers} if answers else {},
        )

    def _to_load(self, state: SplitState, seen: Observation, names: tuple[str, ...]) -> bool:
        """Whether the replicas are to be replaced by ones with the variants of the split, and no others."""
        if seen.changing or seen.running != state.service.layout or seen.loaded == names:
            return False
        return state.asked != names or seen.now_s - state.asked_s >= _AGAIN_S

    def _load(self, running: Layout, loaded: tuple[str, ...], names: tuple[str, ...]) -> Decision:
        more, fewer = (sorted(set(names) - set(loaded)), sorted(set(loaded) - set(names)))
        parts = [f"{', '.join(more)} to be loaded"] * bool(more) + [f"{', '.join(fewer)} to be unloaded"] * bool(fewer)
        reason = f"split: {' and '.join(parts)}; {short(running)} stays"
        return Decision(SET_LAYOUT, self.service, running.names(), self.name, reason, "split")

    def _mix(self, seen: Observation) -> VariantMix:
        """The shares as weights of the loaded variants; each replica's own variant takes the rest."""
        weights = tuple((name, share) for name, share in self.shares if name != self.main and name in seen.loaded)
        # The last step of a mix holds in front of any queue: rate and delay do not matter.
        return VariantMix((MixStep(1.0, 0.0, weights),)) if weights else OWN
