"""What a policy of live trials says of its decisions."""

from __future__ import annotations

import math

from joulery.domain.gpu.layout import Layout
from joulery.domain.serving.service import Slo
from joulery.policies.serving.trial_sample import Sample, Tried, Verdict
from joulery.policies.serving.trial_search import TrialProblem
from joulery.policies.serving.trial_state import TrialState, TrialTerms
from joulery.policies.serving.variant_policy import short

_VERDICTS = {
    Verdict.KEEPS: "keeps the SLO",
    Verdict.BREAKS: "breaks the SLO",
    Verdict.UNSURE: "may break the SLO",
    Verdict.SILENT: "said nothing",
}


def changed(then: TrialTerms | None, now: TrialTerms) -> str:
    """What is asked for otherwise than before, in words; empty for nothing."""
    if then is None or then == now:
        return ""
    if then.slo != now.slo:
        verb = "tightened" if now.slo.latency_s < then.slo.latency_s else "changed"
        before, after = (f"{quantile(slo)} {ms(slo.latency_s)}" for slo in (then.slo, now.slo))
        return f"SLO {verb} from {before} to {after}"
    if then.lambda_ratio != now.lambda_ratio:
        return f"lambda changed from {then.lambda_ratio:g} to {now.lambda_ratio:g}"
    return f"accuracy asked for changed from {then.minimum_accuracy_ratio:.2%} to {now.minimum_accuracy_ratio:.2%}"


def seen(slo: Slo, sample: Sample, verdict: Verdict) -> str:
    """What a trial showed."""
    where = f"{quantile(slo)} {ms(max(0.0, sample.latency_low_s))} to {ms(sample.latency_high_s)}"
    joules = f"{1e3 * sample.energy_j:.3g} mJ a request"
    return f"{short(sample.layout)} {_VERDICTS[verdict]} ({where}, {joules}, {sample.requests} requests)"


def best(problem: TrialProblem, terms: TrialTerms, state: TrialState, chosen: Tried, g_per_kwh: float) -> str:
    """Why a measured layout was settled on."""
    limit = f"{quantile(terms.slo)} at most {ms(chosen.latency_high_s)} of {ms(terms.slo.latency_s)}"
    if state.yardstick is None:
        return f"{short(chosen.layout)}, {limit}"
    objective = problem.objective(terms.lambda_ratio, state.yardstick)
    accuracy = f"accuracy {100 * objective.accuracy_change(chosen.metrics.accuracy_ratio):+.1f} %"
    if not math.isfinite(g_per_kwh):
        return f"intensity unknown, so accuracy alone decides: {short(chosen.layout)}, {accuracy}, {limit}"
    carbon = f"carbon {-100 * objective.carbon_change(chosen.metrics.energy_j, g_per_kwh):+.0f} %"
    among = f"best of {len(state.known)} measured"
    return f"{short(chosen.layout)} is the {among}: {carbon}, {accuracy} against the yardstick, {limit}"


def none_keeps(terms: TrialTerms, measured: int, layout: Layout, *, waits: bool = False) -> str:
    """That nothing keeps what is asked for, and what runs instead; or that nothing was measured yet, as it waits."""
    if not measured and waits:
        return f"{short(layout)} serves meanwhile"
    if not measured:
        return f"nothing could be measured; {short(layout)} serves"
    asked = f"the SLO of {ms(terms.slo.latency_s)}"
    if terms.minimum_accuracy_ratio > 0:
        asked += f" and an accuracy of {terms.minimum_accuracy_ratio:.2%}"
    return f"none of {measured} measured keeps {asked}; back to the yardstick {short(layout)}"


def quantile(slo: Slo) -> str:
    """``p95``."""
    return f"p{100 * slo.quantile:g}"


def ms(seconds: float) -> str:
    """``31 ms``."""
    return f"{1e3 * seconds:.0f} ms" if math.isfinite(seconds) else "unbounded"
