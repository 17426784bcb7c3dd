"""Tests assert what a message is about (key, number, file, name), not its sentences: a better wording breaks none."""

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
FILES = sorted(TESTS.rglob("*.py"))
LONGEST = 6
"""Words of a ``match=`` literal."""


def literal(node: ast.expr) -> str:
    """The text of a string or f-string, each value as one word; empty for other expressions."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "VALUE" for part in node.values)
    return ""


def sentences(source: str) -> list[str]:
    found = [
        (word.value.lineno, literal(word.value))
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        for word in node.keywords
        if word.arg == "match"
    ]
    return [f"{line}: {text}" for line, text in found if len(text.split()) > LONGEST]


def test_a_sentence_is_found() -> None:
    assert sentences('raises(E, match="a: one two three four five six")') == ["1: a: one two three four five six"]
    assert sentences('raises(E, match=f"{a}: one two three four {b}")') == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(TESTS).as_posix())
def test_messages_are_asserted_by_their_facts(path: Path) -> None:
    assert sentences(path.read_text(encoding="utf-8")) == []
