"""Statements of the energy and carbon of jobs, written as CSV, Markdown for a mail, or one HTML page."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass

from joulery.domain.energy.carbon import JOULES_PER_KWH
from joulery.ui.kit.html import Html, content_hash, head, static_text, tag, tiles, whole_page
from joulery.ui.kit.html import table as html_table

FORMATS = ("text", "json", "csv", "markdown")
"""Formats beside the HTML page."""


@dataclass(frozen=True, slots=True)
class StatementRow:
    """One line of a statement.

    Attributes:
        keys: Values of the grouping keys.
        jobs: Number of jobs.
        slot_h: GPU-hours, or slot-hours where slots are not GPUs.
        energy_kwh: Energy.
        carbon_kg: CO2-equivalent; NaN where no intensity is known.
        quality: Weakest quality of the energy; empty where no energy was counted.
    """

    keys: tuple[str, ...]
    jobs: int
    slot_h: float
    energy_kwh: float
    carbon_kg: float
    quality: str

    @classmethod
    def of(
        cls, keys: tuple[str, ...], jobs: int, slot_s: float, joules: tuple[float, float], grams: float, quality: str
    ) -> StatementRow:
        """Make a row from SI units; ``joules`` are the total, and the part whose intensity is known."""
        carbon_kg = grams / 1e3 if joules[1] > 0 else math.nan
        return cls(keys, jobs, slot_s / 3600.0, joules[0] / JOULES_PER_KWH, carbon_kg, quality)

    @property
    def cells(self) -> tuple[str, ...]:
        """The cells of the row as text."""
        carbon = "–" if math.isnan(self.carbon_kg) else _number(self.carbon_kg)
        return (*self.keys, f"{self.jobs}", f"{self.slot_h:.1f}", _number(self.energy_kwh), carbon, self.quality or "–")


@dataclass(frozen=True, slots=True)
class Statement:
    """Rows by key, and their total.

    Attributes:
        title: Its title.
        by: Names of the keys.
        rows: The lines; those of a month are adjacent if the first key is ``month``.
        total: The sum of the rows; its keys are not shown.
        notes: The basis of the numbers, one sentence each.
        slot: Name of a slot.
    """

    title: str
    by: tuple[str, ...]
    rows: tuple[StatementRow, ...]
    total: StatementRow
    notes: tuple[str, ...]
    slot: str = "GPU"

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the columns."""
        return (*self.by, "jobs", f"{self.slot} h", "kWh", "kg CO2e", "quality")

    @property
    def total_cells(self) -> tuple[str, ...]:
        """Cells of the last line, the total."""
        return ("total", *("" for _ in self.by[1:]), *self.total.cells[len(self.total.keys) :])


def as_csv(statement: Statement) -> str:
    """The rows as CSV with all digits and without the total. An unknown amount of carbon is empty."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow((*statement.by, "jobs", f"{statement.slot.lower()}_h", "energy_kwh", "carbon_kg", "quality"))
    for row in statement.rows:
        carbon = "" if math.isnan(row.carbon_kg) else repr(row.carbon_kg)
        keys = (_safe(key) for key in row.keys)
        table.writerow((*keys, row.jobs, repr(row.slot_h), repr(row.energy_kwh), carbon, row.quality))
    return text.getvalue()


def as_markdown(statement: Statement) -> str:
    """The statement as Markdown: heading, table and notes; readable as plain text in a mail."""
    widths = [max(map(len, column)) for column in zip(*_lines(statement), strict=True)]
    text_columns = {*range(len(statement.by)), len(statement.names) - 1}

    def line(cells: Sequence[str]) -> str:
        padded = (
            cell.ljust(width) if at in text_columns else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return f"| {' | '.join(padded)} |"

    rule = ("-" * width if at in text_columns else "-" * (width - 1) + ":" for at, width in enumerate(widths))
    first, *rest = _lines(statement)
    notes = [f"- {_cell(note)}" for note in statement.notes]
    table = [line(first), f"| {' | '.join(rule)} |", *map(line, rest)]
    return "\n".join([f"# {_cell(statement.title)}", "", *table, *([""] if notes else []), *notes, ""])


def as_html(statement: Statement) -> str:
    """The statement as one self-contained HTML page."""
    style = static_text("joulery.css")
    policy = f"default-src 'none'; style-src {content_hash(style)}; base-uri 'none'; form-action 'none'"
    total, text_columns = statement.total, {*range(len(statement.by)), len(statement.names) - 1}
    carbon = "unknown" if math.isnan(total.carbon_kg) else f"{_number(total.carbon_kg)} kg"
    facts = [
        ("energy", f"{_number(total.energy_kwh)} kWh", total.quality),
        ("carbon", carbon, "CO2-equivalent"),
        (f"{statement.slot} hours", f"{total.slot_h:.1f}", f"{total.jobs} jobs"),
    ]
    rows: list[Sequence[Html | str]] = [row.cells for row in statement.rows]
    rows.append([tag("strong", cell) for cell in statement.total_cells])
    title = tag("h1", tag("span", "joulery ", class_="brand"), statement.title)
    body = (
        tag("header", tag("div", title), class_="top"),
        tag(
            "main",
            tiles(facts),
            tag("h2", f"By {' and '.join(statement.by)}"),
            tag("div", html_table(statement.names, rows, text=text_columns), class_="card"),
            tag("ul", (tag("li", note) for note in statement.notes), class_="notes") if statement.notes else None,
        ),
    )
    return whole_page(head(statement.title, style, policy=policy), tag("body", *body))


def _lines(statement: Statement) -> list[tuple[str, ...]]:
    rows = (statement.names, *(row.cells for row in statement.rows), statement.total_cells)
    return [tuple(map(_cell, row)) for row in rows]


def _cell(text: str) -> str:
    """Text that cannot end a cell or a line of Markdown, or become HTML."""
    flat = " ".join(text.split()).replace("\\", "\\\\").replace("|", "\\|")
    return flat.replace("&", "&amp;").replace("<", "&lt;")


def _safe(key: str) -> str:
    """A name, escaped so that a spreadsheet does not read it as a formula."""
    return f"'{key}" if key[:1] in "=+-@\t\r" else key


def _number(value: float) -> str:
    return f"{value:.2f}" if value >= 0.1 or value == 0 else f"{value:.3g}"
