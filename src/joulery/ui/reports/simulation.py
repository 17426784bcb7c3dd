"""Results of a simulation for a terminal: paragraphs and tables."""

from __future__ import annotations

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from joulery.app.simulation import Paragraph, ResultTable


def result_view(part: Paragraph | ResultTable) -> RenderableType:
    """A paragraph or a table."""
    if not isinstance(part, ResultTable):
        return _text(part)
    padding = (0, 1) if part.wide else (0, 1, 0, 0)
    table = Table(box=None, header_style="dim", padding=padding, pad_edge=part.wide)
    for title in part.titles:
        table.add_column(title, justify="left" if title in part.left else "right", no_wrap=True)
    for row in part.rows:
        table.add_row(*(cell if isinstance(cell, str) else _text(cell) for cell in row))
    return table


def _text(pieces: Paragraph) -> Text:
    return Text.assemble(*pieces)
