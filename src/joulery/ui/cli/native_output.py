"""Filter that removes lines of native libraries from the standard output of a command."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from joulery.ui.cli.streams import StandardFile

HIGHS_LINE = b"HighsMipSolverData::"
"""HiGHS prints such a line now and then, whatever its options (github.com/ERGO-Code/HiGHS/issues/2783)."""


@contextmanager
def without_solver_lines() -> Iterator[None]:
    """Drop lines that the solver prints, which would corrupt a JSON document; pass on all others."""
    import ctypes

    native = ctypes.CDLL(None)
    try:
        kept = os.dup(1)
    except OSError:  # there is no standard output
        yield
        return
    sys.stdout.flush()
    native.fflush(None)
    held = os.memfd_create("stdout")
    os.dup2(held, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        native.fflush(None)
        os.dup2(kept, 1)
        os.close(kept)
        file = StandardFile(1, "output")
        with os.fdopen(held, "rb") as lines:
            lines.seek(0)
            for line in lines:
                if not line.startswith(HIGHS_LINE):
                    file.write(line)
