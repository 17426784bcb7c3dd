"""Tables of trials: metrics of every configuration of a service, simulated or read, by row of its layout space."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from joulery.domain.arrays import FloatArray
from joulery.domain.errors import DataError
from joulery.domain.gpu.mig import MigMenu
from joulery.domain.serving.variant_table import TableEntry, VariantTable
from joulery.perf.queues.pull_costs import ServiceCosts
from joulery.policies.serving.search.annealing import TrialMetrics
from joulery.policies.serving.search.configuration_graph import GraphSpace, one_gpu
from joulery.policies.serving.search.layout_space import LayoutSpace
from joulery.sim.core.streams import Streams
from joulery.sim.queues.pull_fit import MeasurementWindow, simulate

REQUESTS = 1000
"""Requests of a measurement, as published."""
BASE_REQUESTS = 2000
"""Requests of the measurement that sets the latency limit."""


@dataclass(frozen=True, slots=True, eq=False)
class Bench:
    """A service's table, indexed by the rows of its layout space.

    Attributes:
        table: The table.
        layouts: Configurations that can run; edges that appear nowhere in the table do not exist.
        metrics: Metrics of each row under the load served.
        same_gpus_j: Joules a request of each row with every GPU powered, by row.
        interarrival_s: The load served.
        accuracy_ratio: Accuracy of each variant of the space alone, least first.
        costs: What a request costs, for pools that are not in the table; None where only the table is known.
        shortlist: Rows among which the best is searched where there are too many to try them all; None for all.
    """

    table: VariantTable
    layouts: LayoutSpace
    metrics: Sequence[TrialMetrics]
    same_gpus_j: Sequence[float]
    interarrival_s: float
    accuracy_ratio: tuple[float, ...]
    costs: ServiceCosts | None = None
    shortlist: tuple[int, ...] | None = None

    @property
    def space(self) -> GraphSpace:
        """The configurations as vectors of edge weights."""
        return self.layouts.graph

    @property
    def menu(self) -> MigMenu:
        """The MIG menu of a GPU."""
        return self.layouts.menu

    @property
    def odds(self) -> FloatArray:
        """Odds of each row in the published search."""
        return self.layouts.odds

    @property
    def copies(self) -> int:
        """Number of copies of a row: one on every GPU, or one where rows are configurations of all GPUs together."""
        return self.layouts.copies

    @property
    def pool_gpus(self) -> int:
        """GPUs of the baseline, at the demand served: those that stay powered in the accounting of the same GPUs."""
        return round(self.table.gpus * self.table.loads_s[0] / self.interarrival_s)

    @property
    def smallest(self) -> str:
        """The least accurate variant."""
        return self.space.variants[0]

    @property
    def largest(self) -> str:
        """The most accurate variant."""
        return self.space.variants[-1]

    @property
    def base_row(self) -> int:
        """The most accurate variant on whole GPUs."""
        return self.layouts.whole(self.largest)


def bench(
    table: VariantTable, menu: MigMenu, interarrival_s: float | None = None, costs: ServiceCosts | None = None
) -> Bench:
    """Index a table by the rows of its layout space.

    Args:
        table: Metrics of every configuration.
        menu: MIG partitions of a GPU.
        interarrival_s: The load served; the heaviest of the table when None.
        costs: What a request costs, where that is known too.

    Raises:
        DataError: The table lacks a load, or a configuration of the space.
    """
    loads = table.loads_s
    served = loads[-1] if interarrival_s is None else interarrival_s
    if served not in loads:
        raise DataError(f"the table of {table.service!r} has no load of {served} s between requests; it has {loads}")
    accuracy = _accuracies(table)
    edges = {(variant, profile.name) for variant in accuracy for profile in menu.profiles}
    used = {edge for entry in table.entries for edge in entry.instances}
    layouts = LayoutSpace.of(menu, tuple(accuracy), edges - used, table.gpus)
    space = layouts.graph
    return Bench(
        table=table,
        layouts=layouts,
        metrics=_at_load(table, space, served),
        same_gpus_j=tuple(metrics.energy_j for metrics in _at_load(table, space, loads[0])),
        interarrival_s=served,
        accuracy_ratio=tuple(accuracy.values()),
        costs=costs,
    )


def _accuracies(table: VariantTable) -> dict[str, float]:
    """Accuracy of each variant alone, least accurate first."""
    alone = {
        entry.instances[0][0]: entry.accuracy_ratio
        for entry in table.entries
        if len({variant for variant, _ in entry.instances}) == 1
    }
    return dict(sorted(alone.items(), key=lambda item: (item[1], item[0])))


def _at_load(table: VariantTable, space: GraphSpace, interarrival_s: float) -> tuple[TrialMetrics, ...]:
    """Metrics of each row of the space under one load."""
    row_of = {tuple(row): number for number, row in enumerate(space.graphs.tolist())}
    found: dict[int, TrialMetrics] = {}
    for entry in table.entries:
        if entry.interarrival_s == interarrival_s:
            row = row_of.get(space.vector(entry.instances))
            if row is None:
                raise DataError(f"the table of {table.service!r} holds {entry.instances}, which no partition carries")
            found[row] = TrialMetrics(entry.accuracy_ratio, entry.latency_s, entry.energy_j)
    for row in range(len(space)):
        if row not in found:
            missing = space.describe(space.graphs[row])
            raise DataError(f"the table of {table.service!r} lacks {missing} at {interarrival_s} s between requests")
    return tuple(found[row] for row in range(len(space)))


def exhaustive_table(
    costs: ServiceCosts,
    menu: MigMenu,
    streams: Streams,
    loads_s: Sequence[float] | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> VariantTable:
    """Simulate every configuration under every load.

    Args:
        costs: The service.
        menu: MIG partitions of its GPUs; all GPUs get the same one.
        streams: Random streams of arrivals, sizes and jitter: the same for every configuration.
        loads_s: Mean times between requests, the reference first; the service's own when None.
        progress: Called with the configurations done and their total.
    """
    loads = costs.loads_s if loads_s is None else tuple(loads_s)
    names = [variant.name for variant in costs.variants]
    fits = {(variant.name, profile) for variant in costs.variants for profile in variant.slowdown}
    space = one_gpu(menu, names, {(name, p.name) for name in names for p in menu.profiles} - fits)
    gaps = streams("gaps", costs.name).exponential(1.0, BASE_REQUESTS)
    windows = {load_s: MeasurementWindow(costs, gaps[:REQUESTS], load_s, streams) for load_s in loads}
    entries = []
    for row, vector in enumerate(space.graphs, 1):
        edges = space.instances(vector)
        for load_s in loads:
            found = windows[load_s].metrics(edges)
            entries.append(TableEntry(load_s, edges, found.accuracy_ratio, found.p95_s, found.energy_j_per_request))
        progress(row, len(space))
    largest = max(costs.variants, key=lambda variant: variant.accuracy_ratio)
    base = simulate(costs, [(largest.name, menu.profiles[0].name)], np.asarray(gaps), loads[0], streams)
    return VariantTable(
        service=costs.name,
        gpus=costs.gpus,
        entries=tuple(entries),
        base_accuracy_ratio=base.accuracy_ratio,
        base_latency_s=base.p95_s,
        base_energy_j=base.energy_j_per_request,
        quality=costs.source,
    )
