"""Starting the load generator."""

from __future__ import annotations

import os
import subprocess
import sys

import orjson

from joulery.runtime.load.plan import LoadPlan

TOKEN = "JOULERY_TOKEN"
"""Environment variable with the bearer token: command lines can be read by everyone."""


def start(plan: LoadPlan, token: str | None = None) -> subprocess.Popen[bytes]:
    """Start a process that sends ``plan`` and prints the summary of its outcomes, one JSON object, when it is done.

    It ends early, with what it has, on SIGTERM and when the calling thread ends. It is in a process group of its own:
    Ctrl-C in the terminal is for the caller.
    """
    environment = {name: value for name, value in os.environ.items() if name != TOKEN}
    if token is not None:
        environment[TOKEN] = token
    return subprocess.Popen(
        (
            sys.executable,
            "-m",
            "joulery.runtime.load",
            "--plan",
            orjson.dumps(plan).decode(),
            "--parent",
            str(os.getpid()),
        ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        env=environment,
        process_group=0,
    )
