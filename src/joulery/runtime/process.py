"""Parts of joulery that run in processes of their own and are spoken to over pipes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

import joulery


def spawn_process(module: str, arguments: Sequence[str], errors: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start a module of this very joulery, in a session of its own: what ends this process's group does not end it.

    Args:
        module: Its name, to be run as ``python -m``.
        arguments: Its command-line arguments.
        errors: Where its standard error goes; it has pipes for the other two.

    Raises:
        OSError: No process can be started.
    """
    return subprocess.Popen(
        process_command(module, *arguments),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        env=part_environment(),
        start_new_session=True,
    )


def process_command(module: str, *arguments: str) -> tuple[str, ...]:
    """The command line of a part; it needs :func:`part_environment`."""
    # -P: a file of the user's folder named like a module must not be imported.
    return (sys.executable, "-P", "-m", module, *arguments)


def part_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """An environment in which a part is of this very joulery, wherever that was imported from."""
    parent = str(Path(joulery.__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, (parent, environment.get("PYTHONPATH"))))
    return {**environment, "PYTHONPATH": path}
