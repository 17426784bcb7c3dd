"""Handle failed writes to standard output and error: a full disk, a closed pipe, a missing character."""

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
    """A write to a standard stream failed; failures of other files are a plain ``OSError``."""

    def as_error(self) -> CapabilityError:
        """The error for the user."""
        return CapabilityError(
            f"standard {self.filename} cannot be written: {self.strerror}",
            hint="free some space, or send it to another place",
        )


class StandardFile(io.FileIO):
    """The file of a standard stream, whose failed writes name the stream."""

    def __init__(self, file: int, title: str) -> None:
        super().__init__(file, "wb", closefd=False)
        self._title = title

    def write(self, data: Any, /) -> int:
        """As :meth:`io.FileIO.write`.

        Raises:
            OutputError: The write failed for another reason than a closed pipe.
        """
        try:
            return super().write(data)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise OutputError(error.errno, error.strerror, self._title) from error


@contextmanager
def standard_streams() -> Iterator[None]:
    """Make standard streams raise :class:`OutputError` and escape unencodable characters, while the block runs.

    Characters that an encoding lacks, and bytes of names that are not text, are written as ``\\u2013``.
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
    """Wrap a standard stream as described; a replacement, such as a test's, is returned unchanged.

    Where the process was started without the stream, its output is discarded.
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
    """Wrap a printer of log lines so that a line that cannot be written is dropped, and the work continues."""

    def say_if_possible(entry: Mapping[str, Any]) -> None:
        with suppress(OutputError):
            say(entry)

    return say_if_possible


@contextmanager
def lost_if_refused() -> Iterator[None]:
    """Discard output to standard error if it cannot be written; the exit code is kept."""
    try:
        yield
    except (OutputError, BrokenPipeError):
        discard(sys.stderr)


def discard(stream: TextIO) -> None:
    """Redirect a standard stream to the null device, so that writes to it do not fail."""
    with suppress(OSError, ValueError):  # in a test it is no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
