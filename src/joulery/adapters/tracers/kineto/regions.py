"""Names inside compiled regions: marked kernel calls are named by module, other operations by region."""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np

from joulery.adapters.tracers.inject.compiled import CALL
from joulery.adapters.tracers.kineto.compiled import CompiledCall
from joulery.adapters.tracers.kineto.reader import MODULE_RANGE, EventKind
from joulery.adapters.tracers.kineto.stacks import COMPILED, NODE, Host
from joulery.domain.arrays import BoolArray, IntArray
from joulery.domain.trace.events import UNNAMED, module_components

ROOT = "<root>"
"""Component for the operations of a root module with an unnamed range."""

PHASES = ("", "forward", "backward", "recompute", "optimizer", "data")
NOWHERE, FORWARD, BACKWARD, RECOMPUTE, OPTIMIZER, DATA = range(6)

_FRAME = re.compile(f"{COMPILED.pattern}|^(TorchDynamo Cache Lookup|Pregraph bytecode|AOTDispatcher|{NODE})")
_JOINED = re.compile(r"_\d+$")


class Strings:
    """A growing table of distinct strings."""

    def __init__(self) -> None:
        self._index: dict[str, int] = {}

    def __call__(self, text: str) -> int:
        """The index of a string, which is added when it is new."""
        return self._index.setdefault(text, len(self._index))

    def all(self) -> list[str]:
        """The strings by index."""
        return list(self._index)


def module_path(name: str) -> str:
    """The path of a module range: ``QTN:Net/encoder.layer.0`` -> ``Net/encoder/layer_0``.

    An index directly after a slash is not joined to the name before the slash.
    """
    dotted = name.removeprefix(MODULE_RANGE).split("/")
    return "/".join(part for piece in dotted for part in module_components(piece)) or ROOT


def name_regions(
    host: Host,
    compiled: Mapping[str, CompiledCall],
    paths: Strings,
    leaves: Strings,
    path: IntArray,
    phase: IntArray,
    leaf: IntArray,
) -> BoolArray:
    """Name the rows inside compiled regions, in place.

    An operation belongs to the module of its kernel call, or else to the region. The rest of a region (guards,
    allocations, on a CPU the kernels of calls that are not marked) is a leaf named after the region. A region that
    autograd records is in a forward pass.

    Args:
        host: Host rows.
        compiled: The calls by the names of their ranges.
        paths, leaves: The tables of ``path`` and ``leaf``.
        path, phase, leaf: Columns of the host rows, int64[h].

    Returns:
        The rows inside regions that are events of their own, bool[h].
    """
    inside = np.flatnonzero(host.composite >= 0)
    region = host.composite[inside]
    recorded = np.unique(region[phase[inside] == FORWARD])
    phase[recorded[phase[recorded] == NOWHERE]] = FORWARD
    own = leaf.copy()
    for column in (path, phase, leaf):
        column[inside] = column[region]
    kept = np.zeros(len(host.row), np.bool_)
    ops = inside[(host.columns.kind[host.row[inside]] == EventKind.OP) & ~frames(host, compiled)[inside]]
    texts, names = paths.all(), leaves.all()
    pairs, back = np.unique(np.stack([path[ops], leaf[ops]]), axis=1, return_inverse=True)
    below = [paths(f"{texts[base]}/{names[name]}") for base, name in pairs.T.tolist()]
    path[ops], leaf[ops] = np.array(below, np.int64)[back.ravel()], own[ops]
    kept[ops] = True
    rows = inside[host.call[inside] >= 0]
    if len(rows):
        _name_calls(host, compiled, paths, leaves, rows, path, leaf, kept)
    return kept


def frames(host: Host, compiled: Mapping[str, CompiledCall]) -> BoolArray:
    """The mask of rows that only call compiled code: regions, the compiler's wrappers, and unknown calls, bool[h]."""
    named = np.array(
        [bool(_FRAME.search(name)) or (name.startswith(CALL) and name not in compiled) for name in host.columns.names],
        np.bool_,
    )
    return named[host.columns.name[host.row]] if len(named) else np.zeros(len(host.row), np.bool_)


def _name_calls(
    host: Host,
    compiled: Mapping[str, CompiledCall],
    paths: Strings,
    leaves: Strings,
    rows: IntArray,
    path: IntArray,
    leaf: IntArray,
    kept: BoolArray,
) -> None:
    """Name the rows inside marked calls of kernels, in place."""
    call = host.call[rows]
    base = path[host.composite[rows]]
    texts, names = paths.all(), host.columns.name[host.row[call]]
    pairs, back = np.unique(np.stack([base, names]), axis=1, return_inverse=True)
    found = [compiled.get(host.columns.names[name]) for name in pairs[1].tolist()]
    known = np.array([entry is not None for entry in found], np.bool_)[back.ravel()]
    table = [
        paths(below(texts[base], entry.module if entry is not None else None))
        for base, entry in zip(pairs[0].tolist(), found, strict=True)
    ]
    kernels = [leaves(entry.leaf if entry is not None else "") for entry in found]
    path[rows[known]] = np.array(table, np.int64)[back.ravel()][known]
    outer = known & (rows == call)
    leaf[rows[outer]] = np.array(kernels, np.int64)[back.ravel()][outer]
    # The range of a call is an event where nothing inside it says what runs: the kernels of a CPU.
    ops = (rows != call) & (host.columns.kind[host.row[rows]] == EventKind.OP)
    speaks = np.zeros(len(host.row), np.bool_)
    speaks[call[ops]] = True
    kept[rows[rows == call]] = (known & ~speaks[rows])[rows == call]


def below(base: str, module: str | None) -> str:
    """The path of a module of a compiled region: its full path, or a path below the module that called the region."""
    if not module or module == ".":
        return base
    if not module.startswith("."):
        return module_path(module)
    above, slash, last = base.rpartition("/")
    first, _, rest = module[1:].partition(".")
    if not slash or not first.isdigit() or _JOINED.search(last):
        return "/".join([*([base] if base != UNNAMED else []), *module_components(module[1:])])
    below = f"{above}/{last}_{first}"
    return "/".join([below, *_rest(rest)])


def _rest(dotted: str) -> tuple[str, ...]:
    """The components behind an index; a further index stays a component of its own."""
    first, _, rest = dotted.partition(".")
    if first.isdigit():
        return (first, *module_components(rest))
    return module_components(dotted)
