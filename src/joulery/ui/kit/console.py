"""Consoles for tables: a terminal keeps its width, other output is as wide as the table."""

from __future__ import annotations

from rich.console import Console


def table_console(width: int, *, stderr: bool = False) -> Console:
    """A console that does not wrap a table of ``width`` characters in a file, a pipe or a log.

    Args:
        width: What the widest table needs, in characters; a terminal keeps its own.
        stderr: Print to standard error.
    """
    console = Console(stderr=stderr, highlight=False)
    if not console.is_terminal:
        console.width = width
    return console
