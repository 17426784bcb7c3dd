"""Every test can fail by what it states: it asserts, expects an error, or calls a helper of the tests that does."""

import ast
from collections.abc import Iterable

from tests.house.syntax import TESTS, files_in, nodes_of

EXPECTS = frozenset({"raises", "warns", "fail"})


def functions(nodes: Iterable[ast.AST]) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def calls(nodes: Iterable[ast.AST]) -> set[str]:
    """Names of the functions that are called."""
    called = [part.func for part in nodes if isinstance(part, ast.Call)]
    names = {part.id for part in called if isinstance(part, ast.Name)}
    return names | {part.attr for part in called if isinstance(part, ast.Attribute)}


def states(node: ast.AST, helpers: frozenset[str] = frozenset()) -> bool:
    """Whether a function asserts, expects an error, or calls one of the helpers."""
    parts = list(ast.walk(node))
    named = calls(parts)
    return (
        any(isinstance(part, ast.Assert) for part in parts)
        or bool(named & (EXPECTS | helpers))
        or any(name.startswith("assert_") for name in named)
    )


def test_a_test_that_states_nothing_is_found() -> None:
    assert not states(ast.parse("def test_it():\n    run()"))
    assert states(ast.parse("def test_it():\n    run()"), frozenset({"run"}))
    assert states(ast.parse("def test_it():\n    with pytest.raises(E):\n        run()"))


def test_every_test_states_something() -> None:
    helpers = frozenset(
        function.name
        for path in files_in(TESTS)
        for function in functions(nodes_of(path))
        if not function.name.startswith(("test_", "_")) and states(function)
    )
    silent = [
        f"{path.relative_to(TESTS)}: {function.name}"
        for path in files_in(TESTS)
        if path.name.startswith("test_")
        for function in functions(nodes_of(path))
        if function.name.startswith("test_") and not states(function, helpers)
    ]
    assert silent == []
