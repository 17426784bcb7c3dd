"""The reasons that a service policy gives for its decisions."""

from __future__ import annotations

import math

from joulery.domain.format import latency
from joulery.domain.gpu.layout import Layout
from joulery.domain.serving.mix import VariantMix, Weights
from joulery.domain.serving.service import Slo
from joulery.policies.serving.objective import NO_BASE_G_PER_KWH, Objective, ReplanTrigger, ServiceObjectives
from joulery.policies.serving.observation import Sample
from joulery.policies.serving.search.predictive_search import PredictedChoice
from joulery.policies.serving.search.trials import MeasuredLayout, Verdict

_VERDICTS = {
    Verdict.WITHIN: "keeps the SLO",
    Verdict.ABOVE: "violates the SLO",
    Verdict.UNSURE: "may violate the SLO",
    Verdict.NO_DATA: "had no data",
}

_FORGETS = 60.0
"""Multiples of the settling time for which an intensity that is not known any more still counts."""


def short(layout: Layout) -> str:
    """A layout in few characters: ``lite2+lite0``, ``lite1 (2 cores)``."""
    slices = {item.slice for item in layout.instances}
    names = "+".join(item.variant for item in layout.instances)
    (one,) = slices if len(slices) == 1 else (None,)
    if one is None:
        return "+".join(f"{item.variant}@{item.slice.cores or item.slice}" for item in layout.instances)
    return f"{names} ({one.cores} cores)" if one.cores > 1 else names


def quantile(slo: Slo) -> str:
    """The quantile of an SLO as text: ``p95``."""
    return f"p{100 * slo.quantile:g}"


def changed(then: ServiceObjectives | None, now: ServiceObjectives) -> str:
    """Changes of the objectives as text; empty where they did not change."""
    if then is None or then == now:
        return ""
    if then.slo != now.slo:
        verb = "tightened" if now.slo.latency_s < then.slo.latency_s else "changed"
        before, after = (f"{quantile(slo)} {latency(slo.latency_s)}" for slo in (then.slo, now.slo))
        return f"SLO {verb} from {before} to {after}"
    if then.lambda_ratio != now.lambda_ratio:
        return f"lambda changed from {then.lambda_ratio:g} to {now.lambda_ratio:g}"
    return f"minimum accuracy changed from {then.minimum_accuracy_ratio:.2%} to {now.minimum_accuracy_ratio:.2%}"


def moved(what: str, unit: str, now: float, then: float) -> str:
    """The change of a quantity as text: ``grid up from 190 to 201 g/kWh``."""
    return f"{what} {'up' if now > then else 'down'} from {then:.0f} to {now:.0f} {unit}"


def measured(slo: Slo, sample: Sample, verdict: Verdict) -> str:
    """The outcome of a trial as text."""
    where = f"{quantile(slo)} {latency(max(0.0, sample.latency_low_s))} to {latency(sample.latency_high_s)}"
    joules = f"{1e3 * sample.energy_j:.3g} mJ a request"
    return f"{short(sample.layout)} {_VERDICTS[verdict]} ({where}, {joules}, {sample.requests} requests)"


def intensity_moved(trigger: ReplanTrigger, now_g: float, planned_g: float, unknown_s: float) -> str:
    """Change of the intensity from the one searched at, as text; empty where it did not move.

    Args:
        trigger: Thresholds above which the intensity counts as moved.
        now_g: Intensity now; NaN while unknown.
        planned_g: Intensity searched at; NaN where it was unknown.
        unknown_s: Seconds for which it has been unknown; after 60 settling times it counts as gone.
    """
    if not math.isfinite(now_g):
        gone = math.isfinite(planned_g) and unknown_s >= _FORGETS * trigger.settle_s
        return "intensity not known any more" if gone else ""
    if math.isnan(planned_g):
        return f"intensity known again, {now_g:.0f} g/kWh"
    if trigger.intensity_moved(now_g, planned_g):
        return moved("grid", "g/kWh", max(0.0, now_g), max(0.0, planned_g))
    return ""


def predicted(choice: PredictedChoice, objective: Objective, slo: Slo, g_per_kwh: float) -> str:
    """The reason for choosing a predicted layout."""
    limit = f"{quantile(slo)} {latency(choice.latency_s)} of {latency(slo.latency_s)}"
    if not choice.feasible:
        return f"none of {choice.tried} layouts keeps the SLO; {short(choice.layout)} comes nearest, {limit}"
    metrics, name = choice.metrics, short(choice.layout)
    changes = _changes(objective, metrics.accuracy_ratio, metrics.energy_j, g_per_kwh)
    if not math.isfinite(g_per_kwh):
        return f"intensity unknown, so {_decider(objective)}: {name}, {changes}, {limit}"
    return f"{name} scores best of {choice.tried}: {changes} against {_baseline(objective)}, {limit}"


def best(best: MeasuredLayout, objective: Objective, slo: Slo, g_per_kwh: float, known: int) -> str:
    """The reason for settling on a measured layout."""
    limit = f"{quantile(slo)} at most {latency(best.latency_high_s)} of {latency(slo.latency_s)}"
    changes = _changes(objective, best.metrics.accuracy_ratio, best.metrics.energy_j, g_per_kwh)
    if not math.isfinite(g_per_kwh):
        return f"intensity unknown, so {_decider(objective)}: {short(best.layout)}, {changes}, {limit}"
    return f"{short(best.layout)} is the best of {known} measured: {changes} against {_baseline(objective)}, {limit}"


def _decider(objective: Objective) -> str:
    """The criterion while carbon cannot be weighed."""
    return "accuracy alone decides" if objective.lambda_ratio < 1 else "the fewest joules decide"


def _baseline(objective: Objective) -> str:
    """Reference of changes: the grams of Eq. 2 are those of the baseline at a stated intensity."""
    if objective.base_g_per_kwh == NO_BASE_G_PER_KWH:
        return "the baseline"
    return f"the baseline at {objective.base_g_per_kwh:g} g/kWh"


def _changes(objective: Objective, accuracy_ratio: float, energy_j: float, g_per_kwh: float) -> str:
    accuracy = f"accuracy {100 * objective.accuracy_change(accuracy_ratio):+.1f} %"
    if not math.isfinite(g_per_kwh):
        return accuracy
    if objective.base_g_per_kwh == NO_BASE_G_PER_KWH:
        return f"joules {100 * (energy_j / objective.base_energy_j - 1):+.0f} %, {accuracy}"
    return f"carbon {-100 * objective.carbon_change(energy_j, g_per_kwh):+.0f} %, {accuracy}"


def none_feasible(goals: ServiceObjectives, measured: int, layout: Layout, *, deferred: bool = False) -> str:
    """The message that no measured layout keeps the objectives, or none was measured yet, and what runs instead."""
    if not measured and deferred:
        return f"{short(layout)} serves meanwhile"
    if not measured:
        return f"nothing could be measured; {short(layout)} serves"
    asked = f"the SLO of {latency(goals.slo.latency_s)}"
    if goals.minimum_accuracy_ratio > 0:
        asked += f" and an accuracy of {goals.minimum_accuracy_ratio:.2%}"
    return f"none of {measured} measured keeps {asked}; {short(layout)} comes nearest"


def steered(mix: VariantMix, cause: str) -> str:
    """The loaded variants that answer from now on, as text.

    Args:
        mix: The mix.
        cause: The reason; empty where only a long queue is steered.
    """
    if not mix.steps:
        return "each replica answers with its own variant, whatever waits"
    shares = [f"{name} {share:.0%}" for name, share in mix.steady if share > 0]
    rest = 1.0 - math.fsum(share for _, share in mix.steady)
    if rest > 1e-9:
        shares.append(f"each replica's own variant {rest:.0%}")
    leaner = mix.steps[-1].weights
    queue = "" if leaner == mix.steady else f"; {_names(leaner)} in front of a long queue"
    reason = f"{cause}: " if cause else ""
    if not mix.steady:
        return f"{reason}each replica answers with its own variant{queue}"
    return f"{reason}answers by {', '.join(shares)}{queue}"


def _names(weights: Weights) -> str:
    return " and ".join(name for name, share in weights if share > 0) or "each replica's own variant"
