"""Replay a run's log: the same observations must lead to the same decisions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from joulery.domain.decisions import Decision, Step
from joulery.domain.errors import DataError
from joulery.policies.placement.standby import StandbyObservation, StandbyPolicy
from joulery.policies.serving.observation import Observation
from joulery.policies.serving.policy import ServicePolicy
from joulery.policies.serving.predictive_search import PredictiveSearch
from joulery.policies.serving.trial_search import TrialSearch

POLICY, STEP = "policy", "step"
_POLICIES: Mapping[str, tuple[Any, Any]] = {
    PredictiveSearch.name: (ServicePolicy, Observation),
    TrialSearch.name: (ServicePolicy, Observation),
    StandbyPolicy.name: (StandbyPolicy, StandbyObservation),
}
"""Policies by the name they log, with what they observe."""


def policy_entry(policy: ServicePolicy | StandbyPolicy) -> dict[str, Any]:
    """What the log holds about a policy: everything it takes to make it again."""
    return {"name": policy.name, "service": policy.service, "policy": policy.as_dict()}


def step_entry(service: str, observation: Observation | StandbyObservation, step: Step[Any]) -> dict[str, Any]:
    """What the log holds about one step."""
    decisions = [asdict(decision) for decision in step.decisions]
    return {"service": service, "observation": observation.as_dict(), "decisions": decisions}


@dataclass(frozen=True, slots=True)
class Difference:
    """A step that was decided differently.

    Attributes:
        t_s: When, Unix seconds.
        service: Service that it belongs to.
        logged, again: The decisions then and now.
    """

    t_s: float
    service: str
    logged: tuple[Decision, ...]
    again: tuple[Decision, ...]


@dataclass(frozen=True, slots=True)
class Replayed:
    """The outcome of a replay.

    Attributes:
        steps: Steps decided again.
        decisions: Decisions in the log.
        differences: Steps with other decisions; empty when the log can be trusted.
    """

    steps: int
    decisions: int
    differences: tuple[Difference, ...]


def decide_again(log: Iterable[Mapping[str, Any]]) -> Replayed:
    """Feed a log's observations to its policies once more.

    Raises:
        DataError: The log names no policy, or is damaged.
    """
    policies: dict[str, Any] = {}
    states: dict[str, Any] = {}
    seen_as: dict[str, Any] = {}
    steps = decisions = 0
    differences: list[Difference] = []
    try:
        for entry in log:
            if entry["kind"] == POLICY:
                kind, seen_as[entry["service"]] = _POLICIES[entry["name"]]
                policy = kind.from_dict(entry["policy"])
                anew = isinstance(policy, StandbyPolicy) or not isinstance(policies.get(policy.service), kind)
                if anew:
                    states[policy.service] = policy.initial()
                policies[policy.service] = policy  # one that came later asks for something else, and remembers
            elif entry["kind"] == STEP:
                service = entry["service"]
                seen = seen_as[service].from_dict(entry["observation"])
                again = policies[service].step(states[service], seen)
                states[service] = again.state
                logged = tuple(Decision(**fields) for fields in entry["decisions"])
                steps, decisions = steps + 1, decisions + len(logged)
                if logged != again.decisions:
                    differences.append(Difference(seen.now_s, service, logged, again.decisions))
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"the log cannot be replayed: {error!r}") from error
    if not policies:
        raise DataError("the log names no policy: nothing was decided in this run")
    return Replayed(steps, decisions, tuple(differences))
