"""CPU time of processes that one parent does not tell apart from others, such as the workers of one Ray job."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection

from joulery.runtime.measuring.share import TreeReader


class JoinedTrees:
    """The trees of several processes as one; none of them lies below another.

    Args:
        roots: The processes at the top; those that come later are found by :meth:`discover`.
        open_tree: Opens the tree of one.
    """

    def __init__(self, roots: Callable[[], Collection[int]], open_tree: Callable[[int], TreeReader]) -> None:
        self._roots, self._open_tree = roots, open_tree
        self._trees: dict[int, TreeReader] = {}
        self._before: dict[int, tuple[float, ...]] = {}
        self.discover()

    def discover(self) -> None:
        """Look for new roots, and for new processes below all."""
        for tree in self._trees.values():
            tree.discover()
        for root in self._roots():
            if root not in self._trees:
                self._trees[root] = tree = self._open_tree(root)
                self._before[root] = tree.read()

    def pids(self) -> frozenset[int]:
        """The processes known."""
        return frozenset().union(*(tree.pids() for tree in self._trees.values()))

    def read(self) -> tuple[float, ...]:
        """CPU seconds on each socket since each tree was opened; never less than before."""
        moved = [
            [now - before for now, before in zip(tree.read(), self._before[root], strict=True)]
            for root, tree in self._trees.items()
        ]
        return tuple(math.fsum(each) for each in zip(*moved, strict=True))

    def close(self) -> None:
        """Release all of them. Safe to call twice."""
        for tree in self._trees.values():
            tree.close()
