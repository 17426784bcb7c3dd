"""The commands that README and the pages show."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"^ *```(console|sh)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`(joulery [^`]+)`")
PROGRAM = re.compile(r"^(\S*/)?joulery\b")
OPERATORS = {"|", "||", "&&", ">", ">>", "<", "2>&1", "&"}


def pages() -> list[Path]:
    """README and every page."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def name(page: Path) -> str:
    """The page as a test's parameter."""
    return str(page.relative_to(ROOT))


def commands(page: Path) -> Iterator[str]:
    """The lines of ``joulery`` in the terminal blocks of a page, continuation lines joined."""
    for kind, body in FENCE.findall(page.read_text()):
        for line in body.replace("\\\n", " ").splitlines():
            line = line.strip()
            if kind == "console" and not line.startswith("$ "):
                continue
            line = line.removeprefix("$ ")
            if PROGRAM.match(line):
                yield line


def arguments(command: str) -> list[str]:
    """What follows ``joulery``, up to a pipe or a redirection; comments are left out."""
    words = shlex.split(command, comments=True)[1:]
    for at, word in enumerate(words):
        if word in OPERATORS:
            return words[:at]
    return words


def spans(page: Path) -> Iterator[str]:
    """The commands that stand in the text of a page."""
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    yield from (span.replace("\n", " ") for span in SPAN.findall(text))
