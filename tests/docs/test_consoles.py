"""Pages that show a plan or a simulation in a terminal show what it prints."""

import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CONSOLE = re.compile(r"^```console\n\$ joulery ([^\n]+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
SLOW = "clover-pool"
"""Plans for longer than a test should take."""
PAGES = {"README.md": "plan ", "docs/how-to/plan.md": "plan ", "docs/how-to/simulate.md": "simulate "}
SHOWN = [
    (page, arguments, text)
    for page, verb in PAGES.items()
    for arguments, text in CONSOLE.findall((ROOT / page).read_text())
    if text and arguments.startswith(verb) and "examples/" in arguments and SLOW not in arguments
]
CUT = ("…", "...")
"""A line that stands for those that a page leaves out."""


@cache
def printed(arguments: str) -> tuple[str, ...]:
    """The lines that a command prints; what two pages show runs once."""
    done = subprocess.run(
        [sys.executable, "-m", "joulery", *arguments.split()], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return tuple(line.rstrip() for line in done.stdout.splitlines())


@pytest.mark.slow
@pytest.mark.parametrize(("page", "arguments", "text"), SHOWN, ids=[f"{page}: {words}" for page, words, _ in SHOWN])
def test_the_page_shows_what_is_printed(page: str, arguments: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    lines, shown = list(printed(arguments)), text.splitlines()
    if shown[0] in CUT:
        assert lines[-len(shown) + 1 :] == shown[1:]
    elif shown[-1] in CUT:
        assert lines[: len(shown) - 1] == shown[:-1]
    else:
        assert lines == shown
