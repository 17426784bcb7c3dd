"""Replay a run's log: the same observations must lead to the same decisions.

Policies in logs of joulery 0.1 are converted to the present names of their parts. The reasons of decisions in those
logs are worded differently, so they are not compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from joulery.domain.decisions import Decision
from joulery.domain.errors import DataError
from joulery.domain.renames import DECISION_KINDS, POLICY_NAMES, warn_renamed
from joulery.policies.clocks.service_limit import ServiceLimitTuner, ServingDeviceView
from joulery.policies.placement.joint.following.drift import DriftObservation, PlanDrift
from joulery.policies.placement.standby import StandbyObservation, StandbyPolicy
from joulery.policies.serving.observation import Observation
from joulery.policies.serving.policy import ServicePolicy
from joulery.policies.serving.search.predictive_search import PredictiveSearch
from joulery.policies.serving.search.trial_search import TrialSearch
from joulery.policies.serving.switchback import AUDIT, AuditedPolicy
from joulery.policies.serving.variants.language_family import FamilySeen, LanguageFamilyPolicy
from joulery.policies.serving.variants.traffic_split import SHARES, TrafficSplit
from joulery.runtime.session.history import POLICY, STEP

_POLICIES: Mapping[str, tuple[Any, Any]] = {
    PredictiveSearch.name: (ServicePolicy, Observation),
    TrialSearch.name: (ServicePolicy, Observation),
    StandbyPolicy.name: (StandbyPolicy, StandbyObservation),
    LanguageFamilyPolicy.name: (LanguageFamilyPolicy, FamilySeen),
    ServiceLimitTuner.name: (ServiceLimitTuner, ServingDeviceView),
    PlanDrift.name: (PlanDrift, DriftObservation),
}
"""Policy and observation classes by the policy's name in logs."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A step whose replayed decisions differ from the log.

    Attributes:
        t_s: Time of the step, Unix seconds.
        service: Service of the step.
        logged, again: The logged and the replayed decisions.
    """

    t_s: float
    service: str
    logged: tuple[Decision, ...]
    again: tuple[Decision, ...]


@dataclass(frozen=True, slots=True)
class Replayed:
    """The outcome of a replay.

    Attributes:
        steps: Number of replayed steps.
        decisions: Number of decisions in the log.
        differences: Steps with other decisions; empty when the log can be trusted.
    """

    steps: int
    decisions: int
    differences: tuple[Difference, ...]


def decide_again(log: Iterable[Mapping[str, Any]]) -> Replayed:
    """Replay a log: run its policies on its observations and compare the decisions.

    Logs of joulery 0.1 can be replayed; their decisions are compared without the wording of their reasons.

    Raises:
        DataError: The log names no policy, or is damaged.
    """
    older = ""
    policies: dict[str, Any] = {}
    states: dict[str, Any] = {}
    seen_as: dict[str, Any] = {}
    steps = decisions = 0
    differences: list[Difference] = []
    try:
        for entry in log:
            if entry["kind"] == POLICY:
                name, fields, old = renamed_policy(entry["name"], entry["policy"])
                older = older or old
                kind, seen_as[entry["service"]] = _POLICIES[name]
                kind = AuditedPolicy if AUDIT in fields else TrafficSplit if SHARES in fields else kind
                policy = kind.from_dict(fields)
                forgets = isinstance(policy, StandbyPolicy | TrafficSplit | PlanDrift)
                if forgets or not isinstance(policies.get(policy.service), kind):
                    states[policy.service] = policy.initial()
                policies[policy.service] = policy  # a later one has other settings, and keeps its state
            elif entry["kind"] == STEP:
                service = entry["service"]
                seen = seen_as[service].from_dict(entry["observation"])
                again = policies[service].step(states[service], seen)
                states[service] = again.state
                logged = tuple(renamed_decision(fields) for fields in entry["decisions"])
                steps, decisions = steps + 1, decisions + len(logged)
                if _compared(logged, older) != _compared(again.decisions, older):
                    differences.append(Difference(seen.now_s, service, logged, again.decisions))
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"the log cannot be replayed: {error!r}") from error
    if not policies:
        raise DataError("the log names no policy: nothing was decided in this run")
    if older:
        warn_renamed(older, _NEW_WORDS[older], "log of joulery 0.1")
    return Replayed(steps, decisions, tuple(differences))


_NEW_WORDS = {"problem": "search", "fewest": "min_requests", **POLICY_NAMES}


def _compared(decisions: tuple[Decision, ...], older: str) -> tuple[Decision, ...]:
    """Decisions as compared: without the reason for logs of an older version."""
    return tuple(replace(one, reason="") for one in decisions) if older else decisions


def renamed_policy(name: str, policy: Mapping[str, Any]) -> tuple[str, Mapping[str, Any], str]:
    """Convert a logged policy to its present name and fields.

    Returns:
        Name, fields, and the first old name that was read; empty for a log of this version.

    Raises:
        KeyError: A field is missing.
    """
    if name in (StandbyPolicy.name, *POLICY_NAMES):
        return _standby(name, policy)
    if name == TrialSearch.name and "problem" in policy:
        return name, _trials(policy), "problem"
    if name == PredictiveSearch.name and "predictor" in policy:
        return name, _predictive(policy), "fewest"
    return name, policy, ""


def renamed_decision(fields: Mapping[str, Any]) -> Decision:
    """Convert a logged decision to its present kind and policy name."""
    decision = Decision(**fields)
    return Decision(
        DECISION_KINDS.get(decision.kind, decision.kind),
        decision.target,
        decision.value,
        POLICY_NAMES.get(decision.policy, decision.policy),
        decision.reason,
        decision.cause,
    )


def _standby(name: str, policy: Mapping[str, Any]) -> tuple[str, Mapping[str, Any], str]:
    old = name if name in POLICY_NAMES else ""
    fields = {("min_requests" if key == "fewest" else key): value for key, value in policy.items()}
    fields["instances"] = [
        {("standby_percent" if key == "shadow_percent" else key): value for key, value in one.items()}
        for one in policy["instances"]
    ]
    return StandbyPolicy.name, fields, old


def _predictive(policy: Mapping[str, Any]) -> dict[str, Any]:
    objective = policy["objective"]
    objectives = {
        "lambda_ratio": objective["lambda_ratio"],
        "slo": policy["slo"],
        "minimum_accuracy_ratio": policy["minimum_accuracy_ratio"],
    }
    search = {
        "kind": PredictiveSearch.name,
        **{name: policy[name] for name in ("candidates", "predictor", "objective", "gain")},
        "min_requests": policy["fewest"],
    }
    return _service(policy, objective, objectives, search)


def _trials(policy: Mapping[str, Any]) -> dict[str, Any]:
    problem, budget = dict(policy["problem"]), dict(policy["budget"])
    budget["min_requests"] = budget.pop("fewest")
    search = {
        "kind": TrialSearch.name,
        **problem,
        "method": problem["search"],
        "baseline": problem["base"],
        "budget": budget,
        "alike": True,
        "as_published": False,
        "predictor": None,
    }
    return _service(policy, problem, policy["terms"], search)


def _service(
    policy: Mapping[str, Any], base: Mapping[str, Any], objectives: Mapping[str, Any], search: Mapping[str, Any]
) -> dict[str, Any]:
    return {
        "service": policy["service"],
        "rate_rps": policy["rate_rps"],
        "trigger": {
            "base_g_per_kwh": base["base_g_per_kwh"] * base["base_pue"],
            "pue": base["pue"],
            "intensity_ratio": policy["replan_ratio"],
            "rate_ratio": policy["rate_step_ratio"],
            "settle_s": policy["settle_s"],
        },
        "objectives": objectives,
        "search": search,
    }
