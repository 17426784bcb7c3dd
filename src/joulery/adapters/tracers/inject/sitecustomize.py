"""Start-up of a traced Python program: waits for torch to be imported, then records it.

Python imports a module of this name at start from the first folder of PYTHONPATH. The program's own ``sitecustomize``,
if it has one, is run in its turn.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

_HERE = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120  # pathlib is a slow import at start-up
ORDERS = "JOULERY_TORCH_TRACE"


class TorchImport:
    """A finder that steps aside when torch is imported, and installs the recorder behind it."""

    def __init__(self, orders: dict[str, object]) -> None:
        self._orders = orders

    def find_spec(self, name: str, path: object = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Torch's own spec, with the recorder behind its loader; None for anything else."""
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            _recorder().install_from(self._orders)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _recorder() -> ModuleType:
    spec = importlib.util.spec_from_file_location("joulery_torch_recorder", os.path.join(_HERE, "torch_recorder.py"))  # noqa: PTH118
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _start() -> None:
    """Run the program's own start-up, then wait for torch."""
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != _HERE]  # noqa: PTH100
    own = PathFinder.find_spec("sitecustomize", sys.path)
    if own is not None and own.loader is not None:
        module = importlib.util.module_from_spec(own)
        sys.modules["sitecustomize"] = module
        own.loader.exec_module(module)
    orders = os.environ.get(ORDERS)
    if orders:
        sys.meta_path.insert(0, TorchImport(json.loads(orders)))


if os.environ.get(ORDERS):
    _start()
