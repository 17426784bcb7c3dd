"""Claims of a paper, each with the figure that joulery computes, and functions that print them or write a page."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.table import Table

from joulery.store.files import write_named
from joulery.ui.kit.console import table_console
from joulery.ui.kit.html import Html, tag

F = TypeVar("F", bound=Callable[..., Any])
HOLDS, PARTLY, FAILS = "holds", "partly", "does not hold"
_CLASSES = {HOLDS: "holds", FAILS: "fails", "costs more": "fails", PARTLY: "half", "sign only": "half"}
STYLE = """
main{padding-top:8px}
main>figure{margin-top:14px}
table.claims td:nth-child(3),table.claims td:nth-child(4){text-align:right}
table.claims th:nth-child(3),table.claims th:nth-child(4){text-align:right}
table.claims td:last-child,table.claims td:first-child{white-space:nowrap}
table.claims td:nth-child(2){min-width:240px}
td.holds,td.fails,td.half{font-weight:600}
td.holds{color:var(--good)} td.fails{color:var(--bad)} td.half{color:var(--warn)}
figure svg{margin-top:8px;height:auto}
figure .legend svg{margin-top:0}
figcaption{margin-top:2px}
.three{grid-template-columns:repeat(auto-fit,minmax(min(100%,300px),1fr))}
"""
"""CSS that a paper's page adds to joulery's style sheet."""


@dataclass(frozen=True, slots=True)
class Claim:
    """One claim of a paper, compared with joulery's figure.

    Attributes:
        figure: Figure, table or section of the paper that states the claim.
        what: The claim or the quantity compared, as text.
        paper, ours: The paper's figure and joulery's, as text.
        verdict: ``holds``, ``sign only``, ``partly``, ``costs more``, ``does not hold``; empty where the paper gives
            no number.
    """

    figure: str
    what: str
    paper: str
    ours: str
    verdict: str

    def as_dict(self) -> dict[str, Any]:
        """The claim as JSON-ready values."""
        return asdict(self)


def verdict(holds: bool) -> str:
    """The verdict on a claim that either holds or does not."""
    return HOLDS if holds else FAILS


def output_options(command: F) -> F:
    """Add ``--html`` and ``--json`` to a paper's command."""
    file = click.Path(path_type=Path)
    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print one JSON object."),
        click.option("--html", type=file, metavar="FILE", help="Write the figures as one HTML page."),
    ):
        command = option(command)
    return command


def json_option(command: F) -> F:
    """Add ``--json`` to a paper's command that has no page."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")(command)


def print_claims(
    claims: Sequence[Claim], document: Mapping[str, Any], *, as_json: bool, notes: Sequence[str] = ()
) -> None:
    """Print claims as a table with ``notes`` below it, or ``document`` with the claims as JSON."""
    if as_json:
        click.echo(json.dumps({**document, "claims": [claim.as_dict() for claim in claims]}))
        return
    table = Table(box=None, header_style="dim", pad_edge=False)
    for title in ("figure", "claim", "paper", "ours", ""):
        table.add_column(title)
    for claim in claims:
        table.add_row(claim.figure, claim.what, claim.paper, claim.ours, claim.verdict)
    console = table_console(160)
    console.print(table)
    for note in notes:
        console.print(note, style="dim", markup=False)


def write_page(file: Path, page: str) -> None:
    """Write a page to a file and print the file's name on standard error.

    Raises:
        CapabilityError: The file cannot be written.
    """
    write_named(file, page)
    click.echo(f"{file}", err=True)


def claims_table(claims: Sequence[Claim]) -> Html:
    """The claims as an HTML table."""
    rows = [
        tag(
            "tr",
            (tag("td", text) for text in (claim.figure, claim.what, claim.paper, claim.ours)),
            tag("td", claim.verdict, class_=_CLASSES.get(claim.verdict)),
        )
        for claim in claims
    ]
    names = tag("tr", (tag("th", text) for text in ("figure", "claim", "paper", "ours", "")))
    table = tag("table", tag("thead", names), tag("tbody", rows), class_="claims")
    return tag("div", table, class_="scroll")
