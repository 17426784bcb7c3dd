"""Gives a variant that joined a running service a small share of the requests until its times are known.

Until then its times are assumed: it may be much slower than planned. So no search chooses it, and it is not one of the
variants that protect the SLO. Where replicas keep it loaded, it answers 2 % of the requests at most, or half of the
share that the SLO's quantile allows to be late, one request a second at most, and only while nothing waits behind that
request. It answers none for a minute after a sign that it is slow: one of its answers took longer than the SLO, or a
request has been with it for so long, or the SLO was threatened.

Where requests cannot be steered, at most one replica is planned with it; after such a sign none for ten minutes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from joulery.domain.decisions import Decision, Step
from joulery.domain.format import latency
from joulery.domain.serving.mix import OWN, MixStep, VariantMix
from joulery.domain.serving.service import Slo
from joulery.policies.serving.observation import SET_WEIGHTS, Observation
from joulery.policies.serving.search.predictive_search import PredictiveSearch, known_layouts
from joulery.policies.serving.search.trial_search import TrialSearch
from joulery.policies.serving.state import Family, ServiceState

if TYPE_CHECKING:
    from joulery.policies.serving.policy import ServicePolicy

JOINED = "joined"
"""Cause of the decisions that give such a variant a share of the requests, or take it away."""
_SHARE_RATIO, _LATE_PART, _MOST_RPS = 0.02, 0.5, 1.0
_PAUSE_S, _DOUBT_S = 60.0, 600.0
_MARK_RPS = 1e-3
"""Rate that marks the step with the share: no service is that slow."""
_PLAIN = MixStep(1.0, 0.0)
"""The step in which each replica answers with its own variant; the last step of a mix holds for any queue."""


def assumed(family: Family) -> frozenset[str]:
    """The variants of a family whose times are assumed."""
    return frozenset(name for name, unknown in family if unknown)


def unshared(mix: VariantMix) -> VariantMix:
    """A mix without the step that gives variants their first share; the inverse of :func:`shared`."""
    if not mix.steps or (mix.steps[0].rate_rps, mix.steps[0].delay_s) != (_MARK_RPS, 0.0):
        return mix
    rest = mix.steps[1:]
    return OWN if rest == (_PLAIN,) else VariantMix(rest)


def shared(mix: VariantMix, names: Sequence[str], share_ratio: float) -> VariantMix:
    """A mix in which variants answer a share each while nothing waits; the others keep what is left in proportion."""
    weights = {name: part * (1.0 - share_ratio * len(names)) for name, part in mix.steady}
    weights |= dict.fromkeys(names, share_ratio)
    return VariantMix((MixStep(_MARK_RPS, 0.0, tuple(weights.items())), *(mix.steps or (_PLAIN,))))


def first_share(slo: Slo, rate_rps: float, variants: int) -> float:
    """The share of the requests that each of so many variants answers while its times are assumed."""
    whole = min(_SHARE_RATIO, _LATE_PART * (1.0 - slo.quantile), _MOST_RPS / max(rate_rps, _MOST_RPS))
    return whole / variants


def slow(seen: Observation, names: Sequence[str], slo: Slo) -> str:
    """Evidence that one of these variants is slower than the SLO, as a phrase; empty for none."""
    for name in names:
        held_s = seen.held_s.get(name, 0.0)
        if held_s > slo.latency_s:
            return f"a request has been with {name} for {latency(held_s)}"
        if seen.occupied_s.get(name, 0.0) > slo.latency_s:
            return f"{name} took {latency(seen.occupied_s[name])} a request"
    return ""


def trusted(
    search: PredictiveSearch | TrialSearch, state: ServiceState, now_s: float
) -> PredictiveSearch | TrialSearch:
    """A search by prediction without layouts of variants whose assumed times are in doubt; trials measure theirs."""
    names = assumed(state.family)
    if isinstance(search, TrialSearch) or not names or now_s - state.doubted_s >= _DOUBT_S:
        return search
    return replace(search, candidates=known_layouts(search.candidates, names))


def introduced(step: Step[ServiceState], seen: Observation, policy: ServicePolicy) -> Step[ServiceState]:
    """The step of a policy with the first share of the variants whose times are assumed.

    Args:
        step: The policy's step without them.
        seen: The original observation, with them.
        policy: The policy.
    """
    names = sorted(assumed(policy.family).intersection(seen.loaded))
    decided = next((one for one in step.decisions if one.kind == SET_WEIGHTS), None)
    mix = unshared(seen.mix) if decided is None else VariantMix.of(decided.value)
    state, slo = step.state, policy.objectives.slo
    tried = () if seen.running is None else sorted(assumed(policy.family).intersection(seen.running.counts))
    phrase = slow(seen, [*names, *tried], slo)
    if tried and state.threat_s == seen.now_s:
        phrase = phrase or f"the SLO is threatened with {', '.join(tried)}"
    state = replace(state, doubted_s=seen.now_s) if phrase else state
    calm = seen.now_s - max(state.doubted_s, state.threat_s) >= _PAUSE_S
    settled = seen.running is not None and seen.running == state.layout and not seen.changing
    wanted = mix
    if names and calm and settled and state.trying is None and not state.protecting and state.planned_rps > 0:
        wanted = shared(mix, names, first_share(slo, state.planned_rps, len(names)))
    rest = tuple(one for one in step.decisions if one is not decided)
    if wanted == seen.mix:
        return Step(state, rest, step.wake_s)
    if decided is not None and wanted == mix:
        return Step(state, step.decisions, step.wake_s)
    if wanted == mix:
        reason = f"{phrase or 'the SLO or the layout comes first'}: the variants that joined answer no requests now"
    else:
        (_, share), joined = wanted.steady[-1], ", ".join(names)
        reason = f"the times of {joined} are assumed: {joined} answer{'s' * (len(names) == 1)} {share:.2%} at first"
    reason = "; ".join([*([] if decided is None else [decided.reason]), reason])
    decision = Decision(SET_WEIGHTS, policy.service, wanted.as_list(), policy.name, reason, JOINED)
    return Step(state, (decision, *rest), step.wake_s)
