"""The cheapest plan of a few services, by dynamic programming over subsets: exact, and no solver needed.

Every set of services that fits on one GPU is listed, with the cheapest GPU for it. No superset of a set that does not
fit can fit, so the list is short. The best way to serve a subset takes one such set for its first service and the best
way to serve the rest. Ways are compared by cost, then by the units that they use.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from joulery.policies.placement.provisioning.packing import Packing, Pattern

SERVICES_MAX = 15
"""Beyond this many services there are too many subsets."""


class ExactGpu(NamedTuple):
    """A GPU of the optimum: its type and its pattern."""

    type_index: int
    pattern: Pattern


def fitting_sets(packing: Packing, services: int) -> list[Pattern]:
    """Every set of the items ``0 .. services - 1``, each at most once, that fits on one GPU of the type."""
    found: list[Pattern] = []
    level: list[Pattern] = [(item,) for item in range(services)]
    while level:
        possible = np.array(level)
        enough = packing.least(possible).sum(axis=1) <= packing.capacity
        fits = [one for one, enough_ in zip(level, enough, strict=True) if enough_ and packing.fit(one) is not None]
        found += fits
        level = [(*one, item) for one in fits for item in range(one[-1] + 1, services)]
    return found


def cheapest(packings: Sequence[Packing], services: int) -> list[ExactGpu] | None:
    """The cheapest plan, among equals the one with the fewest units; None when some service fits nowhere.

    Args:
        packings: The GPU types; item ``i`` is service ``i``, undivided.
        services: Number of services, at most ``SERVICES_MAX``.
    """
    by_first: list[list[tuple[int, float, int, ExactGpu]]] = [[] for _ in range(services)]
    best_of: dict[Pattern, tuple[float, int, ExactGpu]] = {}
    for index, packing in enumerate(packings):
        for one in fitting_sets(packing, services):
            layout = packing.tightest(one)
            assert layout is not None
            option = (packing.gpu_type.usd_per_hour, layout.total, ExactGpu(index, one))
            best_of[one] = min(best_of.get(one, option), option)
    for one, (usd, units, gpu) in best_of.items():
        by_first[one[0]].append((sum(1 << item for item in one), usd, units, gpu))
    everything = (1 << services) - 1
    best: dict[int, tuple[float, int, int, ExactGpu | None]] = {0: (0.0, 0, 0, None)}
    for mask in range(1, everything + 1):
        first = (mask & -mask).bit_length() - 1
        options = [
            (best[mask ^ part][0] + usd, best[mask ^ part][1] + units, mask ^ part, gpu)
            for part, usd, units, gpu in by_first[first]
            if part & mask == part and (mask ^ part) in best
        ]
        if options:
            best[mask] = min(options, key=lambda option: (round(option[0], 9), option[1]))
    if everything not in best:
        return None
    chosen: list[ExactGpu] = []
    mask = everything
    while mask:
        _, _, mask, taken = best[mask]
        assert taken is not None
        chosen.append(taken)
    return chosen
