"""The energy dependency diagram: a footprint as the tree of its qualified names.

Source: Smaragdine (ICSE'24), Definition 3.4 and function T2E. A node's energy is that of its children; what an inner
node spent outside of them is a child called ``<self>``. Siblings come in the order in which they first ran, or
of dataflow where the trace names which operation feeds which (TensorFlow does); a node then lists these edges.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from joulery.domain.energy.tensor_footprint import TensorFootprint
from joulery.domain.trace.events import SELF


@dataclass(frozen=True, slots=True)
class Node:
    """A module, or an operation where it has no children.

    Attributes:
        name: Its component of the path; the ancestors hold the components before it.
        energy_j: Known energy of everything below it.
        share_ratio: Share of its siblings' and its own energy together; 0 where none of them has any.
        runtime_s: Exclusive time of everything below it, added up.
        count: Events below it.
        uncovered_s: Part of that time without known power.
        children: In the order they first ran, producers before those they feed.
        feeds: (producer, consumer) among the children, by name, sorted; empty where the trace has no dataflow.
    """

    name: str
    energy_j: float
    share_ratio: float
    runtime_s: float
    count: int
    uncovered_s: float
    children: tuple[Node, ...] = ()
    feeds: tuple[tuple[str, str], ...] = ()

    @classmethod
    def over(cls, name: str, children: Sequence[Node], feeds: tuple[tuple[str, str], ...] = ()) -> Node:
        """The node above these children, which get their shares of its energy."""
        energy_j = math.fsum(child.energy_j for child in children)
        shared = tuple(
            cls(
                child.name,
                child.energy_j,
                child.energy_j / energy_j if energy_j > 0 else 0.0,
                child.runtime_s,
                child.count,
                child.uncovered_s,
                child.children,
                child.feeds,
            )
            for child in children
        )
        return cls(
            name,
            energy_j,
            1.0,
            math.fsum(child.runtime_s for child in shared),
            sum(child.count for child in shared),
            math.fsum(child.uncovered_s for child in shared),
            shared,
            feeds,
        )

    def at(self, path: str) -> Node | None:
        """The node at a path below this one, such as ``encoder/layer_0``; None where there is none."""
        node: Node | None = self
        for part in filter(None, path.split("/")):
            node = next((child for child in node.children if child.name == part), None) if node else None
        return node

    def walk(self, depth: int = 0) -> Iterator[tuple[int, Node]]:
        """Depth and node, this one first, in order."""
        waiting = [(depth, self)]
        while waiting:
            level, node = waiting.pop()
            yield level, node
            waiting += [(level + 1, child) for child in reversed(node.children)]


@dataclass(slots=True)
class _Growing:
    """A node while the tree is built."""

    first_ns: int = 2**63 - 1
    energies: list[float] | None = None
    runtime_ns: int = 0
    uncovered_ns: int = 0
    count: int = 0
    children: dict[str, _Growing] | None = None
    feeds: set[tuple[str, str]] | None = None


def tree(footprint: TensorFootprint, *, device: str | None = None, phase: str | None = None, root: str = "") -> Node:
    """The diagram of a footprint.

    Args:
        footprint: Energies by operation.
        device: Count this device alone; all metered ones when not given.
        phase: Count this phase alone; all of them when not given.
        root: Name of the root.
    """
    top = _Growing()
    rows = zip(
        footprint.op,
        footprint.device,
        footprint.phase,
        footprint.energy_j.tolist(),
        footprint.runtime_ns.tolist(),
        footprint.uncovered_ns.tolist(),
        footprint.count.tolist(),
        footprint.first_ns.tolist(),
        strict=True,
    )
    for op, where, when, energy_j, runtime_ns, uncovered_ns, count, first_ns in rows:
        if device not in (None, where) or phase not in (None, when):
            continue
        node = top
        for part in op.split("/"):
            node.children = node.children if node.children is not None else {}
            node = node.children.setdefault(part, _Growing())
        node.energies = node.energies if node.energies is not None else []
        node.energies.append(0.0 if math.isnan(energy_j) else energy_j)
        node.runtime_ns += runtime_ns
        node.uncovered_ns += uncovered_ns
        node.count += count
        node.first_ns = min(node.first_ns, first_ns)
    for one, other in footprint.feeds:
        _connect(top, one.split("/"), other.split("/"))
    return _finished(root, top)


def _connect(top: _Growing, one: list[str], other: list[str]) -> None:
    """Record at the innermost common module of two operations that one's child feeds the other's."""
    node = top
    for depth in range(max(len(one), len(other))):
        ends = [path[depth] if depth < len(path) else SELF for path in (one, other)]
        children = node.children or {}
        if any(end not in children and end != SELF for end in ends):
            return
        if ends[0] != ends[1]:
            node.feeds = node.feeds if node.feeds is not None else set()
            node.feeds.add((ends[0], ends[1]))
            return
        node = children[ends[0]]


def _finished(name: str, node: _Growing) -> Node:
    """Freeze a tree from its leaves up, in a loop without recursion, so that modules may nest to any depth."""
    done: dict[int, tuple[Node, int]] = {}
    stack = [(name, node, False)]
    while stack:
        label, here, ready = stack.pop()
        children = here.children or {}
        if children and not ready:
            own = _own(here)
            if own is not None:
                children[SELF] = own
            stack.append((label, here, True))
            stack += [(part, child, False) for part, child in children.items()]
            continue
        below = _ordered([done[id(child)] for child in children.values()], here.feeds or set())
        done[id(here)] = _node(label, here, [child for child, _ in below], [first for _, first in below])
    return done[id(node)][0]


def _ordered(children: list[tuple[Node, int]], feeds: set[tuple[str, str]]) -> list[tuple[Node, int]]:
    """Children, each with its first time, ordered by that time; producers before those they feed where that is known.

    Where layers folded into one feed one another in turn, the one that ran first comes first.
    """
    waiting = sorted(children, key=lambda pair: pair[1])
    if not feeds:
        return waiting
    result: list[tuple[Node, int]] = []
    needs = {node.name: {one for one, other in feeds if other == node.name} for node, _ in waiting}
    while waiting:
        left = {node.name for node, _ in waiting}
        free = next((pair for pair in waiting if not needs[pair[0].name] & left), waiting[0])
        waiting.remove(free)
        result.append(free)
    return result


def _own(node: _Growing) -> _Growing | None:
    """An inner node's own energy, taken out of it as a child; joined with a child already called ``<self>``."""
    if node.energies is None:
        return None
    own = (node.children or {}).get(SELF) or _Growing()
    own.energies = [*(own.energies or []), *node.energies]
    own.runtime_ns += node.runtime_ns
    own.uncovered_ns += node.uncovered_ns
    own.count += node.count
    own.first_ns = min(own.first_ns, node.first_ns)
    node.energies, node.runtime_ns, node.uncovered_ns, node.count = None, 0, 0, 0
    return own


def _node(name: str, node: _Growing, children: list[Node], firsts: list[int]) -> tuple[Node, int]:
    if not children:
        energy_j = math.fsum(node.energies or ())
        leaf = Node(name, energy_j, 1.0, node.runtime_ns / 1e9, node.count, node.uncovered_ns / 1e9)
        return leaf, node.first_ns
    names = {child.name for child in children}
    feeds = tuple(sorted(pair for pair in node.feeds or () if {*pair} <= names))
    return Node.over(name, children, feeds), min(firsts)


def powers_w(footprint: TensorFootprint) -> tuple[list[float], list[float]]:
    """The two powers of each row (STPF), watts; NaN where it never ran or its power was never known.

    The first is the paper's, energy per event time: it falls where events overlap and share. The second is the mean
    power of the whole device while the row ran. Where some of a row's time is uncovered, both are the energy read over
    all of its time: a lower bound.
    """
    read = ~footprint.unread
    with np.errstate(invalid="ignore", divide="ignore"):
        shared = footprint.energy_j / (footprint.runtime_ns / 1e9)
        device = footprint.active_j / (footprint.active_ns / 1e9)
    return (
        np.where(read & (footprint.runtime_ns > 0), shared, np.nan).tolist(),
        np.where(read & (footprint.active_ns > 0), device, np.nan).tolist(),
    )
