"""A machine with GPUs and the MPS control program: the fake ones on the path, and nothing of them left afterwards."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.nvml import STATE, NvmlFake

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


@contextmanager
def gpu_machine(folder: Path, monkeypatch: pytest.MonkeyPatch, *boards: dict[str, Any]) -> Iterator[NvmlFake]:
    """This machine with these boards, for this process and those it starts; what it keeps is in a folder."""
    nvml = NvmlFake(*boards, file=folder / "boards.json")
    monkeypatch.setenv(STATE, str(folder / "boards.json"))
    monkeypatch.setenv("PATH", on_path())
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setenv("JOULERY_STATE", str(folder / "state"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(PATH), os.environ.get("PYTHONPATH")))))
    with no_daemon_left(folder):
        yield nvml


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
