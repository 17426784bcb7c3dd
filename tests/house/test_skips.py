"""Skips are accounted for: the hook of ``tests/conftest.py`` in a run of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.skips import allowed_as

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("reason", "at_home", "in_ci"),
    [
        ("PyTorch is not installed: pip install 'joulery[torch]'", True, False),
        ("no Chromium here: install it (apt-get install chromium) or name it in CHROMIUM", True, False),
        ("the data set is not here: set JOULERY_DATA to a folder that holds green/", True, True),
        ("did not feel like it", False, False),
    ],
)
@pytest.mark.parametrize("ci", ["", "true"])
def test_a_skip_needs_an_allowed_reason(tmp_path: Path, reason: str, at_home: bool, in_ci: bool, ci: str) -> None:
    assert (allowed_as(reason, ci=bool(ci)) is not None) is (in_ci if ci else at_home)
    test = tmp_path / "test_one.py"
    test.write_text(f"import pytest\ndef test_it():\n    pytest.skip({reason!r})\n")
    line = [sys.executable, "-m", "pytest", "-q", "-c", str(ROOT / "pyproject.toml"), "-p", "tests.conftest", str(test)]
    done = subprocess.run(line, cwd=ROOT, env=environment(ci), capture_output=True, text=True)
    allowed = in_ci if ci else at_home
    assert done.returncode == (0 if allowed else 1), done.stdout + done.stderr
    assert ("skipped: 1 " in done.stdout) is allowed
    assert ("not allowed" in done.stdout) is not allowed


def environment(ci: str) -> dict[str, str]:
    return {**{k: v for k, v in os.environ.items() if not k.startswith("PYTEST")}, "CI": ci}
