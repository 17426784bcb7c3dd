"""Files that are either whole or absent."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from joulery.domain.errors import DataError


def write_atomically(target: Path, content: bytes) -> None:
    """Write ``target`` so that nobody ever sees half of it, not even after a crash or beside a second writer.

    Raises:
        DataError: The folder cannot be written, or the disk is full.
    """
    temporary = ""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(target)
    except OSError as error:
        if temporary:
            Path(temporary).unlink(missing_ok=True)
        raise DataError(
            f"cannot be written: {error.strerror}",
            file=str(target),
            hint="free some space, or name another folder with JOULERY_CACHE",
        ) from error
