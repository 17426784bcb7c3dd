"""One reader of Python sources for the tests of the house: each file is read, parsed and walked once."""

import ast
import gc
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
TRIES = 3


@cache
def text_of(path: Path) -> str:
    """The source of a file."""
    return path.read_text(encoding="utf-8")


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """Every node of a file's syntax tree, the module first; shared, so not to be changed."""
    nodes = tuple(ast.walk(parsed(text_of(path))))
    gc.freeze()  # or the garbage collector would look at all trees again and again: two thirds of the time
    return nodes


@cache
def files_in(folder: Path) -> tuple[Path, ...]:
    """Every Python file below a folder, sorted."""
    return tuple(sorted(folder.rglob("*.py")))


def parsed(source: str) -> ast.Module:
    """The syntax tree of a source."""
    for attempt in range(TRIES):
        try:
            return ast.parse(source)
        except SystemError:
            # CPython 3.11 counts every thread's depth in one place (gh-106905): another one parsed meanwhile.
            if attempt == TRIES - 1:
                raise
    raise AssertionError("unreachable")


def forget() -> None:
    """Free the trees."""
    for kept in (text_of, nodes_of, files_in):
        kept.cache_clear()
    gc.unfreeze()
    gc.collect()
    gc.freeze()
