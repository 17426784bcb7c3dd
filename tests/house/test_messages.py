"""Tests assert what a message is about (key, number, file, name), not its sentences: a better wording breaks none."""

import ast
from collections.abc import Iterable

from tests.house.syntax import TESTS, files_in, nodes_of, parsed

LONGEST = 6
"""Words of a literal that a message is matched with or compared to."""
TEXTS = frozenset({"reason", "message", "hint", "detail", "remark"})
"""Attributes that hold sentences for people."""


def literal(node: ast.expr) -> str:
    """The text of a string or f-string, each value as one word; empty for other expressions."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "VALUE" for part in node.values)
    return ""


def sentences(nodes: Iterable[ast.AST]) -> list[str]:
    """Line and text of every literal that is too long."""
    found = []
    for node in nodes:
        if isinstance(node, ast.Call):
            found += [(word.value.lineno, literal(word.value)) for word in node.keywords if word.arg == "match"]
        elif isinstance(node, ast.Compare) and any(isinstance(operator, ast.Eq | ast.In) for operator in node.ops):
            sides = (node.left, *node.comparators)
            if any(isinstance(side, ast.Attribute) and side.attr in TEXTS for side in sides):
                found += [(node.lineno, literal(side)) for side in sides]
    return [f"{line}: {text}" for line, text in found if len(text.split()) > LONGEST]


def in_source(source: str) -> list[str]:
    return sentences(ast.walk(parsed(source)))


def test_a_sentence_is_found() -> None:
    assert in_source('raises(E, match="a: one two three four five six")') == ["1: a: one two three four five six"]
    assert in_source('raises(E, match=f"{a}: one two three four {b}")') == []
    assert in_source('assert step.reason == "one two three four five six seven"')
    assert in_source('assert "one two three four five six seven" in caught.value.hint')
    assert in_source('assert step.kind == "one two three four five six seven"') == []


def test_messages_are_asserted_by_their_facts() -> None:
    found = {str(path.relative_to(TESTS)): sentences(nodes_of(path)) for path in files_in(TESTS)}
    assert {name: lines for name, lines in found.items() if lines} == {}
