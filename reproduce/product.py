"""The product's own commands, run in this process."""

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
    """The JSON object that ``joulery ARGUMENTS --json`` prints; a plan that is infeasible is printed, too.

    Raises:
        DataError: The command fails; its own message is on standard error.
    """
    printed = io.StringIO()
    with redirect_stdout(printed):
        code = main([*arguments, "--json"])
    if code not in (0, InfeasibleError.exit_code) or not printed.getvalue():
        raise DataError(f"joulery {' '.join(arguments)} ended with exit code {code}")
    found = json.loads(printed.getvalue())
    assert isinstance(found, dict)
    return found
