"""JAX's Chrome trace (``*.trace.json.gz``): instructions of compiled programs, joined with the programs' ``op_name``.

The ``*.xplane.pb`` beside it says more (when it began, the programs themselves): prefer that one where it is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from joulery.adapters.tracers.chrome import ChromeTrace
from joulery.adapters.tracers.kineto.names import HOST
from joulery.adapters.tracers.xla.hlo import names_in_text
from joulery.adapters.tracers.xla.xplane import Event, XlaProfile, read_profile, xla_trace
from joulery.domain.errors import DataError
from joulery.domain.trace.events import EventTrace


def read_jax(path: Path, hlo: Sequence[Path] = ()) -> EventTrace:
    """The named operations of a JAX trace.

    Args:
        path: The trace.
        hlo: Compiled programs as text, or profiles that hold them; those beside the trace that share its name are
            found by themselves.

    Raises:
        DataError: A file cannot be read, or the trace holds no instruction of a compiled program.
    """
    trace = ChromeTrace(path)
    tracks: dict[Any, str] = {}
    events: list[Event] = []
    event: Any = None
    try:
        for block in trace.blocks():
            for event in block.events:
                args = event.get("args") or {}
                if event.get("ph") == "M" and event.get("name") == "process_name":
                    tracks[event["pid"]] = str(args["name"])
                if event.get("ph") == "X" and "hlo_op" in args:
                    lane = (str(event["pid"]), event["tid"])
                    begin, length = round(event["ts"] * 1e6), round(event["dur"] * 1e6)
                    events.append(
                        Event(event["name"], _device(tracks.get(event["pid"], "")), lane, begin, length, args)
                    )
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise DataError(
            f"an event of the trace is malformed ({type(error).__name__} {error}): {str(event)[:200]}", file=str(path)
        ) from error
    if not events:
        raise DataError("the trace holds no instruction of a compiled program (no event has hlo_op)", file=str(path))
    programs = known_programs(path, hlo)
    return xla_trace(events, programs.op_names, programs.start_ns)


def known_programs(path: Path, hlo: Sequence[Path]) -> XlaProfile:
    """Programs and start of a trace, from the files given or those beside it with the same name."""
    stem = path.name.removesuffix(".gz").removesuffix(".json").removesuffix(".trace")
    beside = [
        other for end in ("hlo.txt", "xplane.pb", "xplane.pb.gz") if (other := path.with_name(f"{stem}.{end}")).exists()
    ]
    found = XlaProfile()
    for file in hlo or [file for file in beside if file.exists()]:
        if ".pb" in file.suffixes or file.suffix == ".pb":
            profile = read_profile(file)
            found.op_names |= profile.op_names
            found.start_ns = profile.start_ns
        else:
            try:
                found.op_names |= names_in_text(file.read_text(encoding="utf-8", errors="replace"))
            except OSError as error:
                raise DataError(f"cannot be read: {error.strerror}", file=str(file)) from error
    return found


def _device(track: str) -> str:
    kind, _, rest = track.removeprefix("/device:").partition(":")
    return f"{kind}:{rest.split('/')[0].split(' ')[0]}" if track.startswith("/device:") and kind != "CPU" else HOST
