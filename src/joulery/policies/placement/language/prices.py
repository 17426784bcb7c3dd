"""Prices of requests, GPUs, milliseconds and quality in a plan for language models: the duals, and their proof.

At given prices of GPUs a request a second is worth the least that any candidate serves it for: its slope, and its fixed
part spread over its greatest rate. So any prices of GPUs prove a bound, and those of the relaxation prove the best one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from joulery.domain.gpu.language_plan import CandidateReplica, LanguageCertificate, LooserLimit
from joulery.policies.placement.language.candidates import ReplicaCandidate, greatest_rate
from joulery.policies.placement.language.master import ReplicaLine, line_below, pool_prices
from joulery.policies.placement.language.task import LanguageRules, LanguageService

_LOOSER = 1.1
"""Ratio by which a limit is made looser to find what it is worth."""
_NEAREST = 8
"""Candidates of a service that a looser limit is tried on: those that serve requests for least now."""
_WORTH_SAYING = 1e-6
"""Savings below this part of a service's cost are rounding."""


def price_proof(
    lines: Sequence[ReplicaLine],
    services: Sequence[LanguageService],
    available: Mapping[str, int],
    rules: LanguageRules,
    barred: Sequence[ReplicaCandidate] = (),
) -> LanguageCertificate:
    """The prices of a problem, the bound they prove, and what looser limits would save.

    Args:
        lines: Every candidate that no other replaces; at least one of each service.
        services: What is served.
        available: GPUs there are, by type.
        rules: The objective.
        barred: Candidates of variants below the quality that their service requires.
    """
    rates = {each.name: each.rate_rps for each in services}
    pools = pool_prices(lines, rates, available)
    demand = {
        name: min(_price(line, pools) for line in lines if line.candidate.group.service.name == name) for name in rates
    }
    relaxed = math.fsum(demand[name] * rate for name, rate in rates.items())
    relaxed -= math.fsum(pools.get(name, 0.0) * most for name, most in available.items())
    looser = [
        each
        for service in services
        for each in (
            *_looser_slos(service, [line for line in lines if line.candidate.group.service == service], pools, rules),
            *_looser_quality(service, demand[service.name], barred, pools, rules),
        )
    ]
    return LanguageCertificate(
        relaxed, demand, pools, rates, dict(available), tuple(_candidate(each) for each in lines), tuple(looser)
    )


def _price(line: ReplicaLine, pools: Mapping[str, float]) -> float:
    """Price at which a candidate serves a request a second, in fractions of replicas."""
    candidate = line.candidate
    fixed = line.fixed + candidate.group.gpus * pools.get(candidate.group.gpu.name, 0.0)
    return line.slope + fixed / candidate.rate_rps


def _looser_slos(
    service: LanguageService, lines: Sequence[ReplicaLine], pools: Mapping[str, float], rules: LanguageRules
) -> list[LooserLimit]:
    """Savings of a limit that is a tenth looser, for each SLO where that saves anything."""
    nearest = sorted(lines, key=lambda each: _price(each, pools))[:_NEAREST]
    now = _price(nearest[0], pools)
    found = []
    for what, limit_s, other in _with_looser_slo(service):
        prices = [now]
        for line in nearest:
            rate = greatest_rate(other, line.candidate.careful)
            if rate > line.candidate.rate_rps:
                prices.append(_price(line_below(replace(line.candidate, rate_rps=rate), rules), pools))
        saves = (now - min(prices)) * service.rate_rps
        if saves > _WORTH_SAYING * now * service.rate_rps:
            found.append(LooserLimit(service.name, what, limit_s, limit_s * _LOOSER, saves))
    return found


def _with_looser_slo(service: LanguageService) -> list[tuple[str, float, LanguageService]]:
    """Each SLO with its limit, and the service with that one a tenth looser."""
    found = []
    if service.ttft is not None:
        wider = service.ttft._replace(latency_s=service.ttft.latency_s * _LOOSER)
        found.append(("ttft", service.ttft.latency_s, service._replace(ttft=wider)))
    if service.itl is not None:
        wider = service.itl._replace(latency_s=service.itl.latency_s * _LOOSER)
        found.append(("itl", service.itl.latency_s, service._replace(itl=wider)))
    if service.answer_s is not None:
        found.append(("answer", service.answer_s, service._replace(answer_s=service.answer_s * _LOOSER)))
    return found


def _looser_quality(
    service: LanguageService,
    now: float,
    barred: Sequence[ReplicaCandidate],
    pools: Mapping[str, float],
    rules: LanguageRules,
) -> list[LooserLimit]:
    """Savings of variants of lower quality, best quality first; each saves more than those before it."""
    found: list[LooserLimit] = []
    mine = [each for each in barred if each.group.service.name == service.name]
    least = now * (1 - _WORTH_SAYING)
    for quality in sorted({each.group.variant.quality_ratio or 0.0 for each in mine}, reverse=True):
        some = [each for each in mine if (each.group.variant.quality_ratio or 0.0) == quality]
        price, model = min((_price(line_below(each, rules), pools), each.group.variant.model) for each in some)
        if price < least:
            least = price
            saves = (now - price) * service.rate_rps
            found.append(LooserLimit(service.name, "quality", service.minimum_quality_ratio, quality, saves, model))
    return found


def _candidate(line: ReplicaLine) -> CandidateReplica:
    candidate, group = line.candidate, line.candidate.group
    return CandidateReplica(
        group.service.name,
        group.variant.model,
        group.variant.precision,
        group.gpu.name,
        group.gpus,
        candidate.curve.limit,
        candidate.rate_rps,
        line.fixed,
        line.slope,
    )
