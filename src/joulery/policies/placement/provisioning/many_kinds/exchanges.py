"""Patterns that differ from known ones by one item: cheap to find, and many of them fit as well.

Knapsacks hold the items that are most valuable alone, so column generation by them ends above the relaxation, and whole
numbers find few patterns that go together. One item exchanged for another of about its value, or one more where there
is room, keeps a pattern close to its worth: thousands of such patterns are checked against a GPU at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from joulery.domain.arrays import FloatArray
from joulery.policies.placement.provisioning.packing import IntArray, Packing, Pattern


class Exchangeable(NamedTuple):
    """Items of one GPU type that may join a pattern.

    Attributes:
        packing: The GPU type.
        kind: The service of each item, int64[items].
        copies: How many of each item one pattern may hold, int64[items].
        values: Value of each item, in prices of the GPU, float64[items]; those of 0 may not join.
    """

    packing: Packing
    kind: IntArray
    copies: IntArray
    values: FloatArray

    def worth(self, pattern: Pattern) -> float:
        """Worth of a pattern."""
        return float(self.values[list(pattern)].sum())

    def neighbours(self, patterns: Sequence[Pattern], least: float, most: float) -> list[Pattern]:
        """Patterns with one item exchanged for another, or with one more, whose items alone fit beside one another.

        Args:
            patterns: The known patterns; none of them is returned.
            least, most: Bounds on the worth of a pattern.
        """
        by_size: dict[int, list[Pattern]] = {}
        for pattern in patterns:
            by_size.setdefault(len(pattern), []).append(pattern)
        found = set[Pattern]()
        for some in by_size.values():
            known = np.array(some, np.int64)
            for place in range(known.shape[1]):
                found |= self._joined(np.delete(known, place, axis=1), least, most)
            found |= self._joined(known, least, most)
        return sorted(found.difference(patterns))

    def _joined(self, rest: IntArray, least: float, most: float) -> set[Pattern]:
        """The patterns of some items, each with one more."""
        rest, items = np.unique(rest, axis=0), np.flatnonzero(self.values > 0)
        worth = self.values[rest].sum(axis=1)[:, None] + self.values[items]
        alone, kind = self.packing.alone, self.kind
        room = self.packing.capacity - alone[rest].sum(axis=1)
        fits = (worth > least) & (worth < most) & (alone[items] <= room[:, None])
        there = np.zeros(fits.shape, np.int64)
        for place in range(rest.shape[1]):
            same = items == rest[:, place, None]
            there += same
            # A service comes in one division: copies of an item stand side by side, other items of it do not.
            fits &= same | (kind[items] != kind[rest[:, place], None])
        parent, at = np.nonzero(fits & (there < self.copies[items]))
        made = np.sort(np.concatenate([rest[parent], items[at, None]], axis=1), axis=1)
        return set(map(tuple, made.tolist()))
