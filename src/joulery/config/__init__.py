"""The one site file: models, units, and errors that point at the line.

``load(path)`` reads it; :mod:`~joulery.config.site` says what it holds, one file a section. A new section is a
:class:`~joulery.config.parsing.section.Section` in its own file and one line in ``Site``. The whole site's models are
imported on use: a measured block needs one section of them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from joulery.config.parsing.reading import check as check
    from joulery.config.parsing.reading import load as load
    from joulery.config.parsing.reading import parse as parse
    from joulery.config.parsing.reading import schema as schema
    from joulery.config.site import Mode as Mode
    from joulery.config.site import Site as Site

_SITE = frozenset({"Mode", "Site"})
_READING = frozenset({"check", "load", "parse", "schema"})

__all__ = ["Mode", "Site", "check", "load", "parse", "schema"]


def __getattr__(name: str) -> Any:
    if name in _SITE:
        return getattr(importlib.import_module("joulery.config.site"), name)
    if name in _READING:
        return getattr(importlib.import_module("joulery.config.parsing.reading"), name)
    raise AttributeError(f"module 'joulery.config' has no attribute {name!r}")
