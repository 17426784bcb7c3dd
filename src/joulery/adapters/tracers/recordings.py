"""Settings, marks and clocks of the recorders that run inside traced programs, common to all frameworks.

The recorder itself (:mod:`joulery.adapters.tracers.inject`) is started through the program's environment, so that
neither the program's code nor its command changes.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from joulery.adapters.tracers import inject
from joulery.domain.arrays import IntArray
from joulery.domain.errors import DataError
from joulery.domain.trace.events import EventTrace, of_process, shifted
from joulery.domain.trace.tracing import ClockFit, StepCounts, Steps, TracedSession


class RecordingTracer:
    """Tracer that starts a recorder inside Python programs through their environment.

    It implements :class:`joulery.domain.ports.Tracer`.

    Args:
        framework: Name of the framework; files are named after it.
        called: The kind of call that is recorded, as text.
        read: Reads one cycle's file: its events, and where its clock ranges begin (nanoseconds, of the trace's clock).
            The second argument states whether repeated calls of one module are numbered.
    """

    def __init__(self, framework: str, called: str, read: Callable[[Path, bool], tuple[EventTrace, IntArray]]) -> None:
        self._framework, self._called, self._read = framework, called, read

    def environment(self, folder: str, steps: Steps, inherited: Mapping[str, str]) -> dict[str, str]:
        """Environment variables, on top of ``inherited``, that make a Python program record into an existing folder."""
        start_up = str(Path(inject.__file__).resolve().parent)
        path = os.pathsep.join(filter(None, (start_up, inherited.get("PYTHONPATH"))))
        settings = json.dumps({"framework": self._framework, "folder": str(Path(folder).resolve()), **asdict(steps)})
        return {"PYTHONPATH": path, inject.SETTINGS: settings}

    def recorded(
        self, folder: str, sampler_offset_ns: int | None, *, calls: bool = False
    ) -> tuple[list[TracedSession], list[str]]:
        """The sessions of every process that recorded itself into a folder, and one sentence for each problem.

        Args:
            folder: Where they recorded.
            sampler_offset_ns: Unix minus monotonic nanoseconds on the clock of the power readings; None without power
                readings.
            calls: Number repeated calls of one module, where the framework has modules.

        Raises:
            DataError: A file is damaged.
        """
        place = Path(folder)
        sessions: list[TracedSession] = []
        notes: list[str] = []
        begun: set[int] = set()
        failed: dict[int, str] = {}
        ended: dict[int, Mapping[str, Any]] = {}
        for entry in _marks(place, self._framework, notes):
            if entry["kind"] in ("note", "failed"):
                notes.append(entry["text"])
            if entry["kind"] == "failed":
                failed[int(entry["pid"])] = entry["text"]
            elif entry["kind"] == "begin":
                begun.add(int(entry["pid"]))
            elif entry["kind"] == "end":
                ended[int(entry["pid"])] = entry
            elif entry["kind"] == "cycle":
                trace, starts = self._read(place / entry["file"], calls)
                sessions.append(_session(trace, starts, entry, sampler_offset_ns))
        elsewhere = sum(int(entry.get("elsewhere", 0)) for entry in ended.values())
        if elsewhere:
            notes.append(
                f"{elsewhere} steps of optimizers in other threads are not counted as steps; their operations are "
                "recorded where they ran beside recorded steps"
            )
        killed = len(begun - ended.keys() - failed.keys())
        if killed:
            what = "the program was" if killed == 1 else f"{killed} processes were"
            notes.append(
                f"{what} killed while recording, or ended by os._exit: of an unfinished cycle of steps nothing is known"
            )
        if not sessions:
            most = max((int(entry["steps"]) for entry in ended.values()), default=0)
            notes.append(
                f"no step was recorded: the program called no {self._called}, or its Python ignores PYTHONPATH"
                if not begun
                else "no step was recorded: the program was killed before a cycle of steps was complete"
                if killed
                else f"no step was recorded: {next(iter(failed.values()))}"
                if failed
                else f"no step was recorded: the program ended after {most} step(s), before the schedule reached one"
            )
        return sessions, notes

    def step_counts(self, folder: str) -> StepCounts:
        """All steps, recorded or not, of the processes that recorded into a folder and ended in an orderly way."""
        ends = {
            int(entry["pid"]): entry for entry in _marks(Path(folder), self._framework, []) if entry["kind"] == "end"
        }
        total = StepCounts()
        for entry in ends.values():
            known = {name: int(entry.get(name, 0)) for name in ("training", "evaluation")}
            total += StepCounts(**known, other=int(entry["steps"]) if "training" not in entry else entry["other"])
        return total

    def leftovers(self, folder: str) -> None:
        """Delete the recorded files, after they have been read.

        Raises:
            DataError: A file cannot be deleted.
        """
        for file in Path(folder).glob(f"{self._framework}-*"):
            try:
                if file.is_dir():
                    shutil.rmtree(file)
                else:
                    file.unlink()
            except OSError as error:
                raise DataError(f"cannot be deleted: {error.strerror}", file=str(file)) from error


def clock_fit(starts: IntArray, marks: IntArray, sampler_offset_ns: int | None) -> ClockFit:
    """Estimate the offset from the clock of a trace to the clock of the power readings.

    At each mark the program noted the system's clocks just before and just after a range of the trace began. The
    monotonic clock relates these stamps to the sampler, so a step of the Unix clock in between has no effect.

    Args:
        starts: Where the ranges begin on the clock of the trace, nanoseconds, int64[m].
        marks: (unix, monotonic) before and (monotonic, unix) after the beginning of each range, int64[m, 4].
        sampler_offset_ns: Unix minus monotonic nanoseconds of the sampler; None to stay on the program's Unix clock.
    """
    if len(starts) != len(marks) or not len(marks):
        return ClockFit(None, 0, 0)
    if sampler_offset_ns is None:
        low, high = marks[:, 0], marks[:, 3]
    else:
        low, high = marks[:, 1] + sampler_offset_ns, marks[:, 2] + sampler_offset_ns
    # A mark during which the program was held up says little: the narrower half decides.
    narrow = np.argsort(high - low, kind="stable")[: max(1, len(marks) // 2)]
    distances = ((low + high) // 2 - np.sort(starts))[narrow]
    offset = int(np.median(distances))
    return ClockFit(offset, int(np.max(np.abs(distances - offset))), int(np.max((high - low)[narrow])) // 2)


def _marks(folder: Path, framework: str, notes: list[str]) -> Iterator[dict[str, Any]]:
    """The marks of every process, in order; an incomplete line becomes a note."""
    for marks in sorted(folder.glob(f"{framework}-*.marks")):
        for line in marks.read_text(encoding="utf-8").splitlines():
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                notes.append(f"{marks.name} ends within a line: the program was killed while it wrote")


def _session(
    trace: EventTrace, starts: IntArray, entry: Mapping[str, Any], sampler_offset_ns: int | None
) -> TracedSession:
    begin, end = (np.array(entry[key], np.int64) for key in ("begin", "end"))
    fit = clock_fit(starts, np.concatenate([begin, end]), sampler_offset_ns)
    if sampler_offset_ns is None:
        window = int(begin[-1, 3]), int(end[0, 0])
    else:
        window = int(begin[-1, 2]) + sampler_offset_ns, int(end[0, 1]) + sampler_offset_ns
    return TracedSession(
        of_process(shifted(trace, fit.offset_ns or 0), int(entry["pid"])),
        window,
        int(entry["steps"]),
        int(entry["pid"]),
        fit,
        kind=entry.get("what", "other"),
        uuids=entry.get("gpus", {}),
        rank=entry.get("rank"),
        samples=entry.get("samples"),
        tokens=entry.get("tokens"),
    )
