"""Standard output and standard error that refuse what is written: a full disk, a reader that went away, an encoding."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from joulery.domain.errors import CapabilityError


class OutputError(OSError):
    """A standard stream refused what was written to it; of another file it is a plain ``OSError``."""

    def as_error(self) -> CapabilityError:
        """The error that a person reads."""
        return CapabilityError(
            f"standard {self.filename} cannot be written: {self.strerror}",
            hint="free some space, or send it to another place",
        )


class StandardFile(io.FileIO):
    """The file under a standard stream, whose failures say that it was this one."""

    def __init__(self, file: int, title: str) -> None:
        super().__init__(file, "wb", closefd=False)
        self._title = title

    def write(self, data: Any, /) -> int:
        """As :meth:`io.FileIO.write`.

        Raises:
            OutputError: The write failed, and not because a reader went away.
        """
        try:
            return super().write(data)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise OutputError(error.errno, error.strerror, self._title) from error


@contextmanager
def standard_streams() -> Iterator[None]:
    """While the block runs, a standard stream raises :class:`OutputError`, and escapes what its encoding lacks.

    Characters that an encoding lacks, and bytes of names that are no text, are written as ``\\u2013``.
    """
    kept = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = _marked(sys.stdout, "output"), _marked(sys.stderr, "error")
    try:
        yield
    finally:
        for stream, before in zip((sys.stdout, sys.stderr), kept, strict=True):
            with suppress(OSError, ValueError):
                stream.flush() if before else stream.close()
        sys.stdout, sys.stderr = kept


def _marked(stream: TextIO | None, title: str) -> TextIO:
    """A stream of the process as described; one that stands in for it, such as a test's, as it is.

    Where the process was started without the stream, what is written goes nowhere.
    """
    if stream is None:
        return Path(os.devnull).open("w", encoding="utf-8")
    if type(stream) is not io.TextIOWrapper:
        return stream
    try:
        file = stream.fileno()
        stream.flush()
    except (OSError, ValueError):
        return stream
    return io.TextIOWrapper(
        io.BufferedWriter(StandardFile(file, title)),
        stream.encoding,
        "backslashreplace",
        line_buffering=True,
    )


def keep_going(say: Callable[[Mapping[str, Any]], None]) -> Callable[[Mapping[str, Any]], None]:
    """A printer of log lines whose work does not end because its log is full; the next line may fit again."""

    def say_if_possible(entry: Mapping[str, Any]) -> None:
        with suppress(OutputError):
            say(entry)

    return say_if_possible


@contextmanager
def lost_if_refused() -> Iterator[None]:
    """Drop output to standard error where that refuses it; the exit code is kept."""
    try:
        yield
    except (OutputError, BrokenPipeError):
        discard(sys.stderr)


def discard(stream: TextIO) -> None:
    """From now on nothing that is written to a standard stream goes anywhere, nor fails."""
    with suppress(OSError, ValueError):  # in a test it is no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
