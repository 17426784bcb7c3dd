"""Helpers for native code in a traced program: filter its standard error, and skip its destructors at exit."""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager


def exit_at_once() -> None:
    """Make a forked process skip C++ destructors at exit: the profiler's waits for a thread that was not forked.

    Functions registered with ``on_exit`` run in reverse: streams are flushed, then the process ends with its status.
    """
    libc = ctypes.CDLL(None)
    try:
        libc.on_exit(libc._exit, None)
        libc.on_exit(libc.fcloseall, None)
    except AttributeError:  # not glibc
        return


@contextmanager
def without_lines(unwanted: bytes) -> Iterator[None]:
    """Drop lines that native code writes to standard error; all others are passed on."""
    kept = os.dup(2)
    with tempfile.TemporaryFile() as held:
        try:
            os.dup2(held.fileno(), 2)
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            held.seek(0)
            for line in held:
                if unwanted not in line:
                    os.write(2, line)
