"""Old keys of a file, read under their new names for one release."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from joulery.config.parsing.explain import Schema, resolve
from joulery.config.parsing.tree import Path, Tree
from joulery.domain.errors import ConfigError
from joulery.domain.renames import warn_renamed


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
        self.new_keys: dict[Path, str] = {}

    def renamed(self, schema: Schema, data: Any, path: Path) -> Any:
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

    def _new_key(self, data: Mapping[str, Any], old: str, new: str, path: Path) -> str:
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

    def moved(self, entries: Mapping[Path, Any]) -> dict[Path, Any]:
        """``entries`` with their paths under the new keys."""
        return {self._moved(path): entry for path, entry in entries.items()}

    def _moved(self, path: Path) -> Path:
        return tuple(self.new_keys.get(path[: depth + 1], part) for depth, part in enumerate(path))
