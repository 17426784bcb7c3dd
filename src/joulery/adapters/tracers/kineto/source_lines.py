"""Names from the program's functions that called an operation, in traces recorded ``with_stack=True``.

PyTorch records Python frames as events (``train.py(31): step``); up to 1.12 as a list at each operation
(``Call stack``). Scripted models recorded ``with_modules=True`` have a ``Module Hierarchy`` there. These names serve
operations outside every module and every range: losses, metrics, data.
"""

from __future__ import annotations

import numpy as np

from joulery.adapters.tracers.kineto.reader import EventKind
from joulery.adapters.tracers.kineto.regions import Strings
from joulery.adapters.tracers.kineto.stacks import Host, nearest
from joulery.adapters.tracers.source_names import called_below, frame_component
from joulery.domain.arrays import BoolArray, IntArray
from joulery.domain.trace.nesting import nesting

NOWHERE = -1


def name_sources(host: Host, paths: Strings, path: IntArray, in_module: BoolArray) -> None:
    """Name the host rows by their callers, in place: rows outside modules by functions, rows in a scripted module by
    its submodules. A row without a caller of its own (a launch) takes that of the enclosing operation.

    Args:
        host: Host rows.
        paths: Table of ``path``.
        path: Path of each host row so far, int64[h].
        in_module: Rows inside the range of a module, bool[h].
    """
    columns = host.columns
    if (columns.kind == EventKind.FRAME).any():
        found = _framed(host, paths)
        path[~in_module & (found >= 0)] = found[~in_module & (found >= 0)]
    says = nearest(columns.source[host.row] >= 0, host.parent)
    at = np.flatnonzero(says >= 0)
    if not len(at):
        return
    source = columns.source[host.row[says]]
    inner = np.array([modules for _, modules in columns.sources], np.bool_)[source[at]]
    at = at[inner | ~in_module[at]]
    base = np.where(in_module[at], path[at], NOWHERE)
    pairs, back = np.unique(np.stack([base, source[at]]), axis=1, return_inverse=True)
    texts = paths.all()
    table = [
        paths("/".join([*([texts[above]] if above >= 0 else []), columns.sources[each][0]]))
        for above, each in pairs.T.tolist()
    ]
    path[at] = np.array(table, np.int64)[back.ravel()]


def _framed(host: Host, paths: Strings) -> IntArray:
    """Path of the functions that called each host row, from the frames that are events; -1 for none."""
    columns = host.columns
    rows = np.concatenate([host.row, np.flatnonzero(columns.kind == EventKind.FRAME)])
    rows.sort()
    start_ns = columns.start_ns[rows]
    stacks = nesting(start_ns, start_ns + columns.dur_ns[rows], columns.lane[rows])
    labels = [frame_component(name) for name in columns.names]
    kind, name = columns.kind[rows].tolist(), columns.name[rows].tolist()
    texts: list[str] = [""] * len(rows)
    known: dict[str, int] = {"": NOWHERE}
    found = np.full(len(rows), NOWHERE, np.int64)
    parent = stacks.parent.tolist()
    for at in stacks.order.tolist():
        text = texts[parent[at]] if parent[at] >= 0 else ""
        if kind[at] == EventKind.FRAME:
            text = called_below(text, labels[name[at]])
        texts[at] = text
        if text not in known:
            known[text] = paths(text)
        found[at] = known[text]
    return found[np.searchsorted(rows, host.row)]
