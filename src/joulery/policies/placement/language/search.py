"""The plan of least grams, joules or dollars for language models, with a lower bound.

Every variant on every number of GPUs of every type with every limit of requests at once is a candidate replica; the
integer program of :mod:`joulery.policies.placement.language.master` chooses how many of each, and bounds what any plan
of them could cost. Replicas of one kind alone are enumerated beside it, and the better of the two is the plan.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from joulery.domain.errors import ConfigError, InfeasibleError
from joulery.domain.gpu.language_plan import LanguageAlternative, LanguageBound, LanguagePlan, LanguageReplicas
from joulery.perf.llm.predictor import LlmPredictor
from joulery.perf.llm.replica import steady_state
from joulery.policies.placement.language.candidates import RefusedGroup, ReplicaCandidate, ReplicaGroup, candidates
from joulery.policies.placement.language.master import ReplicaShare, line_below, solve_replicas, undominated
from joulery.policies.placement.language.prices import price_proof
from joulery.policies.placement.language.task import LanguageGpu, LanguageRules, LanguageService


@dataclass(frozen=True, slots=True)
class ServedReplicas:
    """Equal replicas of a candidate.

    Attributes:
        candidate: Candidate of each replica.
        count: Number of replicas.
        rate_rps: Requests a second of each.
    """

    candidate: ReplicaCandidate
    count: int
    rate_rps: float

    def cost(self, rules: LanguageRules) -> float:
        """The objective of all of them, in its unit."""
        return self.count * self.candidate.cost(self.rate_rps, rules)


Judge = Callable[[ServedReplicas], tuple[tuple[str, float], ...]]
"""Simulates a replica at its rate."""


class _Searched(NamedTuple):
    """A service with its eligible variants and candidates, and the candidates barred by their quality alone."""

    service: LanguageService
    eligible: tuple[object, ...]
    found: list[ReplicaCandidate]
    refused: list[RefusedGroup]
    barred: list[ReplicaCandidate]


def plan_language(
    services: Sequence[LanguageService],
    gpus: Sequence[LanguageGpu],
    predictor: LlmPredictor,
    rules: LanguageRules,
    source: str,
    notes: tuple[str, ...] = (),
    judge: Judge | None = None,
) -> LanguagePlan:
    """The plan of least objective that was found, with a lower bound on any plan.

    Args:
        services, gpus: The services to plan for, and the GPU types to plan with.
        predictor: Predicts times and power of replicas.
        rules: The objective and the rules of planning.
        source, notes: Source and notes to put into the plan.
        judge: Simulates a replica at its rate and returns the time for each SLO by name, s.

    Raises:
        ConfigError: The objective is carbon and there is no intensity.
        InfeasibleError: No candidate of a service keeps its SLOs, or there are too few GPUs.
    """
    if rules.objective == "carbon" and rules.g_per_kwh is None:
        raise ConfigError(
            "least carbon needs a carbon intensity", pointer="carbon", hint="add carbon: to the site, or --intensity"
        )
    searched = [_search(service, gpus, predictor, rules) for service in services]
    available = {gpu.name: gpu.available for gpu in gpus if gpu.available is not None}
    lines = undominated([line_below(candidate, rules) for each in searched for candidate in each.found])
    solved = solve_replicas(lines, {service.name: service.rate_rps for service in services}, available, rules)
    if solved.infeasible:
        raise _too_few(searched, available, rules)
    chosen = _shared_out(solved.shares, rules)
    alike = [_cheapest(_alike(each, rules), rules) for each in searched]
    if _are_available(alike, available) and (
        not chosen or math.fsum(each.cost(rules) for each in alike) <= math.fsum(each.cost(rules) for each in chosen)
    ):
        chosen = alike
    if not chosen:
        raise InfeasibleError(
            "the solver reached its limit before it found a plan within the GPUs there are",
            binding="limit of the solver",
            hint="list fewer variants or GPU types, or plan where the machine has less to do",
        )
    value = math.fsum(each.cost(rules) for each in chosen)
    bound = min(solved.bound, value)
    return LanguagePlan(
        rules.objective,
        tuple(_replicas(each, () if judge is None else judge(each)) for each in chosen),
        LanguageBound(bound, 1 - bound / value if value > 0 else 0.0),
        sum(len(each.found) for each in searched),
        tuple(other for each in searched for other in _alternatives(each, rules)),
        rules.g_per_kwh,
        rules.pue,
        source,
        notes,
        certificate=price_proof(
            lines, services, available, rules, [candidate for each in searched for candidate in each.barred]
        ),
    )


def _are_available(replicas: Sequence[ServedReplicas], available: Mapping[str, int]) -> bool:
    """Whether there are enough GPUs for some replicas."""
    needed: Counter[str] = Counter()
    for each in replicas:
        needed[each.candidate.group.gpu.name] += each.count * each.candidate.group.gpus
    return all(needed[name] <= most for name, most in available.items())


def _shared_out(shares: Sequence[ReplicaShare], rules: LanguageRules) -> list[ServedReplicas]:
    """The replicas of the program's solution with their rates. Dollars do not depend on rates: each replica then gets
    the same share of its greatest rate, so that none reaches its limit before the others."""
    found = []
    for share in shares:
        rate = share.rate_rps / share.count
        if rules.objective == "cost":
            mine = [other for other in shares if other.candidate.group.service == share.candidate.group.service]
            full = math.fsum(other.count * other.candidate.rate_rps for other in mine)
            rate = share.candidate.rate_rps * share.candidate.group.service.rate_rps / full
        found.append(ServedReplicas(share.candidate, share.count, min(rate, share.candidate.rate_rps)))
    return found


def _search(
    service: LanguageService, gpus: Sequence[LanguageGpu], predictor: LlmPredictor, rules: LanguageRules
) -> _Searched:
    """Every candidate of a service.

    Raises:
        InfeasibleError: There is no candidate.
    """
    eligible = tuple(
        variant for variant in service.variants if (variant.quality_ratio or 0.0) >= service.minimum_quality_ratio
    )
    if not eligible:
        best = max((variant.quality_ratio or 0.0) for variant in service.variants)
        raise InfeasibleError(
            f"{service.name}: no variant has a quality of {service.minimum_quality_ratio:.1%}",
            binding=f"{service.name}: minimum_quality",
            nearest={"quality_ratio": best},
            hint=f"the best stated quality is {best:.1%}",
        )
    found: list[ReplicaCandidate] = []
    refused: list[RefusedGroup] = []
    barred: list[ReplicaCandidate] = []
    groups = [
        ReplicaGroup(service, variant, gpu, count)
        for variant in service.variants
        for gpu in gpus
        for count in variant.gpus
        if gpu.available is None or count <= gpu.available
    ]
    for group in groups:
        made = candidates(group, predictor, rules)
        if group.variant not in eligible:
            barred += [] if isinstance(made, RefusedGroup) else made
        elif isinstance(made, RefusedGroup):
            refused.append(made)
        else:
            found += made
    if not found:
        raise _infeasible(service, refused)
    return _Searched(service, eligible, found, refused, barred)


def _alike(searched: _Searched, rules: LanguageRules) -> list[ServedReplicas]:
    """Ways to serve a service with replicas of one kind: as few as keep the SLOs, and one more."""
    rate = searched.service.rate_rps
    options = []
    for candidate in searched.found:
        least = math.ceil(rate / candidate.rate_rps - 1e-9)
        counts = (least,) if rules.objective == "cost" else (least, least + 1)
        options += [ServedReplicas(candidate, count, rate / count) for count in counts]
    return options


def _cheapest(options: Sequence[ServedReplicas], rules: LanguageRules) -> ServedReplicas:
    """The option of least objective; watts decide between equal prices."""
    least = min(option.cost(rules) for option in options)
    near = [option for option in options if option.cost(rules) <= least * (1 + 1e-9)]
    return min(near, key=lambda option: option.count * option.candidate.power_w(option.rate_rps))


def _too_few(searched: Sequence[_Searched], available: dict[str, int], rules: LanguageRules) -> InfeasibleError:
    """The error raised when there are too few GPUs: the type that binds, and the numbers that would suffice."""
    needed: Counter[str] = Counter()
    for each in searched:
        best = _cheapest(_alike(each, rules), rules)
        needed[best.candidate.group.gpu.name] += best.count * best.candidate.group.gpus
    name = next((name for name, most in available.items() if needed[name] > most), next(iter(available)))
    return InfeasibleError(
        f"the GPUs there are do not serve {' and '.join(each.service.name for each in searched)}",
        binding=f"fleet.gpus {name}: available {available[name]}",
        nearest={"gpus": dict(needed)},
        hint=f"without the limits {' + '.join(f'{count} x {kind}' for kind, count in needed.items())} would do",
    )


def _alternatives(searched: _Searched, rules: LanguageRules) -> list[LanguageAlternative]:
    """The best plan of each variant on each GPU type alone, or the reason where there is none."""
    kinds: dict[tuple[str, str, str], list[ServedReplicas]] = {}
    for option in _alike(searched, rules):
        group = option.candidate.group
        kinds.setdefault((group.variant.model, group.variant.precision, group.gpu.name), []).append(option)
    best = {}
    for key, options in kinds.items():
        replicas = _replicas(_cheapest(options, rules))
        gpus = replicas.count * replicas.gpus
        figures = (replicas.total_w, replicas.total_usd_per_hour, replicas.energy_per_token_j)
        best[key] = LanguageAlternative(searched.service.name, *key, gpus, *figures, "")
    for each in searched.refused:
        group = each.group
        key = (group.variant.model, group.variant.precision, group.gpu.name)
        if key not in best:
            best[key] = LanguageAlternative(searched.service.name, *key, 0, 0.0, 0.0, 0.0, each.reason)
    return list(best.values())


def _replicas(part: ServedReplicas, simulated_s: tuple[tuple[str, float], ...] = ()) -> LanguageReplicas:
    candidate, group = part.candidate, part.candidate.group
    state = steady_state(candidate.curve, part.rate_rps)
    assert state is not None
    watts = state.power_w + candidate.host_w
    return LanguageReplicas(
        group.service.name,
        group.variant.model,
        group.variant.precision,
        group.variant.quality_ratio,
        group.gpu.name,
        group.gpus,
        part.count,
        candidate.curve.limit,
        part.rate_rps,
        state.in_flight,
        state.power_w,
        candidate.host_w,
        candidate.usd_per_hour,
        watts / (part.rate_rps * group.service.answer_tokens),
        candidate.parts(part.rate_rps),
        candidate.basis,
        candidate.error_ratio,
        simulated_s,
    )


def _infeasible(service: LanguageService, refused: Sequence[RefusedGroup]) -> InfeasibleError:
    """The error that names the binding limit and the nearest candidate."""
    if not refused:
        return InfeasibleError(
            f"{service.name}: no GPU type has as many GPUs as a replica needs",
            binding="fleet.gpus available",
            hint="raise available, or allow replicas of fewer GPUs",
        )
    tried = [each for each in refused if each.part is not None]
    if not tried:
        group = refused[0].group
        return InfeasibleError(
            f"{service.name}: no variant fits into the memory of a replica",
            binding=refused[0].reason,
            hint=f"allow more GPUs a replica than {max(group.variant.gpus)}, or a smaller model or precision",
        )
    near = max(tried, key=lambda each: each.part.slack_ratio if each.part is not None else -math.inf)
    part, group = near.part, near.group
    assert part is not None
    return InfeasibleError(
        f"{service.name}: no variant keeps {part.name} within {part.limit_s:g} s, even with one request at a time",
        binding=f"{service.name}: slo.{part.name}",
        nearest={
            "model": group.variant.model,
            "gpu": group.gpu.name,
            "gpus": group.gpus,
            f"{part.name}_s": part.predicted_s,
        },
        hint=f"nearest: {group.variant.model} on {group.gpus} x {group.gpu.name} with {part.predicted_s:.3g} s",
    )
