"""Callback with a module of the traced program as soon as the program has imported it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType


class AwaitedImport:
    """Import finder that removes itself when one module is imported, and calls back after the import.

    Args:
        name: Full name of the module.
        then: Receives the module once it has been run.
    """

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self._name, self._then = name, then

    def find_spec(self, name: str, path: object = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """The module's own spec, with the callback after its loader; None for any other module."""
        if name != self._name:
            return None
        self.remove()
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        run, then = spec.loader.exec_module, self._then

        def exec_module(module: ModuleType) -> None:
            run(module)
            then(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def remove(self) -> None:
        """Remove this finder from the import system. Safe to call twice."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)


def when_imported(name: str, then: Callable[[ModuleType], None]) -> Callable[[], None]:
    """Call back with a module: now if it is loaded, else once it is. The returned function cancels the wait."""
    loaded = sys.modules.get(name)
    if loaded is not None:
        then(loaded)
        return lambda: None
    finder = AwaitedImport(name, then)
    sys.meta_path.insert(0, finder)
    return finder.remove
