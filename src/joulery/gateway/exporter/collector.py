"""The energy books of a node as Prometheus metrics, read at each scrape."""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Iterator
from pathlib import Path

from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from joulery import __version__
from joulery.accounting.engine_energy import EngineBook
from joulery.accounting.node_energy import EnergyTotal
from joulery.domain.energy.carbon import CarbonSeries
from joulery.domain.energy.workload import NodeWorkload
from joulery.domain.quality import Quality
from joulery.gateway.exporter.families import EXPORT_METRICS
from joulery.gateway.families import Registry, family_metric
from joulery.runtime.exporting.node import NodeExporter

_FAMILIES = {family.name: family for family in EXPORT_METRICS}
_STATM = Path("/proc/self/statm")


class ExporterMetrics:
    """The metrics of one exporter.

    Args:
        node: The node exporter with the energy books.
    """

    def __init__(self, node: NodeExporter) -> None:
        self.registry = Registry(EXPORT_METRICS)
        self.registry.register(_NodeCollector(node))

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """Render the exposition, with its content type, in the format of the scraper's ``Accept`` header."""
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type


class _NodeCollector(Collector):
    def __init__(self, node: NodeExporter) -> None:
        self._node = node

    def describe(self) -> Iterator[Metric]:
        """The families without their values."""
        return (family_metric(family) for family in EXPORT_METRICS)

    def collect(self) -> Iterator[Metric]:
        """The families with their present values; the books are locked while they are copied."""
        families = {name: family_metric(family) for name, family in _FAMILIES.items()}
        with self._node.lock:
            _channels(self._node, families)
            _workloads(self._node, families)
            _carbon(self._node, families)
            for engine in self._node.engines:
                _add(families, "joulery_engine_up", (engine.name, engine.kind or "unknown"), float(engine.up))
                _engine(engine.name, engine.book, self._node.now_s(), families)
        _add(families, "joulery_build_info", (__version__, platform.python_version()), 1.0)
        _add(families, "joulery_exporter_cpu_seconds_total", (), time.process_time())
        _add(families, "joulery_exporter_resident_bytes", (), _resident_bytes())
        return iter(families.values())


_Families = dict[str, CounterMetricFamily | GaugeMetricFamily]


def _add(families: _Families, name: str, labels: tuple[str, ...], value: float) -> None:
    """Add a sample; an unknown value is left out."""
    if not math.isnan(value):
        families[name].add_metric(labels, value)


def _channels(node: NodeExporter, families: _Families) -> None:
    now_s = node.now_s()
    for one in node.readers.channels.channels:
        channel = one.channel
        where = (channel.device, channel.component, channel.meter)
        quality = channel.quality.value
        _add(families, "joulery_node_energy_joules_total", (*where, quality), one.total_j)
        _add(families, "joulery_power_watts", (*where, quality), one.power_w)
        _add(families, "joulery_meter_staleness_seconds", where, now_s - one.read_at_s)
        _add(families, "joulery_meter_faults_total", where, float(one.faults))


def _workloads(node: NodeExporter, families: _Families) -> None:
    book = node.book
    grams: dict[NodeWorkload, EnergyTotal] = {}
    for (workload, device, quality), total in book.workloads.items():
        labels = (workload.kind, workload.name, device, quality.value)
        _add(families, "joulery_workload_energy_joules_total", labels, total.energy_j)
        grams.setdefault(workload, EnergyTotal()).merge(total)
    for workload, total in grams.items():
        if total.unknown_j < total.energy_j:
            _add(families, "joulery_workload_carbon_grams_total", (workload.kind, workload.name), total.carbon_g)
    for name, sums in (
        ("joulery_node_idle_joules_total", book.idle),
        ("joulery_node_unattributed_joules_total", book.unattributed),
        ("joulery_node_divided_joules_total", book.devices),
    ):
        for (device, quality), total in sums.items():
            _add(families, name, (device, quality.value), total.energy_j)
    if node.readers.intensity is not None:
        for part, totals in (
            ("workloads", book.workloads.values()),
            ("idle", book.idle.values()),
            ("unattributed", book.unattributed.values()),
        ):
            carbon_g = math.fsum(total.carbon_g for total in totals)
            _add(families, "joulery_node_carbon_grams_total", (part,), carbon_g)
    unknown_j = math.fsum(total.unknown_j for total in book.devices.values())
    _add(families, "joulery_carbon_unknown_joules_total", (), unknown_j)


def _carbon(node: NodeExporter, families: _Families) -> None:
    feed = node.readers.intensity
    if feed is None:
        return
    now = node.intensity()
    _add(families, "joulery_carbon_intensity_known_ratio", (), 0.0 if math.isnan(now) else 1.0)
    if feed.series is not None:
        labels = carbon_labels(feed.series)
        _add(families, "joulery_carbon_intensity_grams_per_kilowatthour", labels, now)


def carbon_labels(series: CarbonSeries) -> tuple[str, str, str, str, str]:
    """Labels of an intensity: zone, source, basis, signal and scope."""
    basis = "assumed" if series.quality is Quality.ASSUMED else "live"
    return (series.zone, series.source, basis, series.signal.value, series.scope.value)


def _engine(name: str, book: EngineBook, now_s: float, families: _Families) -> None:
    quality = book.quality.value
    _add(families, "joulery_engine_restarts_total", (name,), float(book.restarts))
    models_j = math.fsum(model.energy_j for model in book.models.values())
    if book.total.energy_j > 0:
        for part, energy_j in (
            ("models", models_j),
            ("idle", book.idle.energy_j),
            ("unattributed", book.unattributed.energy_j),
        ):
            _add(families, "joulery_engine_energy_joules_total", (name, part, quality), energy_j)
    for model, totals in book.models.items():
        who = (name, model)
        _add(families, "joulery_model_energy_joules_total", (*who, quality), totals.energy_j)
        if totals.unknown_j < totals.energy_j:
            _add(families, "joulery_model_carbon_grams_total", who, totals.carbon_g)
        _add(families, "joulery_model_requests_total", who, totals.requests)
        _add(families, "joulery_model_tokens_total", (*who, "prompt"), totals.prompt_tokens)
        _add(families, "joulery_model_tokens_total", (*who, "output"), totals.output_tokens)
        per = book.per_unit(model, now_s)
        _add(families, "joulery_model_joules_per_token", (*who, "output"), per.output_token_j)
        _add(families, "joulery_model_joules_per_token", (*who, "all"), per.token_j)
        _add(families, "joulery_model_grams_per_token", (*who, "output"), per.output_token_g)
        _add(families, "joulery_model_grams_per_token", (*who, "all"), per.token_g)
        _add(families, "joulery_model_joules_per_request", who, per.request_j)
        _add(families, "joulery_model_grams_per_request", who, per.request_g)


def _resident_bytes() -> float:
    try:
        return float(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return math.nan
