"""What is measured, never timed inside a test. ``python -m benchmarks`` runs all, ``python -m benchmarks NAME…`` some.

A benchmark is a module of this package with a function ``run() -> Result``. With ``--write`` its section of
docs/benchmarks.md is replaced, under a description of the machine it ran on. A bar holds only if its figures were
measured: a benchmark without its data or its hardware raises :class:`NotRun`, a single bar is None.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path


class NotRun(Exception):  # noqa: N818 - a state of the benchmark, not a defect
    """A benchmark, or a part of it, cannot run here. The message says what is missing and how to provide it."""


@dataclass(frozen=True, slots=True)
class Result:
    """One table of measurements.

    Attributes:
        title: What was measured.
        columns: Headings.
        rows: Cells, as they are to be read, units included.
        notes: How it was measured and against what; one paragraph each.
        checks: Each bar, and whether it held; None where it was not run.
        figures: The same as numbers, for ``--json``; empty where only the table says them.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()
    checks: Sequence[tuple[str, bool | None]] = ()
    figures: Mapping[str, object] = field(default_factory=dict)

    def as_dict(self) -> dict[str, object]:
        """JSON-ready."""
        return {
            "title": self.title,
            "columns": list(self.columns),
            "rows": [list(row) for row in self.rows],
            "checks": [{"bar": bar, "held": held} for bar, held in self.checks],
            "figures": dict(self.figures),
        }

    @property
    def missed(self) -> bool:
        """Whether a bar was measured and missed."""
        return any(held is not None and not held for _, held in self.checks)

    @property
    def complete(self) -> bool:
        """Whether there are bars, and every one was run."""
        return bool(self.checks) and all(held is not None for _, held in self.checks)

    def markdown(self) -> str:
        """The table, its checks and its notes, as Markdown."""
        table = [self.columns, ["---"] * len(self.columns), *self.rows]
        lines = [f"## {self.title}", "", *(f"| {' | '.join(row)} |" for row in table), ""]
        lines += [f"- {_verdict(held)}: {bar}" for bar, held in self.checks]
        lines += [""] * bool(self.checks)
        for note in self.notes:
            lines += [note, ""]
        return "\n".join(lines)


def _verdict(held: bool | None) -> str:
    if held is None:
        return "**not run**"
    return "holds" if held else "**missed**"


def data_folder(part: str) -> Path:
    """The folder ``part`` of the data set: ``JOULERY_DATA``, else ``../shared/data`` beside the checkout.

    Raises:
        NotRun: The data set is not here.
    """
    root = Path(os.environ.get("JOULERY_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))
    if not (root / part).is_dir():
        raise NotRun(f"no data in {root / part}: set JOULERY_DATA to a folder that holds {part}/")
    return root / part


def chosen(variable: str, parts: Iterable[str]) -> list[str]:
    """Parts that a list with commas in the environment names, in their own order; all where it names none.

    Raises:
        NotRun: There is no such part.
    """
    known = list(parts)
    names = {name.strip() for name in os.environ.get(variable, "").split(",")} - {""}
    if unknown := sorted(names - set(known)):
        raise NotRun(f"{variable} names no part {', '.join(unknown)}: there are {', '.join(known)}")
    return [part for part in known if part in names or not names]
