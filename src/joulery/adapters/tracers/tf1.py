"""Reader of TensorFlow 1 timelines: ``Timeline(step_stats).generate_chrome_trace_format()`` of a ``Session.run``.

Node names are qualified names already. A device has several tracks: ``/job:.../device:GPU:0 Compute`` shows the host
launching operations, ``/device:GPU:0/stream:16 Compute`` the work on the GPU. Only the second kind is GPU time.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from joulery.adapters.tracers.chrome import Block, ChromeTrace, microseconds_ns, numbers, stamps_ns
from joulery.adapters.tracers.kineto.names import HOST
from joulery.domain.errors import DataError
from joulery.domain.trace.events import UNNAMED, EventTrace

_STREAM = re.compile(r"^/device:GPU:(\d+)/(stream:\S+|memcpy\S*)")
_COMPUTE = re.compile(r"/device:(CPU|GPU):\d+(/\S+)? Compute$")
_INPUT = re.compile(r"^input\d+$")
_NO_OPERATION = frozenset({"_SOURCE", "_SINK", "cuStreamSynchronize"})
_GRAPPLER = re.compile(r"^(\w*Optimizer|ConstantFolding|Remapper|LoopOptimizer)/")
_GRADIENTS = re.compile(r"^gradients(_\d+)?$")
_APPLIES = re.compile(r"^(Resource)?(Sparse)?Apply[A-Z]")
_OPTIMIZERS = re.compile(r"^(Adam|AdamW|LAMB|Momentum|GradientDescent|RMSProp|Adagrad|Adadelta|Ftrl)\w*(_\d+)?$")

PHASES = ("forward", "backward", "optimizer")


def read_tf1(path: Path) -> EventTrace:
    """The events of a timeline.

    Raises:
        DataError: The file cannot be read, ends early, holds no TensorFlow timeline, or an event is malformed.
    """
    trace = ChromeTrace(path)
    tracks: dict[Any, str] = {}
    rows: list[tuple[str, str, Any, Any, int, float]] = []
    feeds: set[tuple[str, str]] = set()
    for block in trace.blocks():
        stamps = [event["ts"] for event in block.events if isinstance(event, dict) and "ts" in event]
        _collect(block, stamps_ns(block, stamps, file=str(path)).tolist(), tracks, rows, feeds, str(path))
    compute = {track: name for track, name in tracks.items() if _COMPUTE.search(name)}
    if not compute:
        raise DataError(
            "no TensorFlow timeline: no process is called ...device:CPU:0 Compute",
            file=str(path),
            hint="export it with Timeline(run_metadata.step_stats).generate_chrome_trace_format()",
        )
    device_of = _devices(compute)
    kept = [row for row in rows if row[2] in device_of and row[0] not in _NO_OPERATION]
    return _trace(kept, device_of, feeds, _notes(compute, device_of), str(path))


def _collect(
    block: Block,
    starts: list[int],
    tracks: dict[Any, str],
    rows: list[tuple[str, str, Any, Any, int, float]],
    feeds: set[tuple[str, str]],
    file: str,
) -> None:
    """Collect a block's track names, event rows (name, type, process, thread, start_ns, dur_us) and dataflow."""
    at = 0
    event: Any = None
    try:
        for event in block.events:
            args = event.get("args") or {}
            if event.get("ph") == "M" and event.get("name") == "process_name":
                tracks[event["pid"]] = args["name"]
            if event.get("ph") == "X":
                name = args.get("name") or event["name"]
                feeds.update((str(value), name) for key, value in args.items() if _INPUT.match(key))
                rows.append((name, args.get("op", ""), event["pid"], event["tid"], starts[at], float(event["dur"])))
            at += "ts" in event
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"an event of the timeline is malformed ({type(error).__name__} {error}): {str(event)[:200]}", file=file
        ) from error


def _devices(compute: dict[Any, str]) -> dict[Any, str]:
    """Device of each track; tracks that repeat others are left out."""
    streams = {track: match for track, name in compute.items() if (match := _STREAM.match(name))}
    single = {match[1] for match in streams.values() if match[2] != "stream:all"}
    device_of = {track: HOST for track in compute if track not in streams}
    for track, match in streams.items():
        if match[2] != "stream:all" or match[1] not in single:
            device_of[track] = f"GPU:{match[1]}"
    return device_of


def _notes(compute: dict[Any, str], device_of: dict[Any, str]) -> list[str]:
    launched = {match[2] for name in compute.values() if (match := re.search(r"^/job.*device:(GPU:(\d+)) ", name))}
    shown = {device.partition(":")[2] for device in device_of.values() if device != HOST}
    return [
        f"GPU:{number}: the timeline shows launches only, no kernels; its energy stays unattributed"
        for number in sorted(launched - shown)
    ]


def _trace(
    rows: list[tuple[str, str, Any, Any, int, float]],
    device_of: dict[Any, str],
    feeds: set[tuple[str, str]],
    notes: list[str],
    file: str,
) -> EventTrace:
    names = {name: i for i, name in enumerate(dict.fromkeys(row[0] for row in rows))}
    devices = {name: i for i, name in enumerate(dict.fromkeys(device_of.values()))}
    lanes = {lane: i for i, lane in enumerate(dict.fromkeys((row[2], row[3]) for row in rows))}
    gradients = gradient_scopes(names)
    phases = [PHASES.index(phase(row[0], row[1], gradients)) for row in rows]
    durations = numbers([row[5] for row in rows], "a duration", file=file)
    if bool(np.any(durations < 0)):
        raise DataError(f"a duration is {durations.min()} us, expected at least 0", file=file)
    return EventTrace(
        [name or UNNAMED for name in names],
        list(devices),
        PHASES,
        op=[names[row[0]] for row in rows],
        start_ns=[row[4] for row in rows],
        dur_ns=microseconds_ns(durations),
        device=[devices[device_of[row[2]]] for row in rows],
        lane=[lanes[row[2], row[3]] for row in rows],
        phase=phases,
        feeds=frozenset(pair for pair in feeds if pair[0] in names and pair[1] in names),
        notes=notes,
    )


def gradient_scopes(names: Iterable[str]) -> frozenset[str]:
    """The top scopes that ``tf.gradients`` created: ``gradients`` or ``gradients_2`` with a ``..._grad`` scope inside.

    A module that merely has that name contains no such scope.
    """
    found = set()
    for name in names:
        parts = _GRAPPLER.sub("", name).split("/")
        if _GRADIENTS.match(parts[0]) and any(part.endswith("_grad") for part in parts[1:-1]):
            found.add(parts[0])
    return frozenset(found)


def phase(name: str, op_type: str, gradients: Collection[str]) -> str:
    """Phase of a node by its name and type."""
    top = _GRAPPLER.sub("", name).split("/")[0]
    if top in gradients:
        return "backward"
    if _APPLIES.match(op_type) or _OPTIMIZERS.match(top):
        return "optimizer"
    return "forward"
