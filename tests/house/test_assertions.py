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


def idle(nodes: Iterable[ast.AST]) -> list[int]:
    """Lines of assertions with a part that decides nothing: an alternative which another one already asks for, as in
    ``(rows and right(rows)) or rows``, or a value that equals itself."""
    found = [node for node in nodes if isinstance(node, ast.Assert)]
    return [node.lineno for node in found if any(map(_decides_nothing, ast.walk(node.test)))]


def _decides_nothing(node: ast.AST) -> bool:
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and isinstance(node.ops[0], ast.Eq):
        same = ast.dump(node.left) == ast.dump(node.comparators[0])
        return same and not any(isinstance(part, ast.Call) for part in ast.walk(node))
    if not (isinstance(node, ast.BoolOp) and isinstance(node.op, ast.Or)):
        return False
    names = [{part.id for part in ast.walk(each) if isinstance(part, ast.Name)} for each in node.values]
    alone = [(at, each.id) for at, each in enumerate(node.values) if isinstance(each, ast.Name)]
    return any(name in other for at, name in alone for index, other in enumerate(names) if index != at)


def test_an_assertion_that_decides_nothing_is_found() -> None:
    source = "assert (len(rows) > 10 and right(rows)) or rows\nassert noun == noun\nassert f() == f()\n"
    source += "assert not a or a[0]\nassert a[0] != a[0]\n"
    assert idle(ast.walk(ast.parse(source))) == [1, 2]


def test_no_assertion_has_a_part_that_decides_nothing() -> None:
    found = {str(path.relative_to(TESTS)): idle(nodes_of(path)) for path in files_in(TESTS)}
    assert {name: lines for name, lines in found.items() if lines} == {}


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
