"""Statements of jobs in every format: hostile names, nothing known, round trips."""

from __future__ import annotations

import csv
import math

from hypothesis import given
from hypothesis import strategies as st

from joulery.ui.cli.report_sacct import FORMATS as SACCT_FORMATS
from joulery.ui.kit.statement import FORMATS, Statement, StatementRow, as_csv, as_html, as_markdown

names = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc", "Zl", "Zp")), min_size=1, max_size=12)


def statement(*rows: StatementRow) -> Statement:
    total = StatementRow((), 3, 10.0, 2.0, math.nan, "modelled")
    return Statement("Energy and carbon, 2026-11", ("account", "owner"), rows, total, ("a note | with <b>",))


def row(account: str, owner: str, kwh: float = 2.0, kg: float = math.nan) -> StatementRow:
    return StatementRow((account, owner), 3, 10.0, kwh, kg, "modelled")


@given(names, names, st.floats(0, 1e9), st.floats(0, 1e9))
def test_csv_gives_the_numbers_back_whole(account: str, owner: str, kwh: float, kg: float) -> None:
    (read,) = csv.DictReader(as_csv(statement(row(account, owner, kwh, kg))).splitlines())
    assert float(read["energy_kwh"]) == kwh and float(read["carbon_kg"]) == kg
    assert read["account"].lstrip("'") == account.lstrip("'")
    assert not read["owner"].startswith(("=", "+", "-", "@"))


@given(names, names)
def test_no_name_breaks_the_table_or_becomes_html(account: str, owner: str) -> None:
    made = statement(row(account, owner))
    lines = as_markdown(made).splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert len(table) == 4, "heading, rule, row, total"
    assert all(line.replace("\\\\", "").replace("\\|", "").count("|") == 8 for line in table)
    page = as_html(made)
    assert "<h2>By account and owner</h2>" in page
    assert page.count("<tr>") == 3 and "with &lt;b&gt;" in page and "http://" not in page


def test_unknown_carbon_is_empty_and_a_dash_and_nothing_is_zero() -> None:
    made = statement(row("lab", "ada"))
    assert [line["carbon_kg"] for line in csv.DictReader(as_csv(made).splitlines())] == [""]
    assert "–" in as_markdown(made) and "unknown" in as_html(made)
    empty = statement()
    assert as_csv(empty).count("\n") == 1 and "| total" in as_markdown(empty)
    assert StatementRow.of((), 0, 0.0, (0.0, 0.0), 0.0, "measured").cells[2:4] == ("0.00", "–")


def test_the_flags_name_these_formats() -> None:
    assert SACCT_FORMATS == FORMATS
