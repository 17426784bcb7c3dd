"""Lower bounds of a plan's cost over price and load, from the plans that were made at some prices and loads.

Two facts extend bounds from the points where plans were made to all other points. At one load the least cost is concave
in the price (it is a minimum of lines), so between two prices it is above the chord, and below the lowest price it is
above the line to the origin. At one price it rises with the load by at least the watts that the further requests take
in any plan: a plan for more requests can also serve fewer requests, at a cost that is lower by that much.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from joulery.domain.arrays import FloatArray


class PlannedPoint(NamedTuple):
    """A load and a price that a plan was made for, and a lower bound of the cost of any plan there."""

    load: float
    price: float
    bound: float


class Floors:
    """Lower bounds of the cost at any price and load, in dollars an hour, from the least costs at some of them.

    Args:
        least: For each load of the points, prices in increasing order and the least cost at each.
    """

    def __init__(self, least: Mapping[float, Sequence[tuple[float, float]]]) -> None:
        self._loads = np.array(sorted(least), np.float64)
        self._known = [np.array(least[load], np.float64).T for load in self._loads.tolist()]

    def at(self, prices: FloatArray, rises: FloatArray, loads: FloatArray) -> FloatArray:
        """The least costs, float64[loads, prices].

        Args:
            prices: Prices, float64[prices].
            rises: Least cost of the requests of load 1 at each price, float64[prices].
            loads: Loads, float64[loads].
        """
        before = np.searchsorted(self._loads, loads, side="right")
        found = np.empty((len(loads), len(prices)))
        floor, load = np.zeros(len(prices)), 0.0  # with no requests nothing is needed
        for at in range(len(self._loads) + 1):
            here = before == at
            found[here] = floor + rises * (loads[here, None] - load)
            if at < len(self._loads):
                known = _above_chords(prices, *self._known[at])
                floor = np.maximum(floor + rises * (self._loads[at] - load), known)
                load = float(self._loads[at])
        return found


def _above_chords(prices: FloatArray, known: FloatArray, costs: FloatArray) -> FloatArray:
    """Lower bound of a concave function that never falls, from its values at some prices, float64[prices]."""
    between = np.interp(prices, known, costs)
    below = costs[0] * prices / known[0] if known[0] > 0 else between
    return np.where(prices < known[0], below, between)
