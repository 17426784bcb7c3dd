"""A small profile of a GPU as XLA writes it (``xla/backends/profiler/gpu/cupti_collector.cc``), message by message."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any


def varint(value: int) -> bytes:
    out = bytearray()
    while True:
        out.append((value & 0x7F) | (0x80 if value > 0x7F else 0))
        value >>= 7
        if not value:
            return bytes(out)


def message(*fields: tuple[int, Any]) -> bytes:
    """Fields by number: whole numbers, texts, or bytes of a message."""
    out = b""
    for tag, value in fields:
        if isinstance(value, int):
            out += varint(tag << 3) + varint(value)
        else:
            content = value.encode() if isinstance(value, str) else value
            out += varint(tag << 3 | 2) + varint(len(content)) + content
    return out


class Plane:
    """One plane; names of events and of statistics get numbers as they come."""

    def __init__(self, name: str) -> None:
        self.name, self.lines = name, list[bytes]()
        self.events: dict[str, int] = {}
        self.stats: dict[str, int] = {}

    def stat(self, key: str, value: Any) -> bytes:
        """Whole numbers as such, texts as references, bytes as bytes: as the collector does."""
        number = self.stats.setdefault(key, len(self.stats) + 1)
        if isinstance(value, int):
            return message((1, number), (3, value))
        if isinstance(value, bytes):
            return message((1, number), (6, value))
        return message((1, number), (7, self.stats.setdefault(value, len(self.stats) + 1)))

    def line(self, title: str, events: Iterable[tuple[str, float, float, dict[str, Any]]]) -> None:
        """Events: name, start and length in microseconds, statistics."""
        rows = []
        for name, start, length, stats in events:
            kind = self.events.setdefault(name, len(self.events) + 1)
            own = [(4, self.stat(key, value)) for key, value in stats.items()]
            rows.append((4, message((1, kind), (2, round(start * 1e6)), (3, round(length * 1e6)), *own)))
        self.lines.append(message((2, title), (3, 0), *rows))

    def written(self, *more: tuple[int, Any]) -> bytes:
        def table(tag: int, names: dict[str, int]) -> list[tuple[int, Any]]:
            return [(tag, message((1, number), (2, message((1, number), (2, name))))) for name, number in names.items()]

        return message(
            (2, self.name), *((3, line) for line in self.lines), *more, *table(4, self.events), *table(5, self.stats)
        )


def program(
    name: str, computations: dict[str, list[tuple[str, str, str, list[str]]]], operands: dict[str, str] | None = None
) -> bytes:
    """An ``HloProto``: instructions by computation as (name, opcode, op_name, what they call), in their order.

    They are written back to front; the schedule says how they run. ``operands`` has what an instruction reads.
    """
    reads = operands or {}
    ids = {each[0]: n for n, each in enumerate((i for part in computations.values() for i in part), start=10)}
    numbers = {part: n for n, part in enumerate(computations, start=1)}
    parts, orders = [], []
    for part, instructions in computations.items():
        rows = []
        for own, opcode, op_name, called in instructions:
            calls = b"".join(varint(numbers[each]) for each in called)
            row = [(1, own), (2, opcode), (7, message((2, op_name))), (35, ids[own]), (38, calls)]
            row += [(36, varint(ids[reads[own]]))] if own in reads else []
            rows.append((2, message(*row)))
        root = ids[instructions[-1][0]]
        parts.append((3, message((1, part), *reversed(rows), (5, numbers[part]), (6, root))))
        order = b"".join(varint(ids[own]) for own, *_ in instructions)
        orders.append((1, message((1, numbers[part]), (2, message((1, order))))))
    return message((1, message((1, name), *parts, (7, message(*orders)))))


def write_profile(path: Path, gpu: Plane, programs: dict[str, bytes]) -> Path:
    """The profile of one GPU and of its programs, which began at the first microsecond of 2001."""
    metadata = Plane("/host:metadata")
    rows = []
    for number, (name, content) in enumerate(programs.items(), start=1):
        stat = metadata.stat("Hlo Proto", content)
        rows.append((4, message((1, number), (2, message((1, number), (2, name), (5, stat))))))
    began = Plane("Task Environment")
    start = (6, began.stat("profile_start_time", 978_307_200_000_000_000))
    planes = (gpu.written(), metadata.written(*rows), began.written(start))
    path.write_bytes(b"".join(message((1, plane)) for plane in planes))
    return path
