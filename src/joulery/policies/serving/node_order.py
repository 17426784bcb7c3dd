"""The order in which nodes on different grids are given requests: the cleaner grid first."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

MARGIN_RATIO = 0.05
"""Intensities this close count as equal, so that the order does not flap."""


@dataclass(frozen=True, slots=True)
class NodeOrder:
    """Ranks nodes by the intensity of their grids.

    Attributes:
        margin_ratio: Nodes within it of the cleanest of a rank share that rank; an order stays while no node that comes
            later is cleaner by more.
    """

    margin_ratio: float = MARGIN_RATIO

    def step(self, g_per_kwh: Mapping[str, float], before: Mapping[str, int]) -> dict[str, int]:
        """The rank of each node, 0 for the cleanest; nodes of unknown intensity come last.

        Args:
            g_per_kwh: Intensity of each node's grid; NaN unknown.
            before: The ranks so far; empty at the start.
        """
        if before.keys() == g_per_kwh.keys() and self._holds(g_per_kwh, before):
            return dict(before)
        known = sorted((name for name in g_per_kwh if math.isfinite(g_per_kwh[name])), key=lambda name: g_per_kwh[name])
        ranks: dict[str, int] = {}
        first, rank = math.nan, -1
        for name in known:
            if not g_per_kwh[name] <= first * (1.0 + self.margin_ratio):
                first, rank = g_per_kwh[name], rank + 1
            ranks[name] = rank
        return ranks | {name: rank + 1 for name in g_per_kwh if name not in ranks}

    def _holds(self, g_per_kwh: Mapping[str, float], before: Mapping[str, int]) -> bool:
        """Whether the ranks so far still hold.

        No node may be cleaner than one of a better rank by more than the margin, nor than one of its own rank by twice
        the margin. Nodes of unknown intensity come after all others.
        """
        known = [name for name, value in g_per_kwh.items() if math.isfinite(value)]
        unknown = [name for name in g_per_kwh if name not in known]
        if any(before[one] >= before[other] for one in known for other in unknown):
            return False
        slack = 1.0 + self.margin_ratio
        for one in known:
            for other in known:
                apart = slack if before[one] < before[other] else slack * slack
                if before[one] <= before[other] and g_per_kwh[one] > g_per_kwh[other] * apart:
                    return False
        return True
