"""The rules of the house that no linter holds."""

import ast
import importlib
import re
import subprocess
import sys

import pytest

import joulery
from joulery.domain import errors
from joulery.ui.cli.verbs import VERBS
from tests.house.syntax import ROOT, files_in, nodes_of, text_of

SOURCES = ROOT / "src" / "joulery"
HEAVY = [
    "numpy",
    "scipy",
    "pydantic",
    "pyarrow",
    "rich",
    "httpx",
    "uvicorn",
    "starlette",
    "onnxruntime",
    "torch",
    "highspy",
]


def test_no_help_imports_anything_heavy() -> None:
    code = f"""
from joulery.ui.cli import main, sys
for arguments in ([], *([verb] for verb in {list(VERBS)})):
    main([*arguments, "--help"])
    print("heavy:", arguments, [m for m in {HEAVY} if m in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("heavy:")]
    assert len(lines) == 1 + len(VERBS)
    assert [line for line in lines if not line.endswith(" []")] == []


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_and_json(verb: str) -> None:
    done = subprocess.run([sys.executable, "-m", "joulery", verb, "--help"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    group = "COMMAND [ARGS]" in done.stdout
    assert group or "--json" in done.stdout


def test_every_public_name_is_exported_and_nothing_else() -> None:
    for name in joulery.__all__:
        assert getattr(joulery, name) is not None
    assert set(joulery.__all__) <= set(dir(joulery))


def test_an_unknown_public_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nothing_like_this"):
        _ = joulery.nothing_like_this


def test_every_error_is_drawn_in_the_tree_with_its_exit_code() -> None:
    tree = errors.__doc__ or ""
    for value in vars(errors).values():
        if isinstance(value, type) and issubclass(value, errors.JouleryError):
            assert re.search(rf"{value.__name__}\s+exit {value.exit_code}\b", tree), value.__name__


def test_no_source_is_left_unfinished_or_swallows_errors() -> None:
    unfinished = re.compile(r"\b(TODO|FIXME|XXX|NotImplementedError)\b")
    found = [
        f"{path.relative_to(ROOT)}: {word}" for path in files_in(SOURCES) for word in unfinished.findall(text_of(path))
    ]
    found += [
        f"{path.relative_to(ROOT)}:{node.lineno}: bare except"
        for path in files_in(SOURCES)
        for node in nodes_of(path)
        if isinstance(node, ast.ExceptHandler) and node.type is None
    ]
    assert found == []


def test_equal_values_have_one_order_on_every_processor() -> None:
    """numpy sorts equal values as the processor's instructions have it: plans and figures would differ by machine."""
    found = []
    for path in files_in(SOURCES):
        calls = [n for n in nodes_of(path) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)]
        sorted_again = {id(part) for call in calls if call.func.attr == "sort" for part in ast.walk(call)}
        for call in calls:
            name = call.func.attr
            kinds = [word.value for word in call.keywords if word.arg == "kind"]
            stable = any(isinstance(kind, ast.Constant) and kind.value == "stable" for kind in kinds)
            if (name == "argsort" and not stable) or (name == "argpartition" and id(call) not in sorted_again):
                found.append(f"{path.relative_to(ROOT)}:{call.lineno}")
    assert found == [], "domain.arrays.largest, or kind='stable'"


def test_every_package_says_what_it_is() -> None:
    for init in SOURCES.rglob("__init__.py"):
        module = ".".join(init.relative_to(ROOT / "src").parent.parts)
        assert importlib.import_module(module).__doc__, module
