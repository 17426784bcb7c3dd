"""Shared base of the JAX and TensorFlow recorders: steps counted by calls of compiled functions, XLA profiles as files.

A step ends where the first function that was called twice is called again. If a function is known to differentiate, the
first such function counts instead, and calls of others (initialisation, augmentation, an earlier evaluation) do not.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import threading
import uuid
from abc import abstractmethod
from pathlib import Path
from typing import Any

from joulery.adapters.tracers.inject.cycles import OTHER, TRAINING, Cycles


class XlaCycles(Cycles):
    """Recorder of cycles of compiled-function calls; it takes the arguments of its base class."""

    def __init__(self, framework: str, folder: Path, skip: int, warmup: int, active: int, repeat: int) -> None:
        super().__init__(framework, folder, skip, warmup, active, repeat)
        self._called: set[int] = set()
        self._training: set[int] = set()
        self._main: int | None = None
        self._ended = False

    @abstractmethod
    def _start_into(self, folder: str) -> None:
        """Start the framework's profiler, to write below a folder."""

    @abstractmethod
    def _stop_profiler(self) -> None:
        """Stop the framework's profiler, which writes its profile."""

    def _calls(self, function: Any) -> None:
        """Handle the call of a compiled function from plain Python, which may begin a step."""
        key = id(function)
        if self._thread is None:
            self.begin()
        elif not self._by_hand and self._is_step_thread():
            if self._main is None and key in self._called and (not self._training or key in self._training):
                self._main = key
                self._guarded(self._arrange)
            if self._main == key:
                self._guarded(self._advance)
        if self._main is None:
            self._called.add(key)

    def _calls_later(self, function: Any) -> None:
        """Handle the call of a compiled function after recording: count steps."""
        if self._main == id(function) and threading.get_ident() == self._thread and not self._by_hand:
            self._steps += 1
            self._counts[self._kind] += 1

    def _trains(self, function: Any) -> None:
        """Register a function that differentiates: its calls are the steps, and earlier calls of others were not."""
        key = id(function)
        if key in self._training or self._over:
            return
        self._training.add(key)
        if self._kind == TRAINING:
            return
        if self._main != key and self._called - {key}:
            self._guarded(self._begin_training)
            self._called.add(key)
        self._kind = TRAINING

    def _begin_training(self) -> None:
        """Restart the schedule, with the next call of a function that differentiates."""
        self._resting = False
        if self._files:
            self._end(partial=True)
            self._counts[OTHER] += 1  # the last call had ended its step
        else:
            self._forget()
            self._counts[OTHER] = self._steps = 0
        self._position = self._cycles = 0
        self._main = None

    def _done(self) -> None:
        """Finish after the last training cycle; without a function that differentiates, training may still follow."""
        if self._kind == TRAINING:
            super()._done()
        self._resting = True

    def _is_step_thread(self) -> bool:
        """Whether this is the thread whose calls count: the latest caller until steps or a recording begin."""
        if threading.get_ident() != self._thread and self._main is None and not self._ready:
            self._thread = threading.get_ident()
        return threading.get_ident() == self._thread

    def finish(self) -> None:
        """End recording and keep what was recorded. Safe to call twice."""
        if os.getpid() == self._pid and not self._ended and self._main is not None and not self._by_hand:
            self._ended = self._later = True  # the last call has ended its step
            self._counts[self._kind] += 1
        super().finish()

    def _end(self, *, partial: bool = False) -> None:
        # Within a cycle the last call has ended its step, though no other call came to say so.
        self._steps += partial and self._recording
        super()._end(partial=partial)

    def _gpus(self) -> dict[str, str]:
        return cuda_uuids()

    def _prepare(self) -> None:
        """Do nothing: XLA's profiler needs no preparation."""

    def _drop(self) -> None:
        """Do nothing: no profiler was started."""

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


def cuda_uuids() -> dict[str, str]:
    """The UUID of each GPU that this process may use, by its number in the process; empty if the process uses none.

    The frameworks do not report UUIDs; the CUDA driver does, if the process has loaded and initialised it.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        count, found = ctypes.c_int(), {}
        if driver.cuDeviceGetCount(ctypes.byref(count)):
            return {}
        for number in range(count.value):
            device, name = ctypes.c_int(), ctypes.create_string_buffer(16)
            if driver.cuDeviceGet(ctypes.byref(device), number) == 0 and driver.cuDeviceGetUuid_v2(name, device) == 0:
                found[f"GPU:{number}"] = str(uuid.UUID(bytes=name.raw))
        return found
    except (AttributeError, OSError):
        return {}
