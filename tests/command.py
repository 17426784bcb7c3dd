"""joulery's command line in this process: a start of Python costs half a second of CPU, and is not what most tests ask.

Tests whose subject is a process (its signals, its streams, its exit, two runs with other hash seeds) start one.
"""

import contextlib
import io
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from joulery.ui.cli import main


@dataclass(frozen=True)
class Done:
    """What a command came to, under the names of :class:`subprocess.CompletedProcess`."""

    returncode: int
    stdout: str
    stderr: str


class _Stream(io.TextIOWrapper):
    """A standard stream: text that is kept, with the bytes below it."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO(), encoding="utf-8", write_through=True)

    def kept(self) -> str:
        below = self.buffer
        assert isinstance(below, io.BytesIO)
        return below.getvalue().decode()


def joulery(*arguments: object, folder: Path | None = None, environment: Mapping[str, str] | None = None) -> Done:
    """Run ``joulery`` with these arguments, in ``folder`` and with ``environment`` on top of this process's."""
    out, err = _Stream(), _Stream()
    with (
        contextlib.chdir(folder or Path.cwd()),
        patch.dict(os.environ, environment or {}),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        code = main([str(one) for one in arguments])
    return Done(code, out.kept(), err.kept())
