"""Parser of XLA programs in HLO text: modules, computations and instructions.

``jax.jit(f).lower(x).compile().as_text()`` and XLA's dumps print this text. Instructions are interpreted elsewhere:
:mod:`joulery.adapters.graphs.hlo` counts their arithmetic, :mod:`joulery.adapters.tracers.xla.hlo` reads their names.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import NamedTuple

_TABLE = re.compile(r"^(FileNames|FunctionNames|FileLocations|StackFrames)$")
_ROW = re.compile(r"^\d+ (.+)$")
_MODULE = re.compile(r"^HloModule ([^\s,]+)")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-<>]+) .*\{$")
_INSTRUCTION = re.compile(r"^\s*(ROOT )?%?([\w.\-]+) = (.*)$")


class HloInstruction(NamedTuple):
    """One instruction of a computation.

    Attributes:
        name: Its name in the module.
        root: Whether it gives the result of its computation.
        text: Text after the equals sign: shape, opcode, operands, attributes, metadata.
    """

    name: str
    root: bool
    text: str


@dataclass(slots=True)
class HloModule:
    """One XLA program.

    Attributes:
        name: Its name.
        computations: The instructions of each computation.
        entry: Name of the computation where it starts; empty where the text names none.
        tables: Rows of the tables of files, functions, places and stack frames, in order; they count from 1.
    """

    name: str
    computations: dict[str, list[HloInstruction]] = field(default_factory=dict)
    entry: str = ""
    tables: dict[str, list[str]] = field(default_factory=dict)


def hlo_modules(text: str) -> list[HloModule]:
    """The programs in a text, in order; lines before the first are skipped."""
    modules: list[HloModule] = []
    current: list[HloInstruction] = []
    table: list[str] = []
    for line in text.splitlines():
        if match := _MODULE.match(line):
            modules.append(HloModule(match[1]))
            current = []
        elif not modules:
            continue
        elif match := _TABLE.match(line):
            table = modules[-1].tables.setdefault(match[1], [])
        elif match := _ROW.match(line):
            table.append(match[1])
        elif match := _INSTRUCTION.match(line):
            current.append(HloInstruction(match[2], match[1] is not None, match[3]))
        elif match := _COMPUTATION.match(line):
            current = modules[-1].computations.setdefault(match[2], [])
            if match[1]:
                modules[-1].entry = match[2]
    return modules
