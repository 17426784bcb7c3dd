"""HTML built from calls: everything is escaped unless it is already HTML."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cache
from html import escape
from importlib import resources
from typing import Any

import orjson

from joulery import __version__

_VOID = frozenset({"meta", "link", "br", "hr", "img", "input"})
_SVG_VOID = frozenset({"rect", "line", "circle", "path"})


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


Child = str | Iterable["Child"] | None


def tag(name: str, /, *children: Child, **attributes: str | int | float | bool | None) -> Html:
    """An element. ``class_`` is ``class``, ``aria_label`` is ``aria-label``; None and False leave an attribute out."""
    written = "".join(
        f" {key.rstrip('_').replace('_', '-')}" + ("" if value is True else f'="{escape(str(value))}"')
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    if name in _VOID:
        return Html(f"<{name}{written}>")
    if name in _SVG_VOID and not children:
        return Html(f"<{name}{written}/>")
    return Html(f"<{name}{written}>{join(children)}</{name}>")


def join(children: Child) -> Html:
    """Join children into one piece of HTML; plain text is escaped."""
    if children is None:
        return Html("")
    if isinstance(children, Html):
        return children
    if isinstance(children, str):
        return Html(escape(children))
    return Html("".join(join(child) for child in children))


def head(title: str, style: str, *, policy: str | None = None) -> Html:
    """The head of a self-contained page.

    Args:
        title: Of the page; joulery's name is put after it.
        style: CSS.
        policy: Its content security policy; None for none.
    """
    return tag(
        "head",
        tag("meta", charset="utf-8"),
        None if policy is None else tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="generator", content=f"joulery {__version__}"),
        tag("title", f"{title} · joulery"),
        tag("style", Html(style)),
    )


def tiles(
    facts: Iterable[tuple[str, str, str]], *, four: bool = False, tone: Callable[[str], str] | None = None
) -> Html:
    """Facts as tiles: a label, its value in large letters, a note.

    Args:
        facts: Label, value and note of each.
        four: Four in a row where there is room.
        tone: Further CSS classes of a value, from its note.
    """
    items = (
        tag(
            "div",
            tag("dt", label),
            tag("dd", value, class_="value" if tone is None else f"value {tone(note)}".rstrip()),
            tag("dd", note, class_="note"),
            class_="tile",
        )
        for label, value, note in facts
    )
    return tag("dl", items, class_="tiles four" if four else "tiles")


def figure(title: str, caption: str, *content: Child, unit: str = "", wide: bool = False) -> Html:
    """A figure with its title, unit and caption above the picture and its legend."""
    heading = tag("h3", title, tag("span", unit, class_="unit") if unit else None)
    return tag("figure", heading, tag("figcaption", caption), *content, class_="wide" if wide else None)


def table(
    names: Sequence[str], rows: Iterable[Sequence[Child]], *, text: Collection[int], bad: Collection[int] = ()
) -> Html:
    """A table.

    Args:
        names: Of the columns.
        rows: Cells of each row.
        text: Columns of words, by index; the others hold numbers.
        bad: Rows to mark, by index.
    """
    kinds = [None if at in text else "number" for at in range(len(names))]
    titles = (tag("th", name, class_=kind) for name, kind in zip(names, kinds, strict=True))
    body = (
        tag(
            "tr",
            (tag("td", cell, class_=kind) for cell, kind in zip(row, kinds, strict=True)),
            class_="bad-text" if at in bad else None,
        )
        for at, row in enumerate(rows)
    )
    return tag("table", tag("thead", tag("tr", titles)), tag("tbody", body))


def whole_page(head: Html, body: Html) -> str:
    """A whole page, ready to be written to a file."""
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def data_block(identifier: str, value: Any) -> Html:
    """JSON inside a page (dataclasses too, NaN as null): no text in it can end the element or start another."""
    text = orjson.dumps(value).decode()
    for letter, code in (("<", "\\u003c"), (">", "\\u003e"), ("&", "\\u0026")):
        text = text.replace(letter, code)
    return Html(f'<script type="application/json" id="{escape(identifier)}">{text}</script>')


@cache
def static_text(name: str) -> str:
    """The text of a file in ``joulery/ui/static``."""
    return resources.files("joulery.ui").joinpath("static", name).read_text(encoding="utf-8")


def content_hash(text: str) -> str:
    """The hash by which a Content-Security-Policy allows one inline script or style."""
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"
