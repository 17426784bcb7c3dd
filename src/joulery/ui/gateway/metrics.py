"""What Prometheus can scrape: requests by service, variant and outcome, their latency and their energy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from joulery.domain.engine import Outcome, ReplicaState, RequestRecord
from joulery.domain.ports import Engine

LATENCY_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
ENERGY_BUCKETS_J = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


class RequestMetrics:
    """A telemetry sink that counts. Children of labelled metrics are looked up once a label set.

    Args:
        registry: Where the metrics are registered.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter(
            "joulery_requests", "Requests by how they ended.", ["workload", "variant", "outcome"], registry=registry
        )
        self._latency = Histogram(
            "joulery_request_latency_seconds",
            "Arrival to answer of answered requests, queueing included.",
            ["workload", "variant"],
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )
        self._energy = Histogram(
            "joulery_request_energy_joules",
            "Energy charged to a request, where it is known.",
            ["workload", "variant", "quality"],
            buckets=ENERGY_BUCKETS_J,
            registry=registry,
        )
        self._cpu = Counter(
            "joulery_request_cpu_seconds", "CPU seconds of replicas.", ["workload", "variant"], registry=registry
        )
        self._counters: dict[tuple[str, str, Outcome], Counter] = {}
        self._observers: dict[tuple[str, str], tuple[Histogram, Counter]] = {}
        self._energies: dict[tuple[str, str, str], Histogram] = {}

    def __call__(self, record: RequestRecord) -> None:
        """Count one request."""
        kind = (record.service, record.variant, record.outcome)
        counter = self._counters.get(kind)
        if counter is None:
            counter = self._counters[kind] = self._requests.labels(*kind)
        counter.inc()
        if record.cpu_s > 0 or record.outcome is Outcome.OK:
            self._observe(record)

    def _observe(self, record: RequestRecord) -> None:
        where = (record.service, record.variant)
        observers = self._observers.get(where)
        if observers is None:
            observers = self._observers[where] = (self._latency.labels(*where), self._cpu.labels(*where))
        if record.outcome is Outcome.OK:
            observers[0].observe(record.end_s - record.arrival_s)
        observers[1].inc(record.cpu_s)
        if record.energy is not None:
            key = (*where, record.energy.quality.value)
            energy = self._energies.get(key)
            if energy is None:
                energy = self._energies[key] = self._energy.labels(*key)
            energy.observe(record.energy.energy_j)


class ServingState(Collector):
    """What is true at the moment of a scrape: replicas by state, requests in flight.

    Args:
        engine: Whose replicas.
        in_flight: Requests in the gateway by service; read at every scrape.
    """

    def __init__(self, engine: Engine, in_flight: Mapping[str, int]) -> None:
        self._engine = engine
        self._in_flight = in_flight

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Prometheus: the metrics now."""
        replicas = GaugeMetricFamily(
            "joulery_replicas", "Replicas by state.", labels=["workload", "variant", "slice", "state"]
        )
        counts: dict[tuple[str, str, str, ReplicaState], int] = {}
        views = self._engine.replicas()
        for view in views:
            key = (view.spec.service, view.spec.variant, str(view.spec.slice), view.state)
            counts[key] = counts.get(key, 0) + 1
        for key, count in counts.items():
            replicas.add_metric(key, count)
        yield replicas
        restarts = GaugeMetricFamily(
            "joulery_replica_restarts", "How often a replica was started again.", labels=["workload", "replica"]
        )
        for view in views:
            restarts.add_metric((view.spec.service, view.id), view.restarts)
        yield restarts
        in_flight = GaugeMetricFamily(
            "joulery_requests_in_flight", "Requests received and not yet answered.", labels=["workload"]
        )
        for service in {view.spec.service for view in views}:
            in_flight.add_metric((service,), self._in_flight.get(service, 0))
        yield in_flight
