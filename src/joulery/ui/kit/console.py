"""Consoles that do not wrap tables, and progress bars."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console


def table_console(width: int, *, stderr: bool = False) -> Console:
    """A console that does not wrap a table of ``width`` characters in a file, a pipe or a log.

    Args:
        width: Width of the widest table, in characters; a terminal keeps its own.
        stderr: Print to standard error.
    """
    console = Console(stderr=stderr, highlight=False)
    if not console.is_terminal:
        console.width = width
    return console


@contextmanager
def progress_bar(title: str = "profiling", *, quiet: bool = False) -> Iterator[Callable[[int, int, str], None]]:
    """Show progress while the block runs; yields the function that reports ``(done, of, next step)``.

    Args:
        title: Name of the work.
        quiet: Show nothing.
    """
    if quiet:
        yield lambda done, of, what: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield lambda done, of, what: console.print(f"{title} {done}/{of} {what}".rstrip()) if what else None
        return
    columns = (
        TextColumn(title),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, of, what: bar.update(task, completed=done, total=of, description=what)
