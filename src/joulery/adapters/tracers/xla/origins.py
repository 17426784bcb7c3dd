"""Origins of the instructions of a compiled XLA program: source operation and place in the program.

The metadata of an instruction contains its ``op_name`` and its program lines: an index into the module's table of
stack frames, or a file and a line. A fusion without a name has the name of its root. An instruction that the compiler
added (a copy, a broadcast) belongs to the operation whose result it moves, else to the operation that reads it, else to
the operation whose body contains it. An instruction with the name of an argument (``params['head']['kernel']``) counts
as added: it moves a value.
"""

from __future__ import annotations

import os.path
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from joulery.adapters.hlo_text import HloModule, hlo_modules
from joulery.adapters.tracers.source_names import called_below, source_component
from joulery.adapters.tracers.xla.protobuf import fields, number, packed, sub, text

_OP_NAME = re.compile(r'\bop_name="((?:[^"\\]|\\.)*)"')
_FRAME = re.compile(r"\bstack_frame_id=(\d+)")
_LINE = re.compile(r'\bsource_file="((?:[^"\\]|\\.)*)" source_line=(\d+)')
_OPCODE = re.compile(r"(?:^|[ )}])([a-z][\w-]*)\(")
_CALLED = re.compile(r"\b(?:calls|body|condition|to_apply)=%?([\w.\-]+)")
_WORD = re.compile(r"[\w.\-]+")
_ROW = re.compile(r"(\w+)=(\d+)")
_PASSED_ON = ("parameter", "constant", "tuple", "get-tuple-element")
"""Operations whose name is that of a value, not of work."""
_NO_WORK = (
    *(*_PASSED_ON, "bitcast", "after-all", "partition-id", "replica-id", "opt-barrier"),
    *("call", "while", "conditional"),
)
"""Operations that a GPU does nothing for, but for the instructions of what they call."""
_ROUNDS = 8
"""Number of added instructions in a row that are followed to an operation."""


class Origin(NamedTuple):
    """Origin of an instruction.

    Attributes:
        op_name: Source operation.
        place: Path of the functions that called it, ``train.py:12 loss/net.py:4 layer``; empty where it is not known.
        added: Whether the compiler added the instruction; then name and place are those of the operation it serves.
    """

    op_name: str
    place: str = ""
    added: bool = False


Origins = Mapping[tuple[str, str], Origin]
Sequences = Mapping[str, list[list[str]]]
"""Names of the instructions that do work, in the order of their schedule, of each computation of each module."""


@dataclass(slots=True)
class _Instruction:
    name: str
    opcode: str = ""
    op_name: str = ""
    place: str = ""
    root: bool = False
    operands: list[str] = field(default_factory=list)
    called: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Program:
    """A compiled HLO module: its computations, and the distinct functions in its table of stack frames."""

    name: str
    computations: dict[str, list[_Instruction]]
    functions: set[str]

    def origins(self) -> dict[tuple[str, str], Origin]:
        """The origin of each instruction that has one; the entry with an empty name has all places of the program."""
        roots = {name: each for name, instructions in self.computations.items() for each in instructions if each.root}
        callers = {
            called: each
            for instructions in self.computations.values()
            for each in instructions
            for called in each.called
        }
        common = self._common_place()
        arguments = {
            each.op_name
            for name, instructions in self.computations.items()
            for each in instructions
            if name not in callers and each.opcode == "parameter"
        }
        known: dict[str, Origin] = {}
        moved: dict[str, Origin] = {}
        for instructions in self.computations.values():
            for each in instructions:
                named = each if each.op_name else next((roots[c] for c in each.called if c in roots), each)
                if named.op_name and each.opcode not in _PASSED_ON:
                    found = moved if named.op_name in arguments else known
                    found[each.name] = Origin(named.op_name, "" if common is None else named.place or common)
        for name, instructions in self.computations.items():
            self._serve(instructions, known, callers.get(name))
        known = moved | known
        parts = dict.fromkeys(part for place in sorted(self._places()) for part in place.split("/"))
        return {(self.name, ""): Origin("", "/".join(parts))} | {
            (self.name, name): origin for name, origin in known.items()
        }

    def sequences(self) -> list[list[str]]:
        """The instructions that do work, of each computation, in the order of the schedule."""
        return [
            [each.name for each in instructions if each.opcode not in _NO_WORK]
            for instructions in self.computations.values()
        ]

    def _serve(self, instructions: list[_Instruction], known: dict[str, Origin], caller: _Instruction | None) -> None:
        """Give added instructions the origin of the operation that they serve, in place."""
        readers: dict[str, list[str]] = {}
        for each in instructions:
            for operand in each.operands:
                readers.setdefault(operand, []).append(each.name)
        missing = [each for each in instructions if each.name not in known]
        for neighbours in ({each.name: each.operands for each in missing}, readers):
            for _ in range(_ROUNDS):
                found = {
                    each.name: known[other]._replace(added=True)
                    for each in missing
                    if each.name not in known
                    for other in neighbours.get(each.name, ())[:1]
                    if other in known
                }
                if not found:
                    break
                known.update(found)
        above = known.get(caller.name) if caller is not None else None
        for each in missing:
            if above is not None:
                known.setdefault(each.name, above._replace(added=True))

    def _places(self) -> set[str]:
        return {each.place for instructions in self.computations.values() for each in instructions if each.place}

    def _common_place(self) -> str | None:
        """The path of functions that all operations of the program have in common; None for a primitive that is
        compiled by itself, because calls from other places use it too.

        A program is a user's function if it has the name of a function in its stack frames, or several places.
        """
        places = self._places()
        title = _word(self.name.partition("_")[2])
        if len(places) < 2 and not any(_word(name) == title for name in self.functions if title):
            return None
        return os.path.commonpath(places) if places else ""


def _word(name: str) -> str:
    """Convert a function's name to XLA's spelling."""
    return re.sub(r"\W", "_", name).strip("_")


def programs_in_text(program: str) -> list[Program]:
    """The programs in HLO text, which may contain several."""
    return [_of_text(module) for module in hlo_modules(program)]


def _of_text(module: HloModule) -> Program:
    frames = _frames_of_text(module.tables)
    computations: dict[str, list[_Instruction]] = {}
    for computation, instructions in module.computations.items():
        names = {each.name for each in instructions}
        rows = computations[computation] = []
        for each in instructions:
            body, _, metadata = each.text.partition("metadata={")
            op_name, frame, line = _OP_NAME.search(metadata), _FRAME.search(metadata), _LINE.search(metadata)
            place = frames.get(int(frame[1]), "") if frame else ""
            rows.append(
                _Instruction(
                    each.name,
                    opcode[1] if (opcode := _OPCODE.search(body)) else "",
                    op_name[1] if op_name else "",
                    place or (source_component(line[1], line[2], "") if line else ""),
                    each.root,
                    [word for word in _WORD.findall(body) if word in names],
                    _CALLED.findall(body),
                )
            )
    return Program(module.name, computations, _functions(module.tables.get("FunctionNames", ())))


def _frames_of_text(tables: Mapping[str, list[str]]) -> dict[int, str]:
    """The path of each stack frame. The text gives a frame's parent plus one, or the frame itself if it has none."""
    files, functions = ([row.strip('"') for row in tables.get(name, ())] for name in ("FileNames", "FunctionNames"))
    locations, frames = (
        [{key: int(value) for key, value in _ROW.findall(row)} for row in tables.get(name, ())]
        for name in ("FileLocations", "StackFrames")
    )
    rows = [(row.get("file_location_id", 0), row.get("parent_frame_id", 1) - 1) for row in frames]
    places = [(row.get("file_name_id", 0), row.get("function_name_id", 0), row.get("line", 0)) for row in locations]
    return _frames(files, functions, places, rows)


def _frames(
    files: list[str], functions: list[str], places: list[tuple[int, int, int]], frames: list[tuple[int, int]]
) -> dict[int, str]:
    """Path of each stack frame by its number, from tables that count from 1 (0 is none)."""
    paths: dict[int, str] = {0: ""}
    for at, (location, parent) in enumerate(frames, start=1):
        component = ""
        if 0 < location <= len(places):
            file, function, line = places[location - 1]
            if 0 < file <= len(files) and 0 < function <= len(functions):
                component = source_component(files[file - 1], line, functions[function - 1])
        paths[at] = called_below(paths.get(parent, ""), component)  # a caller is listed before what it calls
    return paths


def _functions(names: list[str] | tuple[str, ...]) -> set[str]:
    return {name.strip('"').rpartition(".")[2] for name in names}


def programs_in_proto(program: memoryview) -> list[Program]:
    """The programs in a serialised ``HloProto``.

    Raises:
        WireError: The bytes are not such a message.
    """
    return [_of_proto(sub(value)) for tag, value in fields(program) if tag == 1]


def _of_proto(message: memoryview) -> Program:
    name = ""
    parts: list[memoryview] = []
    index = memoryview(b"")
    schedule: dict[int, list[int]] = {}
    for tag, value in fields(message):
        if tag == 1:
            name = text(value)
        elif tag == 3:
            parts.append(sub(value))
        elif tag == 7:
            schedule = _schedule(sub(value))
        elif tag == 17 and not isinstance(value, int):
            index = value
    functions, frames = _frames_of_proto(index)
    computations = dict(_computation(part, frames, schedule) for part in parts)
    return Program(name, computations, _functions(functions))


def _schedule(message: memoryview) -> dict[int, list[int]]:
    """Numbers of the instructions of each computation in the order in which they run."""
    found: dict[int, list[int]] = {}
    for tag, value in fields(message):
        entry = dict(fields(sub(value))) if tag == 1 else {}
        if isinstance(number_ := entry.get(1), int) and 2 in entry:
            found[number_] = [each for key, ids in fields(sub(entry[2])) if key == 1 for each in packed(ids)]
    return found


def _frames_of_proto(index: memoryview) -> tuple[list[str], dict[int, str]]:
    """Names of functions, and the path of each stack frame."""
    files, functions = [], []
    places, frames = [], []
    for tag, value in fields(index):
        if tag == 1:
            files.append(text(value))
        elif tag == 2:
            functions.append(text(value))
        elif tag in (3, 4):
            row = {key: part for key, part in fields(sub(value)) if isinstance(part, int)}
            if tag == 3:
                places.append((row.get(1, 0), row.get(2, 0), row.get(3, 0)))
            else:
                frames.append((row.get(1, 0), row.get(2, 0)))
    return functions, _frames(files, functions, places, frames)


def _computation(
    message: memoryview, frames: Mapping[int, str], schedule: Mapping[int, list[int]]
) -> tuple[str, list[_Instruction]]:
    """Number of a computation as text, and its instructions, in the order of the schedule where there is one."""
    ident = root = -1
    rows: list[tuple[int, list[int], _Instruction]] = []
    for tag, value in fields(message):
        if tag == 5:
            ident = number(value)
        elif tag == 6:
            root = number(value)
        elif tag == 2:
            rows.append(_instruction(sub(value), frames))
    names = {key: each.name for key, _, each in rows}
    for key, operands, each in rows:
        each.root = key == root
        each.operands = [names[operand] for operand in operands if operand in names]
    place = {key: at for at, key in enumerate(schedule.get(ident, ()))}
    return str(ident), [each for _, _, each in sorted(rows, key=lambda row: place.get(row[0], -1))]


def _instruction(message: memoryview, frames: Mapping[int, str]) -> tuple[int, list[int], _Instruction]:
    each, key, operands = _Instruction(""), -1, list[int]()
    for tag, value in fields(message):
        if tag == 1:
            each.name = text(value)
        elif tag == 2:
            each.opcode = text(value)
        elif tag == 7:
            each.op_name, each.place = _metadata(sub(value), frames)
        elif tag == 35:
            key = number(value)
        elif tag == 36:
            operands += packed(value)
        elif tag == 38:
            each.called += map(str, packed(value))
    return key, operands, each


def _metadata(message: memoryview, frames: Mapping[int, str]) -> tuple[str, str]:
    op_name = file = ""
    line = frame = 0
    for tag, value in fields(message):
        if tag == 2:
            op_name = text(value)
        elif tag == 3:
            file = text(value)
        elif tag == 4:
            line = number(value)
        elif tag == 15:
            frame = number(value)
    return op_name, frames.get(frame, "") or (source_component(file, line, "") if file else "")
