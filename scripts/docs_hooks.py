"""A hook of MkDocs: cross-reference roles of docstrings become plain code spans."""

import re
from typing import Any

ROLE = re.compile(r":(?:class|func|meth|mod|attr|data|exc):<code>~?([^<]+)</code>")


def on_page_content(html: str, **_: Any) -> str:
    """The page with ``:class:`~a.b.C``` shown as ``C``."""
    return ROLE.sub(lambda role: f"<code>{role.group(1).rpartition('.')[2]}</code>", html)
