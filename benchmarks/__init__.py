"""What is measured, never timed inside a test. ``python -m benchmarks`` runs all, ``python -m benchmarks NAME…`` some.

A benchmark is a module of this package with a function ``run() -> Result``. With ``--write`` its section of
docs/benchmarks.md is replaced, under a description of the machine it ran on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Result:
    """One table of measurements.

    Attributes:
        title: What was measured.
        columns: Headings.
        rows: Cells, as they are to be read, units included.
        notes: How it was measured and against what; one paragraph each.
        checks: Each bar, and whether it held.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()
    checks: Sequence[tuple[str, bool]] = ()

    def markdown(self) -> str:
        """The table, its checks and its notes, as Markdown."""
        table = [self.columns, ["---"] * len(self.columns), *self.rows]
        lines = [f"## {self.title}", "", *(f"| {' | '.join(row)} |" for row in table), ""]
        lines += [f"- {'holds' if held else '**missed**'}: {bar}" for bar, held in self.checks]
        lines += [""] * bool(self.checks)
        for note in self.notes:
            lines += [note, ""]
        return "\n".join(lines)
