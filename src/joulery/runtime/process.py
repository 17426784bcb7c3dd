"""Start parts of joulery as separate processes that communicate over pipes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

import joulery


def spawn_process(module: str, arguments: Sequence[str], errors: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start a module of this joulery in a new session, so that signals to this process group do not reach it.

    Args:
        module: Module name, run as ``python -m``.
        arguments: Its command-line arguments.
        errors: Destination of its standard error; standard input and output are pipes.

    Raises:
        OSError: The process cannot be started.
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
    """The command line that runs a module of joulery; it needs :func:`part_environment`."""
    # -P: a file of the user's folder named like a module must not be imported.
    return (sys.executable, "-P", "-m", module, *arguments)


def part_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """An environment in which a child process imports this same joulery, wherever that was imported from."""
    parent = str(Path(joulery.__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, (parent, environment.get("PYTHONPATH"))))
    return {**environment, "PYTHONPATH": path}
