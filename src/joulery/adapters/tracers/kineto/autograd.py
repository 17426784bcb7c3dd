"""Links from the nodes of the backward pass to the forward operations they differentiate, in a Kineto trace."""

from __future__ import annotations

import re

import numpy as np

from joulery.adapters.tracers.kineto.reader import EventKind
from joulery.adapters.tracers.kineto.stacks import Host
from joulery.domain.arrays import BoolArray, IntArray

_ACCUMULATE = re.compile(r"AccumulateGrad")

_DERIVATIVES = 4
"""Number of derivatives of derivatives that are followed back to a module."""


def node_paths(host: Host, path: IntArray, in_node: BoolArray, unnamed: int) -> IntArray:
    """Path of the module that each backward node differentiates, by host row of the node."""
    nodes = np.flatnonzero(host.node == np.arange(len(host.row)))
    nodes = nodes[np.argsort(host.rank[nodes], kind="stable")]
    forward = _forward_ops(host, nodes)
    # A gradient is accumulated by a node of its own that knows no forward operation: it belongs to the node before it.
    accumulates = np.array([bool(_ACCUMULATE.search(name)) for name in host.columns.names], np.bool_)
    follows = accumulates[host.columns.name[host.row[nodes]]] if len(nodes) else np.zeros(0, np.bool_)
    before = np.maximum.accumulate(np.where(follows, -1, np.arange(len(nodes))))
    lane = host.columns.lane[host.row[nodes]]
    same = follows & (before >= 0) & (lane[before] == lane)
    forward[same] = forward[before[same]]
    lost = int(np.count_nonzero(forward < 0))
    if lost:
        host.notes.append(f"{lost} of {len(nodes)} backward nodes lead to no forward operation of the trace")
    result = np.full(len(host.row), unnamed, np.int64)
    found = forward >= 0
    # The forward operation of a second derivative is itself backward: follow it until nothing changes.
    for _ in range(_DERIVATIVES):
        source = forward[found]
        result[nodes[found]] = np.where(in_node[source], result[host.node[source]], path[source])
    return result


def _forward_ops(host: Host, nodes: IntArray) -> IntArray:
    """Forward operation of each backward node, -1 where there is none: by arrow first, then by sequence number."""
    columns = host.columns
    ops = np.flatnonzero(columns.kind[host.row] == EventKind.OP)
    forward = np.full(len(host.row), -1, np.int64)
    tail, head = (_starting(host, ops, columns.flow_lane[:, end], columns.flow_ns[:, end]) for end in (0, 1))
    both = (tail >= 0) & (head >= 0)
    both[both] = host.node[head[both]] >= 0
    tail, head = tail[both], head[both]
    forward[host.node[head]] = tail
    lane_of_thread = _forward_lanes(host, tail, head)

    seq, fwd = columns.seq[host.row], columns.fwd[host.row]
    candidates = ops[(seq[ops] >= 0) & (fwd[ops] <= 0)]
    lanes = np.unique(columns.lane[host.row[candidates]])
    missing = nodes[(forward[nodes] < 0) & (seq[nodes] >= 0)]
    known = np.array([lane_of_thread.get(thread, -1) for thread in fwd[missing].tolist()], np.int64)
    only, named = np.full((2, len(missing)), -1, np.int64)
    threads = np.zeros(len(missing), np.int64)
    for lane in lanes.tolist():
        hit = _last_with(host, candidates, lane, missing)
        only = np.where(hit >= 0, hit, only)
        named = np.where(known == lane, hit, named)
        threads += hit >= 0
    ambiguous = (known < 0) & (threads > 1)
    forward[missing] = np.where(known >= 0, named, np.where(ambiguous, -1, only))
    if ambiguous.any():
        host.notes.append(
            f"{int(ambiguous.sum())} backward nodes carry a sequence number that several threads used and no arrow "
            "decides: left without a module"
        )
    return forward[nodes]


def _starting(host: Host, ops: IntArray, lane: IntArray, time_ns: IntArray) -> IntArray:
    """Outermost of ``ops`` that starts on a lane at a time, -1 for none."""
    starts = host.columns.start_ns[host.row]
    if not len(ops) or not len(time_ns):
        return np.full(len(time_ns), -1, np.int64)
    first = min(int(starts[ops].min()), int(time_ns.min()))
    span = max(int(starts[ops].max()), int(time_ns.max())) - first + 1
    ordered = ops[np.argsort(host.rank[ops], kind="stable")]
    key = host.columns.lane[host.row[ordered]] * span + (starts[ordered] - first)
    order = np.argsort(key, kind="stable")
    wanted = lane * span + (time_ns - first)
    at = np.minimum(np.searchsorted(key[order], wanted, "left"), len(key) - 1)
    return np.where(key[order[at]] == wanted, ordered[order[at]], -1)


def _forward_lanes(host: Host, tail: IntArray, head: IntArray) -> dict[int, int]:
    """The lane of each thread number that autograd uses: the lane from which most arrows of that thread start."""
    threads = host.columns.fwd[host.row[host.node[head]]]
    lanes = host.columns.lane[host.row[tail]]
    pairs, votes = np.unique(np.stack([threads, lanes]), axis=1, return_counts=True)
    order = np.argsort(votes, kind="stable")
    return {int(pairs[0, at]): int(pairs[1, at]) for at in order.tolist()}


def _last_with(host: Host, candidates: IntArray, lane: int, nodes: IntArray) -> IntArray:
    """The last operation on a lane with each node's sequence number that begins before the node; -1 for none."""
    columns = host.columns
    here = candidates[columns.lane[host.row[candidates]] == lane]
    order = np.lexsort((host.rank[here], columns.seq[host.row[here]]))
    ordered = here[order]
    seq = columns.seq[host.row[ordered]]
    wanted = columns.seq[host.row[nodes]]
    at = np.searchsorted(seq, wanted, "right") - 1
    found = ordered[np.maximum(at, 0)]
    earlier = columns.start_ns[host.row[found]] <= columns.start_ns[host.row[nodes]]
    return np.where((at >= 0) & (seq[np.maximum(at, 0)] == wanted) & earlier, found, -1)
