"""A comparison of traced runs for a terminal and as a page."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from joulery.app.runs.anatomies import RunAnatomy
from joulery.domain.format import UNKNOWN, percent, si
from joulery.ui.kit.html import Html, data_block, table, tag
from joulery.ui.reports.anatomy.comparison import Change, Comparison
from joulery.ui.reports.anatomy.page import as_tree, page, phase_trees, with_phases
from joulery.ui.reports.anatomy.text import plain_table, print_titled

CHANGES = 3
"""Maximum number of runs beside the first for which the table for a terminal shows changes in percent."""
HEAT = 5
"""Shades of the cells of a matrix, beside none (``heat-1`` ... of the style sheet)."""
_NAME, _RUN = 40, 16
"""Minimum width of a name, and approximate width of a run, in columns of a terminal."""
Cell = Callable[[float], str]


def text_width(comparison: Comparison) -> int:
    """Width of the comparison where nothing limits it, in columns."""
    return _NAME + _RUN * len(comparison.names)


def print_comparison(comparison: Comparison, console: Console, *, top: int) -> None:
    """Print the four matrices and the rows that changed."""
    console.print(Text(_heading(comparison), style="bold"))
    for title, rows, cell in _matrices(comparison):
        table = plain_table("", *comparison.names, text_columns=("",))
        for name, row in zip(comparison.names, rows, strict=True):
            table.add_row(name, *(cell(value) for value in row))
        print_titled(console, title, table)
    print_titled(console, f"what changed, by {comparison.by}", _changes_table(comparison, top))


def comparison_page(comparison: Comparison, runs: Sequence[RunAnatomy], *, top: int) -> str:
    """The comparison as a page: matrices, changes, and the anatomy of each run side by side."""
    return page(" · ".join(comparison.names), _body(comparison, runs, top))


def _body(comparison: Comparison, runs: Sequence[RunAnatomy], top: int) -> Iterable[Html]:
    first, *others = comparison.names
    yield tag("p", _heading(comparison), class_="soft")
    yield tag("h2", "How alike")
    for title, rows, cell in _matrices(comparison):
        yield _card(tag("h3", title), _heat_table(comparison.names, rows, cell))
    yield tag("h2", f"What changed, by {comparison.by}")
    kinds = [word for name in others for word in (name, f"against {first}")]
    body = ((row.name, si(row.energy_j[0], "J"), *_changed(row)) for row in comparison.changes[:top])
    yield _card(table((comparison.by, first, *kinds), body, text={0}))
    yield tag("h2", "Side by side")
    for place, run in enumerate(runs):
        tree = with_phases(phase_trees(run.footprint))
        name = tag("h3", f"{run.name}, {si(tree.energy_j, 'J')}")
        yield _card(name, data_block(f"tree{place}", as_tree(tree)), tag("div", data_tree=f"tree{place}"))


def _heat_table(names: Sequence[str], rows: Sequence[Sequence[float]], cell: Cell) -> Html:
    """A matrix with darker cells for higher values, between the lowest and the highest (Fig. 9)."""
    known = [value for row in rows for value in row if not math.isnan(value)]
    low, high = min(known, default=0.0), max(known, default=0.0)

    def level(value: float) -> str:
        tint = 0 if math.isnan(value) or high <= low else round((value - low) / (high - low) * HEAT)
        return f"number heat-{tint}"

    head = tag("tr", (tag("th", name, class_=kind) for name, kind in [("", None), *((n, "number") for n in names)]))
    body = (
        tag("tr", tag("td", name), (tag("td", cell(value), class_=level(value)) for value in row))
        for name, row in zip(names, rows, strict=True)
    )
    return tag("table", tag("thead", head), tag("tbody", body))


def _card(*children: Html) -> Html:
    return tag("div", *children, class_="card scroll spaced")


def _heading(comparison: Comparison) -> str:
    unit = "joules per step" if comparison.per_step else "joules of the whole recording"
    marked = any(not all(map(math.isnan, change.significant_j)) for change in comparison.changes)
    stars = "; * beyond what steps vary by (5 % for the whole table)" if marked else ""
    alike = f"{comparison.common} operations in common once self-similar layers are folded"
    return f"{len(comparison.names)} runs, {alike}; {unit}{stars}"


def _matrices(comparison: Comparison) -> list[tuple[str, list[list[float]], Cell]]:
    return [
        ("correlation of energy (PCC of STEF)", comparison.energy_pcc, _ratio),
        ("correlation of power (PCC of STPF)", comparison.power_pcc, _ratio),
        ("mean difference of energy (row minus column)", comparison.energy_med_j, lambda v: _signed(v, "J")),
        ("mean difference of power (row minus column)", comparison.power_med_w, lambda v: _signed(v, "W")),
    ]


def _changes_table(comparison: Comparison, top: int) -> Table:
    first, *others = comparison.names
    with_change = len(others) <= CHANGES
    kinds = [word for name in others for word in ((name, "change") if with_change else (name,))]
    table = plain_table(first, *kinds)
    table.add_column(comparison.by, overflow="fold", min_width=_NAME)
    for row in comparison.changes[:top]:
        cells = enumerate(_changed(row))
        styled = [
            Text(cell, style=_style(row, at // 2 + 1) if at % 2 else "")
            for at, cell in cells
            if with_change or not at % 2
        ]
        table.add_row(si(row.energy_j[0], "J"), *styled, Text(row.name))
    return table


def _changed(row: Change) -> Iterable[str]:
    """Energy of each other run and its change against the first."""
    for run in range(1, len(row.energy_j)):
        change = row.change_j(run)
        ratio = percent(change / row.energy_j[0]) if row.energy_j[0] > 0 and not math.isnan(change) else UNKNOWN
        yield si(row.energy_j[run], "J")
        yield f"{'+' if change > 0 else ''}{ratio}{' *' if row.significant(run) else ''}"


def _style(row: Change, run: int) -> str:
    change = row.change_j(run)
    return "green" if change < 0 else "red" if change > 0 else ""


def _ratio(value: float) -> str:
    return UNKNOWN if math.isnan(value) else f"{value:.4f}"


def _signed(value: float, unit: str) -> str:
    if math.isnan(value):
        return UNKNOWN
    return f"{'+' if value > 0 else '−' if value < 0 else ''}{si(abs(value), unit)}"
