"""Prometheus metrics: base units, bounded labels, nothing counted twice.

Requests and decisions are counted as they happen; everything else is read from the latest
:class:`~joulery.domain.serving.timeline.NowSnapshot` at the moment of the scrape, so a scrape and the dashboard never
disagree. ``METRICS`` declares every family; ``docs/reference/metrics.md`` is written from it.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import Counter, Histogram
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from joulery import __version__
from joulery.domain.decisions import Decision
from joulery.domain.energy.footprint import Footprint
from joulery.domain.serving.engine import Outcome, RequestRecord
from joulery.domain.serving.timeline import DecisionRecord, NowSnapshot
from joulery.gateway.families import MAX_LABELS as MAX_LABELS
from joulery.gateway.families import OTHER as OTHER
from joulery.gateway.families import Bounded, family_metric
from joulery.gateway.families import Family as Family
from joulery.gateway.families import Registry as Registry

_STEPS = (1.0, 2.5, 5.0)
_TOGETHER = 256
"""Number of requests that are counted together: counting one by one takes five times the CPU time."""
LATENCY_BUCKETS_S = tuple(round(step * 10.0**power, 9) for power in range(-4, 3) for step in _STEPS)
ENERGY_BUCKETS_J = tuple(round(step * 10.0**power, 9) for power in range(-4, 5) for step in _STEPS)


_WHO = ("workload", "owner")
METRICS = (
    Family(
        "joulery_energy_joules_total",
        "counter",
        ("device", "component", *_WHO, "quality"),
        "Energy charged to a workload itself, by component.",
    ),
    Family(
        "joulery_idle_joules_total",
        "counter",
        (*_WHO, "quality"),
        "Energy its devices drew without running anything, as charged to a workload.",
    ),
    Family(
        "joulery_unattributed_joules_total",
        "counter",
        (*_WHO, "quality"),
        "Metered energy without an owner.",
    ),
    Family(
        "joulery_carbon_grams_total",
        "counter",
        (*_WHO, "signal", "scope"),
        "Grams of CO2-equivalent of the energy with a known intensity; facility overhead included.",
    ),
    Family(
        "joulery_coverage_ratio",
        "gauge",
        _WHO,
        "Share of the metered time with readings.",
    ),
    Family(
        "joulery_power_watts",
        "gauge",
        ("device", "component", "meter", "quality"),
        "Present power of one channel; absent while unknown.",
    ),
    Family(
        "joulery_meter_staleness_seconds",
        "gauge",
        ("device", "component", "meter"),
        "Time since the last reading of one channel; infinite when there was none.",
    ),
    Family(
        "joulery_carbon_intensity_grams_per_kilowatthour",
        "gauge",
        ("zone", "source", "basis", "signal", "scope"),
        "Carbon intensity in use; basis is live, replayed or assumed.",
    ),
    Family(
        "joulery_carbon_intensity_known_ratio",
        "gauge",
        (),
        "1 while the carbon intensity of now is known, held values included; 0 while it is not.",
    ),
    Family(
        "joulery_carbon_intensity_age_seconds",
        "gauge",
        (),
        "Time since the newest carbon intensity ended, while it is held; 0 for a value of now.",
    ),
    Family(
        "joulery_slo_attainment_ratio",
        "gauge",
        ("workload",),
        "Share of the answers of the latest period within the service level's latency; absent without answers.",
    ),
    Family(
        "joulery_slo_latency_seconds",
        "gauge",
        ("workload", "quantile"),
        "Latency that the quantile must not exceed.",
    ),
    Family(
        "joulery_accuracy_ratio",
        "gauge",
        ("workload",),
        "Request-weighted accuracy of the answers of the latest period; absent without answers.",
    ),
    Family(
        "joulery_requests_total",
        "counter",
        ("workload", "outcome"),
        "Requests that ended, by how they ended.",
    ),
    Family(
        "joulery_request_latency_seconds",
        "histogram",
        ("workload", "variant"),
        "Arrival to answer of answered requests, queueing included.",
    ),
    Family(
        "joulery_request_energy_joules",
        "histogram",
        ("workload", "variant"),
        "Energy charged to an answered request; requests of unknown energy are left out.",
    ),
    Family(
        "joulery_decisions_total",
        "counter",
        ("policy", "kind", "mode", "outcome"),
        "Decisions taken, by what became of them.",
    ),
    Family(
        "joulery_replans_total",
        "counter",
        ("cause",),
        "New plans, by cause.",
    ),
    Family(
        "joulery_build_info",
        "gauge",
        ("version", "python"),
        "Always 1; the labels name the version that runs.",
    ),
)
_BY_NAME = {family.name: family for family in METRICS}
_EVENTS = frozenset(
    {
        "joulery_requests_total",
        "joulery_request_latency_seconds",
        "joulery_request_energy_joules",
        "joulery_decisions_total",
        "joulery_replans_total",
    }
)


class Metrics:
    """Registry of the gateway's metrics, with event counters and the latest snapshot.

    Args:
        services: The services; requests for any other name count as ``other``, so that clients cannot add labels.
        latest: Returns the latest snapshot; None before the first.
        mode: The site's mode, a label of decisions.
    """

    def __init__(
        self,
        services: Iterable[str] = (),
        latest: Callable[[], NowSnapshot | None] = lambda: None,
        mode: str = "advise",
    ) -> None:
        self.registry = Registry(METRICS)
        self.registry.register(_BeforeScrape(self._count_all))
        self._services = set(services)
        self._mode = mode
        self._requests = self._counter("joulery_requests_total")
        self._decisions = self._counter("joulery_decisions_total")
        self._replans = self._counter("joulery_replans_total")
        self._latency = self._histogram("joulery_request_latency_seconds", LATENCY_BUCKETS_S)
        self._energy = self._histogram("joulery_request_energy_joules", ENERGY_BUCKETS_J)
        self._outcomes: dict[tuple[str, Outcome], Counter] = {}
        self._answers: dict[tuple[str, str], tuple[Histogram, Histogram]] = {}
        self._uncounted: list[RequestRecord] = []
        self._causes = Bounded()
        self.registry.register(_SnapshotCollector(latest))

    def add(self, services: Iterable[str]) -> None:
        """Add services."""
        self._services.update(services)

    def request(self, record: RequestRecord) -> None:
        """Count one request that ended, at the next scrape at the latest. Called on the hot path."""
        self._uncounted.append(record)
        if len(self._uncounted) >= _TOGETHER:
            self._count_all()

    def _count_all(self) -> None:
        records, self._uncounted = self._uncounted, []
        for record in records:
            self._count(record)

    def _count(self, record: RequestRecord) -> None:
        service = record.service if record.service in self._services else OTHER
        counter = self._outcomes.get((service, record.outcome))
        if counter is None:
            counter = self._requests.labels(service, record.outcome.value)
            self._outcomes[service, record.outcome] = counter
        counter.inc()
        if record.outcome is not Outcome.OK:
            return
        key = (service, record.variant)
        histograms = self._answers.get(key)
        if histograms is None:
            histograms = self._answers[key] = (self._latency.labels(*key), self._energy.labels(*key))
        histograms[0].observe(record.latency_s)
        if record.energy is not None:
            histograms[1].observe(record.energy.energy_j)

    def decision(self, record: DecisionRecord) -> None:
        """Count a decision by its outcome, and by its cause (``intensity``, ``demand``)."""
        decision: Decision = record.decision
        self._decisions.labels(decision.policy, decision.kind, self._mode, record.outcome).inc()
        self._replans.labels(self._causes(decision.cause)).inc()

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """Render the exposition, with its content type, in the format of the scraper's ``Accept`` header."""
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type

    def _counter(self, name: str) -> Counter:
        family = _BY_NAME[name]
        return Counter(name.removesuffix("_total"), family.help, family.labels, registry=self.registry)

    def _histogram(self, name: str, buckets: tuple[float, ...]) -> Histogram:
        family = _BY_NAME[name]
        return Histogram(name, family.help, family.labels, buckets=buckets, registry=self.registry)


class _BeforeScrape(Collector):
    """Counts buffered requests before a scrape: registered first, it exports no families of its own."""

    def __init__(self, count: Callable[[], None]) -> None:
        self._count_all = count

    def describe(self) -> Iterator[Metric]:
        """Return no families."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Return no families."""
        self._count_all()
        return iter(())


class _SnapshotCollector(Collector):
    """Exports the latest snapshot; its only state are the owners and workloads that were seen first."""

    def __init__(self, latest: Callable[[], NowSnapshot | None]) -> None:
        self._latest = latest
        self._workloads, self._owners = Bounded(), Bounded()

    def describe(self) -> Iterator[Metric]:
        """The families without their values, so that registration needs no snapshot."""
        for family in METRICS:
            if family.name not in _EVENTS:
                yield _metric(family.name)

    def collect(self) -> Iterator[Metric]:
        """The families with their present values."""
        build = _metric("joulery_build_info")
        build.add_metric((__version__, platform.python_version()), 1.0)
        yield build
        snapshot = self._latest()
        if snapshot is not None:
            yield from self._charges(snapshot)
            yield from _channels(snapshot)
            yield from _carbon(snapshot)
            yield from _services(snapshot)

    def _charges(self, snapshot: NowSnapshot) -> Iterator[Metric]:
        sums: dict[tuple[str, str], Footprint] = {}
        for charge in snapshot.charges:
            who = (self._workloads(charge.workload), self._owners(charge.owner))
            sums[who] = sums.get(who, Footprint()) + charge.footprint
        energy = _metric("joulery_energy_joules_total")
        idle, rest = _metric("joulery_idle_joules_total"), _metric("joulery_unattributed_joules_total")
        grams, coverage = _metric("joulery_carbon_grams_total"), _metric("joulery_coverage_ratio")
        for who, footprint in sums.items():
            parts: dict[tuple[str, ...], float] = {}
            for part in footprint.parts:
                key = (part.device, part.component, *who, part.quality.value)
                parts[key] = parts.get(key, 0.0) + part.energy_j
            for names, energy_j in parts.items():
                energy.add_metric(names, energy_j)
            quality = footprint.idle_quality.value
            idle.add_metric((*who, quality), footprint.idle_j)
            rest.add_metric((*who, quality), footprint.unattributed_j)
            coverage.add_metric(who, footprint.coverage_ratio)
            if footprint.signal is not None and footprint.scope is not None:
                grams.add_metric((*who, footprint.signal.value, footprint.scope.value), footprint.counted_g)
        yield from (energy, idle, rest, grams, coverage)


def _channels(snapshot: NowSnapshot) -> Iterator[Metric]:
    power, staleness = _metric("joulery_power_watts"), _metric("joulery_meter_staleness_seconds")
    for meter in snapshot.meters:
        if not math.isnan(meter.power_w):
            power.add_metric((meter.device, meter.component, meter.meter, meter.quality.value), meter.power_w)
        staleness.add_metric((meter.device, meter.component, meter.meter), meter.age_s)
    yield from (power, staleness)


def _carbon(snapshot: NowSnapshot) -> Iterator[Metric]:
    intensity = _metric("joulery_carbon_intensity_grams_per_kilowatthour")
    label = snapshot.site.carbon
    if label is not None and snapshot.ticks and not math.isnan(snapshot.ticks[-1].g_per_kwh):
        names = (label.zone, label.source, label.basis.value, label.signal.value, label.scope.value)
        intensity.add_metric(names, snapshot.ticks[-1].g_per_kwh)
    known, age = _metric("joulery_carbon_intensity_known_ratio"), _metric("joulery_carbon_intensity_age_seconds")
    if snapshot.carbon is not None:
        known.add_metric((), float(snapshot.carbon.known))
        if snapshot.carbon.known:
            age.add_metric((), snapshot.carbon.age_s)
    yield from (intensity, known, age)


def _services(snapshot: NowSnapshot) -> Iterator[Metric]:
    attainment, accuracy = _metric("joulery_slo_attainment_ratio"), _metric("joulery_accuracy_ratio")
    bound = _metric("joulery_slo_latency_seconds")
    for service in snapshot.site.services:
        bound.add_metric((service.name, f"{service.quantile_ratio:g}"), service.slo_s)
    for tick in snapshot.ticks[-1].services if snapshot.ticks else ():
        if not math.isnan(tick.attainment_ratio):
            attainment.add_metric((tick.service,), tick.attainment_ratio)
        if not math.isnan(tick.accuracy_ratio):
            accuracy.add_metric((tick.service,), tick.accuracy_ratio)
    yield from (attainment, accuracy, bound)


def _metric(name: str) -> CounterMetricFamily | GaugeMetricFamily:
    return family_metric(_BY_NAME[name])
