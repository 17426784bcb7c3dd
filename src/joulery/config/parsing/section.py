"""Base of all sections of the site file: frozen, no unknown keys, no silent conversion, texts of keys, paths."""

from __future__ import annotations

import ast
import inspect
import os
import re
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    GetJsonSchemaHandler,
    StringConstraints,
    ValidationInfo,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, to_jsonable_python

from joulery.config.parsing.problem import problem


class Section(BaseModel):
    """Base of every section. YAML keys are the aliases; attributes carry the unit (``latency``: ``latency_s``).

    Attributes:
        ALIASES: New key by old key: the old one is read from files for one release, with a warning.
    """

    # Built when first read or made: no command reads every section. Defaults that are sections are made by factories.
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, defer_build=True)
    ALIASES: ClassVar[Mapping[str, str]] = {}

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        schema = handler(core)
        section = handler.resolve_ref_schema(schema)
        if cls.ALIASES:
            section["x-renamed"] = dict(cls.ALIASES)
        for name, field in cls.model_fields.items():
            entry = section["properties"][field.alias or name]
            if about := attribute_docstring(cls, name):
                entry.setdefault("description", about)
            default = field.get_default(call_default_factory=True, validated_data={})
            if isinstance(default, Section):
                entry.setdefault("default", to_jsonable_python(default))
        return schema


def old_keys(section: type[Section] = Section) -> frozenset[str]:
    """The old keys of all sections: where a file has none of them, no schema is needed to find new names."""
    return frozenset(section.ALIASES).union(*(old_keys(below) for below in section.__subclasses__()))


def attribute_docstring(cls: type, name: str) -> str | None:
    """The text below an attribute in the class that declares it; None without a text, and where there is no source.

    Read when a schema is made: pydantic's ``use_attribute_docstrings`` reads the source of every class at its import.
    """
    for owner in cls.__mro__:
        if name in inspect.get_annotations(owner):
            return _docstrings(owner.__module__).get((owner.__qualname__, name))
    return None


@cache
def _docstrings(module: str) -> Mapping[tuple[str, str], str]:
    """The docstrings of a module's attributes, by qualified name of the class and name of the attribute."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (OSError, TypeError, KeyError):
        return {}
    found: dict[tuple[str, str], str] = {}
    _collect(tree, "", found)
    return found


def _collect(node: ast.AST, scope: str, found: dict[tuple[str, str], str]) -> None:
    """Collect from the classes below a node, which stands in a scope: empty, or a name and a dot."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            for attribute, text in zip(child.body, child.body[1:], strict=False):
                match attribute, text:
                    case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(about))):
                        found[scope + child.name, name] = inspect.cleandoc(about)
            _collect(child, f"{scope}{child.name}.", found)
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            _collect(child, f"{scope}{child.name}.<locals>.", found)
        else:
            _collect(child, scope, found)


def _resolve(value: Path, info: ValidationInfo) -> Path:
    context: dict[str, Any] = info.context or {}
    return Path(context.get("folder", "")) / value


def _with_environment(value: Path) -> Path:
    """``${NAME}`` and ``${NAME:-used where NAME is not set}`` in a path, as shells and Compose files write them."""

    def text(found: re.Match[str]) -> str:
        known = os.environ.get(found["name"], "") or found["default"]
        if known is None:
            raise problem(
                f"the environment variable {found['name']} is not set",
                hint=f"set it, or write ${{{found['name']}:-PATH}} to use PATH where it is not",
            )
        return known

    return Path(re.sub(r"\$\{(?P<name>[A-Za-z_]\w*)(?::-(?P<default>[^}]*))?\}", text, str(value)))


def _existing_file(value: Path) -> Path:
    return _existing(value, Path.is_file, "file")


def _existing_data(value: Path) -> Path:
    return _existing(value, Path.is_file, "file", hint=f"looked for {value}; paths are relative to the site file")


def _existing_folder(value: Path) -> Path:
    return _existing(value, Path.is_dir, "folder")


def _writable_place(value: Path) -> Path:
    _existing(value.parent, Path.is_dir, "folder")
    return value


def _existing(
    value: Path, exists: Callable[[Path], bool], what: str, hint: str = "paths are relative to the site file"
) -> Path:
    try:
        found = exists(value)
    except OSError as error:
        raise problem(f"cannot be looked at: {error.strerror}") from None
    if not found:
        raise problem(f"no such {what}", hint=hint)
    return value


Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
"""A name fit for URLs, labels and file names."""
Text = Annotated[str, StringConstraints(min_length=1, max_length=500)]
"""Some words."""
InputFile = Annotated[Path, AfterValidator(_resolve), AfterValidator(_existing_file)]
"""A file that is there; relative to the site file."""
DataFile = Annotated[Path, AfterValidator(_with_environment), AfterValidator(_resolve), AfterValidator(_existing_data)]
"""As InputFile; ``${NAME}`` and ``${NAME:-default}`` stand for an environment variable."""
FeedFile = Annotated[Path, AfterValidator(_resolve), AfterValidator(_writable_place)]
"""A file that another program writes, and that may not be there yet; its folder is. Relative to the site file."""
InputFolder = Annotated[Path, AfterValidator(_resolve), AfterValidator(_existing_folder)]
"""A folder that is there; relative to the site file."""
OutputPath = Annotated[Path, AfterValidator(_resolve)]
"""A place that need not exist yet; relative to the site file."""
