"""Prometheus metrics of language models: tokens, latency, joules and grams per request and token, predictions, queue.

``LLM_METRICS`` declares every family; ``docs/reference/metrics.md`` is written from it and
:data:`joulery.gateway.metrics.METRICS`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from prometheus_client import Counter, Histogram
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from joulery.domain.serving.engine import Outcome, RequestRecord
from joulery.domain.serving.generation import GenerationCost, GenerationKind
from joulery.gateway.metrics import Family, Registry
from joulery.runtime.llm.request_meter import RequestMeter
from joulery.runtime.llm.service import LLMService

_STEPS = (1.0, 2.5, 5.0)
TOKEN_ENERGY_BUCKETS_J = tuple(round(step * 10.0**power, 9) for power in range(-5, 3) for step in _STEPS)
GRAM_BUCKETS = tuple(round(step * 10.0**power, 12) for power in range(-7, 2) for step in _STEPS)
TIME_BUCKETS_S = tuple(round(step * 10.0**power, 9) for power in range(-3, 3) for step in _STEPS)
_GEN_AI = ("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model", "gen_ai_response_model")
"""Attributes of OpenTelemetry's semantic conventions for generative AI, as Prometheus labels."""
_GEN_AI_BUCKETS = {
    "gen_ai_server_request_duration_seconds": tuple(0.01 * 2**power for power in range(14)),
    "gen_ai_server_time_to_first_token_seconds": (
        *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    ),
    "gen_ai_server_time_per_output_token_seconds": (
        *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
    ),
    "gen_ai_client_token_usage": tuple(float(4**power) for power in range(14)),
}
"""Bucket boundaries that the conventions recommend."""
_OPERATIONS = {
    GenerationKind.CHAT: "chat",
    GenerationKind.RESPONSE: "chat",
    GenerationKind.COMPLETION: "text_completion",
    GenerationKind.EMBEDDING: "embeddings",
}
_ENGINE = {
    "engine_running_requests": "running",
    "engine_waiting_requests": "waiting",
    "engine_kv_cache_usage_ratio": "kv_usage_ratio",
}
_PREFIX, _OLD_PREFIX = "joulery_llm_", "joulery_text_"


def _family(name: str, kind: str, labels: tuple[str, ...], text: str, old: str = "") -> Family:
    """Declare a family ``joulery_llm_NAME``; ``old`` is its name in the previous release, without the prefix."""
    return Family(_PREFIX + name, kind, labels, text, old=_OLD_PREFIX + old if old else "")


LLM_METRICS = (
    _family(
        "machine_joules_total",
        "counter",
        ("part",),
        "Metered energy of the machine that runs language models; requests, idle and unattributed add up to it.",
        old="machine_joules_total",
    ),
    _family(
        "tokens_total",
        "counter",
        ("workload", "kind"),
        "Tokens read (prompt) and generated (completion).",
        old="tokens_total",
    ),
    _family(
        "token_energy_joules",
        "histogram",
        ("workload",),
        "Energy of a request per generated token; requests of unknown energy are left out.",
        old="token_energy_joules",
    ),
    _family(
        "request_carbon_grams",
        "histogram",
        ("workload",),
        "Grams of CO2-equivalent of a request; requests of unknown intensity are left out.",
        old="request_carbon_grams",
    ),
    _family(
        "time_to_first_token_seconds",
        "histogram",
        ("workload",),
        "From the arrival of a request to its first generated token.",
    ),
    _family(
        "inter_token_seconds",
        "histogram",
        ("workload",),
        "Mean time between two generated tokens of an answer.",
    ),
    _family(
        "queue_seconds",
        "histogram",
        ("workload",),
        "Time a request waited in joulery's own queue.",
    ),
    _family(
        "waiting_requests",
        "gauge",
        ("workload",),
        "Requests in joulery's own queue.",
        old="waiting_requests",
    ),
    _family(
        "running_requests",
        "gauge",
        ("workload",),
        "Requests in the engine.",
        old="working_requests",
    ),
    _family(
        "engine_running_requests",
        "gauge",
        ("workload",),
        "Requests in the engine's batch as vLLM or SGLang reports them, other clients' included.",
    ),
    _family(
        "engine_waiting_requests",
        "gauge",
        ("workload",),
        "Requests in the engine's own queue as it reports them, other clients' included.",
    ),
    _family(
        "engine_kv_cache_usage_ratio",
        "gauge",
        ("workload",),
        "Share of the engine's KV cache in use, as it reports it.",
    ),
    _family(
        "predictions_total",
        "counter",
        ("workload", "source"),
        "Output-length predictions by source.",
        old="forecasts_total",
    ),
    _family(
        "prediction_failures_total",
        "counter",
        ("workload", "error"),
        "Exceptions of the length predictor or its cache; the request then counts as one of average length.",
        old="forecast_failures_total",
    ),
    Family(
        "gen_ai_server_request_duration_seconds",
        "histogram",
        (*_GEN_AI, "error_type"),
        "OpenTelemetry gen_ai.server.request.duration: arrival to the last token; error_type is empty for answers.",
    ),
    Family(
        "gen_ai_server_time_to_first_token_seconds",
        "histogram",
        _GEN_AI,
        "OpenTelemetry gen_ai.server.time_to_first_token, of answers.",
    ),
    Family(
        "gen_ai_server_time_per_output_token_seconds",
        "histogram",
        _GEN_AI,
        "OpenTelemetry gen_ai.server.time_per_output_token: after the first token, of answers.",
    ),
    Family(
        "gen_ai_client_token_usage",
        "histogram",
        (*_GEN_AI, "gen_ai_token_type"),
        "OpenTelemetry gen_ai.client.token.usage: tokens of a request, input and output.",
    ),
)
_BY_NAME = {family.name: family for family in LLM_METRICS}


class LLMMetrics:
    """Counts answers as they end; gauges and totals are read at the moment of the scrape.

    Args:
        registry: Registry of the metrics.
        llms: The models, by name.
        meter: Meter of their requests.
    """

    def __init__(self, registry: Registry, llms: Mapping[str, LLMService], meter: RequestMeter) -> None:
        registry.declare(LLM_METRICS)

        def histogram(name: str, buckets: tuple[float, ...], prefix: str = _PREFIX) -> Histogram:
            family = _BY_NAME[prefix + name]
            return Histogram(family.name, family.help, family.labels, buckets=buckets, registry=registry)

        tokens = _BY_NAME[_PREFIX + "tokens_total"]
        self._tokens = Counter(tokens.name.removesuffix("_total"), tokens.help, tokens.labels, registry=registry)
        self._energy = histogram("token_energy_joules", TOKEN_ENERGY_BUCKETS_J)
        self._grams = histogram("request_carbon_grams", GRAM_BUCKETS)
        self._first_token = histogram("time_to_first_token_seconds", TIME_BUCKETS_S)
        self._inter_token = histogram("inter_token_seconds", TIME_BUCKETS_S)
        self._queue = histogram("queue_seconds", TIME_BUCKETS_S)
        gen_ai = (histogram(name, buckets, "") for name, buckets in _GEN_AI_BUCKETS.items())
        self._duration, self._gen_ai_first, self._per_token, self._usage = gen_ai
        registry.register(_LLMCollector(llms, meter))

    def ended(self, model: str, record: RequestRecord, cost: GenerationCost) -> None:
        """Count a request that has ended, also one whose client disconnected."""
        self._tokens.labels(model, "prompt").inc(cost.usage.prompt)
        self._tokens.labels(model, "completion").inc(cost.usage.completion)
        if cost.energy_per_token_j is not None:
            self._energy.labels(model).observe(cost.energy_per_token_j)
        if cost.energy is not None and cost.energy.carbon_g is not None:
            self._grams.labels(model).observe(cost.energy.carbon_g)
        if not math.isnan(cost.start_s):
            self._queue.labels(model).observe(max(0.0, cost.start_s - cost.arrival_s))
        self._count_gen_ai(model, record, cost)
        if not math.isnan(cost.first_token_s) and cost.kind is not GenerationKind.EMBEDDING:
            self._first_token.labels(model).observe(max(0.0, cost.first_token_s - cost.arrival_s))
            if cost.usage.completion > 1:
                self._inter_token.labels(model).observe(_gap_s(cost))

    def _count_gen_ai(self, model: str, record: RequestRecord, cost: GenerationCost) -> None:
        """Count a request under OpenTelemetry's names; times to and between tokens only include answered requests."""
        who = (_OPERATIONS[cost.kind], "joulery", model, cost.variant)
        answered = record.outcome is Outcome.OK
        error = "" if answered else record.outcome.value
        self._duration.labels(*who, error).observe(max(0.0, cost.end_s - cost.arrival_s))
        if cost.usage.prompt or cost.usage.completion:
            self._usage.labels(*who, "input").observe(cost.usage.prompt)
            self._usage.labels(*who, "output").observe(cost.usage.completion)
        if answered and not math.isnan(cost.first_token_s) and cost.kind is not GenerationKind.EMBEDDING:
            self._gen_ai_first.labels(*who).observe(max(0.0, cost.first_token_s - cost.arrival_s))
            if cost.usage.completion > 1:
                self._per_token.labels(*who).observe(_gap_s(cost))


def _gap_s(cost: GenerationCost) -> float:
    """Mean time between two generated tokens, at least two."""
    return max(0.0, (cost.end_s - cost.first_token_s) / (cost.usage.completion - 1))


class _LLMCollector(Collector):
    def __init__(self, llms: Mapping[str, LLMService], meter: RequestMeter) -> None:
        self._llms, self._meter = llms, meter

    def describe(self) -> Iterator[Metric]:
        """The families without their values."""
        for name in ("machine_joules_total", "predictions_total", "prediction_failures_total"):
            yield _counter(name)
        for name in ("waiting_requests", "running_requests", *_ENGINE):
            yield _gauge(name)

    def collect(self) -> Iterator[Metric]:
        """The families with their present values."""
        self._meter.settle()
        totals = self._meter.totals
        joules = _counter("machine_joules_total")
        for part, value_j in (
            ("requests", totals.requests_j),
            ("idle", totals.idle_j),
            ("unattributed", totals.unattributed_j),
        ):
            joules.add_metric((part,), max(0.0, value_j))
        waiting, running = _gauge("waiting_requests"), _gauge("running_requests")
        predictions, failures = _counter("predictions_total"), _counter("prediction_failures_total")
        for name, llm in self._llms.items():
            waiting.add_metric((name,), llm.waiting)
            running.add_metric((name,), llm.running)
            for source, count in sorted(llm.forecaster.sources.items()):
                predictions.add_metric((name, source), count)
            for error, count in sorted(llm.forecaster.failures.items()):
                failures.add_metric((name, error), count)
        yield from (joules, waiting, running, predictions, failures)
        yield from self._reported()

    def _reported(self) -> Iterator[Metric]:
        """The figures that engines report; absent where an engine reports none."""
        for name, attribute in _ENGINE.items():
            gauge = _gauge(name)
            for model, llm in self._llms.items():
                value = math.nan if llm.reports.load is None else getattr(llm.reports.load, attribute)
                if not math.isnan(value):
                    gauge.add_metric((model,), value)
            yield gauge


def _counter(name: str) -> CounterMetricFamily:
    family = _BY_NAME[_PREFIX + name]
    return CounterMetricFamily(family.name.removesuffix("_total"), family.help, labels=family.labels)


def _gauge(name: str) -> GaugeMetricFamily:
    family = _BY_NAME[_PREFIX + name]
    return GaugeMetricFamily(family.name, family.help, labels=family.labels)
