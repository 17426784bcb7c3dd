"""Answered prompts with model and token count: the training data of a length predictor.

One JSON object a line (``model``, ``prompt``, ``out_tokens``; ``cut`` where the client's limit ended the answer, which
would have been at least so long), appended as answers end. A writer that was killed leaves
a torn last line, which readers skip. Prompts are personal: the log is off unless it is switched on.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import orjson

from joulery.domain.errors import DataError
from joulery.store.files import disk_errors

SUFFIX = ".jsonl"


class AnswerLog:
    """An append-only log of answers. Its file has mode 0600, because prompts are personal.

    Args:
        path: The file; its content is kept.

    Raises:
        CapabilityError: It cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with disk_errors(path):
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            size = os.fstat(self._fd).st_size
            if size and os.pread(self._fd, 1, size - 1) != b"\n":
                os.write(self._fd, b"\n")  # the last writer was killed: end its line here

    def add(self, model: str, prompt: str, tokens: int, *, cut: bool = False) -> None:
        """Append one answer.

        Args:
            model: Name of the model.
            prompt: Its prompt's text.
            tokens: Tokens of the answer.
            cut: Whether the client's limit cut it off.

        Raises:
            CapabilityError: The disk refuses.
        """
        entry = {"model": model, "prompt": prompt, "out_tokens": tokens}
        line = orjson.dumps({**entry, "cut": True} if cut else entry) + b"\n"
        with disk_errors(self._path):
            os.write(self._fd, line)

    def close(self) -> None:
        """Close the file. Safe to call twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def read_answer_log(path: Path) -> Iterator[tuple[str, str, int]]:
    """Yield ``(model, prompt, tokens)`` of every complete line.

    Raises:
        DataError: The file cannot be read, or a line is not such an entry and is not the last of a killed
            writer.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", file=str(path)) from error
    lines = content.split(b"\n")
    for row, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            entry = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            if not line.endswith(b"}"):
                continue  # torn by the end of its writer
            raise DataError(f"not JSON: {error}", file=str(path), row=row) from error
        yield _checked(entry, path, row)


def _checked(entry: object, path: Path, row: int) -> tuple[str, str, int]:
    if not isinstance(entry, dict):
        raise DataError("a line must be an object with model, prompt and out_tokens", file=str(path), row=row)
    model, prompt, tokens = (entry.get(name) for name in ("model", "prompt", "out_tokens"))
    if not isinstance(model, str) or not model or not isinstance(prompt, str):
        raise DataError("a line must name a model and hold a prompt", file=str(path), row=row)
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 0:
        raise DataError(f"out_tokens is {tokens!r}, expected a whole number of 0 or more", file=str(path), row=row)
    return model, prompt, tokens
