"""``joulery report`` of traced runs: by module, layer, operation or phase, and as pictures."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from joulery.domain.errors import ConfigError, DataError

if TYPE_CHECKING:
    from joulery.accounting.operations.rows import Fold
    from joulery.app.runs.anatomies import RunAnatomy
    from joulery.domain.energy.tensor_footprint import TensorFootprint
    from joulery.ui.kit.html import Html

BY = ("module", "layer", "op", "phase")
"""Groupings that need operations (joulery.accounting.operations.rows.BY)."""
FORMATS = ("svg", "perfetto", "speedscope", "folded", "parquet")
"""Output formats that only reports of operations have."""


@dataclass(frozen=True, slots=True)
class ReportSelection:
    """Selection of the operations to show.

    Attributes:
        by: One of :data:`BY`; operations when None.
        depth: Components of a name to keep, and levels to draw.
        top: Rows to print.
        fold: Fold self-similar layers.
        patterns: Further folds, ``PATTERN=NAME``.
        phase, device: Show only this one.
    """

    by: str | None
    depth: int | None
    top: int
    fold: bool
    patterns: tuple[str, ...]
    phase: str | None
    device: str | None


def render(runs: Sequence[str], selection: ReportSelection, form: str) -> bytes:
    """The report of traced runs in one form.

    Raises:
        DataError: A run was not traced, or a form needs a single run, or events it does not keep.
        ConfigError: The selection or the form does not fit the runs.
    """
    from joulery.app.runs.anatomies import load_anatomies, ranks, step_counts, together
    from joulery.ui.reports.anatomy import exports

    anatomies = load_anatomies(runs)
    whole = _selected(together(anatomies, _folds(selection)), selection)
    if form == "perfetto":
        return _perfetto(_single(anatomies, form))
    if form == "speedscope":
        return exports.as_speedscope(whole, anatomies[0].name)
    if form == "folded":
        return exports.as_folded(whole).encode()
    if form in ("html", "svg"):
        return _drawn(anatomies, whole, selection, form)
    from joulery.accounting.operations.rows import rolled_up

    rows = rolled_up(whole, selection.by or "op", selection.depth)
    if form == "parquet":
        return exports.as_parquet(rows)
    if form == "csv":
        return exports.as_csv(rows).encode()
    if form == "json":
        from joulery.store.run.tensors import tensor_footprint_to_dict

        document = {**tensor_footprint_to_dict(rows), "steps": step_counts(anatomies), "ranks": ranks(anatomies)}
        return (json.dumps(document) + "\n").encode()
    return _text(rows, selection, step_line(step_counts(anatomies)))


def _folds(selection: ReportSelection) -> list[Fold]:
    from joulery.accounting.operations.rows import TRANSFORMERS, fold_from

    return [*(fold_from(text) for text in selection.patterns), *(TRANSFORMERS if selection.fold else ())]


def _selected(footprint: TensorFootprint, selection: ReportSelection) -> TensorFootprint:
    from joulery.accounting.operations.rows import selected

    return selected(footprint, phase=selection.phase, device=selection.device)


def _drawn(anatomies: Sequence[RunAnatomy], whole: TensorFootprint, selection: ReportSelection, form: str) -> bytes:
    from joulery.accounting.operations.edd import tree
    from joulery.accounting.operations.rows import rolled_up
    from joulery.ui.reports.anatomy.edd import edd_svg
    from joulery.ui.reports.anatomy.page import anatomy_page, phase_trees, with_phases

    rows = rolled_up(whole, selection.by or "op") if selection.by != "phase" else whole
    depth = selection.depth or 4
    if form == "svg":
        root = tree(rows, root=selection.phase) if selection.phase else with_phases(phase_trees(rows))
        return edd_svg(root, depth=depth, standalone=True).encode()
    title = anatomies[0].name if len(anatomies) == 1 else f"{len(anatomies)} runs"
    return anatomy_page(title, rows, _spans(anatomies), top=selection.top, depth=depth).encode()


def _spans(anatomies: Sequence[RunAnatomy]) -> Html | None:
    from joulery.ui.reports.anatomy.spans import spans_svg

    if len(anatomies) != 1:
        return None
    events = anatomies[0].events
    return None if events is None else spans_svg(events, anatomies[0].power, anatomies[0].windows_ns[0])


def _perfetto(anatomy: RunAnatomy) -> bytes:
    from joulery.ui.reports.anatomy.exports import write_perfetto

    events = anatomy.events
    if events is None:
        raise DataError("the run keeps no events", file=str(anatomy.run.path))
    file = io.BytesIO()
    write_perfetto(file, events, anatomy.power)
    return file.getvalue()


def _single(anatomies: Sequence[RunAnatomy], form: str) -> RunAnatomy:
    if len(anatomies) != 1:
        raise ConfigError(f"{form} shows one run at a time", got=f"{len(anatomies)} runs")
    return anatomies[0]


def step_line(counts: Mapping[str, float | int | None]) -> str:
    """The recorded steps of a run, in one line; empty where the run has none recorded."""
    seen = [f"{counts[kind]} {kind}" for kind in ("training", "evaluation", "other") if counts[kind]]
    if not seen:
        return ""
    share = counts["share_of_run_ratio"]
    part = "" if share is None else f" ({share:.1%} of the run's time)"
    from joulery.domain.format import si

    used = [
        f"{si(joules, 'J')} a {one}"
        for one in ("step", "sample", "token")
        if (joules := counts.get(f"energy_j_per_{one}")) is not None
    ]
    each = f"; operations use {', '.join(used)}" if used else ""
    return f"{counts['recorded']} steps recorded{part}, of {' and '.join(seen)} steps{each}\n"


def layers_text(runs: Sequence[str | Path], *, top: int = 8) -> str:
    """The layers that used most energy, and the steps, of traced runs; empty where a run was not traced."""
    from joulery.accounting.operations.rows import rolled_up
    from joulery.app.runs.anatomies import load_anatomies, step_counts, together
    from joulery.ui.reports.anatomy.text import as_text, print_rows

    try:
        anatomies = load_anatomies(runs)
    except DataError:
        return ""
    rows = rolled_up(together(anatomies, None), "layer")
    text = as_text(lambda console: print_rows(rows, console, top=top, title="layer"))
    return text.decode() + step_line(step_counts(anatomies))


def _text(rows: TensorFootprint, selection: ReportSelection, steps: str) -> bytes:
    from joulery.ui.reports.anatomy.text import as_text, print_footprint

    text = as_text(lambda console: print_footprint(rows, console, top=selection.top, title=selection.by or "operation"))
    return text + steps.encode()


def wanted(selection: ReportSelection, form: str) -> bool:
    """Whether the report is of operations: a grouping, form or flag is given that only such reports have."""
    flagged = selection.fold or selection.patterns or selection.phase or selection.device or selection.depth
    return selection.by in BY or form in FORMATS or bool(flagged)


def write(content: bytes, form: str, out: Path | None) -> None:
    """Write a report to a file, or to standard output.

    Raises:
        ConfigError: A binary form would be written to a terminal.
        CapabilityError: The disk refuses.
    """
    if out is None:
        if form == "parquet" and sys.stdout.isatty():
            raise ConfigError("parquet is not text", hint="name a file with --out")
        click.echo(content, nl=False)
        return
    from joulery.store.files import write_named

    write_named(out, content)
    click.echo(f"{out}", err=True)
