"""Rates that one replica of a variant on GPUs of a type can serve within the SLOs, by its limit of requests at once."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from joulery.domain.arrays import FloatArray
from joulery.domain.gpu.language_plan import SloPart
from joulery.perf.llm.errors import Distance
from joulery.perf.llm.predictor import ENERGY, ITL_P99, TOKEN_TIME, LlmPredictor
from joulery.perf.llm.replica import (
    ReplicaCurve,
    SteadyLoad,
    answer_time_s,
    first_token_s,
    prompt_time_s,
    steady_state,
    token_latency_s,
    tokens_within,
)
from joulery.perf.llm.roofline import memory_limit
from joulery.perf.llm.runs import LlmPoint
from joulery.policies.placement.language.task import LanguageGpu, LanguageRules, LanguageService, LanguageVariant

_GRID = 24
_LIMITS = (4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
_STEPS = 28
"""Halvings that find the greatest rate: to 4e-9 of the capacity."""


class ReplicaGroup(NamedTuple):
    """A variant on a number of GPUs of one type.

    Attributes:
        service, variant, gpu: The service, its variant and the GPU type.
        gpus: GPUs of one replica.
    """

    service: LanguageService
    variant: LanguageVariant
    gpu: LanguageGpu
    gpus: int


@dataclass(frozen=True, slots=True)
class ReplicaCandidate:
    """A replica with a limit of requests at once, and the greatest rate it serves within the SLOs.

    Attributes:
        group: Variant, GPU type and number of GPUs.
        curve: Its predicted times and power.
        careful: The same curve, slower by the margins: SLOs are checked on it.
        margins: Margin of token times, and of the time between tokens.
        rate_rps: Greatest rate within the SLOs.
        basis, error_ratio: Basis and error of its joules a token at that load.
    """

    group: ReplicaGroup
    curve: ReplicaCurve
    careful: ReplicaCurve
    margins: tuple[float, float]
    rate_rps: float
    basis: str
    error_ratio: float

    @property
    def host_w(self) -> float:
        """Host power of its GPUs, W."""
        return self.group.gpus * self.group.gpu.host_w

    @property
    def usd_per_hour(self) -> float:
        """Price of its GPUs."""
        return self.group.gpus * self.group.gpu.usd_per_hour

    def power_w(self, rate_rps: float) -> float:
        """Mean power of its GPUs at a rate, W."""
        if rate_rps <= 0:
            return self.curve.idle_w
        state = steady_state(self.curve, rate_rps)
        assert state is not None
        return state.power_w

    def cost(self, rate_rps: float, rules: LanguageRules) -> float:
        """The objective of one replica at a rate, in its unit."""
        if rules.objective == "cost":
            return self.usd_per_hour
        watts = self.power_w(rate_rps) + self.host_w
        return watts if rules.objective == "energy" else watts / 1e3 * rules.pue * (rules.g_per_kwh or 0.0)

    def parts(self, rate_rps: float) -> tuple[SloPart, ...]:
        """The SLOs with their predictions at a rate, margins included."""
        state = steady_state(self.careful, rate_rps)
        assert state is not None
        return slo_parts(self.group.service, self.careful, state, self.margins)


class RefusedGroup(NamedTuple):
    """A group without a candidate, and the reason.

    Attributes:
        group: Variant, GPU type and number of GPUs.
        reason: The reason, as text.
        part: The SLO that one request alone breaks; None where the memory is too small.
    """

    group: ReplicaGroup
    reason: str
    part: SloPart | None = None


def slo_parts(
    service: LanguageService, curve: ReplicaCurve, state: SteadyLoad, margins: tuple[float, float]
) -> tuple[SloPart, ...]:
    """Every SLO of a service with its prediction."""
    parts = []
    if service.ttft is not None:
        quantile = service.ttft.quantile_ratio
        parts.append(
            SloPart("ttft", quantile, first_token_s(curve, state, quantile), margins[0], service.ttft.latency_s)
        )
    if service.itl is not None:
        quantile = service.itl.quantile_ratio
        parts.append(
            SloPart("itl", quantile, token_latency_s(curve, state, quantile), margins[1], service.itl.latency_s)
        )
    if service.answer_s is not None:
        wait = state.wait_ratio / state.drain_rps
        took = wait + curve.stall_s + answer_time_s(curve, state)
        parts.append(SloPart("answer", None, took, margins[0], service.answer_s))
    return tuple(parts)


def within(service: LanguageService, curve: ReplicaCurve, rate_rps: float) -> bool:
    """Whether a replica keeps every SLO at a rate."""
    state = steady_state(curve, rate_rps)
    if state is None:
        return False
    if service.itl is not None and tokens_within(curve, state, service.itl.latency_s) < service.itl.quantile_ratio:
        return False
    if service.ttft is not None:
        took = first_token_s(curve, state, service.ttft.quantile_ratio)
        if took > service.ttft.latency_s:
            return False
    if service.answer_s is None:
        return True
    took = state.wait_ratio / state.drain_rps + curve.stall_s + answer_time_s(curve, state)
    return took <= service.answer_s


def candidates(
    group: ReplicaGroup, predictor: LlmPredictor, rules: LanguageRules
) -> list[ReplicaCandidate] | RefusedGroup:
    """Replicas of a group by their limit of requests at once; a refusal where none keeps the SLOs."""
    service = group.service
    point = LlmPoint(
        group.variant.model,
        group.variant.facts,
        group.gpu.facts,
        group.gpus,
        group.variant.precision,
        service.task,
        1.0,
        None,
        service.prompt_tokens,
        service.answer_tokens,
    )
    most = min(int(memory_limit(replace(point, output_tokens=2 * service.answer_tokens))), rules.most_seqs)
    if most < 1:
        need = group.variant.facts.weights_bytes(group.variant.precision) / 1e9
        has = group.gpus * group.gpu.facts.memory_bytes / 1e9
        return RefusedGroup(group, f"weights of {need:.0f} GB and a KV cache do not fit into {has:.0f} GB")
    curve, distance, error, margins = _curve(group, point, most, predictor, rules)
    careful = _slower(curve, margins)
    found = []
    for limit in sorted({*(each for each in _LIMITS if each < most), most}):
        short, slow = curve.limited(limit), careful.limited(limit)
        rate = greatest_rate(service, slow)
        if rate > 0:
            basis = "fitted" if distance in (Distance.MEASURED, Distance.INSIDE, Distance.BEYOND) else "transferred"
            found.append(ReplicaCandidate(group, short, slow, margins, rate, basis, error))
    if found:
        return found
    state = steady_state(careful, 1e-6 * float(careful.ends_rps[0]))
    assert state is not None
    violated = min(slo_parts(service, careful, state, margins), key=lambda part: part.slack_ratio)
    return RefusedGroup(
        group, f"{violated.name} {violated.predicted_s:.3g} s of {violated.limit_s:g} s with one request", violated
    )


def greatest_rate(service: LanguageService, curve: ReplicaCurve) -> float:
    """The greatest rate within the SLOs, requests/s; 0 where not even the smallest is."""
    high = float(curve.ends_rps[-1]) * (1 - 1e-6)
    if within(service, curve, high):
        return high
    low = high * 1e-5
    if not within(service, curve, low):
        return 0.0
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if within(service, curve, middle) else (low, middle)
    return low


def _curve(
    group: ReplicaGroup, point: LlmPoint, most: int, predictor: LlmPredictor, rules: LanguageRules
) -> tuple[ReplicaCurve, Distance, float, tuple[float, float]]:
    """The predicted curve up to ``most`` requests, how far it is from measurements, its error and its margins."""
    loads = np.unique(np.concatenate([[1.0, float(most)], np.geomspace(1.0, most, _GRID)]))
    asked = replace(point, output_tokens=None if group.service.task else point.output_tokens)
    predicted = predictor.predict([asked.at(float(load)) for load in loads])
    every = np.log(np.arange(1, most + 1))

    def spread(values: list[float | None]) -> FloatArray:
        return np.asarray(np.exp(np.interp(every, np.log(loads), np.log(np.array(values, np.float64)))), np.float64)

    token_time = spread([each.point.batch / (each.throughput_tps or math.nan) for each in predicted])
    power = spread([each.power_w for each in predicted])
    p50 = spread([each.itl_p50_s or each.point.batch / (each.throughput_tps or math.nan) for each in predicted])
    p99 = np.maximum(spread([each.itl_p99_s or math.nan for each in predicted]), p50)
    idle = float(power[0]) if group.gpu.idle_w is None else group.gpus * group.gpu.idle_w
    stall = prompt_time_s(point, group.service.prompt_tokens)
    # Prompts longer than those of the measured runs make steps longer than was measured.
    joined = np.arange(1, most + 1) / group.service.answer_tokens
    token_time = np.maximum(token_time, p50 + joined * np.maximum(stall - p50, 0.0))
    curve = ReplicaCurve(token_time, power, p50, p99, idle, stall, group.service.answer_tokens)
    middle = predicted[len(predicted) // 2]
    margins = (
        (rules.margin_ratio, rules.margin_ratio)
        if rules.margin_ratio is not None
        else (middle.bands[TOKEN_TIME].typical_ratio, middle.bands[ITL_P99].typical_ratio)
    )
    margins = (margins[0] + rules.extra_margin_ratio, margins[1] + rules.extra_margin_ratio)
    return curve, middle.distance, middle.bands[ENERGY].typical_ratio, margins


def _slower(curve: ReplicaCurve, margins: tuple[float, float]) -> ReplicaCurve:
    """A curve whose times are longer by the margins."""
    times, latencies = 1 + margins[0], 1 + margins[1]
    return replace(
        curve,
        token_time_s=curve.token_time_s * times,
        itl_p50_s=curve.itl_p50_s * latencies,
        itl_p99_s=curve.itl_p99_s * latencies,
        stall_s=curve.stall_s * times,
    )
