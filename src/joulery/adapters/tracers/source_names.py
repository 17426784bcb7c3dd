"""Qualified-name components for places in a program's source, such as ``train.py:31 step``.

Frames of the frameworks and of the standard library are left out, for they are not part of the program.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from joulery.domain.trace.events import module_components, qualified

_INSTALLED = re.compile(r"^.*/(?:site|dist)-packages/")
_LIBRARY = re.compile(
    r"^(?:torch|torchgen|functorch|triton|jax|jaxlib|flax|equinox|tensorflow|keras/src)/"
    r"|^<(?:frozen|eval_with_key|__array_function__)|/lib/python3[\d.]*/|(?:^|/)torchinductor_\w+/"
    r"|^(?:abc|asyncio|collections|concurrent|contextlib|copy|dataclasses|enum|functools|glob|importlib|inspect|json|logging"
    r"|multiprocessing|os|pathlib|pickle|queue|random|re|runpy|selectors|shutil|socket|subprocess|tempfile|threading"
    r"|traceback|typing|unittest|warnings|weakref)(?:/|\.py$)"
)
_FRAME = re.compile(r"^(.+)\((\d+)\): (.+)$")
_STACK, _HIERARCHY = "Call stack", "Module Hierarchy"
WHERE = frozenset({_STACK, _HIERARCHY})
"""Arguments of an operation in PyTorch's traces that say where it was called."""
_SCRIPTED = re.compile(r"(?P<name>\w+)\(\w*\)::")


def source_component(file: str, line: int | str, function: str) -> str:
    """The component for a source line; empty for code of a framework and of the standard library.

    Code outside every function is named after its file.

    >>> source_component("/home/me/train.py", 31, "step")
    'train.py:31 step'
    >>> source_component("train.py", 60, "<module>")
    'train.py'
    >>> source_component("torch/nn/functional.py", 2966, "layer_norm")
    ''
    """
    inside = _INSTALLED.sub("", file)
    if _LIBRARY.search(inside):
        return ""
    name = inside.rpartition("/")[2]
    if function == "<module>":
        return qualified(name)
    return qualified(f"{name}:{line} {function.rpartition('<locals>.')[2]}".rstrip())


def called_below(path: str, component: str) -> str:
    """The path of a function that is called at ``path``; a file that only calls functions is left out.

    A component below itself is not repeated: XLA lists a place again for its calls in a loop.
    """
    caller = path.rpartition("/")[2]
    if component == caller:
        return path
    return f"{path}/{component}" if ":" in caller and component else component or path


def frame_component(name: str) -> str:
    """The component for a Python frame in PyTorch's format, ``train.py(31): step``; empty for any other text."""
    match = _FRAME.match(name)
    return source_component(*match.groups()) if match else ""


def written_path(arguments: Mapping[str, Any]) -> tuple[str, bool]:
    """The path in the arguments of an operation, and whether it consists of modules rather than of calling functions.

    >>> written_path({"Module Hierarchy": "TOP()::<forward op>.blocks(Sequential)::forward.0(Linear)::forward."})
    ('blocks_0', True)
    >>> written_path({"Call stack": "torch/nn/functional.py(3014): cross_entropy;train.py(31): step"})
    ('train.py:31 step', False)
    """
    hierarchy = str(arguments.get(_HIERARCHY) or "")
    if hierarchy:
        called = [match["name"] for match in _SCRIPTED.finditer(hierarchy) if match["name"] not in ("TOP", "SELF")]
        return "/".join(module_components(".".join(called) if "::" in hierarchy else hierarchy)), True
    path = ""
    for frame in reversed(str(arguments.get(_STACK) or "").split(";")):
        path = called_below(path, frame_component(frame.strip()))
    return path, False
