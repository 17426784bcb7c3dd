"""A table of every configuration of a service, made by simulating each of them on the same requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from joulery.domain.gpu.mig import MigMenu
from joulery.domain.serving.variant_table import TableEntry, VariantTable
from joulery.perf.queues.pull_costs import ServiceCosts
from joulery.policies.serving.configuration_graph import one_gpu
from joulery.sim.core.streams import Streams
from joulery.sim.queues.pull_fit import simulate

REQUESTS = 1000
"""Requests of a measurement, as published."""
BASE_REQUESTS = 2000
"""Requests of the measurement that sets the promise."""


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
        menu: How its GPUs can be cut; all alike.
        streams: Where arrivals, sizes and jitter are drawn: the same for every configuration.
        loads_s: Mean times between requests, the reference first; the service's own when None.
        progress: Told how many of how many configurations are done.
    """
    loads = costs.loads_s if loads_s is None else tuple(loads_s)
    names = [variant.name for variant in costs.variants]
    fits = {(variant.name, profile) for variant in costs.variants for profile in variant.slowdown}
    space = one_gpu(menu, names, {(name, p.name) for name in names for p in menu.profiles} - fits)
    gaps = streams("gaps", costs.name).exponential(1.0, BASE_REQUESTS)
    entries = []
    for row, vector in enumerate(space.graphs, 1):
        edges = space.instances(vector)
        for load_s in loads:
            found = simulate(costs, edges, gaps[:REQUESTS], load_s, streams)
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
