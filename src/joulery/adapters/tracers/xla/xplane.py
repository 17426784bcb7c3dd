"""Reader of XLA profiles (``*.xplane.pb``) of JAX and TensorFlow 2, which needs neither framework.

A plane is a device, a line a thread or stream, an event an interval on it. JAX's events name instructions of compiled
programs, which the profile contains too (:mod:`hlo`); TensorFlow's are called ``path/of/node:OpType``.
"""

from __future__ import annotations

import re
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from joulery.adapters.tracers.chrome import open_stream
from joulery.adapters.tracers.kineto.names import HOST
from joulery.adapters.tracers.tf1 import gradient_scopes, phase
from joulery.adapters.tracers.xla.graphs import COUNTED, from_graphs
from joulery.adapters.tracers.xla.hlo import qualified_op
from joulery.adapters.tracers.xla.launches import launch_places
from joulery.adapters.tracers.xla.origins import Origin, Origins, Program, Sequences, programs_in_proto
from joulery.adapters.tracers.xla.protobuf import WireError, fields, number, sub, text
from joulery.domain.errors import DataError
from joulery.domain.trace.events import UNNAMED, EventTrace, qualified

PHASES = ("", "forward", "backward", "recompute", "optimizer")
_ACCELERATOR = re.compile(r"^/device:(GPU|TPU):(\d+)")
_OVERLAYS = re.compile(r"^(Steps|XLA Modules|XLA TraceMe|Framework Ops|Framework Name Scope|Source code|Async XLA Ops)")
STREAM = re.compile(r"^Stream #")
"""Titles of the lines of a GPU on which work is; all others of its plane repeat it."""
_TF_NODE = re.compile(r"^([^:\s]+):(_?[A-Z]\w*)$")
_KERAS = re.compile(r"^(adam|adamw|adamax|nadam|adagrad|adadelta|adafactor|rmsprop|sgd|ftrl|lion|lamb|muon)(_\d+)?$")
"""Scopes of Keras' optimizers; one that assigns no variable is a user's module of that name."""
_ASSIGNS = re.compile(r"^(Assign(Sub|Add)?VariableOp|(Resource)?(Sparse)?Apply[A-Z]\w*)$")
_NUMBER = re.compile(r"(\.\d+)+$")
_TAPE = "gradient_tape/"
_TF_CALL = re.compile(r"^((Stateful)?PartitionedCall(_\d+)?/)+")


@dataclass(slots=True)
class Event:
    """One interval of a plane."""

    name: str
    device: str
    lane: tuple[str, int]
    start_ps: int
    dur_ps: int
    stats: dict[str, Any]


@dataclass(slots=True)
class XlaProfile:
    """A parsed XLA profile.

    Attributes:
        start_ns: Unix nanoseconds all times count from; 0 when the profile does not contain it.
        events: Every event of every line that is not an overlay of others.
        origins: Origins of instructions, by (HLO module, instruction).
        sequences: Instructions of each computation of a module, in order.
    """

    start_ns: int = 0
    events: list[Event] = field(default_factory=list)
    origins: dict[tuple[str, str], Origin] = field(default_factory=dict)
    sequences: dict[str, list[list[str]]] = field(default_factory=dict)

    def learn(self, programs: Iterable[Program]) -> None:
        """Add the origins and the instruction sequences of programs."""
        for program in programs:
            self.origins |= program.origins()
            self.sequences[program.name] = program.sequences()


def read_xplane(path: Path) -> EventTrace:
    """The named operations of a profile.

    Raises:
        DataError: The file cannot be read, is truncated, or contains no operation.
    """
    return profile_trace(read_xla(path), path)


def profile_trace(profile: XlaProfile, path: Path) -> EventTrace:
    """The named operations of a profile that was read.

    Raises:
        DataError: The profile contains no operation.
    """
    if any("hlo_op" in event.stats for event in profile.events):
        jax = [event for event in profile.events if "hlo_op" in event.stats or event.device.startswith("GPU")]
        launched = launch_places(profile.events, profile.origins)
        return xla_trace(jax, profile.origins, profile.start_ns, launched, profile.sequences)
    nodes = [(event, match) for event in profile.events if (match := _TF_NODE.match(_node(event)))]
    if not nodes:
        raise DataError(
            "the profile holds no operation of JAX or TensorFlow",
            file=str(path),
            hint="profile at least one step; TensorFlow needs host tracing on (host_tracer_level >= 2)",
        )
    paths = [_TF_CALL.sub("", match[1]) for _, match in nodes]
    gradients = gradient_scopes(paths)
    # A tape names gradients after what they are of: only the phase separates the two then.
    names = [path.removeprefix(_TAPE) for path in paths]
    kinds = [match[2] for _, match in nodes]
    optimizers = {
        top for path, kind in zip(paths, kinds, strict=True) if _ASSIGNS.match(kind) and _KERAS.match(top := _top(path))
    }
    phases = [
        "backward"
        if path.startswith(_TAPE)
        else "optimizer"
        if _top(path) in optimizers
        else phase(path, kind, gradients)
        for path, kind in zip(paths, kinds, strict=True)
    ]
    return trace_of([event for event, _ in nodes], names, phases, profile.start_ns, ())


def _top(path: str) -> str:
    return path.partition("/")[0]


def _node(event: Event) -> str:
    return str(event.stats.get("tf_op") or event.name)


def xla_trace(
    events: list[Event],
    origins: Origins,
    start_ns: int,
    launched: Mapping[tuple[str, object], str] | None = None,
    sequences: Sequences | None = None,
) -> EventTrace:
    """Events of compiled programs, named by the source operation of their instruction.

    Args:
        events: Runs of instructions, and all work of GPUs.
        origins: Origins of instructions.
        start_ns: Unix nanoseconds that the events count from; 0 where it is not known.
        launched: Functions that launched a run, by (HLO module, run), for programs that do not contain them.
        sequences: Instructions of each computation, in order: for kernels that a CUDA graph launched.
    """
    names, phases, counts = [], [], Counter[str]()
    modules = {module for module, _ in origins}
    in_graphs = from_graphs(events, origins, sequences or {})
    known: dict[tuple[Origin, str], tuple[str, str]] = {}
    for at, event in enumerate(events):
        module, op = str(event.stats.get("hlo_module", "")), str(event.stats.get("hlo_op", ""))
        short = module.partition("(")[0]
        if at in in_graphs:
            origin = in_graphs[at] or _annotated(event, whole=True)
        else:
            origin = origins.get((module, op)) or origins.get((short, op)) or _annotated(event)
        by = (launched or {}).get((short, event.stats.get("run_id")), "")
        if origin is None:
            counts["of no operation" if not modules.isdisjoint((short, module)) else "unknown" if op else ""] += 1
            names.append(f"{by}/{_NUMBER.sub('', op)}" if by else qualified(UNNAMED, op or event.name))
            phases.append("")
            continue
        origin = origin if origin.place or not by else origin._replace(place=by)
        counts["in graphs" if at in in_graphs else "added" if origin.added else ""] += 1
        own = (COUNTED.sub("", event.name) if at in in_graphs else _NUMBER.sub("", op)) if origin.added else ""
        if (origin, own) not in known:
            name, when = qualified_op(origin.op_name, origin.place)
            known[origin, own] = (f"{name.rpartition('/')[0]}/{qualified(own)}" if own else name), when
        name, when = known[origin, own]
        names.append(name)
        phases.append("" if by else when)  # a primitive does not know which pass launched it
    return trace_of(events, names, phases, start_ns, _notes(counts, len(events), start_ns))


def _annotated(event: Event, *, whole: bool = False) -> Origin | None:
    """The source operation in a GPU kernel's annotation: the prefix that the module shares, and the rest.

    Args:
        event: The kernel.
        whole: Whether the annotation is shared by all kernels of a graph.
    """
    name = str(event.stats.get("name") or "")
    stated = "/".join(filter(None, (str(event.stats.get("prefix") or ""), name)))
    if whole:
        return Origin(f"{stated}/", added=True) if stated else None
    return Origin(stated) if name else None


def _notes(counts: Mapping[str, int], total: int, start_ns: int) -> list[str]:
    """Notes on names missing in a trace."""
    texts = {
        "added": "run instructions that the compiler added: named after the operation that they serve",
        "in graphs": "were launched with a CUDA graph: named by the numbers, the names and the order of its kernels",
        "of no operation": "run instructions that the compiler added, of no operation",
        "unknown": "run instructions without op_name: give the compiled program with --hlo",
    }
    notes = [f"{counts[kind]} of {total} events {text}" for kind, text in texts.items() if counts.get(kind)]
    if not start_ns:
        notes.append("the trace does not say when it began: its times count from its start")
    return notes


def trace_of(
    events: list[Event], names: list[str], phases: list[str], start_ns: int, notes: tuple[str, ...] | list[str]
) -> EventTrace:
    """Build an event trace from named events."""
    ops = {name: i for i, name in enumerate(dict.fromkeys(names))}
    devices = {name: i for i, name in enumerate(dict.fromkeys(event.device for event in events))}
    lanes = {lane: i for i, lane in enumerate(dict.fromkeys(event.lane for event in events))}
    begins = [event.start_ps // 1000 for event in events]
    return EventTrace(
        list(ops),
        list(devices),
        PHASES,
        op=[ops[name] for name in names],
        start_ns=[start_ns + begin for begin in begins],
        dur_ns=[(e.start_ps + e.dur_ps) // 1000 - begin for e, begin in zip(events, begins, strict=True)],
        device=[devices[event.device] for event in events],
        lane=[lanes[event.lane] for event in events],
        phase=[PHASES.index(name) for name in phases],
        notes=notes,
    )


def read_xla(path: Path) -> XlaProfile:
    """Read the data of a profile that energy accounting needs.

    Raises:
        DataError: The file cannot be read or is truncated.
    """
    try:
        with open_stream(path) as stream:
            content = memoryview(stream.read())
        profile = XlaProfile()
        for tag, value in fields(content):
            if tag == 1:
                _plane(sub(value), profile)
    except (WireError, struct.error, EOFError, OSError) as error:
        raise DataError(
            f"truncated or damaged profile: {error}", file=str(path), hint="record or copy it again"
        ) from error
    if not len(content):
        raise DataError("the profile is empty", file=str(path))
    return profile


def _plane(message: memoryview, profile: XlaProfile) -> None:
    name = ""
    lines: list[memoryview] = []
    stats: list[memoryview] = []
    kinds: dict[int, memoryview] = {}
    stat_names: dict[int, str] = {}
    for tag, value in fields(message):
        if tag == 2:
            name = text(value)
        elif tag == 3:
            lines.append(sub(value))
        elif tag == 4:
            key, entry = _entry(sub(value))
            kinds[key] = entry
        elif tag == 5:
            key, entry = _entry(sub(value))
            stat_names[key] = next((text(v) for t, v in fields(entry) if t == 2), "")
        elif tag == 6:
            stats.append(sub(value))
    if name == "Task Environment":
        profile.start_ns = int(dict(_stat(stat, stat_names) for stat in stats).get("profile_start_time", 0))
    names = {key: next((text(v) for t, v in fields(entry) if t == 2), "") for key, entry in kinds.items()}
    if name == "/host:metadata":
        for entry in kinds.values():
            for program in _programs(entry, stat_names):
                profile.learn(programs_in_proto(program))
    match = _ACCELERATOR.match(name)
    device = f"{match[1]}:{match[2]}" if match else HOST
    titles = [next((text(value) for tag, value in fields(line) if tag == 2), "") for line in lines]
    streams = device.startswith("GPU") and any(STREAM.match(title) for title in titles)
    for index, (line, title) in enumerate(zip(lines, titles, strict=True)):
        if STREAM.match(title) if streams else not _OVERLAYS.match(title):
            profile.events += _line(line, (name, index), device, names, stat_names)


def _programs(entry: memoryview, stat_names: dict[int, str]) -> Iterator[memoryview]:
    """Compiled programs kept in the metadata of a plane."""
    for tag, value in fields(entry):
        if tag == 5:
            key, content = _stat(sub(value), stat_names)
            if key in ("Hlo Proto", "hlo_proto") and isinstance(content, memoryview):
                yield content


def _line(
    message: memoryview, lane: tuple[str, int], device: str, names: dict[int, str], stat_names: dict[int, str]
) -> list[Event]:
    base_ns = 0
    events: list[memoryview] = []
    for tag, value in fields(message):
        if tag == 3:
            base_ns = number(value)
        elif tag == 4:
            events.append(sub(value))
    return [_event(event, base_ns, lane, device, names, stat_names) for event in events]


def _event(
    message: memoryview,
    base_ns: int,
    lane: tuple[str, int],
    device: str,
    names: dict[int, str],
    stat_names: dict[int, str],
) -> Event:
    kind = offset_ps = dur_ps = 0
    stats: dict[str, Any] = {}
    for tag, value in fields(message):
        if tag == 1:
            kind = number(value)
        elif tag == 2:
            offset_ps = number(value)
        elif tag == 3:
            dur_ps = number(value)
        elif tag == 4:
            key, content = _stat(sub(value), stat_names)
            stats[key] = content
    return Event(names.get(kind, ""), device, lane, base_ns * 1000 + offset_ps, dur_ps, stats)


def _entry(message: memoryview) -> tuple[int, memoryview]:
    """Key and message of a map entry."""
    key, entry = 0, memoryview(b"")
    for tag, value in fields(message):
        if tag == 1:
            key = number(value)
        elif tag == 2:
            entry = sub(value)
    return key, entry


def _stat(message: memoryview, names: dict[int, str]) -> tuple[str, Any]:
    """Name and value of a statistic; a reference to another name becomes that name."""
    name, content = "", None
    for tag, value in fields(message):
        if tag == 1:
            name = names.get(number(value), "")
        elif tag == 2:
            (content,) = struct.unpack("<d", sub(value))
        elif tag in (3, 4):
            content = number(value)
        elif tag == 5:
            content = text(value)
        elif tag == 6:
            content = sub(value)
        elif tag == 7:
            content = names.get(number(value), "")
    return name, content
