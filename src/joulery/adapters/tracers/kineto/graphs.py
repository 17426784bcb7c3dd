"""Origins of the kernels of replayed CUDA graphs.

One call launches all kernels of a captured graph, so a trace of a replay does not name their operations. Two sources
do:

- the capture, if the same trace has it: the calls between ``StreamBeginCapture`` and ``StreamEndCapture`` launched
  nothing, and each of them is a node of the graph, in order;
- generated code of ``torch.compile``, which the recorder stored: its fused kernels have unique names, in the order of
  the code, and the kernels between two of them are from the calls between them.

Newer traces number the nodes of a graph (``graph node id``, from CUPTI) in the order of the capture. Without numbers,
kernels are ordered by time, for a graph that ran on one stream.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from joulery.adapters.tracers.inject.compiled import CALL
from joulery.adapters.tracers.kineto.compiled import CompiledCall, common
from joulery.adapters.tracers.kineto.reader import EventKind, KinetoColumns
from joulery.adapters.tracers.kineto.stacks import Host
from joulery.domain.arrays import BoolArray, IntArray

GRAPH_LAUNCH = re.compile(r"^(cuda|hip|cu)GraphLaunch")
_BEGIN = re.compile(r"^(cuda|hip|cu)StreamBeginCapture")
_END = re.compile(r"^(cuda|hip|cu)StreamEndCapture")
_CALLS = (
    ("c", re.compile(r"^(cuda|hip|cu)\w*Memcpy")),
    ("f", re.compile(r"^(cuda|hip|cu)\w*Memset")),
    ("k", re.compile(r"^(cuda|hip|cu)\w*Launch(Cooperative)?Kernel")),
)
"""Kinds of nodes, and the calls that make them: copies, fills, kernels."""
_WORK = (("c", re.compile(r"^Memcpy")), ("f", re.compile(r"^Memset")), ("k", re.compile(r"")))
"""The same by the names of what runs on the accelerator."""
_FUSED = "triton_"
"""Prefix of the unique names of kernels that ``torch.compile`` generates for GPUs."""


@dataclass(frozen=True, slots=True)
class GraphReplay:
    """One launch of a CUDA graph.

    Attributes:
        graph: The graph's number; 0 where the trace has none.
        kernels: Its kernels, as indices into the rows of all kernels, in the order of the capture, int64[n].
    """

    graph: int
    kernels: IntArray


def replays(columns: KinetoColumns, host: Host, row: IntArray, launch: IntArray) -> list[GraphReplay]:
    """The launches of CUDA graphs whose kernels have a known order.

    Args:
        columns: The trace.
        host: Its host rows.
        row: Rows of the kernels, int64[k].
        launch: Host row that launched each of them, -1 for none, int64[k].
    """
    whole = _named(columns, GRAPH_LAUNCH)
    if not len(host.row) or not len(row):
        return []
    launched = np.flatnonzero((launch >= 0) & whole[columns.name[host.row[np.maximum(launch, 0)]]])
    found = []
    for at in np.unique(launch[launched]).tolist():
        kernels = launched[launch[launched] == at]
        node, lanes = columns.graph_node[row[kernels]], np.unique(columns.lane[row[kernels]])
        numbered = bool(np.all(node > 0)) and len(np.unique(node)) == len(node)
        if not numbered and len(lanes) > 1:
            continue
        order = np.argsort(node if numbered else columns.start_ns[row[kernels]], kind="stable")
        graphs = np.unique(columns.graph[row[kernels]])
        found.append(GraphReplay(max(0, int(graphs[0])) if len(graphs) == 1 else 0, kernels[order]))
    return found


def from_captures(
    columns: KinetoColumns, host: Host, row: IntArray, launch: IntArray, found: Sequence[GraphReplay]
) -> IntArray:
    """Replace the launch of a whole graph by the captured call of each kernel, where the trace has the capture.

    A graph is recognised by the kinds of its nodes. Several similar graphs are numbered in the order of the captures.
    """
    if not found:
        return launch
    captures: dict[str, list[IntArray]] = {}
    for calls in _captures(columns, host, row):
        captures.setdefault(_kinds(columns, host.row[calls], _CALLS), []).append(calls)
    graphs: dict[str, dict[tuple[int, ...], list[GraphReplay]]] = {}
    for replay in found:
        names = () if replay.graph else tuple(columns.name[row[replay.kernels]].tolist())
        alike = graphs.setdefault(_kinds(columns, row[replay.kernels], _WORK), {})
        alike.setdefault((replay.graph, *names), []).append(replay)
    result = launch.copy()
    for kinds, alike in graphs.items():
        calls_of = captures.get(kinds, [])
        if len(calls_of) != len(alike) or (len(alike) > 1 and not all(graph for graph, *_ in alike)):
            continue
        for key, calls in zip(sorted(alike), calls_of, strict=True):
            for replay in alike[key]:
                result[replay.kernels] = calls
    return result


def _captures(columns: KinetoColumns, host: Host, row: IntArray) -> list[IntArray]:
    """Host rows of the calls of each capture, in order."""
    names, start_ns = columns.name[host.row], columns.start_ns[host.row]
    begins, ends = (np.flatnonzero(_named(columns, pattern)[names]) for pattern in (_BEGIN, _END))
    if not len(begins):
        return []
    makes = np.zeros(len(columns.names), np.bool_)
    for _, pattern in _CALLS:
        makes |= _named(columns, pattern)
    outer = np.where(host.parent >= 0, host.parent, 0)
    calls = (columns.kind[host.row] == EventKind.RUNTIME) & makes[names]
    calls &= ~((host.parent >= 0) & calls[outer])  # one call inside another is the same node
    calls &= ~np.isin(columns.correlation[host.row], columns.correlation[row])  # those that ran were not captured
    at = np.flatnonzero(calls)
    at = at[np.argsort(start_ns[at], kind="stable")]
    found, until = [], -1
    for begin in begins[np.argsort(start_ns[begins], kind="stable")].tolist():
        later = start_ns[ends[start_ns[ends] > start_ns[begin]]]
        if start_ns[begin] < until or not len(later):
            continue
        until = int(later.min())
        found.append(at[(start_ns[at] > start_ns[begin]) & (start_ns[at] < until)])
    return found


def _kinds(columns: KinetoColumns, rows: IntArray, patterns: Sequence[tuple[str, re.Pattern[str]]]) -> str:
    """The kinds of the nodes, one letter for each."""
    kinds = {
        name: next((kind for kind, pattern in patterns if pattern.search(columns.names[name])), "")
        for name in np.unique(columns.name[rows]).tolist()
    }
    return "".join(kinds[name] for name in columns.name[rows].tolist())


def _named(columns: KinetoColumns, pattern: re.Pattern[str]) -> BoolArray:
    """Mask of the trace's names that match, bool[names]."""
    return np.array([bool(pattern.search(name)) for name in columns.names], np.bool_)


def from_code(
    columns: KinetoColumns, row: IntArray, found: Sequence[GraphReplay], compiled: Mapping[str, CompiledCall]
) -> dict[int, CompiledCall]:
    """The call of generated code behind each kernel of a replay, by index of the kernel, where exactly one fits."""
    codes: dict[str, list[CompiledCall]] = {}
    for name, call in compiled.items():  # the calls of one code follow one another, in order
        codes.setdefault(name.removeprefix(CALL).partition(":")[0], []).append(call)
    known: dict[tuple[int, ...], list[CompiledCall | None] | None] = {}
    result: dict[int, CompiledCall] = {}
    for replay in found if codes else ():
        key = tuple(columns.name[row[replay.kernels]].tolist())
        if key not in known:
            names = [columns.names[name] for name in key]
            fits = [fit for calls in codes.values() if (fit := aligned(names, calls)) is not None]
            known[key] = fits[0] if fits and all(fit == fits[0] for fit in fits) else None
        pairs = zip(replay.kernels.tolist(), known[key] or (), strict=False)
        result |= {kernel: origin for kernel, origin in pairs if origin is not None}
    return result


def aligned(kernels: Sequence[str], calls: Sequence[CompiledCall]) -> list[CompiledCall | None] | None:
    """The call behind each kernel; None if the kernels are not from this code, or fit several places in it.

    Fused kernels are found by their names. The kernels between two of them are from the calls between them: one by
    one if their numbers are equal, else all from the module that the calls have in common, under the kernels' own
    names. A memset directly before one of these kernels belongs to the kernel's module.

    >>> calls = [CompiledCall("convolution", ".conv"), CompiledCall("triton_poi_fused_relu_0", ".act")]
    >>> [call.module for call in aligned(["sm90_xmma_fprop", "triton_poi_fused_relu_0"], calls)]
    ['.conv', '.act']
    """
    own = [at for at, name in enumerate(kernels) if name.startswith(_FUSED)]
    theirs = [at for at, call in enumerate(calls) if call.leaf.startswith(_FUSED)]
    wanted, leaves = [kernels[at] for at in own], [calls[at].leaf for at in theirs]
    places = [at for at in range(len(leaves) - len(wanted) + 1) if leaves[at : at + len(wanted)] == wanted]
    if not wanted or len(places) != 1:
        return None
    first, after = places[0], places[0] + len(wanted)
    anchors = theirs[first:after]
    result: list[CompiledCall | None] = [None] * len(kernels)
    for at, anchor in zip(own, anchors, strict=True):
        result[at] = calls[anchor]
    before = theirs[first - 1] if first else -1
    behind = theirs[after] if after < len(theirs) else len(calls)
    gaps = zip(pairwise((-1, *own, len(kernels))), pairwise((before, *anchors, behind)), strict=True)
    for (low, high), (begin, end) in gaps:
        between = calls[begin + 1 : end]
        inside = [at for at in range(low + 1, high) if not kernels[at].startswith(("Memcpy", "Memset"))]
        if len(between) == 1:
            between = [*between] * len(inside)
        if len(between) != len(inside):
            shared = common(call.module or "" for call in between) if all(call.module for call in between) else None
            between = [CompiledCall(kernels[at], shared) for at in inside]
        for at, call in zip(inside, between, strict=True):
            result[at] = call
            if call.module is not None and at - 1 > low and kernels[at - 1].startswith("Memset"):
                result[at - 1] = CompiledCall(kernels[at - 1], call.module)  # a library clears what its kernel adds to
    return result
