"""The shape of the house: one public name for one thing, readable modules and functions, folders one can scan.

The allowances are debts or have a reason beside them: lists and ceilings may only shrink.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from tests.house.syntax import ROOT, files_in, nodes_of, text_of

PACKAGES = (ROOT / "src" / "joulery", ROOT / "reproduce")
MODULE_LINES = 500
FUNCTION_LINES = 60
FOLDER_FILES = range(4, 16)

DOUBLE_NAMES: frozenset[str] = frozenset()
"""Public classes still defined twice for two things; none may be added."""
LONG_MODULES: dict[str, str] = {}
"""Modules above the limit, with the reason."""
LONG_FUNCTIONS: dict[str, str] = {}
"""Functions above the limit, with the reason."""
FOLDERS = {
    "src/joulery": "the layers are folders",
    "src/joulery/adapters/engines": "one folder an engine",
    "src/joulery/policies": "one folder a decision",
    "src/joulery/policies/clocks": "one decision, two files",
    "src/joulery/policies/placement": "one folder an optimisation problem",
    "src/joulery/runtime": "one folder a live loop",
    "src/joulery/runtime/leasing": "leases and the process that reverts them",
    "src/joulery/sim": "one folder a simulated plant",
    "src/joulery/sim/clocks": "one study, two files",
    "src/joulery/ui": "one folder a face",
    "src/joulery/ui/cli": "one file a verb",
    "src/joulery/ui/dashboard": "one page, two files",
    "src/joulery/app/wiring": "one file a kind of thing that a site names",
}
"""Folders with fewer or more files than the rule, with the reason."""


def modules() -> Iterator[Path]:
    for package in PACKAGES:
        yield from files_in(package)


def test_every_folder_of_modules_is_a_package() -> None:
    """One that a rule of .gitignore hides is missing in a clone and in the wheel."""
    folders = {path.parent for path in modules()}
    assert {folder for folder in folders if not (folder / "__init__.py").exists()} == set()


def test_no_public_class_name_stands_for_two_things() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in modules():
        module = nodes_of(path)[0]
        assert isinstance(module, ast.Module)
        for node in module.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(path.relative_to(ROOT)))
    double = {name: where for name, where in places.items() if len(where) > 1}
    assert {name: where for name, where in double.items() if name not in DOUBLE_NAMES} == {}


def test_no_module_is_longer_than_one_can_read() -> None:
    lengths = {str(path.relative_to(ROOT)): text_of(path).count("\n") for path in modules()}
    assert {name: lines for name, lines in lengths.items() if lines > MODULE_LINES and name not in LONG_MODULES} == {}


def test_no_function_is_longer_than_a_screen() -> None:
    long = {}
    for path in modules():
        for node in nodes_of(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
                name = f"{path.relative_to(PACKAGES[0] if PACKAGES[0] in path.parents else ROOT)}:{node.name}"
                lines = node.end_lineno - node.lineno + 1
                if lines > FUNCTION_LINES and name not in LONG_FUNCTIONS:
                    long[name] = lines
    assert long == {}


def test_every_folder_can_be_scanned() -> None:
    sizes = {}
    for package in PACKAGES:
        for folder in {path.parent for path in files_in(package)}:
            name = str(folder.relative_to(ROOT))
            count = len(list(folder.glob("*.py")))
            if count not in FOLDER_FILES and name not in FOLDERS:
                sizes[name] = count
    assert sizes == {}


def imports(tree: ast.AST) -> Iterator[str]:
    """Modules, and names of modules, that a source imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from (node.module, *(f"{node.module}.{one.name}" for one in node.names))


def words(tree: ast.AST) -> set[str]:
    """Words of the texts of a source, docstrings left out: a module that is imported late is named there."""
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    texts = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in docstrings)
    return {word for node in texts for word in re.findall(r"\w+", str(node.value).replace("-", "_"))}


def unused(shipped: Mapping[str, ast.AST], others: Iterable[ast.AST] = ()) -> set[str]:
    """Modules that no other source imports or names: what only tests or benchmarks need is no part of a wheel."""
    own = {name: (set(imports(tree)), words(tree)) for name, tree in shipped.items()}
    rest = [(set(imports(tree)), words(tree)) for tree in others]
    found = set()
    for name in shipped:
        elsewhere = [*rest, *(facts for other, facts in own.items() if other != name)]
        if not any(name in imported or name.rpartition(".")[2] in named for imported, named in elsewhere):
            found.add(name)
    return found


def test_a_module_that_nothing_uses_is_found() -> None:
    sources = {
        "p.used": "",
        "p.left": "import p.used",
        "p.a_verb": '"""p.left"""',
        "p.cli": "VERBS = ['a-verb', 'cli']",
    }
    shipped = {name: ast.parse(source) for name, source in sources.items()}
    assert unused(shipped) == {"p.left", "p.cli"}
    assert unused(shipped, [ast.parse("from p import cli")]) == {"p.left"}


def test_what_ships_is_used_by_what_ships() -> None:
    """Simulated worlds of a benchmark or of a test stand beside it, under ``benchmarks`` or ``tests``."""
    package = PACKAGES[0]
    by_python = ("__init__", "__main__", "sitecustomize")
    shipped = {
        ".".join(path.relative_to(package.parent).with_suffix("").parts): nodes_of(path)[0]
        for path in files_in(package)
        if path.stem not in by_python
    }
    others = [nodes_of(path)[0] for path in modules() if path.stem in by_python or package not in path.parents]
    assert unused(shipped, others) == set()
