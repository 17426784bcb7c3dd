"""A hook of MkDocs: markup of docstrings that Markdown does not know becomes plain code.

Cross-reference roles become code spans, and the marker of a literal block is left out before it.
"""

import re
from typing import Any

ROLE = re.compile(r":(?:class|func|meth|mod|attr|data|exc):<code>~?([^<]+)</code>")
LITERAL = re.compile(r"<p>::</p>\s*")


def on_page_content(html: str, **_: Any) -> str:
    """The page with ``:class:`~a.b.C``` shown as ``C``, and without the ``::`` before a block of code."""
    html = ROLE.sub(lambda role: f"<code>{role.group(1).rpartition('.')[2]}</code>", html)
    return LITERAL.sub("", html)
