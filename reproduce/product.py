"""Runs joulery's commands in this process and reads their JSON output."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from joulery.domain.errors import DataError, InfeasibleError
from joulery.ui.cli import main

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def joulery_json(*arguments: str) -> dict[str, Any]:
    """Run ``joulery ARGUMENTS --json`` and return the JSON object that it prints; an infeasible plan counts, too.

    Raises:
        DataError: The command failed; its own message is on standard error.
    """
    printed = io.StringIO()
    with redirect_stdout(printed):
        code = main([*arguments, "--json"])
    if code not in (0, InfeasibleError.exit_code) or not printed.getvalue():
        raise DataError(f"joulery {' '.join(arguments)} ended with exit code {code}")
    found = json.loads(printed.getvalue())
    assert isinstance(found, dict)
    return found
