"""Every test can fail by what it states: it asserts, expects an error, or calls a helper of the tests that does."""

import ast
from collections.abc import Iterable
from typing import NamedTuple

from tests.house.syntax import TESTS, files_in, nodes_of

EXPECTS = frozenset({"raises", "warns", "fail"})


def functions(nodes: Iterable[ast.AST]) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def calls(nodes: Iterable[ast.AST]) -> set[str]:
    """Names of the functions that are called."""
    called = [part.func for part in nodes if isinstance(part, ast.Call)]
    names = {part.id for part in called if isinstance(part, ast.Name)}
    return names | {part.attr for part in called if isinstance(part, ast.Attribute)}


class Facts(NamedTuple):
    """What a function does that a test may fail by."""

    asserts: bool
    calls: set[str]

    def states(self, helpers: frozenset[str] = frozenset()) -> bool:
        """Whether it asserts, expects an error, or calls one of the helpers."""
        return (
            self.asserts
            or bool(self.calls & (EXPECTS | helpers))
            or any(name.startswith("assert_") for name in self.calls)
        )


def facts(node: ast.AST) -> Facts:
    parts = list(ast.walk(node))
    return Facts(any(isinstance(part, ast.Assert) for part in parts), calls(parts))


def test_a_test_that_states_nothing_is_found() -> None:
    assert not facts(ast.parse("def test_it():\n    run()")).states()
    assert facts(ast.parse("def test_it():\n    run()")).states(frozenset({"run"}))
    assert facts(ast.parse("def test_it():\n    with pytest.raises(E):\n        run()")).states()
    assert facts(ast.parse("def test_it():\n    assert_all()")).states()


def test_every_test_states_something() -> None:
    found = [
        (path, function.name, facts(function)) for path in files_in(TESTS) for function in functions(nodes_of(path))
    ]
    helpers = frozenset(
        name for _, name, function in found if not name.startswith(("test_", "_")) and function.states()
    )
    silent = [
        f"{path.relative_to(TESTS)}: {name}"
        for path, name, function in found
        if path.name.startswith("test_") and name.startswith("test_") and not function.states(helpers)
    ]
    assert silent == []
