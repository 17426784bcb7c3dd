"""Benchmarks of joulery: ``python -m benchmarks`` runs all of them, ``python -m benchmarks NAME…`` the named ones.

Measurements are made here and never inside a test. A benchmark is a module of this package with a function
``run() -> Result``. ``--write`` replaces its section of docs/benchmarks.md, with a description of the machine. A bar is
a limit that a figure must meet. It holds only if its figures were measured: a benchmark without its data or hardware
raises :class:`NotRun`, and a single bar that was not run is None.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path


class NotRun(Exception):  # noqa: N818 - a state of the benchmark, not a defect
    """A benchmark, or a part of it, cannot run here. The message states what is missing and how to provide it."""


@dataclass(frozen=True, slots=True)
class Result:
    """One table of measurements.

    Attributes:
        title: What was measured.
        columns: Headings.
        rows: Cells as text, units included.
        notes: How it was measured and against what; one paragraph each.
        checks: Each bar, and whether it held; None where it was not run.
        figures: The figures as numbers, for ``--json``; empty if only the table contains them.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()
    checks: Sequence[tuple[str, bool | None]] = ()
    figures: Mapping[str, object] = field(default_factory=dict)

    def as_dict(self) -> dict[str, object]:
        """The result, without its notes, as a JSON-ready dictionary."""
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
    """The folder ``part`` of the data set in ``JOULERY_DATA``, or else in ``../shared/data`` beside the checkout.

    Raises:
        NotRun: The data set is not here.
    """
    root = Path(os.environ.get("JOULERY_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))
    if not (root / part).is_dir():
        raise NotRun(f"no data in {root / part}: set JOULERY_DATA to a folder that holds {part}/")
    return root / part


def chosen(variable: str, parts: Iterable[str]) -> list[str]:
    """The parts that an environment variable (comma-separated) names, in the order of ``parts``; all if it names none.

    Raises:
        NotRun: The variable names an unknown part.
    """
    known = list(parts)
    names = {name.strip() for name in os.environ.get(variable, "").split(",")} - {""}
    if unknown := sorted(names - set(known)):
        raise NotRun(f"{variable} names no part {', '.join(unknown)}: there are {', '.join(known)}")
    return [part for part in known if part in names or not names]
