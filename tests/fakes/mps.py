"""A machine with the MPS control program: the fake one on the path, and nothing of it left afterwards."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PATH = Path(__file__).resolve().parent / "path"


def on_path() -> str:
    """``PATH`` with the vendors' programs first."""
    return f"{PATH}{os.pathsep}{os.environ.get('PATH', '')}"


@contextmanager
def no_daemon_left(folder: Path) -> Iterator[None]:
    """Ends every daemon below a folder afterwards."""
    try:
        yield
    finally:
        for file in folder.rglob("daemon"):
            with suppress(ProcessLookupError):
                os.kill(int(file.read_text()), signal.SIGTERM)


def daemon(folder: Path) -> tuple[int, float, str] | None:
    """The daemon below a folder: process, default percent, GPU; None where none runs."""
    for file in folder.rglob("daemon"):
        pid = int(file.read_text())
        if Path(f"/proc/{pid}").exists():
            beside = file.parent
            return pid, float((beside / "default").read_text()), (beside / "device").read_text().strip()
    return None


def serve(folder: Path, *clients: int) -> None:
    """Have the daemon serve these processes."""
    for file in folder.rglob("daemon"):
        (file.parent / "servers/4000").write_text("".join(f"{pid}\n" for pid in clients))
