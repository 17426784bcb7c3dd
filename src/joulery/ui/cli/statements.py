"""Write statements of jobs to standard output or to a file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from joulery.ui.kit.statement import Statement


def written_statement(statement: Statement, form: str) -> str:
    """A statement as CSV, Markdown or HTML."""
    from joulery.ui.kit import statement as formats

    write = {"csv": formats.as_csv, "markdown": formats.as_markdown, "html": formats.as_html}[form]
    return write(statement)


def put_out(text: str, out: Path | None) -> None:
    """Write text to a file, or to standard output.

    Raises:
        CapabilityError: The disk refuses.
    """
    if out is None:
        click.echo(text, nl=False)
        return
    from joulery.store.files import write_named

    write_named(out, text)
    click.echo(f"{out}", err=True)
