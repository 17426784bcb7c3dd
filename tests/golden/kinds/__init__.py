"""The kinds of golden case files: one module a kind, each with a ``KIND``. A new kind is a new file in this folder."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Case:
    """One case of a file.

    Attributes:
        name: What to call it when it fails.
        check: Runs it; returns None when it passes, otherwise one line that says what differs. Errors count as failed.
    """

    name: str
    check: Callable[[], str | None]


@dataclass(frozen=True)
class Kind:
    """One kind of case file.

    Attributes:
        name: What to call it.
        recognises: Whether a parsed JSON document is of this kind, by its keys alone.
        cases: The cases of such a document.
    """

    name: str
    recognises: Callable[[Any], bool]
    cases: Callable[[Any], Iterable[Case]]


def list_of(*keys: str) -> Callable[[Any], bool]:
    """Recognises a list of cases that all have these keys."""

    def recognises(document: Any) -> bool:
        return (
            isinstance(document, list)
            and bool(document)
            and all(isinstance(each, dict) and set(keys) <= each.keys() for each in document)
        )

    return recognises


def kinds() -> list[Kind]:
    """Every kind there is, by the name of its module."""
    return [importlib.import_module(f"{__name__}.{module.name}").KIND for module in pkgutil.iter_modules(__path__)]
