"""Pages that show a simulation in a terminal show what it prints."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CONSOLE = re.compile(r"^```console\n\$ joulery (simulate [^\n]+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
SHOWN = CONSOLE.findall((ROOT / "docs" / "how-to" / "simulate.md").read_text())


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "expected"), SHOWN, ids=[arguments for arguments, _ in SHOWN])
def test_the_page_shows_what_is_printed(arguments: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    done = subprocess.run(
        [sys.executable, "-m", "joulery", *arguments.split()], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert [line.rstrip() for line in done.stdout.splitlines()] == expected.splitlines()
