"""Print a tensor energy footprint on a terminal: devices, then the operations that used most energy."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Collection

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from joulery.accounting.operations.edd import powers_w
from joulery.accounting.operations.precision import Sight, resolution
from joulery.domain.energy.tensor_footprint import TensorFootprint
from joulery.domain.format import count, duration, si
from joulery.ui.reports.anatomy.messages import share_text, sight_notes

WIDTH = 110
"""Width where there is no terminal, columns."""


def plain_table(*columns: str, text_columns: Collection[str] = ()) -> Table:
    """A table without lines; columns named in ``text_columns`` are left-aligned, the others are numbers."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in columns:
        table.add_column(name, justify="left" if name in text_columns else "right", no_wrap=True)
    return table


def print_titled(console: Console, title: str, table: Table) -> None:
    """Print a table under its title, and an empty line."""
    console.print(Text(title, style="bold"))
    console.print(table)
    console.print()


def as_text(print_to: Callable[[Console], None], *, width: int = WIDTH) -> bytes:
    """Capture the output of a function, with the width and the colours of the terminal if there is one.

    It is captured to be printed in one go: on a closed pipe rich would end the program by itself.

    Args:
        print_to: The function, which prints to a console.
        width: Columns where there is no terminal; at least :data:`WIDTH`.
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


_SEEN = {Sight.RESOLVED: "yes", Sight.ESTIMATED: "estimated", Sight.SHARED: "time-share", Sight.UNSEEN: "no"}


def print_footprint(footprint: TensorFootprint, console: Console, *, top: int = 20, title: str = "operation") -> None:
    """Print the energy of the devices and the ``top`` rows by energy."""
    window_s = (footprint.window_ns[1] - footprint.window_ns[0]) / 1e9
    console.print(Text.assemble(("joules by operation ", "bold"), (f"in a session of {duration(window_s)}", "dim")))
    console.print(_devices(footprint))
    console.print()
    console.print(_operations(footprint, top, title))
    shown = dict.fromkeys((*sight_notes(footprint), *footprint.notes))
    for note in shown:
        console.print(Text(f"· {note}", style="yellow"))


def print_rows(footprint: TensorFootprint, console: Console, *, top: int, title: str) -> None:
    """Print the ``top`` rows by energy, under an empty line."""
    console.print()
    console.print(_operations(footprint, top, title))


def _devices(footprint: TensorFootprint) -> Table:
    columns = ("device", "total", "attributed", "unattributed", "uncovered", "quality", "sensor every")
    table = plain_table(*columns, text_columns=("device", "quality"))
    for entry in footprint.devices:
        table.add_row(
            entry.device,
            si(entry.total_j, "J"),
            si(entry.attributed_j, "J"),
            si(entry.unattributed_j, "J"),
            duration(entry.uncovered_s),
            entry.quality.value if entry.metered else "no meter",
            duration(entry.resolution_s),
        )
    return table


def _operations(footprint: TensorFootprint, top: int, title: str) -> Table:
    attributed = footprint.attributed_j
    order = np.argsort(-np.nan_to_num(footprint.energy_j), kind="stable")[:top].tolist()
    shared_w, device_w = powers_w(footprint)
    sights = resolution(footprint)
    numbers = ("energy", "share", "time", "count", "W shared", "W run")
    table = plain_table(*numbers, "seen", "phase", "device", text_columns=("seen", "phase", "device"))
    table.add_column(title, overflow="fold")
    for at in order:
        energy_j = math.nan if footprint.unread[at] else float(footprint.energy_j[at])
        name = footprint.op[at] + (" (composite)" if footprint.op[at] in footprint.composite else "")
        table.add_row(
            si(energy_j, "J"),
            share_text(energy_j, attributed),
            duration(float(footprint.runtime_ns[at]) / 1e9),
            count(int(footprint.count[at])),
            si(shared_w[at], "W"),
            si(device_w[at], "W"),
            _SEEN[sights[at].sight],
            footprint.phase[at],
            footprint.device[at],
            Text(name),
        )
    rest = len(footprint) - len(order)
    if rest > 0:
        others = float(np.nansum(footprint.energy_j)) - float(np.nansum(footprint.energy_j[order]))
        table.add_row(si(others, "J"), *[""] * 8, Text(f"{count(rest)} more", style="dim"))
    return table
