"""Progress of anything longer than a second, on standard error: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


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
