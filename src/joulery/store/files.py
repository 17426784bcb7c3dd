"""Write files whole or not at all, and read JSON files with one clear error for each fault."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from joulery.domain.errors import CapabilityError, DataError

_HINTS = {
    errno.ENOSPC: "free some space or name another folder with {setting}; what was written before is kept",
    errno.EDQUOT: "the disk quota is used up: free some space or name another folder with {setting}",
    errno.EFBIG: "a limit on file size stands in the way (ulimit -f): raise it or name another folder with {setting}",
    errno.EROFS: "the file system is read-only: name another folder with {setting}",
    errno.EACCES: "name a folder you may write to with {setting}",
    errno.EPERM: "name a folder you may write to with {setting}",
    errno.ENOTDIR: "a file stands where a folder is needed: name another folder with {setting}",
    errno.EEXIST: "a file stands where a folder is needed: name another folder with {setting}",
}


STATE_SETTING = "jobs.state of the site file"
"""Setting that names the folder of scheduled jobs' files."""


@contextmanager
def disk_errors(path: Path, setting: str = "--out") -> Iterator[None]:
    """Turn an ``OSError`` while ``path`` is written into an error with a hint for the user.

    Args:
        path: What is written.
        setting: The flag or key that names another folder.

    Raises:
        CapabilityError: Any ``OSError`` inside the block but a ``BrokenPipeError``, which stays one.
    """
    try:
        yield
    except BrokenPipeError:  # a reader that has enough is no disk that refuses
        raise
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        hint = _HINTS.get(error.errno or 0, "").format(setting=setting)
        raise CapabilityError(f"cannot write {path}: {reason}", resource=str(path), hint=hint) from error


def write_atomically(path: Path, write: Callable[[IO[bytes]], object], setting: str = "--out") -> None:
    """Fill a new file with ``write``, then replace ``path`` by it: readers see the old file or the new one.

    A link or a pipe at ``path`` is replaced too, so that others cannot redirect the write in a shared folder.

    Args:
        path: The file.
        write: Fills it.
        setting: As for :func:`disk_errors`.

    Raises:
        CapabilityError: The disk refuses; ``path`` is as it was and no leftover stays.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with disk_errors(path, setting):
        try:
            with draft.open("wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)


def write_named(path: Path, content: str | bytes) -> None:
    """Write a file that the user named, whole or not at all, as :func:`write_atomically` does; text in UTF-8.

    A link stays a link, and its target is replaced. A terminal or a named pipe is written to directly.

    Raises:
        CapabilityError: The disk refuses.
    """
    data = content.encode() if isinstance(content, str) else content
    with disk_errors(path):
        if path.exists() and not path.is_file():
            path.write_bytes(data)
            return
        target = Path(os.path.realpath(path)) if path.is_symlink() else path
    write_atomically(target, lambda file: file.write(data))


def json_bytes(document: Any, option: int = 0) -> bytes:
    """Serialise a document as JSON; bytes of a name that are not text are written as ``\\udcff``.

    Args:
        document: A document that orjson accepts.
        option: Options of orjson.
    """
    import orjson

    try:
        return orjson.dumps(document, option=option)
    except TypeError:
        return orjson.dumps(_readable(document), option=option)


def readable(name: str) -> str:
    """A name, or an argument, as text that every file can hold: bytes that are not text as ``\\udcff``."""
    return name.encode("utf-8", "backslashreplace").decode()


def _readable(document: Any) -> Any:
    if isinstance(document, str):
        return readable(document)
    if isinstance(document, Mapping):
        return {_readable(key): _readable(value) for key, value in document.items()}
    if isinstance(document, list | tuple):
        return [_readable(value) for value in document]
    return document


def read_json(path: Path, *, bytes_too: bool = False) -> Any:
    """The content of a JSON file.

    Args:
        path: The file.
        bytes_too: Read ``\\udcff`` as a byte that is not text; :mod:`json` writes it for an argument that holds one.

    Raises:
        FileNotFoundError: There is none; the caller decides whether that is an error.
        DataError: It cannot be read, or is not JSON.
    """
    import orjson  # here, for the sampler needs the rest of this module and starts with every run

    try:
        content = path.read_bytes()
        return json.loads(content) if bytes_too and b"\\udc" in content else orjson.loads(content)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileNotFoundError(path) from error
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", file=str(path)) from error
    except json.JSONDecodeError as error:  # orjson's is one of them
        raise DataError(f"not JSON: {error}", file=str(path), row=error.lineno) from error


def require_json(path: Path) -> Any:
    """The content of a JSON file that the user named, so that it has to exist.

    Raises:
        DataError: There is none, it cannot be read, or is not JSON.
    """
    try:
        return read_json(path)
    except FileNotFoundError:
        raise DataError("no such file", file=str(path)) from None
