"""Where tables are printed: a terminal as it is, anything else as wide as the table needs."""

from __future__ import annotations

from rich.console import Console


def table_console(width: int, *, stderr: bool = False) -> Console:
    """A console that folds no table of ``width`` columns where nobody watches: in a file, a pipe, a log.

    Args:
        width: What the widest table needs, in characters; a terminal keeps its own.
        stderr: Print to standard error.
    """
    console = Console(stderr=stderr, highlight=False)
    if not console.is_terminal:
        console.width = width
    return console
