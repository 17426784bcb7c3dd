"""Call stacks of the host rows of a Kineto trace: the events that enclose each row."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import numpy as np

from joulery.adapters.tracers.inject.compiled import CALL
from joulery.adapters.tracers.kineto.reader import MODULE_RANGE, STACKED, EventKind, KinetoColumns
from joulery.domain.arrays import BoolArray, IntArray
from joulery.domain.trace.nesting import nesting

NODE = "autograd::engine::evaluate_function: "
"""Prefix of the operation in which autograd runs one node of the backward pass."""

OPTIMIZER_RANGE = re.compile(r"^Optimizer\.\w+#")
CLOCK_RANGE = "joulery:clock"
"""Range that the recorder leaves at moments of known system time."""

STEP_RANGE = re.compile(rf"^(ProfilerStep#\d+|{CLOCK_RANGE})$")
COMPILED = re.compile(rf"^({NODE})?(Torch-Compiled Region|CompiledFunction|CompiledFxGraph|## Call CompiledFxGraph)")


@dataclass(slots=True)
class Host:
    """Host rows of a trace with their call stacks; ``-1`` means none. All arrays int64[h] or bool[h].

    Attributes:
        columns: The whole trace.
        row: Row of ``columns`` of each host row.
        parent: Enclosing host row.
        rank: Position with callers before callees; of two enclosing events the higher is the inner one.
        module, node, optimizer, user, data: Innermost enclosing event of that kind, itself included.
        composite: Outermost enclosing compiled region, itself included.
        call: Innermost enclosing call of a kernel in compiled code, itself included.
        op: Innermost enclosing operation, itself included.
        recorded: Innermost enclosing operation that autograd recorded, itself included.
        notes: One sentence for each problem that could not be resolved.
    """

    columns: KinetoColumns
    row: IntArray
    parent: IntArray
    rank: IntArray
    module: IntArray
    node: IntArray
    optimizer: IntArray
    user: IntArray
    composite: IntArray
    call: IntArray
    op: IntArray
    recorded: IntArray
    notes: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, columns: KinetoColumns) -> Host:
        """Compute the call stacks of the host rows of a trace."""
        row = np.flatnonzero((columns.kind != EventKind.KERNEL) & (columns.kind != EventKind.FRAME))
        start_ns = columns.start_ns[row]
        stacks = nesting(start_ns, start_ns + columns.dur_ns[row], columns.lane[row])
        rank = np.empty(len(row), np.int64)
        rank[stacks.order] = np.arange(len(row))
        kind, names = columns.kind[row], columns.name[row]

        def named(pattern: re.Pattern[str], *kinds: EventKind) -> BoolArray:
            hit = np.array([bool(pattern.search(name)) for name in columns.names], np.bool_)
            return (hit[names] if len(hit) else np.zeros(len(names), np.bool_)) & np.isin(kind, kinds)

        module = named(re.compile(f"^({re.escape(MODULE_RANGE)}|{re.escape(STACKED)})"), EventKind.RANGE)
        optimizer = named(OPTIMIZER_RANGE, EventKind.RANGE)
        compiled = named(COMPILED, EventKind.RANGE, EventKind.OP)
        user = (kind == EventKind.RANGE) & ~module & ~optimizer & ~compiled & ~named(STEP_RANGE, EventKind.RANGE)
        inner = nearest(compiled, stacks.parent)
        above = np.where(stacks.parent >= 0, inner[stacks.parent], -1)
        host = cls(
            columns,
            row,
            stacks.parent,
            rank,
            nearest(module, stacks.parent),
            nearest(named(re.compile(f"^{NODE}"), EventKind.OP), stacks.parent),
            nearest(optimizer, stacks.parent),
            nearest(user, stacks.parent),
            nearest(compiled & (above < 0), stacks.parent),
            nearest(named(re.compile(f"^{re.escape(CALL)}"), EventKind.OP), stacks.parent),
            nearest(kind == EventKind.OP, stacks.parent),
            nearest((kind == EventKind.OP) & (columns.seq[row] >= 0), stacks.parent),
        )
        crossing = int(np.count_nonzero(stacks.crossing))
        if crossing:
            host.notes.append(f"{crossing} host events overlap others of their thread without nesting")
        return host

    def name(self, at: int) -> str:
        """Name of a host row in the file."""
        return self.columns.names[int(self.columns.name[self.row[at]])]

    def deeper(self, one: IntArray, other: IntArray) -> BoolArray:
        """Mask of rows where ``one`` exists and lies inside ``other``, or ``other`` does not exist."""
        ranks = np.append(self.rank, -1)
        return np.asarray((one >= 0) & (ranks[one] > ranks[other]), np.bool_)


def nearest(marked: BoolArray, parent: IntArray) -> IntArray:
    """Innermost marked event around each one, itself included; -1 where there is none."""
    count = len(parent)
    jump = np.append(np.where(marked, np.arange(count), np.where(parent >= 0, parent, count)), count)
    while True:
        further = jump[jump]
        if np.array_equal(further, jump):
            break
        jump = further
    found = jump[:-1]
    return np.where((found < count) & np.append(marked, False)[found], found, -1)
