"""Parts of joulery that run in processes of their own and are spoken to over pipes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import joulery


def start_part(module: str, arguments: Sequence[str], errors: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start a module of this very joulery, in a session of its own: what ends this process's group does not end it.

    Args:
        module: Its name, to be run as ``python -m``.
        arguments: What it is told.
        errors: Where its standard error goes; it has pipes for the other two.

    Raises:
        OSError: No process can be started.
    """
    parent = str(Path(joulery.__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, (parent, os.environ.get("PYTHONPATH"))))
    return subprocess.Popen(
        # -P: a file of the user's folder named like a module must not be imported.
        [sys.executable, "-P", "-m", module, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        env={**os.environ, "PYTHONPATH": path},
        start_new_session=True,
    )
