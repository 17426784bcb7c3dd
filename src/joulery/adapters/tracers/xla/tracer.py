"""Tracer for JAX and TensorFlow 2 programs, and reader of JAX's Chrome traces.

JAX's Chrome trace (``*.trace.json.gz``) names instructions of compiled programs, which are joined with the programs'
``op_name``. The ``*.xplane.pb`` beside it contains more (its start time, the programs themselves) and is preferable.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from joulery.adapters.tracers.chrome import ChromeTrace
from joulery.adapters.tracers.kineto.names import HOST
from joulery.adapters.tracers.kineto.stacks import CLOCK_RANGE
from joulery.adapters.tracers.recordings import RecordingTracer
from joulery.adapters.tracers.xla.origins import programs_in_text
from joulery.adapters.tracers.xla.xplane import STREAM, Event, XlaProfile, profile_trace, read_xla, xla_trace
from joulery.domain.arrays import IntArray
from joulery.domain.errors import DataError
from joulery.domain.trace.events import EventTrace

_CALLED = {"jax": "function of jax.jit", "tensorflow": "tf.function"}


class XlaTracer(RecordingTracer):
    """Tracer that records JAX or TensorFlow programs from inside.

    Args:
        framework: Name of the framework.
    """

    def __init__(self, framework: Literal["jax", "tensorflow"]) -> None:
        super().__init__(framework, _CALLED[framework], _read)


def _read(file: Path, _calls: bool) -> tuple[EventTrace, IntArray]:
    """Read a file's events and clock ranges; compiled programs have no module calls to number."""
    profile = read_xla(file)
    starts = [profile.start_ns + event.start_ps // 1000 for event in profile.events if event.name == CLOCK_RANGE]
    return profile_trace(profile, file), np.array(starts, np.int64)


def read_jax(path: Path, hlo: Sequence[Path] = ()) -> EventTrace:
    """The named operations of a JAX trace.

    Args:
        path: The trace.
        hlo: Compiled programs as text, or profiles that contain them; without any, the files beside the trace with
            the same name are used.

    Raises:
        DataError: A file cannot be read, or the trace contains no instruction of a compiled program.
    """
    trace = ChromeTrace(path)
    tracks: dict[Any, str] = {}
    lines: dict[tuple[str, Any], str] = {}
    events: list[Event] = []
    event: Any = None
    try:
        for block in trace.blocks():
            for event in block.events:
                args = event.get("args") or {}
                if event.get("ph") == "M" and event.get("name") == "process_name":
                    tracks[event["pid"]] = str(args["name"])
                elif event.get("ph") == "M" and event.get("name") == "thread_name":
                    lines[str(event["pid"]), event["tid"]] = str(args["name"])
                elif event.get("ph") == "X" and (
                    "hlo_op" in args or _device(tracks.get(event["pid"], "")).startswith("GPU")
                ):
                    lane = (str(event["pid"]), event["tid"])
                    begin, length = round(event["ts"] * 1e6), round(event["dur"] * 1e6)
                    events.append(
                        Event(event["name"], _device(tracks.get(event["pid"], "")), lane, begin, length, args)
                    )
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise DataError(
            f"an event of the trace is malformed ({type(error).__name__} {error}): {str(event)[:200]}", file=str(path)
        ) from error
    streams = {process for (process, _), title in lines.items() if STREAM.match(title)}
    events = [e for e in events if e.lane[0] not in streams or STREAM.match(lines.get(e.lane, ""))]
    if not any("hlo_op" in e.stats for e in events):
        raise DataError("the trace holds no instruction of a compiled program (no event has hlo_op)", file=str(path))
    programs = known_programs(path, hlo)
    return xla_trace(events, programs.origins, programs.start_ns, sequences=programs.sequences)


def known_programs(path: Path, hlo: Sequence[Path]) -> XlaProfile:
    """Read the programs and the start time of a trace, from the given files or those beside it with the same name."""
    stem = path.name.removesuffix(".gz").removesuffix(".json").removesuffix(".trace")
    beside = [
        other for end in ("hlo.txt", "xplane.pb", "xplane.pb.gz") if (other := path.with_name(f"{stem}.{end}")).exists()
    ]
    found = XlaProfile()
    for file in hlo or [file for file in beside if file.exists()]:
        if ".pb" in file.suffixes or file.suffix == ".pb":
            profile = read_xla(file)
            found.origins |= profile.origins
            found.sequences |= profile.sequences
            found.start_ns = profile.start_ns
        else:
            try:
                found.learn(programs_in_text(file.read_text(encoding="utf-8", errors="replace")))
            except OSError as error:
                raise DataError(f"cannot be read: {error.strerror}", file=str(file)) from error
    return found


def _device(track: str) -> str:
    kind, _, rest = track.removeprefix("/device:").partition(":")
    return f"{kind}:{rest.split('/')[0].split(' ')[0]}" if track.startswith("/device:") and kind != "CPU" else HOST
