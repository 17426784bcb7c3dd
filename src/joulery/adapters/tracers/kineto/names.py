"""Qualified names for the events of a Kineto trace: module, operation and phase.

Forward operations lie inside the range of their module (``QTN:encoder.layer.0``, recorded by forward hooks). Backward
operations lie inside ``autograd::engine::evaluate_function: X``; an arrow or the autograd sequence number links this
node to the forward operation it differentiates. The correlation id links a kernel to the call that launched it.
Specs: Smaragdine report, section 3.1.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from joulery.adapters.tracers.kineto.autograd import node_paths
from joulery.adapters.tracers.kineto.compiled import CompiledCall
from joulery.adapters.tracers.kineto.graphs import GRAPH_LAUNCH, from_captures, from_code, replays
from joulery.adapters.tracers.kineto.reader import (
    MODULE_RANGE,
    STACKED,
    EventKind,
    KinetoColumns,
    read_columns,
)
from joulery.adapters.tracers.kineto.regions import (
    BACKWARD,
    DATA,
    FORWARD,
    NOWHERE,
    OPTIMIZER,
    PHASES,
    RECOMPUTE,
    Strings,
    below,
    frames,
    module_path,
    name_regions,
)
from joulery.adapters.tracers.kineto.source_lines import name_sources
from joulery.adapters.tracers.kineto.stacks import COMPILED, NODE, OPTIMIZER_RANGE, STEP_RANGE, Host
from joulery.domain.arrays import BoolArray, IntArray
from joulery.domain.trace.events import SELF, UNNAMED, WAIT, EventTrace, qualified

HOST = "CPU"
"""Device of host threads: a trace does not say which socket a thread ran on."""

GRAPH = "<CUDA graph>"
"""Component for the kernels of a replayed graph whose operations are not known: one call launches all of them."""

_LOADER = re.compile(r"^enumerate\(DataLoader\)#")
"""Range in which a program waits for the next batch."""

_WAITS = re.compile(r"^(cuda|hip|cu)(Stream|Device|Event|Ctx)Synchronize")
_PRODUCTS = frozenset({"mm", "bmm", "addmm", "baddbmm", "addbmm", "matmul"})


def read_kineto(path: Path) -> EventTrace:
    """The named events of a Kineto JSON file, host and accelerators.

    Raises:
        DataError: The file cannot be read, ends early, or an event is malformed.
    """
    return name_events(read_columns(path))


def name_events(
    columns: KinetoColumns, *, calls: bool = False, compiled: Mapping[str, CompiledCall] | None = None
) -> EventTrace:
    """Give every event its qualified name, device and phase.

    Args:
        columns: The trace.
        calls: Number the repeated calls of one module inside its caller (``layer@2``), for models that share layers.
        compiled: The calls of kernels in compiled code by the names of their ranges, where the recorder stored them.
    """
    host = Host.of(columns)
    paths = Strings()
    path, phase = _contexts(host, paths, calls)
    leaf, leaves, composite_leaves = _leaves(host, phase)
    opened = name_regions(host, compiled or {}, paths, leaves, path, phase, leaf)
    kept = _kept(host, opened)
    kernels = _kernels(columns, host, compiled or {}, paths, leaves, path, phase, leaf)
    ops, op = _joined(
        paths, leaves, np.concatenate([path[kept], kernels.path]), np.concatenate([leaf[kept], kernels.leaf])
    )
    rows = np.concatenate([host.row[kept], kernels.row])
    devices, device = _devices(columns, len(kept), kernels.row)
    return EventTrace(
        ops,
        devices,
        PHASES,
        op=op,
        start_ns=columns.start_ns[rows],
        dur_ns=columns.dur_ns[rows],
        device=device,
        lane=columns.lane[rows],
        phase=np.concatenate([phase[kept], kernels.phase]),
        composite=frozenset(name for name in ops if name.rpartition("/")[2] in composite_leaves),
        lanes=_threads(host),
        notes=(*host.notes, *kernels.notes, *_nameless_notes(columns), *_unknown_notes(columns)),
    )


def _threads(host: Host) -> list[tuple[int, int]]:
    """The (process, thread) of each lane; zeros for streams and for lanes that the trace names as text."""
    lanes = host.columns.lanes
    threads = [(0, 0)] * len(lanes)
    for at in np.unique(host.columns.lane[host.row]).tolist():
        process, thread = lanes[at]
        if isinstance(process, int) and isinstance(thread, int):
            threads[at] = process, thread
    return threads


def _contexts(host: Host, paths: Strings, calls: bool) -> tuple[IntArray, IntArray]:
    """Path of modules and phase of each host row."""
    columns, count = host.columns, len(host.row)
    path = np.full(count, paths(UNNAMED), np.int64)
    phase = np.where(host.recorded >= 0, FORWARD, NOWHERE)

    in_module = host.deeper(host.module, host.node) & host.deeper(host.module, host.optimizer)
    in_optimizer = host.deeper(host.optimizer, host.module) & host.deeper(host.optimizer, host.node)
    # What autograd records inside an optimizer's step is a closure: the next forward pass, not the step.
    in_optimizer &= ~host.deeper(host.recorded, host.optimizer)
    in_node = host.deeper(host.node, host.module) & host.deeper(host.node, host.optimizer)
    in_user = (host.user >= 0) & ~in_module & ~in_optimizer & ~in_node

    path[in_module] = _module_paths(host, paths, calls)[host.module[in_module]]
    name_sources(host, paths, path, in_module)
    for inside, marker, label in (
        (in_user, host.user, _range_path),
        (in_optimizer, host.optimizer, _range_path),
    ):
        at, back = np.unique(columns.name[host.row[marker[inside]]], return_inverse=True)
        path[inside] = np.array([paths(label(columns.names[name])) for name in at.tolist()], np.int64)[back]
    loads = np.array([bool(_LOADER.search(name)) for name in columns.names], np.bool_)
    in_loader = np.flatnonzero(in_user)
    in_loader = in_loader[loads[columns.name[host.row[host.user[in_loader]]]]] if len(in_loader) else in_loader
    phase[in_loader] = DATA
    phase[in_module] = np.where(host.node[in_module] >= 0, RECOMPUTE, FORWARD)
    phase[in_optimizer], phase[in_node] = OPTIMIZER, BACKWARD
    differentiated = node_paths(host, path, in_node, paths(UNNAMED))[host.node[in_node]]
    # A node without a forward operation belongs to what began the backward pass, where frames say what that was.
    path[in_node] = np.where(differentiated == paths(UNNAMED), path[in_node], differentiated)
    return path, phase


def _range_path(name: str) -> str:
    """The component for a range that is not a module: ``Optimizer.step#AdamW.step`` -> ``AdamW.step``."""
    if _LOADER.search(name):
        return "DataLoader"
    return qualified(OPTIMIZER_RANGE.sub("", name)) or UNNAMED


def _module_paths(host: Host, paths: Strings, calls: bool) -> IntArray:
    """Path of each module range, by host row."""
    columns = host.columns
    result = np.zeros(len(host.row), np.int64)
    rows = np.flatnonzero(host.module == np.arange(len(host.row)))
    stacked = any(name.startswith(STACKED) for name in columns.names)
    if not calls and not stacked:
        at, back = np.unique(columns.name[host.row[rows]], return_inverse=True)
        result[rows] = np.array([paths(module_path(columns.names[name])) for name in at.tolist()], np.int64)[back]
        return result
    texts: dict[int, str] = {}
    seen: dict[tuple[int, int], int] = {}
    for at in rows[np.argsort(host.rank[rows], kind="stable")].tolist():
        above = int(host.parent[at])
        caller = int(host.module[above]) if above >= 0 else -1
        if host.name(at).startswith(STACKED):
            texts[at] = _stacked_path(host.name(at), texts[caller] if caller >= 0 else "")
            result[at] = paths(texts[at])
            continue
        key = (caller, int(columns.name[host.row[at]]))
        seen[key] = seen.get(key, 0) + 1
        plain = module_path(host.name(at))
        outer = module_path(host.name(caller)) if caller >= 0 else ""
        inside = outer and plain.startswith(outer + "/")
        text = texts[caller] + plain[len(outer) :] if inside else plain
        texts[at] = text if seen[key] == 1 or not calls else f"{text}@{seen[key]}"
        result[at] = paths(texts[at])
    return result


def _stacked_path(name: str, caller: str) -> str:
    """The path of ``nn.Module: Linear_7`` below its caller: a frame contains the class, not the attribute name."""
    return qualified(*caller.split("/"), name.removeprefix(STACKED))


def _leaves(host: Host, phase: IntArray) -> tuple[IntArray, Strings, set[str]]:
    """The operation name of each host row, the table of these names, and the set of composite ones."""
    columns = host.columns
    leaves, composite = Strings(), {GRAPH}
    kind, names = columns.kind[host.row], columns.name[host.row]
    by_kind = np.zeros((len(EventKind), len(columns.names)), np.int64)
    used = np.unique(np.stack([kind, names]), axis=1) if len(names) else np.zeros((2, 0), np.int64)
    for k, name in used.T.tolist():
        text = _leaf(EventKind(k), columns.names[name])
        by_kind[k, name] = leaves(text)
    composite |= {_op_name(columns.names[n]) for n in np.unique(names[host.composite[host.composite >= 0]]).tolist()}
    leaf = by_kind[kind, names]
    products = np.array([text in _PRODUCTS for text in leaves.all()], np.bool_)
    rows = (
        np.flatnonzero((phase == BACKWARD) & products[leaf] & (kind == EventKind.OP) & (host.composite < 0))
        if len(leaf)
        else np.zeros(0, int)
    )
    if len(rows):
        ordinal = _ordinals(host.node[rows], leaf[rows], host.rank[rows])
        at, back = np.unique(np.stack([leaf[rows], ordinal]), axis=1, return_inverse=True)
        texts = leaves.all()
        numbered = [leaves(texts[k] if not n else f"{texts[k]}_{n}") for k, n in at.T.tolist()]
        leaf[rows] = np.array(numbered, np.int64)[back.ravel()]
    return leaf, leaves, composite


def _leaf(kind: EventKind, name: str) -> str:
    """Last component of the qualified name of an event."""
    if kind is EventKind.RUNTIME:
        return WAIT if _WAITS.search(name) else GRAPH if GRAPH_LAUNCH.search(name) else name
    if kind is EventKind.RANGE and not COMPILED.search(name):
        return SELF
    return _op_name(name)


def _op_name(name: str) -> str:
    """``aten::mm`` -> ``mm``, ``autograd::engine::evaluate_function: torch::autograd::X`` -> ``X``."""
    return name.removeprefix(NODE).removeprefix("torch::autograd::").removeprefix("aten::").replace("/", "|") or UNNAMED


def _ordinals(group: IntArray, name: IntArray, rank: IntArray) -> IntArray:
    """Number of rows of the same group and name before each one, by rank."""
    order = np.lexsort((rank, name, group))
    fresh = np.ones(len(order), np.bool_)
    fresh[1:] = (group[order][1:] != group[order][:-1]) | (name[order][1:] != name[order][:-1])
    begins = np.flatnonzero(fresh)
    counted = np.arange(len(order)) - np.repeat(begins, np.diff(np.append(begins, len(order))))
    result = np.empty(len(order), np.int64)
    result[order] = counted
    return result


def _kept(host: Host, opened: BoolArray) -> IntArray:
    """The host rows that become events: not profiler steps or launches, and only kernel calls of a compiled region."""
    columns = host.columns
    kind, name = columns.kind[host.row], columns.name[host.row]
    steps = np.array([bool(STEP_RANGE.search(text)) for text in columns.names], np.bool_)
    waits = np.array([bool(_WAITS.search(text)) for text in columns.names], np.bool_)
    step = steps[name] if len(name) else np.zeros(0, np.bool_)
    wait = waits[name] if len(name) else np.zeros(0, np.bool_)
    top = (host.parent < 0) | np.append(step, False)[host.parent]
    runtime = kind == EventKind.RUNTIME
    inside = (host.composite >= 0) & (host.composite != np.arange(len(kind)))
    return np.flatnonzero(~step & (~inside | opened) & (~runtime | wait | top))


@dataclass(frozen=True, slots=True)
class _Kernels:
    """Named rows on accelerators; all arrays int64[k]."""

    row: IntArray
    path: IntArray
    leaf: IntArray
    phase: IntArray
    notes: tuple[str, ...]


def _kernels(
    columns: KinetoColumns,
    host: Host,
    compiled: Mapping[str, CompiledCall],
    paths: Strings,
    leaves: Strings,
    path: IntArray,
    phase: IntArray,
    leaf: IntArray,
) -> _Kernels:
    """Name each kernel after the operation that launched it; a kernel without one keeps its own name."""
    row = np.flatnonzero(columns.kind == EventKind.KERNEL)
    whole = _launches(columns, host, row)
    replayed = replays(columns, host, row, whole)
    launch = from_captures(columns, host, row, whole, replayed)
    source = np.where(launch >= 0, launch, 0)
    op = np.where(launch >= 0, host.op[source], -1) if len(host.row) else np.full(len(row), -1)
    graphs = np.array([bool(GRAPH_LAUNCH.search(text)) for text in columns.names], np.bool_)
    names, back = np.unique(columns.name[row], return_inverse=True)
    own = np.array([leaves(_op_name(columns.names[n])) for n in names.tolist()], np.int64)[back]
    k_path, k_phase = np.full(len(row), paths(UNNAMED), np.int64), np.full(len(row), NOWHERE, np.int64)
    linked = launch >= 0
    k_path[linked], k_phase[linked] = path[source[linked]], phase[source[linked]]
    graph = linked & (graphs[columns.name[host.row[source]]] if len(host.row) else linked)
    noted = _from_code(from_code(columns, row, replayed, compiled), graph, paths, leaves, k_path, own)
    # A kernel that compiled code launches has a name of its own, and so has each of a captured graph.
    bare = linked.copy()
    if len(host.row):
        bare &= (host.composite[source] >= 0) & ((op < 0) | frames(host, compiled)[op]) & ~noted
    named = (op >= 0) & ~bare & ~graph & ~noted
    own[named] = leaf[op[named]]
    if len(host.row):
        inside = named & (host.composite[source] >= 0)
        k_path[inside] = path[op[inside]]
    for inner, label in ((bare & ~graph, leaf), (graph, np.full(len(leaf), leaves(GRAPH)))):
        texts, labels = paths.all(), leaves.all()
        joined = [f"{texts[k_path[k]]}/{labels[label[source[k]]]}" for k in np.flatnonzero(inner).tolist()]
        k_path[inner] = np.array([paths(text) for text in joined], np.int64)
    return _Kernels(row, k_path, own, k_phase, _kernel_notes(linked, graph))


def _from_code(
    found: Mapping[int, CompiledCall], graph: BoolArray, paths: Strings, leaves: Strings, path: IntArray, leaf: IntArray
) -> BoolArray:
    """Name kernels of replayed graphs by their generated code, in place, and return the mask of them, bool[k]."""
    noted, texts = np.zeros(len(graph), np.bool_), paths.all()
    for kernel, call in found.items():
        if graph[kernel] and call.module is not None:
            path[kernel] = paths(below(texts[path[kernel]], call.module))
            leaf[kernel] = leaves(_op_name(call.leaf))
            noted[kernel] = True
    graph &= ~noted
    return noted


def _kernel_notes(linked: BoolArray, graph: BoolArray) -> tuple[str, ...]:
    """Notes on the number of kernels without a launch, and of kernels launched with an unknown graph."""
    lost, whole = int(np.count_nonzero(~linked)), int(np.count_nonzero(graph))
    notes = []
    if lost:
        notes.append(f"{lost} of {len(linked)} kernels, copies and fills have no launch in the trace")
    if whole:
        notes.append(
            f"{whole} of {len(linked)} kernels, copies and fills were launched with a CUDA graph that was captured "
            f"before the trace began: below {GRAPH}"
        )
    return tuple(notes)


def kernel_time_ns(columns: KinetoColumns) -> tuple[int, int]:
    """The time of all work on accelerators, and of the work linked to a launching operation, nanoseconds."""
    host = Host.of(columns)
    row = np.flatnonzero(columns.kind == EventKind.KERNEL)
    launch = _launches(columns, host, row)
    launch = from_captures(columns, host, row, launch, replays(columns, host, row, launch))
    linked = launch >= 0
    linked[linked] = host.op[launch[linked]] >= 0
    return int(columns.dur_ns[row].sum()), int(columns.dur_ns[row[linked]].sum())


def _launches(columns: KinetoColumns, host: Host, row: IntArray) -> IntArray:
    """Host row that launched each kernel: by correlation, else the operation with its external id; -1 for none."""
    found = np.full(len(row), -1, np.int64)
    for kind, ids in ((EventKind.RUNTIME, columns.correlation), (EventKind.OP, columns.external)):
        known = np.flatnonzero((columns.kind[host.row] == kind) & (ids[host.row] >= 0))
        if not len(known):
            continue
        key, first = np.unique(ids[host.row[known]], return_index=True)
        open_ = (found < 0) & (ids[row] >= 0)
        at = np.minimum(np.searchsorted(key, ids[row]), len(key) - 1)
        found = np.where(open_ & (key[at] == ids[row]), known[first[at]], found)
    return found


def _joined(paths: Strings, leaves: Strings, path: IntArray, leaf: IntArray) -> tuple[list[str], IntArray]:
    """Table of qualified names, and the index of each (path, leaf)."""
    path_texts, leaf_texts = paths.all(), leaves.all()
    pairs, back = np.unique(path * max(1, len(leaf_texts)) + leaf, return_inverse=True)
    names = [f"{path_texts[pair // len(leaf_texts)]}/{leaf_texts[pair % len(leaf_texts)]}" for pair in pairs.tolist()]
    return names, back.astype(np.int64)


def _devices(columns: KinetoColumns, host_rows: int, kernel_rows: IntArray) -> tuple[list[str], IntArray]:
    """Table of devices, and the device of the host rows followed by the kernels."""
    numbers = (
        np.array([str(device) for device, _ in columns.lanes])[columns.lane[kernel_rows]]
        if host_rows or len(kernel_rows)
        else np.zeros(0, str)
    )
    accelerators, back = np.unique(numbers, return_inverse=True)
    device = np.concatenate([np.zeros(host_rows, np.int64), back.astype(np.int64) + 1])
    return [HOST, *(f"GPU:{number}" for number in accelerators.tolist())], device


def _nameless_notes(columns: KinetoColumns) -> tuple[str, ...]:
    """A note if the trace contains neither modules nor functions of its operations."""
    says = any(name.startswith((MODULE_RANGE, STACKED)) for name in columns.names)
    says = says or bool(columns.sources) or bool((columns.kind == EventKind.FRAME).any())
    backward = any(name.startswith(NODE) for name in columns.names)
    if says or not backward:
        return ()
    return ("the trace says neither modules nor functions: record it with torch.profiler.profile(with_stack=True)",)


def _unknown_notes(columns: KinetoColumns) -> tuple[str, ...]:
    """A note on events that are left out because their category is not known."""
    if not columns.unknown:
        return ()
    kinds = ", ".join(f"{count} of {kind}" for kind, count in sorted(columns.unknown.items()))
    return (f"events of unknown categories are left out: {kinds}",)
