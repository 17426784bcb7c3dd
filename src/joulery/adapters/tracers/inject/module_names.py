"""Names of the modules of a PyTorch program."""

from __future__ import annotations

import sys
import weakref
from typing import Any


class ModuleNames:
    """Registry of module names: ``Class/dotted.path``, with the class of the module that was called first."""

    def __init__(self) -> None:
        self._names: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._roots: dict[str, weakref.WeakSet[Any]] = {}

    def __contains__(self, module: Any) -> bool:
        return module in self._names

    def of(self, module: Any, caller: str | None) -> str:
        """The name of a module; a new module is named after its class, below its caller where it has one.

        A module called by a model's method (``model.encode(x)``, ``model.training_step(batch)``) is part of that model.
        """
        name = self._names.get(module)
        if name is None and caller is None and (owner := _owner(module)) is not None:
            whole = self._names.get(owner) or self.root(owner, type(owner).__name__)
            self.name_tree(owner, whole)
            name = self._names.get(module)
        if name is None:
            # torch.compile wraps a module in one of its own: the name is that of the program's.
            kind = type(getattr(module, "_orig_mod", module)).__name__
            name = self.root(module, kind) if caller is None else f"{caller}.{kind}"
            self.name_tree(module, name)
        return name

    def root(self, module: Any, kind: str) -> str:
        """Name of a top-level module: its class, numbered where several with parameters are alive."""
        if getattr(module, "_is_replica", False) or next(module.parameters(), None) is None:
            return kind
        alive = self._roots.setdefault(kind, weakref.WeakSet())
        alive.add(module)
        return kind if len(alive) == 1 else f"{kind}#{len(alive)}"

    def name_tree(self, module: Any, name: str) -> None:
        """Name a module and everything below it that has no name yet."""
        for whole, part in module.named_modules():
            path = ".".join(step for step in whole.split(".") if step != "_orig_mod")
            if part not in self._names:
                self._names[part] = f"{name}/{path.replace('/', '|')}" if path else name


def _owner(module: Any) -> Any:
    """The outermost model of the program with a running method and this module as a part; None where there is none."""
    kind = sys.modules["torch"].nn.Module
    owner, frame = None, sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_argcount and not str(frame.f_globals.get("__name__")).startswith(("torch.", __name__)):
            first: Any = frame.f_locals.get(code.co_varnames[0])
            is_model = first is not module and issubclass(type(first), kind)
            if is_model and any(part is module for part in first.modules()):
                owner = first
        frame = frame.f_back  # type: ignore[assignment]
    return owner
