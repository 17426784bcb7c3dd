"""From a file to a :class:`~joulery.config.site.Site` (or another document), or to every error in it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError

from joulery.config.parsing.explain import explain
from joulery.config.parsing.renames import with_new_keys
from joulery.config.parsing.tree import MAX_BYTES, parse_yaml
from joulery.config.site import Site
from joulery.domain.errors import ConfigError

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
    tree = with_new_keys(tree, kind.schema())
    try:
        return kind.adapter.validate_json(json.dumps(tree.data), context={"folder": folder}), ()
    except ValidationError as error:
        return None, explain(error, tree, kind.schema())
