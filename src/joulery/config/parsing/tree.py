"""YAML text as plain data that remembers its lines.

The YAML 1.2 core schema is used (``NO`` is the zone of Norway, not false; ``22:30`` is text). Duplicate keys, tags and
merges are refused, and size, depth and the expansion of aliases are limited: no text can hang or crash the reader.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from joulery.domain.errors import ConfigError

MAX_BYTES = 1 << 20
MAX_DEPTH = 40
MAX_NODES = 20_000

Path = tuple[str | int, ...]

_NULL = frozenset({"", "~", "null", "Null", "NULL"})
_BOOL = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INT = re.compile(r"[-+]?[0-9]{1,18}")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_SPECIAL = {".inf": "inf", "+.inf": "inf", "-.inf": "-inf", ".nan": "nan"}


@dataclass(frozen=True, slots=True)
class Tree:
    """A parsed file.

    Attributes:
        file: Its name, for messages.
        data: Mappings, lists and scalars.
        lines: 1-based line of the key or item at each path.
        texts: Scalars as they are written.
    """

    file: str
    data: Any
    lines: Mapping[Path, int]
    texts: Mapping[Path, str]

    def line(self, path: Path) -> int:
        """The line of the deepest part of ``path`` that exists."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines[path]


@dataclass(frozen=True, slots=True)
class _Node:
    """A composed node: ``value`` is a scalar, a list of nodes, or a list of (key, line, node)."""

    line: int
    value: Any
    text: str | None = None


def parse_yaml(text: str, file: str) -> Tree:
    """The tree of one YAML document.

    Raises:
        ConfigError: Not YAML, more than one document, a duplicate key, a tag, too deep or too large.
    """
    if len(text) > MAX_BYTES:
        raise ConfigError(f"the file is longer than {MAX_BYTES >> 20} MiB", file=file)
    composer = _Composer(file, _events(text, file))
    root = composer.document()
    reader = _Expander(file)
    data = reader.expand(root, ())
    return Tree(file, data, reader.lines, reader.texts)


def _events(text: str, file: str) -> Iterator[yaml.Event]:
    """The parser's events; every way in which the parser can fail becomes one error with its line."""
    try:
        yield from yaml.parse(text, Loader=yaml.SafeLoader)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(f"control character U+{error.character:04X}", file=file, line=line) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        message = f"not valid YAML: {error.problem or error.context}"
        raise ConfigError(message, file=file, line=mark.line + 1 if mark else None) from None
    except (ValueError, OverflowError) as error:  # a \U escape beyond Unicode, a version number of a thousand digits
        raise ConfigError(f"not valid YAML: {error}", file=file) from None


def _line(event: yaml.Event) -> int:
    assert event.start_mark is not None
    return event.start_mark.line + 1


@dataclass(slots=True)
class _Composer:
    file: str
    events: Iterator[yaml.Event]
    anchors: dict[str, _Node] = field(default_factory=dict)

    def document(self) -> _Node:
        """The only document of the stream."""
        next(self.events)  # stream start
        start = next(self.events)
        if isinstance(start, yaml.StreamEndEvent):
            raise ConfigError("the file is empty", file=self.file, expected="a mapping that starts with joulery: 1")
        root = self.node(next(self.events), 0)
        next(self.events)  # document end
        after = next(self.events)
        if not isinstance(after, yaml.StreamEndEvent):
            raise self.error("only one document is allowed in a file", after)
        return root

    def node(self, event: yaml.Event, depth: int) -> _Node:
        """The node that starts with ``event``."""
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in self.anchors:
                raise self.error(f"alias *{event.anchor} names no earlier anchor", event)
            return self.anchors[event.anchor]
        if depth > MAX_DEPTH:
            raise self.error(f"nested deeper than {MAX_DEPTH} levels", event)
        assert isinstance(event, (yaml.ScalarEvent, yaml.SequenceStartEvent, yaml.MappingStartEvent))
        if event.tag is not None:
            raise self.error(f"tags are not allowed: {event.tag[:60]}", event)
        line = _line(event)
        if isinstance(event, yaml.ScalarEvent):
            node = _Node(line, self.scalar(event), event.value)
        elif isinstance(event, yaml.SequenceStartEvent):
            node = _Node(line, tuple(self.items(depth)))
        else:
            node = _Node(line, self.mapping(depth))
        if event.anchor is not None:
            self.anchors[event.anchor] = node
        return node

    def items(self, depth: int) -> Iterator[_Node]:
        """The items of the sequence just opened."""
        while not isinstance(event := next(self.events), yaml.SequenceEndEvent):
            yield self.node(event, depth + 1)

    def mapping(self, depth: int) -> dict[str, tuple[int, _Node]]:
        """The mapping just opened: key -> (line, value)."""
        found: dict[str, tuple[int, _Node]] = {}
        while not isinstance(event := next(self.events), yaml.MappingEndEvent):
            if not isinstance(event, yaml.ScalarEvent):
                raise self.error("a key must be plain text", event)
            key, line = self.text(event), _line(event)
            if key == "<<":
                raise self.error("merging with << is not supported", event)
            if key in found:
                raise self.error(f"duplicate key {key!r}, first on line {found[key][0]}", event)
            found[key] = (line, self.node(next(self.events), depth + 1))
        return found

    def scalar(self, event: yaml.ScalarEvent) -> Any:
        """The value of a scalar: text if quoted, else by the YAML 1.2 core schema."""
        text = self.text(event)
        if event.style is not None:
            return text
        if text in _NULL:
            return None
        if text in _BOOL:
            return _BOOL[text]
        if _INT.fullmatch(text):
            return int(text)
        if text.lower() in _SPECIAL:
            return float(_SPECIAL[text.lower()])
        return float(text) if _FLOAT.fullmatch(text) else text

    def text(self, event: yaml.ScalarEvent) -> str:
        """The characters of a scalar."""
        value = str(event.value)
        if any("\ud800" <= letter <= "\udfff" for letter in value):
            raise self.error("half of a surrogate pair is not a character", event)
        return value

    def error(self, message: str, event: yaml.Event) -> ConfigError:
        """The error at the line of ``event``."""
        return ConfigError(message, file=self.file, line=_line(event))


@dataclass(slots=True)
class _Expander:
    """Turns nodes into data, following aliases within a budget."""

    file: str
    lines: dict[Path, int] = field(default_factory=dict)
    texts: dict[Path, str] = field(default_factory=dict)

    def expand(self, node: _Node, path: Path) -> Any:
        """The data of ``node``, which stands at ``path``."""
        self.lines.setdefault(path, node.line)
        if len(self.lines) > MAX_NODES:
            raise ConfigError(f"more than {MAX_NODES} values once aliases are expanded", file=self.file, line=node.line)
        if len(path) > MAX_DEPTH:
            raise ConfigError(f"nested deeper than {MAX_DEPTH} levels", file=self.file, line=node.line)
        if isinstance(node.value, tuple):
            return [self.expand(item, (*path, index)) for index, item in enumerate(node.value)]
        if isinstance(node.value, dict):
            data = {}
            for key, (line, value) in node.value.items():
                self.lines[(*path, key)] = line
                data[key] = self.expand(value, (*path, key))
            return data
        if node.text is not None:
            self.texts[path] = node.text
        return node.value
