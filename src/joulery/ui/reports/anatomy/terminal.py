"""Tables and consoles of the anatomy: plain columns, printed in one go."""

from __future__ import annotations

import io
from collections.abc import Callable, Collection

from rich.console import Console
from rich.table import Table
from rich.text import Text

WIDTH = 110
"""Columns where there is no terminal to ask."""


def plain_table(*columns: str, words: Collection[str] = ()) -> Table:
    """A table without lines; columns named in ``words`` are left-aligned, the others are numbers."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in columns:
        table.add_column(name, justify="left" if name in words else "right", no_wrap=True)
    return table


def print_titled(console: Console, title: str, table: Table) -> None:
    """A table under its title, and an empty line."""
    console.print(Text(title, style="bold"))
    console.print(table)
    console.print()


def as_text(print_to: Callable[[Console], None], *, width: int = WIDTH) -> bytes:
    """What a function prints, as wide as the terminal, with its colours where there is one.

    Printed in one go: on a closed pipe rich would end the program by itself.

    Args:
        print_to: Prints.
        width: Columns where there is no terminal to ask; at least :data:`WIDTH`.
    """
    terminal = Console(highlight=False)
    console = Console(
        file=io.StringIO(),
        width=terminal.width if terminal.is_terminal else max(WIDTH, width),
        highlight=False,
        force_terminal=terminal.is_terminal,
    )
    with console.capture() as captured:
        print_to(console)
    return captured.get().encode()
