"""docs/architecture.md: its picture agrees with the imports, and the modules of its walks exist."""

import ast
import re
from functools import cache

import pytest
from scripts.walk import crossed

from joulery.ui.cli import main
from tests.house.syntax import ROOT, files_in, nodes_of

PAGE = (ROOT / "docs" / "architecture.md").read_text()
SOURCES = ROOT / "src" / "joulery"
FOLDERS = {path.name for path in SOURCES.iterdir() if (path / "__init__.py").exists()}


def arrows() -> set[tuple[str, str]]:
    """The arrows of the picture, as pairs of folders."""

    return set(re.findall(r"^  (\w+)(?:\[[^\]]*\])? -\.?-+> (\w+)", PAGE.split("## The tree")[0], re.MULTILINE))


@cache
def imports() -> set[tuple[str, str]]:
    """Pairs of folders of which the first imports the second."""
    found = set()
    for path in files_in(SOURCES):
        folder = path.relative_to(SOURCES).parts[0]
        for node in nodes_of(path):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                parts = name.split(".")
                if parts[0] == "joulery" and len(parts) > 1:
                    found.add((folder, parts[1]))
    return {(one, other) for one, other in found if {one, other} <= FOLDERS and one != other}


def reached(pairs: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """The pairs, and those that a path of pairs connects."""
    found = set(pairs)
    while more := {(a, d) for a, b in found for c, d in found if b == c} - found:
        found |= more
    return found


def test_every_arrow_is_an_import() -> None:
    assert arrows() and arrows() - imports() == set()


def test_every_import_follows_the_arrows() -> None:
    assert imports() - reached(arrows()) == set()


def walks() -> list[tuple[str, list[str]]]:
    """Title and modules of each walk, the modules once each."""
    part = PAGE.split("## Four walks")[1].split("\n## ")[0]
    titles = re.split(r"^\*\*(An? [^*]+)\*\*", part, flags=re.MULTILINE)[1:]
    found = []
    for title, text in zip(titles[::2], titles[1::2], strict=True):
        rows = [line.split("|")[2] for line in text.splitlines() if line.startswith("| ") and "| --- |" not in line]
        found.append((title, list(dict.fromkeys(re.findall(r"`([a-z0-9_]+(?:/[a-z0-9_]+)+)`", " ".join(rows))))))
    return found


@pytest.mark.parametrize(("title", "modules"), walks(), ids=[title for title, _ in walks()])
def test_the_modules_of_a_walk_exist(title: str, modules: list[str]) -> None:
    assert len(modules) > 5, title
    assert [module for module in modules if not (SOURCES / f"{module}.py").exists()] == []


def test_a_plan_crosses_the_modules_of_its_walk(capsys: pytest.CaptureFixture[str]) -> None:
    """Twice, for a first run imports; of the second, what runs is counted."""
    command = ["plan", str(ROOT / "examples" / "igniter-3.yaml")]
    assert main(command) == 0
    calls = crossed(lambda: main(command))
    capsys.readouterr()
    listed = dict(walks())["A plan"]
    assert set(calls) - set(listed) == set()
    stated = re.search(r"^\*\*A plan\*\* \((\d+) modules until it is printed", PAGE, re.MULTILINE)
    assert stated is not None and len(calls) == int(stated[1])
