"""Wrappers for optimizer steps that torch.compile hides: in PyTorch 2.1 its first use removes the classes' hooks.

There, and in any later version that does the same, ``TorchPatcher.patch`` replaces each ``step`` that runs hooks with
the plain function and marks it as hooked, so that later optimizers do not get the hooks back. This module wraps each
such ``step`` again: it reports to the recorder as the hook would, inside a range with the name that PyTorch gives it.
Where no hook was removed, nothing is wrapped.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

from joulery.adapters.tracers.inject.awaited_import import when_imported

_PATCHER = "torch._dynamo.eval_frame"


class HiddenSteps:
    """Makes the optimizers of ``torch.optim`` report their steps after torch.compile removed their hooks.

    Args:
        optimizers: ``torch.optim``.
        compiling: Whether the calling code is being compiled.
        stepped: The hook of a step: optimizer, arguments, named arguments.
        enter: Returns a range with the given name while a cycle is recorded, else None.
    """

    def __init__(
        self,
        optimizers: ModuleType,
        compiling: Callable[[], bool],
        stepped: Callable[[Any, Any, Any], None],
        enter: Callable[[str], AbstractContextManager[Any] | None],
    ) -> None:
        self._optimizers, self._compiling, self._stepped, self._enter = optimizers, compiling, stepped, enter
        self._restore: Callable[[], None] = lambda: None
        self._stop_waiting = when_imported(_PATCHER, self._watch)

    def stop(self) -> None:
        """Wrap no further classes; wrapped classes continue to report, for steps are counted to the end."""
        self._stop_waiting()
        self._restore()

    def _watch(self, module: ModuleType) -> None:
        patcher: Any = getattr(module, "TorchPatcher", None)
        patch = getattr(patcher, "patch", None)
        if patch is None:
            return

        @functools.wraps(patch)
        def patching() -> Any:
            result = patch()
            self._wrap()
            return result

        patcher.patch = staticmethod(patching)

        def restore() -> None:
            if patcher.patch is patching:
                patcher.patch = staticmethod(patch)

        self._restore = restore

    def _wrap(self) -> None:
        base: Any = self._optimizers.Optimizer
        hooked = getattr(getattr(base, "profile_hook_step", None), "__code__", None)
        for kind in list(vars(self._optimizers).values()):
            step = vars(kind).get("step") if isinstance(kind, type) and issubclass(kind, base) else None
            if step is None or not getattr(step, "hooked", False) or getattr(step, "_joulery", False):
                continue
            if hooked is None or getattr(step, "__code__", None) not in hooked.co_consts:
                kind.step = self._observed(step)

    def _observed(self, step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(step)
        def seen(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if self._compiling():
                return step(optimizer, *args, **kwargs)
            with self._enter(f"Optimizer.step#{type(optimizer).__name__}.step") or nullcontext():
                result = step(optimizer, *args, **kwargs)
            self._stepped(optimizer, args, kwargs)
            return result

        seen.hooked = seen._joulery = True  # type: ignore[attr-defined]
        return seen
