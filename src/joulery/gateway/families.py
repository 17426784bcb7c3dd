"""Declarations of metric families, and the registry that exports them, with base units and bounded labels."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

MAX_LABELS = 100
OTHER = "other"


@dataclass(frozen=True, slots=True)
class Family:
    """Declaration of a metric family: ``name`` as exported, ``kind`` as in Prometheus.

    ``old`` is its name in the previous release; :class:`Registry` exports it in addition to the new one.
    """

    name: str
    kind: str
    labels: tuple[str, ...]
    help: str
    old: str = ""


class Registry(CollectorRegistry):
    """A registry that exports renamed families under their old names, too, for one release."""

    def __init__(self, families: Iterable[Family] = ()) -> None:
        super().__init__()
        self._renamed: dict[str, Family] = {}
        self.declare(families)

    def declare(self, families: Iterable[Family]) -> None:
        """Register those of ``families`` that have an old name."""
        self._renamed.update((_base(family.name), family) for family in families if family.old)

    def collect(self) -> Iterator[Metric]:
        """Collect every family; a renamed one is followed by a copy under its old name."""
        for metric in super().collect():
            yield metric
            if metric.name in self._renamed:
                yield _copy(metric, self._renamed[metric.name])


def _base(name: str) -> str:
    return name.removesuffix("_total")


def _copy(metric: Metric, family: Family) -> Metric:
    """Copy ``metric`` under its old name; the help text names the new one."""
    new, old = _base(family.name), _base(family.old)
    copy = Metric(old, f"Old name of {family.name}; the next release does not export it.", metric.type)
    copy.samples = [sample._replace(name=old + sample.name.removeprefix(new)) for sample in metric.samples]
    return copy


class Bounded:
    """Limits a label to ``MAX_LABELS`` distinct values; later values become ``other``."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def __call__(self, value: str) -> str:
        """Return the value, or ``other`` if the limit is reached and the value is new."""
        if value not in self._seen and len(self._seen) >= MAX_LABELS:
            return OTHER
        self._seen.add(value)
        return value


def family_metric(family: Family) -> CounterMetricFamily | GaugeMetricFamily:
    """Create an empty family, to which samples are added."""
    if family.kind == "counter":
        return CounterMetricFamily(family.name, family.help, labels=family.labels)
    return GaugeMetricFamily(family.name, family.help, labels=family.labels)
