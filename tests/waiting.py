"""Waiting for something to become true. A loaded machine is slow, not wrong: only pytest's own limit ends the wait."""

import asyncio
import json
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from joulery.store.run.samples import SAMPLES, SUFFIX

T = TypeVar("T")
PATIENCE_S = 240.0
"""Longer than anything takes on a loaded machine; shorter than pytest's limit: the error names what is missing."""
INTERVAL_S = 0.02
LONGEST_INTERVAL_S = 1.0
PAUSE_RATIO = 4.0
"""Some conditions start a program or read all of /proc: the pause is this many times as long as the asking took."""


def pause_s(asking_s: float) -> float:
    """How long to wait after an answer that took so long."""
    return min(max(INTERVAL_S, PAUSE_RATIO * asking_s), LONGEST_INTERVAL_S)


def wait_until(condition: Callable[[], T], what: str = "the condition", patience_s: float = PATIENCE_S) -> T:
    """The first true value of ``condition``, asked every 20 ms, or less often where asking itself takes long.

    Raises:
        TimeoutError: ``what`` never came.
    """
    end_s = (asked_s := time.monotonic()) + patience_s
    while not (value := condition()):
        if (now_s := time.monotonic()) > end_s:
            raise TimeoutError(f"{what} never came")
        time.sleep(pause_s(now_s - asked_s))
        asked_s = time.monotonic()
    return value


async def eventually(condition: Callable[[], T], what: str = "the condition", patience_s: float = PATIENCE_S) -> T:
    """As :func:`wait_until`, while the event loop goes on."""
    end_s = (asked_s := time.monotonic()) + patience_s
    while not (value := condition()):
        if (now_s := time.monotonic()) > end_s:
            raise TimeoutError(f"{what} never came")
        await asyncio.sleep(pause_s(now_s - asked_s))
        asked_s = time.monotonic()
    return value


class Stretch:
    """The time that a block takes, on this machine's monotonic clock.

    A duration that a program reports is no shorter than a block within it, and no longer than one around it.
    """

    def __enter__(self) -> "Stretch":
        self._start_s = self._end_s = time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        self._end_s = time.monotonic()

    @property
    def s(self) -> float:
        """Its length."""
        return self._end_s - self._start_s


def recorded_s(run: Path) -> float:
    """Time from the first to the last reading, as far as the sampler of a run has written them, s."""
    return max(map(_stretch_s, (run / SAMPLES).glob(f"*{SUFFIX}")), default=0.0)


def ended(pid: int) -> bool:
    """True when a process is gone, or only waits for its parent to read its exit code."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def sampled(run: Path) -> None:
    """Wait until the sampler of a run has written two readings of a meter."""
    wait_until(lambda: any(_readings(path) >= 2 for path in (run / SAMPLES).glob(f"*{SUFFIX}")), "two readings")


def _readings(path: Path) -> int:
    return len(_stamps_ns(path))


def _stretch_s(path: Path) -> float:
    stamps = _stamps_ns(path)
    return (stamps[-1] - stamps[0]) / 1e9 if stamps else 0.0


def _stamps_ns(path: Path) -> list[int]:
    """The stamp of each whole record of a file (:mod:`joulery.store.run.samples`)."""
    header, _, records = path.read_bytes().partition(b"\n")
    if not records:
        return []
    size = 8 * (1 + len(json.loads(header)["columns"]))
    return [struct.unpack_from("<q", records, at)[0] for at in range(0, len(records) - size + 1, size)]
