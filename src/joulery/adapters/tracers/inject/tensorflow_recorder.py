"""Recorder of a few steps of a TensorFlow 2 program, by TensorFlow's own profiler.

It runs in the traced program and must never disturb it (:mod:`joulery.adapters.tracers.inject.cycles`). A step ends
where the first ``tf.function`` that was called twice is called again; Keras' ``fit`` makes such calls. A cycle's file
is an XLA profile.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from joulery.adapters.tracers.inject.xla_cycles import XlaCycles


def install_from(settings: dict[str, Any]) -> TensorFlowRecorder:
    """Install a recorder with the settings in the environment of the program."""
    recorder = TensorFlowRecorder(
        Path(settings["folder"]), settings["skip"], settings["warmup"], settings["active"], settings["repeat"]
    )
    recorder.install()
    return recorder


class TensorFlowRecorder(XlaCycles):
    """Records cycles of steps of a TensorFlow program.

    Args:
        folder: Where the files go; it exists.
        skip, warmup, active, repeat: The schedule, as for :class:`~joulery.domain.trace.tracing.Steps`.
    """

    def __init__(self, folder: Path, skip: int, warmup: int, active: int, repeat: int) -> None:
        super().__init__("tensorflow", folder, skip, warmup, active, repeat)
        self._tf: Any = None
        self._profiling: Any = None

    def install(self) -> None:
        """Listen to the calls of every ``tf.function``; recording begins with the first."""
        self._tf = importlib.import_module("tensorflow")
        self._trouble = (*self._trouble, self._tf.errors.OpError)
        self._profiling = importlib.import_module("tensorflow.python.profiler.profiler_v2")
        kind = type(self._tf.function(lambda: None))
        kind.__call__ = self._listening(kind.__call__)
        own = self._tf.profiler.experimental
        own.start = self._profiling.start = self._ending_cycle_first(self._profiling.start)
        self._installed()

    def _listening(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def through(function: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._over and self._tf.executing_eagerly():
                self._calls(function)
            return call(function, *args, **kwargs)

        return through

    def _settle(self) -> None:
        """Wait for the pending work of accelerators."""
        self._tf.test.experimental.sync_devices()

    def _taken(self) -> bool:
        return getattr(self._profiling, "_profiler") is not None  # noqa: B009

    def _start_into(self, folder: str) -> None:
        own = self._tf.profiler.experimental
        own.start(folder, options=own.ProfilerOptions(host_tracer_level=2, python_tracer_level=0))

    def _stop_profiler(self) -> None:
        self._tf.profiler.experimental.stop()

    def _range(self, name: str) -> AbstractContextManager[Any]:
        opened: AbstractContextManager[Any] = self._tf.profiler.experimental.Trace(name)
        return opened

    def _version(self) -> str:
        return str(self._tf.__version__)
