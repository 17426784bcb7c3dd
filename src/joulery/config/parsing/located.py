"""Errors of a site that come after it was read: the file and the line of the key that they name."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from joulery.config.parsing.tree import parse_yaml
from joulery.domain.errors import ConfigError


@contextmanager
def located(file: str | os.PathLike[str]) -> Iterator[None]:
    """Add the file and the line to errors that name a key of it; those of flags and of other files stay as they are.

    Args:
        file: The site file, which was read before.
    """
    try:
        yield
    except ConfigError as error:
        if error.file is None and error.pointer and not error.pointer.startswith("-"):
            _locate(error, os.fspath(file))
        raise


def _locate(error: ConfigError, file: str) -> None:
    try:
        tree = parse_yaml(Path(file).read_text(encoding="utf-8-sig"), file)
    except (OSError, ValueError, ConfigError):  # it has changed since
        return
    path = tuple(int(part) if part.isdigit() else part for part in (error.pointer or "").split("."))
    error.file = file
    if path[:1] in tree.lines:
        error.line = tree.line(path)
