"""PyTorch programs: how to have them recorded, and what the recording says.

The recording itself runs inside the program (:mod:`joulery.adapters.tracers.inject.torch_recorder`), which is started
through the program's environment, so that neither its code nor its command changes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from joulery.adapters.tracers import inject
from joulery.adapters.tracers.kineto import Kind, KinetoColumns, read_columns
from joulery.adapters.tracers.kineto_names import name_events
from joulery.adapters.tracers.kineto_stacks import CLOCK_RANGE
from joulery.domain.arrays import IntArray
from joulery.domain.errors import DataError
from joulery.domain.events import shifted
from joulery.domain.tracing import ClockFit, Steps, TracedSession


class TorchTracer:
    """Has PyTorch programs record themselves through their environment (:class:`joulery.domain.ports.Tracer`)."""

    def environment(self, folder: str, steps: Steps, inherited: Mapping[str, str]) -> dict[str, str]:
        """Variables that have a Python program recorded into ``folder`` (which exists), on top of those it inherits."""
        start_up = str(Path(inject.__file__).resolve().parent)
        path = os.pathsep.join(filter(None, (start_up, inherited.get("PYTHONPATH"))))
        orders = json.dumps({"folder": str(Path(folder).resolve()), **asdict(steps)})
        return {"PYTHONPATH": path, inject.ORDERS: orders}

    def recorded(
        self, folder: str, sampler_offset_ns: int | None, *, calls: bool = False
    ) -> tuple[list[TracedSession], list[str]]:
        """The sessions of every process that recorded itself into a folder, and what went wrong, one sentence each.

        Args:
            folder: Where they recorded.
            sampler_offset_ns: Unix minus monotonic nanoseconds on the clock of the power readings; None where there
                are none.
            calls: Number repeated calls of one module.

        Raises:
            DataError: A file is damaged.
        """
        place = Path(folder)
        sessions: list[TracedSession] = []
        notes: list[str] = []
        steps = 0
        for entry in _marks(place, notes):
            if entry["kind"] == "note":
                notes.append(entry["text"])
            elif entry["kind"] == "end":
                steps = max(steps, entry["steps"])
            elif entry["kind"] == "cycle":
                sessions.append(_session(place, entry, sampler_offset_ns, calls))
        if not sessions:
            notes.append(
                f"no step was recorded: the program ended after {steps} step(s), before the schedule reached one"
                if any(place.glob("torch-*.marks"))
                else "no step was recorded: the program called no PyTorch module, or its Python ignores PYTHONPATH"
            )
        return sessions, notes

    def leftovers(self, folder: str) -> None:
        """Delete what was recorded, after it has been read.

        Raises:
            DataError: A file cannot be deleted.
        """
        for file in Path(folder).glob("torch-*"):
            try:
                file.unlink()
            except OSError as error:
                raise DataError(f"cannot be deleted: {error.strerror}", file=str(file)) from error


def _marks(folder: Path, notes: list[str]) -> Iterator[dict[str, Any]]:
    """The marks of every process, in order; a torn last line becomes a note."""
    for marks in sorted(folder.glob("torch-*.marks")):
        for line in marks.read_text(encoding="utf-8").splitlines():
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                notes.append(f"{marks.name} ends within a line: the program was killed while it wrote")


def _session(folder: Path, entry: Mapping[str, Any], sampler_offset_ns: int | None, calls: bool) -> TracedSession:
    columns = read_columns(folder / entry["file"])
    begin, end = (np.array(entry[key], np.int64) for key in ("begin", "end"))
    fit = clock_fit(columns, np.concatenate([begin, end]), sampler_offset_ns)
    trace = shifted(name_events(columns, calls=calls), fit.offset_ns or 0)
    if sampler_offset_ns is None:
        window = int(begin[-1, 3]), int(end[0, 0])
    else:
        window = int(begin[-1, 2]) + sampler_offset_ns, int(end[0, 1]) + sampler_offset_ns
    return TracedSession(trace, window, int(entry["steps"]), int(entry["pid"]), fit)


def clock_fit(columns: KinetoColumns, marks: IntArray, sampler_offset_ns: int | None) -> ClockFit:
    """Tie the clock of a trace to that of the power readings.

    At each mark the program noted the system's clocks just before and just after a range of the trace began. The
    monotonic clock ties them to the sampler, which a step of the Unix clock in between does not disturb.

    Args:
        columns: The trace.
        marks: (unix, monotonic) before and (monotonic, unix) after the beginning of each range, int64[m, 4].
        sampler_offset_ns: Unix minus monotonic nanoseconds of the sampler; None to stay on the program's Unix clock.
    """
    named = [number for number, name in enumerate(columns.names) if name == CLOCK_RANGE]
    rows = (columns.kind == Kind.RANGE) & np.isin(columns.name, named)
    starts = np.sort(columns.start_ns[rows])
    if len(starts) != len(marks) or not len(marks):
        return ClockFit(None, 0, 0)
    if sampler_offset_ns is None:
        low, high = marks[:, 0], marks[:, 3]
    else:
        low, high = marks[:, 1] + sampler_offset_ns, marks[:, 2] + sampler_offset_ns
    # A mark during which the program was held up says little: the narrower half tells.
    narrow = np.argsort(high - low, kind="stable")[: max(1, len(marks) // 2)]
    distances = ((low + high) // 2 - starts)[narrow]
    offset = int(np.median(distances))
    return ClockFit(offset, int(np.max(np.abs(distances - offset))), int(np.max((high - low)[narrow])) // 2)
