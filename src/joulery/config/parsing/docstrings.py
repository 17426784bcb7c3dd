"""Docstrings of attributes, read from the source when a schema is made.

Pydantic's ``use_attribute_docstrings`` reads the source of every class whenever it is imported.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Mapping
from functools import cache


def attribute_docstring(cls: type, name: str) -> str | None:
    """The text below an attribute in the class that declares it; None without a text, and where there is no source."""
    for owner in cls.__mro__:
        if name in inspect.get_annotations(owner):
            return _docstrings(owner.__module__).get((owner.__qualname__, name))
    return None


@cache
def _docstrings(module: str) -> Mapping[tuple[str, str], str]:
    """The docstrings of a module's attributes, by qualified name of the class and name of the attribute."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (OSError, TypeError, KeyError):
        return {}
    found: dict[tuple[str, str], str] = {}
    _collect(tree, "", found)
    return found


def _collect(node: ast.AST, scope: str, found: dict[tuple[str, str], str]) -> None:
    """Collect from the classes below a node, which stands in a scope: empty, or a name and a dot."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            for attribute, text in zip(child.body, child.body[1:], strict=False):
                match attribute, text:
                    case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(about))):
                        found[scope + child.name, name] = inspect.cleandoc(about)
            _collect(child, f"{scope}{child.name}.", found)
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            _collect(child, f"{scope}{child.name}.<locals>.", found)
        else:
            _collect(child, scope, found)
