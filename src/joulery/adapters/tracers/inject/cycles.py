"""The schedule of a recorder that runs in a traced program, and the marks file that lists its recordings.

A recorder never disturbs the program: it raises no error there. When the profiler or the disk fails, recording ends
and the reason is written to the marks file. After the last cycle no part of the recorder is active.

Files, in the folder of the settings: ``FRAMEWORK-PID.marks`` (one JSON object a line), one file a cycle, and
``FRAMEWORK-PID.recording`` while one is recorded.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from joulery.adapters.tracers.inject.loaded import LoadedCounts, Seen

CLOCK = "joulery:clock"
CLOCK_MARKS = 5
TRAINING, EVALUATION, OTHER = "training", "evaluation", "other"
"""Kinds of steps: of an optimizer, a call of a model without gradients, and calls where neither is known."""
_TROUBLE = (AttributeError, ImportError, OSError, RuntimeError, TypeError, ValueError)
"""Exceptions that a profiler, its bindings or the disk may raise."""


class Cycles(ABC):
    """Base of recorders of cycles of ``skip``, ``warmup`` and ``active`` steps, ``repeat`` times (0: until the end).

    Args:
        framework: Name of the framework; files are named after it.
        folder: Existing folder for the files.
        skip, warmup, active, repeat: The schedule.
    """

    def __init__(self, framework: str, folder: Path, skip: int, warmup: int, active: int, repeat: int) -> None:
        self._framework = framework
        self._folder = folder
        self._skip, self._warmup, self._active, self._repeat = skip, warmup, active, repeat
        self._pid = os.getpid()
        self._thread: int | None = None
        self._kind = OTHER
        self._counts = {TRAINING: 0, EVALUATION: 0, OTHER: 0}
        self._steps = self._position = self._cycles = self._files = 0
        self._ready = self._recording = self._over = self._by_hand = self._later = False
        self._own = self._resting = False
        self._used = self._orphan = False
        self._forks = self._elsewhere = 0
        self._counted: int | None = None
        self._begin: dict[str, Any] = {}
        self._loaded = LoadedCounts()
        self._loaded_then: Seen = (0, 0)
        self._trouble: tuple[type[Exception], ...] = _TROUBLE

    @abstractmethod
    def _taken(self) -> bool:
        """Whether the program's own profiler is on."""

    @abstractmethod
    def _prepare(self) -> None:
        """Prepare the profiler; it does not keep any events yet."""

    @abstractmethod
    def _start(self) -> None:
        """Start the profiler's recording."""

    @abstractmethod
    def _stop(self, stem: Path) -> Path:
        """Stop the profiler, write its recording to a file named after the stem, and return that file."""

    @abstractmethod
    def _drop(self) -> None:
        """Discard a profiler that was prepared and not started."""

    @abstractmethod
    def _range(self, name: str) -> AbstractContextManager[Any]:
        """A context manager that records a named range in the trace."""

    @abstractmethod
    def _version(self) -> str:
        """Version of the framework."""

    @abstractmethod
    def _settle(self) -> None:
        """Wait for the program's pending work on devices, at the start and at the end of a recording."""

    def _gpus(self) -> dict[str, str]:
        """UUID of each accelerator that the program uses, by its name in the trace; empty where it is not known."""
        return {}

    def _installed(self) -> None:
        """Register the handlers of exit and fork; called once the hooks are in place."""
        atexit.register(self.finish)
        os.register_at_fork(after_in_child=self._forked)

    def begin(self) -> None:
        """Start the schedule now instead of with the first call."""
        if self._thread is None:
            self._thread = threading.get_ident()
            self._guarded(self._first)

    def step(self) -> None:
        """End a step explicitly; after the first use, steps end only in this way."""
        self._by_hand = True
        if not self._over:
            self._guarded(self._advance)

    def finish(self) -> None:
        """End recording and keep what was recorded. Safe to call twice."""
        if os.getpid() != self._pid:
            return
        if self._over:
            self._recount()
            return
        if self._ready:
            self._guarded(functools.partial(self._end, partial=True))
        self._retire()
        self._end_mark()

    def _recount(self) -> None:
        """Write the end mark again if steps were counted after it: the new counts replace the earlier ones."""
        if self._counted is not None and (self._steps != self._counted or self._later):
            self._later = False
            self._end_mark()

    def _end_mark(self) -> None:
        self._counted = self._steps
        self._guarded(
            lambda: self._mark(
                {
                    "kind": "end",
                    "steps": self._steps,
                    "cycles": self._cycles,
                    "pid": self._pid,
                    "elsewhere": self._elsewhere,
                    **self._counts,
                }
            )
        )

    def _ending_cycle_first(self, start: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the function that starts the framework's only profiler: the program's own use of it takes precedence."""

        @functools.wraps(start)
        def starting(*args: Any, **kwargs: Any) -> Any:
            if self._ready and not self._own:
                self._guarded(self._end_cycle_early)
            return start(*args, **kwargs)

        return starting

    def _end_cycle_early(self) -> None:
        """End the cycle early and keep its recording, so that the program's own profiler can start."""
        self._mark({"kind": "note", "text": "the program started its own profiler: a cycle ended early"})
        self._end(partial=True)
        self._position = 0

    def _first(self) -> None:
        if self._forks:
            _before_worker_exits(self.finish)
        self._mark({"kind": "begin", "pid": self._pid, "version": self._version()})
        self._arrange()

    def _advance(self) -> None:
        self._steps += 1
        self._loaded_then = self._loaded.now
        self._counts[self._kind] += 1
        self._position += 1
        if self._position == self._skip + self._warmup + self._active:
            self._end()
            self._position = 0
            if self._repeat and self._cycles == self._repeat:
                self._done()
                return
        self._arrange()

    def _done(self) -> None:
        """Finish after the last cycle of the schedule, without a subclass's handling of the program's end."""
        Cycles.finish(self)

    def _arrange(self) -> None:
        """Prepare or start the profiler, as the position in the schedule requires."""
        if self._resting:
            return
        if self._position >= self._skip and not self._ready:
            if self._taken():
                self._position = 0
                self._mark({"kind": "note", "text": "the program's own profiler was on: a cycle was put off"})
                return
            self._used = True
            self._as_own(self._prepare)
            self._ready = True
            self._flag().touch()
        if self._position == self._skip + self._warmup and not self._recording:
            self._settle()
            self._as_own(self._start)
            self._recording = True
            # The first call of a model comes after the first batch, all later beginnings before the next one.
            loaded = self._loaded.now if self._steps else self._loaded.before
            self._begin = {"step": self._steps, "clock": self._clock(), "loaded": loaded}

    def _flag(self) -> Path:
        """The file that exists while a cycle is prepared or recorded; the sampler reads threads meanwhile."""
        return self._folder / f"{self._framework}-{self._pid}.recording"

    def _as_own(self, action: Callable[[], None]) -> None:
        """Run an action that starts the recorder's profiler, so that it is not taken for the program's own."""
        self._own = True
        try:
            action()
        finally:
            self._own = False

    def _end(self, *, partial: bool = False) -> None:
        """End a cycle: stop the profiler and write its recording."""
        if not self._ready:
            return
        self._ready = False
        self._flag().unlink(missing_ok=True)
        if not self._recording:
            self._as_own(self._drop)
            return
        self._settle()
        clock = self._clock()
        self._recording = False
        self._cycles += 1
        self._files += 1
        samples, tokens = self._loaded.between(self._begin["loaded"], self._loaded_then)
        file = self._stop(self._folder / f"{self._framework}-{self._pid}-{self._files}")
        self._mark(
            {
                "kind": "cycle",
                "file": file.name,
                "pid": self._pid,
                "steps": self._steps - self._begin["step"],
                "what": self._kind,
                "gpus": self._gpus(),
                "rank": _rank(),
                "samples": samples,
                "tokens": tokens,
                "partial": partial,
                "begin": self._begin["clock"],
                "end": clock,
            }
        )

    def _forget(self) -> None:
        """Stop a cycle and discard its recording, because the recorded calls were not steps."""
        if self._recording:
            self._recording = self._ready = False
            self._stop(self._folder / f"{self._framework}-{self._pid}-none").unlink()
        elif self._ready:
            self._ready = False
            self._as_own(self._drop)

    def _clock(self) -> list[list[int]]:
        """Clock marks: (unix, monotonic) before and (monotonic, unix) after the beginning of a range of the trace."""
        marks = []
        for _ in range(CLOCK_MARKS):
            before = [time.time_ns(), time.monotonic_ns()]
            with self._range(CLOCK):
                after = [time.monotonic_ns(), time.time_ns()]
            marks.append([*before, *after])
        return marks

    def _guarded(self, action: Callable[[], None]) -> None:
        """Run an action that may fail; a failure ends recording and the program continues."""
        try:
            action()
        except self._trouble as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """End recording because of an error, and write the reason to the marks file."""
        self._retire()
        try:
            text = f"recording ended early: {type(error).__name__}: {error}"
            self._mark({"kind": "failed", "pid": self._pid, "text": text})
        except OSError:
            self._recording = False

    def _mark(self, fields: dict[str, Any]) -> None:
        with (self._folder / f"{self._framework}-{self._pid}.marks").open("a", encoding="utf-8") as marks:
            marks.write(json.dumps(fields) + "\n")

    def _retire(self) -> None:
        """Stop recording for good."""
        self._ready, self._recording, self._over = False, False, True
        if os.getpid() == self._pid:
            self._flag().unlink(missing_ok=True)

    def _forked(self) -> None:
        """Reset the recorder in a forked child, or disable it there if the parent has used the profiler."""
        self._thread = None
        self._forks += 1
        if self._used or self._over:
            self._ready, self._recording, self._over, self._orphan = False, False, True, self._used
            return
        self._pid = os.getpid()
        self._counts = {TRAINING: 0, EVALUATION: 0, OTHER: 0}
        self._steps = self._position = self._cycles = self._files = self._elsewhere = 0
        self._kind, self._resting = OTHER, False

    def _unrecorded(self) -> None:
        """Note, once, that a forked child trains and cannot be recorded."""
        self._orphan = False
        self._pid = os.getpid()
        self._guarded(
            lambda: self._mark(
                {
                    "kind": "note",
                    "text": f"process {self._pid} is not recorded: it was forked from a recorded process, and the "
                    "profiler does not survive a fork (the start method spawn does)",
                }
            )
        )


def _before_worker_exits(action: Callable[[], None]) -> None:
    """Run an action at the end of a forked worker of multiprocessing, which skips Python's exit handlers."""
    util = sys.modules.get("multiprocessing.util")
    if util is not None:
        util.Finalize(None, action, exitpriority=100)


def _rank() -> int | None:
    """Rank of this process in a distributed program, as its launcher set it; None elsewhere."""
    rank = os.environ.get("RANK", "")
    return int(rank) if rank.isdigit() else None
