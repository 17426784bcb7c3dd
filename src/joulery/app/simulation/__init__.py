"""Run scenarios: one module per kind, which turns a section of the scenario file into a table and a JSON object.

A new kind is a section in :mod:`joulery.config.scenario`, a module here with ``ACCEPTS`` and ``run``, and
one line in ``KINDS``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from joulery.domain.errors import ConfigError

if TYPE_CHECKING:
    from joulery.config.scenario import Scenario

KINDS: Mapping[str, str] = MappingProxyType(
    {
        "batched-serving": "joulery.app.simulation.batched_serving",
        "clocks": "joulery.app.simulation.clock_study",
        "ordering": "joulery.app.simulation.ordering_study",
        "training": "joulery.app.simulation.training_study",
        "variants": "joulery.app.simulation.variant_study",
    }
)
"""Kind of scenario to the module that runs it."""

Progress = Callable[[int, int], None]
"""Called with the number of parts done and the total number."""


@dataclass(frozen=True, slots=True)
class Overrides:
    """Command-line values that override the scenario file.

    Attributes:
        policies: Policies or schemes to compare instead of the file's; empty for the file's.
        seeds: Number of random seeds; None for the file's.
        inputs: Files and other values by flag (``profile``, ``carbon``, ``column``), for the kinds that accept them.
    """

    policies: tuple[str, ...] = ()
    seeds: int | None = None
    inputs: Mapping[str, str] = field(default_factory=dict)

    def path(self, name: str) -> Path | None:
        """The file given with a flag; None when it was not."""
        return Path(self.inputs[name]) if name in self.inputs else None


Paragraph = tuple[tuple[str, str], ...]
"""A paragraph: pieces of text, each with its style (``bold``, ``dim``, ``red``, ``yellow``), or none."""
BLANK: Paragraph = ()


def paragraph(*pieces: str | tuple[str, str]) -> Paragraph:
    """Create a paragraph from pieces of text, plain or with a style."""
    return tuple((piece, "") if isinstance(piece, str) else piece for piece in pieces)


@dataclass(slots=True)
class ResultTable:
    """A table of results.

    Attributes:
        titles: Titles of the columns.
        left: Titles of the columns with text, aligned left; the others contain numbers.
        wide: Whether columns are two spaces apart.
        rows: Cells of each row; a cell with a style is a paragraph.
    """

    titles: Sequence[str]
    left: Sequence[str]
    wide: bool = False
    rows: list[Sequence[str | Paragraph]] = field(default_factory=list)

    def add(self, *cells: str | Paragraph) -> None:
        """Add a row."""
        self.rows.append(cells)


@dataclass(frozen=True, slots=True)
class ScenarioResult:
    """The outcome of a scenario.

    Attributes:
        document: JSON-ready results, as printed by ``--json`` and stored in a run directory.
        view: The results as paragraphs and tables.
    """

    document: dict[str, Any]
    view: Sequence[Paragraph | ResultTable]


def run_scenario(scenario: Scenario, overrides: Overrides, progress: Progress) -> ScenarioResult:
    """Run a scenario of any kind.

    Raises:
        ConfigError: A flag does not apply to this kind, or a policy is unknown.
        JouleryError: As the kind's own ``run``.
    """
    if scenario.kind == "training-figures":
        raise ConfigError(
            "kind training-figures has moved to a command of the repository",
            got=scenario.kind,
            hint="in a clone of joulery: python -m reproduce green --html green.html",
        )
    module = importlib.import_module(KINDS[scenario.kind])
    for name in overrides.inputs:
        if name not in module.ACCEPTS:
            takes = ", ".join(f"--{flag.replace('_', '-')}" for flag in sorted(module.ACCEPTS)) or "none of its kind"
            raise ConfigError(f"a scenario of kind {scenario.kind} takes no --{name.replace('_', '-')}", expected=takes)
    result = module.run(scenario, overrides, progress)
    assert isinstance(result, ScenarioResult)
    return result
