"""From a file to a :class:`~joulery.config.site.Site` (or another document), or to every error in it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError

from joulery.config.parsing.explain import Schema, explain, resolve
from joulery.config.parsing.section import old_keys
from joulery.config.parsing.tree import MAX_BYTES, Tree, parse_yaml
from joulery.config.parsing.tree import Path as KeyPath
from joulery.config.site import Site
from joulery.domain.errors import ConfigError
from joulery.domain.renames import warn_renamed

D = TypeVar("D", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Document(Generic[D]):
    """A kind of file that can be read.

    Attributes:
        noun: With its article, for messages: ``a site file``.
        starts: What it starts with.
        adapter: Validates its data.
        schema: Its JSON schema, for messages.
    """

    noun: str
    starts: str
    adapter: TypeAdapter[D]
    schema: Callable[[], dict[str, Any]]

    @property
    def first_key(self) -> str:
        """The key that this kind of file has and other kinds lack."""
        return self.starts.partition(":")[0]


def load(path: str | os.PathLike[str]) -> Site:
    """The site file at ``path``, validated.

    Raises:
        ConfigError: The file cannot be read, is no YAML or no site; the first fault in it, with file, line and pointer.
    """
    site, errors = check(path)
    if site is None:
        raise errors[0]
    return site


def check(path: str | os.PathLike[str]) -> tuple[Site | None, tuple[ConfigError, ...]]:
    """The site file at ``path`` if it is valid, and every fault if it is not."""
    return check_document(path, SITE)


def check_document(path: str | os.PathLike[str], kind: Document[D]) -> tuple[D | None, tuple[ConfigError, ...]]:
    """The document at ``path`` if it is valid, and every fault if it is not."""
    file = os.fspath(path)
    try:
        text = _read(file)
        return _parse(text, file, Path(file).parent, kind)
    except ConfigError as error:
        return None, (error,)


def load_document(path: str | os.PathLike[str], kind: Document[D]) -> D:
    """The document at ``path``, validated.

    Raises:
        ConfigError: As :func:`load`.
    """
    document, errors = check_document(path, kind)
    if document is None:
        raise errors[0]
    return document


def parse(text: str, *, file: str = "site", folder: str | os.PathLike[str] = ".") -> Site:
    """A site from YAML text; relative paths start at ``folder``.

    Raises:
        ConfigError: As :func:`load`.
    """
    site, errors = _parse(text, file, Path(folder), SITE)
    if site is None:
        raise errors[0]
    return site


@cache
def schema() -> dict[str, Any]:
    """The JSON schema of a site file."""
    return with_units(Site.model_json_schema(by_alias=True))


def with_units(document: dict[str, Any]) -> dict[str, Any]:
    """A JSON schema whose defaults of quantities carry their unit; changed in place."""
    for part in (document, *document["$defs"].values()):
        for field in part.get("properties", {}).values():
            if field.get("type") == "string" and "x-unit" in field and "default" in field:
                field["default"] = f"{field['default']:g} {field['x-unit']}"
    return document


SITE = Document("a site file", "joulery: 1", TypeAdapter(Site), schema)


def _read(file: str) -> str:
    """The text of a file.

    Raises:
        ConfigError: Not there, not a file, not readable, too long, not text.
    """
    try:
        with open(file, "rb") as stream:  # noqa: PTH123 - a NUL in the name has to end up below
            content = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"cannot be read: {error.strerror or error}", file=file, hint=_READ_HINTS.get(type(error), "")
        ) from None
    except ValueError as error:
        raise ConfigError(f"cannot be read: {error}", file=file) from None
    if b"\0" in content:
        raise ConfigError("this is a binary file", file=file, expected="YAML text")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        byte = f"byte 0x{content[error.start]:02x}"
        raise ConfigError("not UTF-8", file=file, line=line, got=byte, hint="save the file as UTF-8") from None


_READ_HINTS: dict[type[OSError], str] = {
    FileNotFoundError: "check the path; joulery config schema shows what a site file holds",
    IsADirectoryError: "name the file in the folder",
    PermissionError: "run: chmod u+r on the file, or run as its owner",
}


def _parse(text: str, file: str, folder: Path, kind: Document[D]) -> tuple[D | None, tuple[ConfigError, ...]]:
    tree = parse_yaml(text, file)
    if not isinstance(tree.data, dict):
        return None, (ConfigError(f"{kind.noun} is a mapping", file=file, line=tree.line(()), expected=kind.starts),)
    if mistaken := _other_kind(tree, kind):
        return None, (mistaken,)
    if _any_key(tree.data, old_keys()):
        tree = with_new_keys(tree, kind.schema())
    try:
        return kind.adapter.validate_json(json.dumps(tree.data), context={"folder": folder}), ()
    except ValidationError as error:
        return None, explain(error, tree, kind.schema())


def _any_key(data: Any, keys: frozenset[str]) -> bool:
    """Whether one of the keys stands anywhere in a document."""
    if isinstance(data, dict):
        return not keys.isdisjoint(data) or any(_any_key(value, keys) for value in data.values())
    return isinstance(data, list) and any(_any_key(item, keys) for item in data)


_FIRST_KEYS = {
    "joulery": ("a site file", "joulery up, plan, serve, schedule and config take it"),
    "scenario": ("a scenario file", "joulery simulate takes it"),
}


def _other_kind(tree: Tree, kind: Document[D]) -> ConfigError | None:
    """The error for a valid-looking file of another kind."""
    if kind.first_key in tree.data:
        return None
    for key, (noun, hint) in _FIRST_KEYS.items():
        if key in tree.data and noun != kind.noun and key != kind.first_key:
            return ConfigError(
                f"this is {noun}, expected {kind.noun}", file=tree.file, line=tree.line((key,)), hint=hint
            )
    return None


def with_new_keys(tree: Tree, schema: Schema) -> Tree:
    """``tree`` with every key that a section declares in ``ALIASES`` under its new name, one warning for each.

    Raises:
        ConfigError: Old and new name stand in the same section.
    """
    renamer = _Renamer(tree, schema)
    data = renamer.renamed(schema, tree.data, ())
    if not renamer.new_keys:
        return tree
    return replace(tree, data=data, lines=renamer.moved(tree.lines), texts=renamer.moved(tree.texts))


class _Renamer:
    """Walks data and schema together.

    Attributes:
        new_keys: The new key of every old one found, by its path as written.
    """

    def __init__(self, tree: Tree, schema: Schema) -> None:
        self._tree, self._schema = tree, schema
        self.new_keys: dict[KeyPath, str] = {}

    def renamed(self, schema: Schema, data: Any, path: KeyPath) -> Any:
        """``data``, which stands at ``path`` and follows ``schema``, with new keys."""
        schema = resolve(self._schema, schema, data)
        if isinstance(data, list):
            return [self.renamed(schema.get("items", {}), item, (*path, index)) for index, item in enumerate(data)]
        if not isinstance(data, dict):
            return data
        aliases, properties = schema.get("x-renamed", {}), schema.get("properties", {})
        rest = schema.get("additionalProperties")
        found = {}
        for key, value in data.items():
            new = self._new_key(data, key, aliases[key], (*path, key)) if key in aliases else key
            part = properties.get(new, rest)
            found[new] = self.renamed(part, value, (*path, key)) if isinstance(part, dict) else value
        return found

    def _new_key(self, data: Mapping[str, Any], old: str, new: str, path: KeyPath) -> str:
        pointer, line = ".".join(map(str, path)), self._tree.line(path)
        if new in data:
            raise ConfigError(
                f"{old} is the old name of {new}, which is given, too",
                file=self._tree.file,
                pointer=pointer,
                line=line,
                hint=f"remove {old}",
            )
        warn_renamed(old, new, f"{self._tree.file}:{line} {pointer}")
        self.new_keys[path] = new
        return new

    def moved(self, entries: Mapping[KeyPath, Any]) -> dict[KeyPath, Any]:
        """``entries`` with their paths under the new keys."""
        return {self._moved(path): entry for path, entry in entries.items()}

    def _moved(self, path: KeyPath) -> KeyPath:
        return tuple(self.new_keys.get(path[: depth + 1], part) for depth, part in enumerate(path))
