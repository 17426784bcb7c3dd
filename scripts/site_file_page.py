"""Writes the table of keys in docs/reference/site-file.md from the models of the site file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from joulery.config import schema
from joulery.config.parsing import quantity

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "site-file.md"
BEGIN, END = "<!-- keys: written by scripts/site_file_page.py -->\n", "<!-- end of keys -->\n"
DIMENSIONS = {dimension.unit or "ratio": dimension.noun.partition(" ")[2] for dimension in quantity.DIMENSIONS}
Schema = dict[str, Any]


def keys() -> str:
    """One table per section, in the order of the site file."""
    lines: list[str] = []
    for title, about, rows in _sections("", schema()):
        lines += [f"### {title}", "", about, "", "| key | value | default | meaning |", "| --- | --- | --- | --- |"]
        lines += [f"| `{name}` | {value} | {default} | {meaning} |" for name, value, default, meaning in rows]
        lines.append("")
    return "\n".join(lines)


def page(text: str) -> str:
    """``text`` with its tables renewed."""
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return head + BEGIN + "\n" + keys() + END + tail


def _sections(path: str, section: Schema) -> Iterator[tuple[str, str, list[tuple[str, str, str, str]]]]:
    """Title, description and rows of a section, then those of the sections inside it."""
    rows, inner = [], []
    required = set(section.get("required", ()))
    for name, field in section["properties"].items():
        here = f"{path}.{name}" if path else name
        value, below = _value(here, field)
        default = "**required**" if name in required else _default(field)
        rows.append((name, value, default, field.get("description", "").replace("\n", " ").replace("|", "\\|")))
        inner += below
    about = "The whole file." if not path else section.get("description", "").partition("\n\n")[0].replace("\n", " ")
    yield (f"`{path}`" if path else "Top level", about, rows)
    for where, one in inner:
        yield from _sections(where, one)


def _value(path: str, field: Schema) -> tuple[str, list[tuple[str, Schema]]]:
    """Description of the values that a key accepts, and the sections below the key."""
    field = _opened(field)
    if "discriminator" in field:
        kinds = field["discriminator"]["mapping"]
        below = [(f"{path} (kind: {kind})", _definition(target)) for kind, target in kinds.items()]
        return "one of the kinds " + ", ".join(f"`{kind}`" for kind in kinds), below
    if "$ref" in field:
        target = _definition(field["$ref"])
        if "properties" in target:
            return "section", [(path, target)]
        return _value(path, target)
    if field.get("type") == "array":
        words, below = _value(f"{path}[]", field["items"])
        return f"list of: {words}" if not below else "list", below
    return _scalar(field), []


def _scalar(field: Schema) -> str:
    if "const" in field:
        return f"`{field['const']}`"
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    if "x-unit" in field:
        return DIMENSIONS[field["x-unit"]]
    if field.get("type") == "object":
        return "mapping"
    if field.get("format") == "path":
        return "path"
    if "type" not in field and "anyOf" in field:
        return " or ".join(dict.fromkeys(_scalar(choice) for choice in field["anyOf"]))
    words = {"integer": "whole number", "number": "number", "boolean": "`true`, `false`", "string": "text"}
    word = words[field["type"]]
    low, high = field.get("minimum"), field.get("maximum", field.get("exclusiveMaximum"))
    if low is not None and high is not None and high < 1e9:
        return f"{word}, {low:g} to {high:g}"
    return word


def _default(field: Schema) -> str:
    value = field.get("default")
    if value is None or isinstance(value, (dict, list)):
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _opened(field: Schema) -> Schema:
    """``field`` without its "or null"."""
    choices = [choice for choice in field.get("anyOf", ()) if choice.get("type") != "null"]
    return choices[0] if len(choices) == 1 else field


def _definition(reference: str) -> Schema:
    found: Schema = schema()["$defs"][reference.rpartition("/")[2]]
    return found


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
