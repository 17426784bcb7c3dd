"""Functions that launched the runs of JAX's primitives, in profiles with Python's calls (JAX records them by default).

Outside ``jit``, JAX compiles each primitive once, and all lines that use it run the same program: its metadata has the
line of the first use. The function that launched a run is inferred: the launches of a program
(``PjitFunction(matmul)``) and its runs are paired in order, if their numbers are equal.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from joulery.adapters.tracers.source_names import called_below, source_component
from joulery.adapters.tracers.xla.origins import Origins

_FRAME = re.compile(r"^\$(.+?):(\d+) (.+)$")
_CALL = re.compile(r"^PjitFunction\((.+)\)$")
_LAUNCH = "ExecuteHelper"


class Timed(Protocol):
    """An interval of a profile."""

    name: str
    lane: tuple[str, int]
    start_ps: int
    dur_ps: int
    stats: dict[str, Any]


def launch_places(events: Iterable[Timed], origins: Origins) -> Mapping[tuple[str, object], str]:
    """The path of the functions that launched each run, by (HLO module, run), for programs without their own place."""
    files = {part.partition(":")[0] for (_, name), o in origins.items() if not name for part in o.place.split("/")}
    placed = {module for (module, name), origin in origins.items() if name and origin.place}
    lanes: dict[tuple[str, int], list[Timed]] = defaultdict(list)
    begun: dict[str, dict[object, int]] = defaultdict(dict)
    for event in events:
        if event.name.startswith("$") or _CALL.match(event.name) or _LAUNCH in event.name:
            lanes[event.lane].append(event)
        module = str(event.stats.get("hlo_module", "")).partition("(")[0]
        if module and module not in placed and "run_id" in event.stats:
            run, runs = event.stats["run_id"], begun[module]
            runs[run] = min(runs.get(run, event.start_ps), event.start_ps)
    launches: dict[str, list[tuple[int, str]]] = defaultdict(list)
    for lane in lanes.values():
        _walk(lane, files - {""}, launches)
    found: dict[tuple[str, object], str] = {}
    for module, runs in begun.items():
        started = sorted(runs, key=runs.__getitem__)
        paths = [path for _, path in sorted(launches.get(module, ()))]
        if len(paths) == len(started):
            found |= {(module, run): path for run, path in zip(started, paths, strict=True) if path}
    return found


def _walk(events: list[Timed], files: set[str], launches: dict[str, list[tuple[int, str]]]) -> None:
    """Add the launches of one thread, with the path of the functions around them."""
    stack: list[tuple[int, str, str]] = []
    for event in sorted(events, key=lambda each: (each.start_ps, -each.dur_ps)):
        while stack and stack[-1][0] <= event.start_ps:
            stack.pop()
        path, program = stack[-1][1:] if stack else ("", "")
        frame, call = _FRAME.match(event.name), _CALL.match(event.name)
        if frame and frame[1] in files:
            path = called_below(path, source_component(*frame.groups()))
        elif call:
            program = "jit_" + re.sub(r"\W", "_", call[1])
        elif _LAUNCH in event.name and program:
            launches[program].append((event.start_ps, path))
            program = ""  # a launch inside a launch is the same one
        stack.append((event.start_ps + event.dur_ps, path, program))
