"""Calls of modules that compiled themselves (``module.compile()``): the recorder's hooks lie inside the compiled code,
where they do nothing, so the call is watched from outside.

``for layer in model.layers: layer.compile()`` generates one code for all layers; which layer a call is of, only the
call says.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

_CALL = "_compiled_call_impl"


class CompiledCalls:
    """Has every module that compiles itself from now on report its calls.

    Args:
        kind: ``torch.nn.Module``; before PyTorch 2.2 it lacks ``compile``, and nothing happens.
        compiling: Whether the code that asks is being compiled.
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
        self._plain = compile_ = getattr(kind, "compile", None)
        self._watching: Any = None
        if compile_ is None or not hasattr(kind, _CALL):
            return

        @functools.wraps(compile_)
        def watching(module: Any, *args: Any, **kwargs: Any) -> Any:
            result = compile_(module, *args, **kwargs)
            compiled = getattr(module, _CALL, None)
            if callable(compiled):
                setattr(module, _CALL, _watched(module, compiled, compiling, before, after))
            return result

        self._watching = kind.compile = watching

    def stop(self) -> None:
        """Watch no further modules."""
        if self._watching is not None and self._kind.compile is self._watching:
            self._kind.compile = self._plain


def _watched(
    module: Any,
    compiled: Callable[..., Any],
    compiling: Callable[[], bool],
    before: Callable[[Any, Any], None],
    after: Callable[[Any, Any, Any], None],
) -> Callable[..., Any]:
    """A call of a module between its hooks; inside another compiled module, the call alone."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if compiling():
            return compiled(*args, **kwargs)
        before(module, args)
        try:
            return compiled(*args, **kwargs)
        finally:
            after(module, args, None)

    return call
