"""Starting the load generator."""

from __future__ import annotations

import os
import subprocess

import orjson

from joulery.runtime.load.plan import LoadPlan
from joulery.runtime.process import part_environment, process_command

TOKEN = "JOULERY_TOKEN"
"""Environment variable with the bearer token: command lines can be read by everyone."""


def command(plan: LoadPlan, parent: int) -> tuple[str, ...]:
    """The command line of a process that sends ``plan`` and ends when its parent ``parent`` does.

    It prints the summary of its outcomes, one JSON object, and ends early, with what it has, on SIGTERM.
    """
    fields = orjson.dumps(plan).decode()
    return process_command("joulery.runtime.load", "--plan", fields, "--parent", str(parent))


def start(plan: LoadPlan, token: str | None = None) -> subprocess.Popen[bytes]:
    """Start that process as a child of this one, in a process group of its own: Ctrl-C is for the caller."""
    environment = {name: value for name, value in os.environ.items() if name != TOKEN}
    if token is not None:
        environment[TOKEN] = token
    return subprocess.Popen(
        command(plan, os.getpid()),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        env=part_environment(environment),
        process_group=0,
    )
