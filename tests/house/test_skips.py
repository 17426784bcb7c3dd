"""Skips are accounted for: the hook of ``tests/conftest.py`` in a run of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.syntax import ROOT
from tests.skips import allowed_as

REASONS = [
    ("PyTorch is not installed: pip install 'joulery[torch]'", True, False),
    ("no Chromium here: install it (apt-get install chromium) or name it in CHROMIUM", True, False),
    ("the data set is not here: set JOULERY_DATA to a folder that holds green/", True, True),
    ("did not feel like it", False, False),
]
"""A reason, whether it is allowed at home, and in CI."""


@pytest.mark.parametrize(("reason", "at_home", "in_ci"), REASONS)
def test_a_skip_needs_an_allowed_reason(reason: str, at_home: bool, in_ci: bool) -> None:
    assert (allowed_as(reason, ci=False) is not None) is at_home
    assert (allowed_as(reason, ci=True) is not None) is in_ci


@pytest.mark.parametrize("ci", [False, True])
@pytest.mark.parametrize("allowed", [True, False])
def test_a_run_fails_by_a_skip_that_is_not_allowed(tmp_path: Path, allowed: bool, ci: bool) -> None:
    """It names those and counts the others."""
    permitted = [reason for reason, at_home, in_ci in REASONS if (in_ci if ci else at_home)]
    others = [] if allowed else [reason for reason, *_ in REASONS if reason not in permitted]
    test = tmp_path / "test_some.py"
    skips = [f"def test_{k}():\n    pytest.skip({reason!r})\n" for k, reason in enumerate([*permitted, *others])]
    test.write_text("import pytest\n" + "".join(skips))
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    line = [sys.executable, "-m", "pytest", "-q", "-c", str(tmp_path / "pytest.ini"), "-p", "tests.conftest", str(test)]
    done = subprocess.run(line, cwd=ROOT, env=environment(ci), capture_output=True, text=True)
    assert done.returncode == (0 if allowed else 1), done.stdout + done.stderr
    assert "skipped: 1 " in done.stdout
    named = done.stdout.partition("not allowed")[2]
    assert [reason for reason, *_ in REASONS if reason in named] == others


def environment(ci: bool) -> dict[str, str]:
    """Without what the run around this one has set, and without plugins that a skip does not need."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    return {**kept, "CI": "true" if ci else "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
