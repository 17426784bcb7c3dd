"""Start-up of a traced Python program: waits for its framework to be imported, then records it.

Python imports a module of this name at start from the first folder of PYTHONPATH. This module also runs the program's
own ``sitecustomize``, if it has one.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

_HERE = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120  # pathlib is a slow import at start-up
_PACKAGE = "joulery.adapters.tracers.inject"
SETTINGS = "JOULERY_TRACE"
_RECORDERS = {
    "torch": (
        *("loaded", "cycles", "module_names", "awaited_import", "compiled", "unhooked_calls", "hidden_steps", "native"),
        "step_kinds",
        "torch_recorder",
    ),
    "jax": ("loaded", "cycles", "xla_cycles", "jax_recorder"),
    "tensorflow": ("loaded", "cycles", "xla_cycles", "tensorflow_recorder"),
}
"""Modules to load for a framework; the last one is its recorder."""


class FrameworkImport:
    """Import finder that removes itself when the framework is imported, and installs the recorder afterwards."""

    def __init__(self, settings: dict[str, object]) -> None:
        self._settings = settings
        self._framework = str(settings["framework"])

    def find_spec(self, name: str, path: object = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """The framework's own spec, with the recorder installed after its loader; None for any other module."""
        if name != self._framework:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            try:
                for part in _RECORDERS[self._framework]:
                    loaded = _load(part)
                loaded.install_from(self._settings)
            except Exception as error:  # noqa: BLE001  # whatever this version lacks, the program runs on
                self._note(module, error)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def _note(self, module: ModuleType, error: Exception) -> None:
        """Write the reason why this version of the framework cannot be recorded to the marks file."""
        version = getattr(module, "__version__", "")
        text = f"{self._framework} {version} cannot be recorded: {type(error).__name__}: {error}"
        file = os.path.join(str(self._settings["folder"]), f"{self._framework}-{os.getpid()}.marks")  # noqa: PTH118
        try:
            with open(file, "a", encoding="utf-8") as marks:  # noqa: PTH123
                marks.write(json.dumps({"kind": "note", "text": text}) + "\n")
        except OSError as refused:
            sys.stderr.write(f"joulery: warning: {text} ({refused.strerror})\n")


def _load(name: str) -> ModuleType:
    """Load a module beside this one, under its full name but without its packages: joulery may not be installed."""
    full = f"{_PACKAGE}.{name}"
    spec = importlib.util.spec_from_file_location(full, os.path.join(_HERE, f"{name}.py"))  # noqa: PTH118
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[full] = module
    spec.loader.exec_module(module)
    return module


def _start() -> None:
    """Run the program's own start-up, then wait for the framework."""
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != _HERE]  # noqa: PTH100
    own = PathFinder.find_spec("sitecustomize", sys.path)
    if own is not None and own.loader is not None:
        module = importlib.util.module_from_spec(own)
        sys.modules["sitecustomize"] = module
        own.loader.exec_module(module)
    settings = os.environ.get(SETTINGS)
    if settings:
        sys.meta_path.insert(0, FrameworkImport(json.loads(settings)))


if os.environ.get(SETTINGS):
    _start()
