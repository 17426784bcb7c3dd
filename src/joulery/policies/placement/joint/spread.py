"""Placement of replicas on slices where no two replicas of a service may share a GPU.

For each MIG partition, variables count the slices of a kind that a service uses on GPUs with it: no more than there are
such slices, and no more of one service than there are such GPUs. These rows suffice. Services and slices of one GPU are
the two sides of a graph in which every instance is an edge, and GPUs are its colours: with no more edges at any vertex
than there are colours, edges can be coloured so that none meets another of its colour (König, 1916).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from joulery.policies.placement.joint.problem import JointProblem


class SpreadSlices(NamedTuple):
    """Slices of one kind that a service uses on GPUs with one partition: indices of partition, kind and service."""

    partition: int
    profile: int
    service: int


def spread_slices(problem: JointProblem) -> tuple[SpreadSlices, ...]:
    """Every combination that may be used; none where replicas may share a GPU."""
    if not problem.request.rules.apart:
        return ()
    used = {(one.machine, one.profile, one.service) for one in problem.slices}
    return tuple(
        SpreadSlices(at, profile, service)
        for at, partition in enumerate(problem.partitions)
        for profile, count in enumerate(partition.counts)
        for service in range(len(problem.services))
        if count and (partition.machine, profile, service) in used
    )


def spread_rows(problem: JointProblem, spread: Sequence[SpreadSlices]) -> list[dict[int, float]]:
    """Rows that must be at least 0, by column: slice options first, then partitions, then ``spread``."""
    first = len(problem.slices)
    own = first + len(problem.partitions)
    slots: dict[tuple[int, int], dict[int, float]] = {}
    gpus: dict[tuple[int, int], dict[int, float]] = {}
    placed: dict[tuple[int, int, int], dict[int, float]] = defaultdict(dict)
    for at, one in enumerate(spread):
        partition = problem.partitions[one.partition]
        slots.setdefault((one.partition, one.profile), {first + one.partition: float(partition.counts[one.profile])})[
            own + at
        ] = -1.0
        gpus.setdefault((one.partition, one.service), {first + one.partition: 1.0})[own + at] = -1.0
        placed[(partition.machine, one.profile, one.service)][own + at] = 1.0
    for at, option in enumerate(problem.slices if spread else ()):
        placed[(option.machine, option.profile, option.service)][at] = -1.0
    return [*slots.values(), *gpus.values(), *placed.values()]


def coloured(edges: Sequence[tuple[int, int]], colours: int) -> list[int]:
    """A colour for every edge of a bipartite graph, so that no two at a vertex have the same.

    Args:
        edges: Left and right vertex of each.
        colours: Number of colours; no vertex has more edges.
    """
    at_left: dict[int, dict[int, int]] = defaultdict(dict)
    at_right: dict[int, dict[int, int]] = defaultdict(dict)
    found = [-1] * len(edges)
    for edge, (left, right) in enumerate(edges):
        mine = next(each for each in range(colours) if each not in at_left[left])
        other = next(each for each in range(colours) if each not in at_right[right])
        if mine in at_right[right]:
            _exchange(edges, found, (at_left, at_right), right, mine, other)
        found[edge] = mine
        at_left[left][mine] = at_right[right][mine] = edge
    return found


def _exchange(
    edges: Sequence[tuple[int, int]],
    found: list[int],
    sides: tuple[Mapping[int, dict[int, int]], Mapping[int, dict[int, int]]],
    right: int,
    mine: int,
    other: int,
) -> None:
    """Exchange two colours along the path that begins at a right vertex, so that ``mine`` is free there."""
    path, vertex, side, colour = [], right, 1, mine
    while (edge := sides[side][vertex].get(colour)) is not None:
        path.append(edge)
        side = 1 - side
        vertex = edges[edge][side]
        colour = other if colour == mine else mine
    for edge in path:
        for at, ends in enumerate(sides):
            del ends[edges[edge][at]][found[edge]]
    for edge in path:
        found[edge] = other if found[edge] == mine else mine
        for at, ends in enumerate(sides):
            ends[edges[edge][at]][found[edge]] = edge
