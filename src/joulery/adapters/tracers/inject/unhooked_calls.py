"""Wrappers that report module calls which the recorder's hooks miss.

- Modules that compiled themselves (``module.compile()``): the hooks lie inside the compiled code and do nothing there.
  ``for layer in model.layers: layer.compile()`` generates one code for all layers; only the call itself identifies the
  layer.
- Modules of a class with its own ``__call__``, which calls ``forward`` itself, such as those of GPyTorch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

_CALL = "_compiled_call_impl"


class UnhookedCalls:
    """Makes modules that the hooks miss report their calls from now on.

    Args:
        kind: ``torch.nn.Module``; before PyTorch 2.2 it lacks ``compile``, and no module compiles itself.
        compiling: Whether the calling code is being compiled.
        before, after: The hooks of a call.
    """

    def __init__(
        self,
        kind: Any,
        compiling: Callable[[], bool],
        before: Callable[[Any, Any], None],
        after: Callable[[Any, Any, Any], None],
    ) -> None:
        self._kind = kind
        self._compiling, self._before, self._after = compiling, before, after
        self._plain = compile_ = getattr(kind, "compile", None)
        self._watching: Any = None
        self._watch_classes()
        if compile_ is None or not hasattr(kind, _CALL):
            return

        @functools.wraps(compile_)
        def watching(module: Any, *args: Any, **kwargs: Any) -> Any:
            result = compile_(module, *args, **kwargs)
            compiled = getattr(module, _CALL, None)
            if callable(compiled):
                watched = self._watched(lambda _, *values, **named: compiled(*values, **named))
                setattr(module, _CALL, functools.partial(watched, module))
            return result

        self._watching = kind.compile = watching

    def stop(self) -> None:
        """Watch no further modules; existing wrappers stay, idle: code may have been compiled with them."""
        if self._watching is not None and self._kind.compile is self._watching:
            self._kind.compile = self._plain
        if vars(self._kind).get("__init_subclass__") is self._made:
            del self._kind.__init_subclass__

    def _watch_classes(self) -> None:
        """Watch all existing and future classes with their own ``__call__``."""
        for known in _below(self._kind):
            self._watch_class(known)
        if "__init_subclass__" in vars(self._kind):  # no PyTorch has one
            self._made: Any = None
            return

        def made(kind: Any, /, **kwargs: Any) -> None:
            super(self._kind, kind).__init_subclass__(**kwargs)
            self._watch_class(kind)

        self._made = self._kind.__init_subclass__ = classmethod(made)

    def _watch_class(self, kind: Any) -> None:
        own = vars(kind).get("__call__")
        if isinstance(own, FunctionType) and not kind.__module__.startswith("torch.") and not hasattr(own, "_joulery"):
            kind.__call__ = self._watched(own)

    def _watched(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a call of a module in its hooks; inside another compiled module, the call runs alone."""
        compiling, before, after = self._compiling, self._before, self._after

        @functools.wraps(plain)
        def call(module: Any, *args: Any, **kwargs: Any) -> Any:
            if compiling():
                return plain(module, *args, **kwargs)
            before(module, args)
            try:
                return plain(module, *args, **kwargs)
            finally:
                after(module, args, None)

        call._joulery = True  # type: ignore[attr-defined]
        return call


def _below(kind: Any) -> Iterator[Any]:
    """All classes derived from one."""
    for derived in kind.__subclasses__():
        yield derived
        yield from _below(derived)
