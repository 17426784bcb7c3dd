"""Skips are accounted for: the hook of ``tests/conftest.py`` in a run of its own."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

from tests.house.syntax import ROOT, TESTS, files_in, nodes_of
from tests.skips import allowed_as

REASONS = [
    ("PyTorch is not installed: pip install 'joulery[torch]'", True, False),
    ("no Chromium here: install it (apt-get install chromium) or name it in CHROMIUM", True, False),
    ("the data set is not here: set JOULERY_DATA to a folder that holds green/", True, True),
    ("did not feel like it", False, False),
]
"""A reason, whether it is allowed at home, and in CI."""


@pytest.mark.parametrize(("reason", "at_home", "in_ci"), REASONS)
def test_a_skip_needs_an_allowed_reason(reason: str, at_home: bool, in_ci: bool) -> None:
    assert (allowed_as(reason, ci=False) is not None) is at_home
    assert (allowed_as(reason, ci=True) is not None) is in_ci


@pytest.mark.parametrize("ci", [False, True])
@pytest.mark.parametrize("allowed", [True, False])
def test_a_run_fails_by_a_skip_that_is_not_allowed(tmp_path: Path, allowed: bool, ci: bool) -> None:
    """It names those and counts the others."""
    permitted = [reason for reason, at_home, in_ci in REASONS if (in_ci if ci else at_home)]
    others = [] if allowed else [reason for reason, *_ in REASONS if reason not in permitted]
    test = tmp_path / "test_some.py"
    skips = [f"def test_{k}():\n    pytest.skip({reason!r})\n" for k, reason in enumerate([*permitted, *others])]
    test.write_text("import pytest\n" + "".join(skips))
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    line = [sys.executable, "-m", "pytest", "-q", "-c", str(tmp_path / "pytest.ini"), "-p", "tests.conftest", str(test)]
    done = subprocess.run(line, cwd=ROOT, env=environment(ci), capture_output=True, text=True)
    assert done.returncode == (0 if allowed else 1), done.stdout + done.stderr
    assert "skipped: 1 " in done.stdout
    named = done.stdout.partition("not allowed")[2]
    assert [reason for reason, *_ in REASONS if reason in named] == others


def environment(ci: bool) -> dict[str, str]:
    """Without what the run around this one has set, and without plugins that a skip does not need."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    return {**kept, "CI": "true" if ci else "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


PACKAGE = "torch"
"""Stands for what an f-string names."""


def texts(nodes: Iterable[ast.AST]) -> dict[str, str]:
    """Names that are a text."""
    return {
        target.id: node.value.value
        for node in nodes
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def written(node: ast.AST | None, named: Mapping[str, str]) -> str | None:
    """A reason as it stands in the source; None where it is found out when the test runs."""
    if isinstance(node, ast.Name):
        return named.get(node.id)
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else PACKAGE for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def reasons(nodes: Iterable[ast.AST], named: Mapping[str, str]) -> Iterator[tuple[int, str]]:
    """Lines of skips whose reason stands in the source, and the reason; empty where pytest has to invent one."""
    for node in nodes:
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in ("skip", "skipif", "importorskip", "SkipTest", "skipTest"):
            first = node.args[:1] if name == "skip" else []
            given = [*(word.value for word in node.keywords if word.arg == "reason"), *first]
            reason = written(given[0], named) if given else ""
            if reason is not None:
                yield node.lineno, reason


def test_each_kind_of_reason_is_found() -> None:
    source = "WHY = 'no'\npytest.skip(WHY)\nmark.skipif(a, reason='b')\npytest.skip(str(error))\nimportorskip('x')\n"
    source += "pytest.skip(f'{name} is not installed')\npytest.importorskip('y', reason='c')\n"
    nodes = list(ast.walk(ast.parse(source)))
    found = [(2, "no"), (3, "b"), (5, ""), (6, "torch is not installed"), (7, "c")]
    assert sorted(reasons(nodes, texts(nodes))) == found


def test_every_reason_that_stands_in_a_test_is_allowed() -> None:
    """On a machine where all is there, no test says what a user without root or without a compiler would read."""
    named: dict[str, str] = {}
    for path in files_in(TESTS):
        named |= texts(nodes_of(path))
    found = {
        f"{path.relative_to(TESTS)}:{line}: {reason or 'without a reason'}"
        for path in files_in(TESTS)
        for line, reason in reasons(nodes_of(path), named | texts(nodes_of(path)))
        if allowed_as(reason, ci=False) is None
    }
    assert found == set()
