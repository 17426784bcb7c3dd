"""What recorders of JAX and TensorFlow share: steps counted by calls of compiled functions, XLA profiles as files.

A step ends where the function that the program called twice first is called again.
"""

from __future__ import annotations

import shutil
import threading
from abc import abstractmethod
from pathlib import Path
from typing import Any

from joulery.adapters.tracers.inject.cycles import Cycles


class XlaCycles(Cycles):
    """Records cycles of calls of compiled functions; arguments as of its base."""

    def __init__(self, framework: str, folder: Path, skip: int, warmup: int, active: int, repeat: int) -> None:
        super().__init__(framework, folder, skip, warmup, active, repeat)
        self._called: set[int] = set()
        self._main: int | None = None

    @abstractmethod
    def _start_into(self, folder: str) -> None:
        """Start the framework's profiler, to write below a folder."""

    @abstractmethod
    def _stop_profiler(self) -> None:
        """Stop it and have it write."""

    def _calls(self, function: Any) -> None:
        """A compiled function is called from plain Python: this may begin a step."""
        key = id(function)
        if self._thread is None:
            self.begin()
        elif threading.get_ident() == self._thread and not self._by_hand:
            if self._main is None and key in self._called:
                self._main = key
            if self._main == key:
                self._guarded(self._advance)
        if self._main is None:
            self._called.add(key)

    def _end(self, *, partial: bool = False) -> None:
        # Within a cycle the last call has ended its step, though no other call came to say so.
        self._steps += partial and self._recording
        super()._end(partial=partial)

    def _prepare(self) -> None:
        """XLA's profiler needs no time to settle."""

    def _drop(self) -> None:
        """Nothing was started."""

    def _start(self) -> None:
        self._start_into(str(self._draft))

    def _stop(self, stem: Path) -> Path:
        self._stop_profiler()
        found = sorted(self._draft.rglob("*.xplane.pb"))
        if not found:
            raise FileNotFoundError("the profiler wrote no profile")
        kept = stem.with_name(f"{stem.name}.xplane.pb")
        found[0].replace(kept)
        shutil.rmtree(self._draft, ignore_errors=True)
        return kept

    @property
    def _draft(self) -> Path:
        return self._folder / f"{self._framework}-{self._pid}.draft"
