"""Recorder of a few steps of a JAX program, by JAX's own profiler.

It runs in the traced program and must never disturb it (:mod:`joulery.adapters.tracers.inject.cycles`). A step ends
where one function is called again: the first function that differentiates (:func:`jax.grad`), compiled or not; in a
program without one, the first function compiled by :func:`jax.jit` that was called twice. A cycle's file is an XLA
profile, which contains the compiled programs too.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import threading
import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from joulery.adapters.tracers.inject.xla_cycles import XlaCycles


def install_from(settings: dict[str, Any]) -> JaxRecorder:
    """Install a recorder with the settings in the environment of the program."""
    recorder = JaxRecorder(
        Path(settings["folder"]), settings["skip"], settings["warmup"], settings["active"], settings["repeat"]
    )
    recorder.install()
    return recorder


class Compiled:
    """Proxy of a function from ``jax.jit`` that reports each call to the recorder and is otherwise transparent.

    Args:
        inner: The function that ``jax.jit`` returned.
        call: Calls the function and reports the call.
    """

    def __init__(self, inner: Any, call: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        functools.update_wrapper(self, inner)
        self.__wrapped__ = getattr(inner, "__wrapped__", inner)
        self._inner = inner
        self._call = call

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._inner)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped function."""
        return self._call(self._inner, args, kwargs)

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        return self if owner is None else types.MethodType(self, owner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __hash__(self) -> int:
        return hash(self._inner)

    def __eq__(self, other: object) -> bool:
        return bool(self._inner == (other._inner if type(other) is Compiled else other))

    def __reduce__(self) -> Any:
        return self._inner.__reduce__()

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped function's ``lower``; defined here, like ``trace``, for checks by protocol."""
        return self._inner.lower(*args, **kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped function's ``trace``."""
        return self._inner.trace(*args, **kwargs)


class JaxRecorder(XlaCycles):
    """Records cycles of steps of a JAX program.

    Args:
        folder: Where the files go; it exists.
        skip, warmup, active, repeat: The schedule, as for :class:`~joulery.domain.trace.tracing.Steps`.
    """

    def __init__(self, folder: Path, skip: int, warmup: int, active: int, repeat: int) -> None:
        super().__init__("jax", folder, skip, warmup, active, repeat)
        self._jax: Any = None
        self._core: Any = None
        self._profiling: Any = None
        self._last: Any = None
        self._running: Any = None

    def install(self) -> None:
        """Replace ``jax.jit`` and JAX's gradients; recording begins with the first call of a function they return."""
        self._jax = importlib.import_module("jax")
        self._core = importlib.import_module("jax._src.core")
        self._profiling = importlib.import_module("jax._src.profiler")
        self._hide()
        self._jax.jit = self._recorded_jit(self._jax.jit)
        for name in ("grad", "value_and_grad"):
            setattr(self._jax, name, self._differentiating(getattr(self._jax, name)))
        self._jax.profiler.start_trace = self._profiling.start_trace = self._ending_cycle_first(
            self._profiling.start_trace
        )
        session = getattr(self._profiling, "ProfileSession", None)
        if session is not None:  # since JAX 0.12 start_trace makes one, and a program may
            session.start = self._ending_cycle_first(session.start)
        self._installed()

    def _recorded_jit(self, jit: Callable[..., Any]) -> Callable[..., Any]:
        kind = type(jit(lambda: None))

        def wrap(made: Any) -> Any:
            if type(made) is kind:
                return Compiled(made, self._through)
            # A decorator with arguments: what it makes of the function is what is called.
            return functools.wraps(made)(lambda function: wrap(made(function)))

        @functools.wraps(jit)
        def compiling(*args: Any, **kwargs: Any) -> Any:
            return jit(*args, **kwargs) if self._over else wrap(jit(*args, **kwargs))

        return compiling

    def _hide(self) -> None:
        """Leave the frames of this file out of JAX's locations and of the program's tracebacks."""
        with contextlib.suppress(AttributeError, ImportError):
            importlib.import_module("jax._src.source_info_util").register_exclusion(__file__)

    def _differentiating(self, make: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a transformation that differentiates, so that the recorder recognises the resulting functions."""

        @functools.wraps(make)
        def making(*args: Any, **kwargs: Any) -> Any:
            inner = make(*args, **kwargs)
            # A program may make it again for each step: what it differentiates stays the same.
            source = args[0] if args else kwargs.get("fun")
            source = getattr(source, "__code__", source)

            @functools.wraps(inner)
            def gradients(*values: Any, **named: Any) -> Any:
                if self._core.trace_state_clean():
                    return self._through(inner, values, named, source)
                if self._running is not None and threading.get_ident() == self._thread:
                    self._trains(self._running)
                return inner(*values, **named)

            return gradients if callable(inner) else inner

        return making

    def _through(self, inner: Any, args: tuple[Any, ...], kwargs: dict[str, Any], source: Any = None) -> Any:
        """Call a compiled function, or the gradient of ``source``; outside of any trace, that may begin a step."""
        if not self._core.trace_state_clean():
            return inner(*args, **kwargs)
        called = inner if source is None else source
        if self._over:
            self._calls_later(called)
            return inner(*args, **kwargs)
        self._calls(called)
        if source is not None:
            self._trains(called)
        outer, self._running = self._running, called
        try:
            answer = inner(*args, **kwargs)
        finally:
            self._running = outer
        if self._ready:
            self._last = answer
        return answer

    def _settle(self) -> None:
        """Wait for the last result: JAX returns it before it is computed."""
        last, self._last = self._last, None
        for leaf in self._jax.tree_util.tree_leaves(last):
            if hasattr(leaf, "block_until_ready") and not leaf.is_deleted():
                leaf.block_until_ready()

    def _taken(self) -> bool:
        # JAX calls it ``session`` since 0.12.
        state = getattr(self._profiling, "_profile_state")  # noqa: B009
        return getattr(state, "session", None) is not None or getattr(state, "profile_session", None) is not None

    def _start_into(self, folder: str) -> None:
        options = self._jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        self._jax.profiler.start_trace(folder, profiler_options=options)

    def _stop_profiler(self) -> None:
        self._jax.profiler.stop_trace()

    def _range(self, name: str) -> AbstractContextManager[Any]:
        opened: AbstractContextManager[Any] = self._jax.profiler.TraceAnnotation(name)
        return opened

    def _version(self) -> str:
        return str(self._jax.__version__)
