"""What Prometheus scrapes of language models: tokens, joules and grams a request and a token, forecasts, the queue.

``LLM_METRICS`` declares every family; ``docs/metrics.md`` is written from it and
:data:`joulery.gateway.metrics.METRICS`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from joulery.domain.serving.engine import RequestRecord
from joulery.domain.serving.generation import GenerationCost
from joulery.gateway.metrics import Family
from joulery.runtime.llm.request_meter import RequestMeter
from joulery.runtime.llm.service import LLMService

_STEPS = (1.0, 2.5, 5.0)
TOKEN_ENERGY_BUCKETS_J = tuple(round(step * 10.0**power, 9) for power in range(-5, 3) for step in _STEPS)
GRAM_BUCKETS = tuple(round(step * 10.0**power, 12) for power in range(-7, 2) for step in _STEPS)

LLM_METRICS = (
    Family(
        "joulery_text_machine_joules_total",
        "counter",
        ("part",),
        "Metered energy of the machine that language models run on: requests, idle and unattributed add up to it.",
    ),
    Family(
        "joulery_text_tokens_total", "counter", ("workload", "kind"), "Tokens read (prompt) and written (completion)."
    ),
    Family(
        "joulery_text_token_energy_joules",
        "histogram",
        ("workload",),
        "Energy of a request by the tokens it wrote; requests of unknown energy are left out.",
    ),
    Family(
        "joulery_text_request_carbon_grams",
        "histogram",
        ("workload",),
        "Grams of CO2-equivalent of a request; requests of unknown intensity are left out.",
    ),
    Family("joulery_text_waiting_requests", "gauge", ("workload",), "Requests that wait in joulery's own queue."),
    Family("joulery_text_working_requests", "gauge", ("workload",), "Requests that the engine has."),
    Family("joulery_text_forecasts_total", "counter", ("workload", "source"), "Lengths foretold, by who did."),
    Family(
        "joulery_text_forecast_failures_total",
        "counter",
        ("workload", "error"),
        "Times the length predictor or its cache raised; the request was taken for an average one.",
    ),
)
_BY_NAME = {family.name: family for family in LLM_METRICS}


class LLMMetrics:
    """Counts answers as they end; the rest is read at the moment of the scrape.

    Args:
        registry: Where it is registered.
        llms: The models, by name.
        meter: Their meter.
    """

    def __init__(self, registry: CollectorRegistry, llms: Mapping[str, LLMService], meter: RequestMeter) -> None:
        tokens = _BY_NAME["joulery_text_tokens_total"]
        self._tokens = Counter(tokens.name.removesuffix("_total"), tokens.help, tokens.labels, registry=registry)
        energy, grams = (_BY_NAME[f"joulery_text_{name}"] for name in ("token_energy_joules", "request_carbon_grams"))
        self._energy = Histogram(
            energy.name, energy.help, energy.labels, buckets=TOKEN_ENERGY_BUCKETS_J, registry=registry
        )
        self._grams = Histogram(grams.name, grams.help, grams.labels, buckets=GRAM_BUCKETS, registry=registry)
        registry.register(_LLMCollector(llms, meter))

    def ended(self, model: str, record: RequestRecord, cost: GenerationCost) -> None:
        """Count one request; what the engine wrote before a client left counts, too."""
        self._tokens.labels(model, "prompt").inc(cost.usage.prompt)
        self._tokens.labels(model, "completion").inc(cost.usage.completion)
        if cost.energy_per_token_j is not None:
            self._energy.labels(model).observe(cost.energy_per_token_j)
        if cost.energy is not None and cost.energy.carbon_g is not None:
            self._grams.labels(model).observe(cost.energy.carbon_g)


class _LLMCollector(Collector):
    def __init__(self, llms: Mapping[str, LLMService], meter: RequestMeter) -> None:
        self._llms, self._meter = llms, meter

    def describe(self) -> Iterator[Metric]:
        """The families without their values."""
        for name in ("machine_joules_total", "forecasts_total", "forecast_failures_total"):
            yield _counter(f"joulery_text_{name}")
        for name in ("waiting_requests", "working_requests"):
            yield _gauge(f"joulery_text_{name}")

    def collect(self) -> Iterator[Metric]:
        """The families of the moment."""
        self._meter.settle()
        totals = self._meter.totals
        joules = _counter("joulery_text_machine_joules_total")
        for part, value_j in (
            ("requests", totals.requests_j),
            ("idle", totals.idle_j),
            ("unattributed", totals.unattributed_j),
        ):
            joules.add_metric((part,), max(0.0, value_j))
        waiting, working = _gauge("joulery_text_waiting_requests"), _gauge("joulery_text_working_requests")
        forecasts, failures = (_counter(f"joulery_text_{n}_total") for n in ("forecasts", "forecast_failures"))
        for name, llm in self._llms.items():
            waiting.add_metric((name,), llm.waiting)
            working.add_metric((name,), llm.running)
            for source, count in sorted(llm.forecaster.sources.items()):
                forecasts.add_metric((name, source), count)
            for error, count in sorted(llm.forecaster.failures.items()):
                failures.add_metric((name, error), count)
        yield from (joules, waiting, working, forecasts, failures)


def _counter(name: str) -> CounterMetricFamily:
    family = _BY_NAME[name]
    return CounterMetricFamily(name.removesuffix("_total"), family.help, labels=family.labels)


def _gauge(name: str) -> GaugeMetricFamily:
    family = _BY_NAME[name]
    return GaugeMetricFamily(name, family.help, labels=family.labels)
