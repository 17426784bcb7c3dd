"""An interference profile, however it came about: kept in a file, printed as one object or shown as a table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from joulery.app.profiling.interference_fit import fit_table, totals
from joulery.perf.interference.document import as_document
from joulery.perf.interference.model import InterferenceProfile
from joulery.store.files import write_named
from joulery.ui.kit.console import table_console


def hand_over(profile: InterferenceProfile, output: Path | None, *, as_json: bool, beside: str = "") -> None:
    """Keep a profile and show it.

    Args:
        profile: With its fits and notes.
        output: Where it goes; None to keep it nowhere.
        as_json: Print it as one object instead of a table.
        beside: What else was kept there, in words.

    Raises:
        CapabilityError: The disk refuses.
    """
    document = {**as_document(profile), "totals": totals(profile)}
    keep(document, output)
    if as_json:
        click.echo(json.dumps(document))
        return
    console = table_console(110)
    console.print(fit_table(profile))
    for note in profile.notes:
        console.print(note, style="yellow")
    if output is not None:
        console.print(f"kept in {output}{beside}")


def keep(document: dict[str, Any], output: Path | None) -> None:
    """Write a document as JSON, whole or not at all; nothing where there is no file.

    Raises:
        CapabilityError: The disk refuses.
    """
    if output is not None:
        write_named(output, json.dumps(document) + "\n")
