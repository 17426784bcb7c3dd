"""Pydantic's findings as :class:`~joulery.domain.errors.ConfigError`: file, line, pointer, got, expected and a hint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from joulery.config.parsing.problem import nearest
from joulery.config.parsing.tree import Path, Tree
from joulery.domain.errors import ConfigError

Schema = Mapping[str, Any]

_TYPES = {
    "string_type": ("must be text", ""),
    "path_type": ("must be a path", ""),
    "int_type": ("must be a whole number", ""),
    "int_from_float": ("must be a whole number", ""),
    "int_parsing": ("must be a whole number", ""),
    "float_type": ("must be a number", ""),
    "finite_number": ("must be a finite number", ""),
    "bool_type": ("must be true or false", ""),
    "tuple_type": ("must be a list", ""),
    "list_type": ("must be a list", ""),
    "model_type": ("must be a mapping", ""),
    "model_attributes_type": ("must be a mapping", ""),
    "dict_type": ("must be a mapping", ""),
}
_LIMITS = {
    "greater_than": ("must be above {gt:.15g}", ""),
    "greater_than_equal": ("must be at least {ge:.15g}", ""),
    "less_than": ("must be below {lt:.15g}", ""),
    "less_than_equal": ("must be at most {le:.15g}", ""),
    "too_short": ("needs at least {min_length} item", ""),
    "too_long": ("may have at most {max_length} items", ""),
    "string_too_short": ("must not be empty", ""),
    "string_too_long": ("must be at most {max_length} characters", ""),
    "string_pattern_mismatch": ("is not a valid name", "letters, digits, '.', '_' and '-', at most 63"),
    "literal_error": ("is not a known value", "{expected}"),
    "enum": ("is not a known value", "{expected}"),
    "union_tag_invalid": ("is not a known kind", "{expected_tags}"),
}
_PLAIN = {**_TYPES, **_LIMITS}


def explain(error: ValidationError, tree: Tree, schema: Schema) -> tuple[ConfigError, ...]:
    """Everything ``error`` found, in the order of the file, at most one finding a key."""
    finder = _Finder(tree, schema)
    found = [finder.finding(details) for details in error.errors(include_url=False) if not finder.echoes(details)]
    suggested = {hint for _, error_ in found if (hint := error_.hint)}
    unique: dict[tuple[str | None, str], ConfigError] = {}
    for _, one in sorted(found, key=lambda item: item[0]):
        key = (one.pointer or "").rpartition(".")[2]
        if one.message.startswith("missing key") and f"did you mean {key}?" in suggested:
            continue
        unique.setdefault((one.pointer, one.message), one)
    return tuple(unique.values())


class _Finder:
    """Looks up where a finding lies in the file, and what the schema allows there."""

    def __init__(self, tree: Tree, schema: Schema) -> None:
        self.tree = tree
        self.schema = schema

    def echoes(self, details: ErrorDetails) -> bool:
        """Whether a list is only called too short because of the faults in its items."""
        if details["type"] != "too_short":
            return False
        data = self._data(self.walk(details["loc"])[0])
        return isinstance(data, list) and len(data) >= details["ctx"]["min_length"]

    def finding(self, details: ErrorDetails) -> tuple[tuple[int, int], ConfigError]:
        """One finding with its place in the order: line, then unknown keys before all else."""
        kind, context = details["type"], details.get("ctx", {})
        path, schema = self.walk((*details["loc"], *context.get("at", ())))
        if kind == "extra_forbidden":
            return self._unknown_key(path)
        if kind == "missing":
            return self._missing_key((*path, str(details["loc"][-1])))
        if kind == "union_tag_not_found":
            return self._error(
                path, 1, "missing key 'kind'", None, "", f"kinds: {', '.join(schema.get('x-kinds', ()))}"
            )
        if kind == "union_tag_invalid":
            path = (*path, "kind")
        got = context.get("got")
        if got is None:
            got = self.show(path)
        if kind == "joulery":
            message, expected, hint = context["message"], context["expected"], context["hint"]
        else:
            message, expected, hint = self._plain(kind, context, details["msg"], self.tree.texts.get(path, ""))
        secret = schema.get("writeOnly", False)
        return self._error(path, 1, message, None if secret or not got else got, expected, hint)

    def _plain(self, kind: str, context: Mapping[str, Any], message: str, text: str) -> tuple[str, str, str]:
        if kind not in _PLAIN:
            return message, "", ""
        template, expected = _PLAIN[kind]
        known = expected.format_map(context).replace("'", "") if "{" in expected else expected
        options = known.replace(" or ", ", ").split(", ") if "{" in expected else []
        match = nearest(text, options)
        return template.format_map(context), known, f"did you mean {match}?" if match else ""

    def _unknown_key(self, path: Path) -> tuple[tuple[int, int], ConfigError]:
        _, schema = self.walk(path[:-1])
        known = [key for key in schema.get("properties", {}) if not (path[:-1] and key == "joulery")]
        match = nearest(str(path[-1]), known)
        hint = f"did you mean {match}?" if match else f"known keys: {', '.join(known)}" if known else ""
        return self._error(path, 0, f"unknown key {str(path[-1])!r}", None, "", hint)

    def _missing_key(self, path: Path) -> tuple[tuple[int, int], ConfigError]:
        _, parent = self.walk(path[:-1])
        hint = parent.get("properties", {}).get(path[-1], {}).get("description", "")
        return self._error(path, 2, f"missing key {str(path[-1])!r}", None, "", f"{path[-1]}: {hint}" if hint else "")

    def _error(
        self, path: Path, rank: int, message: str, got: str | None, expected: str, hint: str
    ) -> tuple[tuple[int, int], ConfigError]:
        line = self.tree.line(path)
        pointer = ".".join(map(str, path))
        where = {"file": self.tree.file, "pointer": pointer or None, "line": line}
        return (line, rank), ConfigError(message, **where, got=got, expected=expected or None, hint=hint)  # type: ignore[arg-type]

    def show(self, path: Path) -> str:
        """The value at ``path`` as written, shortened."""
        data = self._data(path)
        if isinstance(data, dict):
            return "a mapping"
        if isinstance(data, list):
            return f"a list of {len(data)}"
        text = self.tree.texts.get(path, "")
        return repr(text if len(text) <= 60 else text[:57] + "...") if text else "nothing"

    def _data(self, path: Path) -> Any:
        data = self.tree.data
        for part in path:
            data = data[part]
        return data

    def walk(self, loc: Iterable[int | str]) -> tuple[Path, Schema]:
        """The part of ``loc`` that exists in the file (tags of unions left out), and the schema that rules there."""
        data, schema = self.tree.data, resolve(self.schema, self.schema, self.tree.data)
        path: Path = ()
        for part in loc:
            if isinstance(data, dict) and part in data:
                schema = schema.get("properties", {}).get(part, schema.get("additionalProperties", {}))
            elif isinstance(data, list) and isinstance(part, int) and part < len(data):
                schema = schema.get("items", {})
            else:
                continue
            data, path = data[part], (*path, part)
            schema = resolve(self.schema, schema if isinstance(schema, dict) else {}, data)
        return path, schema


def resolve(root: Schema, schema: Schema, data: Any) -> Schema:
    """A part of the schema ``root``: references followed, optional parts opened, unions chosen by ``data["kind"]``."""
    while True:
        if "$ref" in schema:
            schema = root["$defs"][schema["$ref"].rpartition("/")[2]]
        elif "discriminator" in schema:
            kind = data.get("kind") if isinstance(data, dict) else None
            target = schema["discriminator"]["mapping"].get(kind) if isinstance(kind, str) else None
            schema = {"$ref": target} if target else {"x-kinds": tuple(schema["discriminator"]["mapping"])}
        elif "anyOf" in schema:
            choices = [choice for choice in schema["anyOf"] if choice.get("type") != "null"]
            if len(choices) != 1:
                return schema
            schema = choices[0]
        else:
            return schema
