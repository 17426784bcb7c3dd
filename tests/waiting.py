"""Waiting for something to become true. A loaded machine is slow, not wrong: only pytest's own limit ends the wait."""

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
PATIENCE_S = 240.0
"""Longer than anything takes beside a load on every core, shorter than pytest's limit, so that the error names what never came."""
INTERVAL_S = 0.02


def wait_until(condition: Callable[[], T], what: str = "the condition", patience_s: float = PATIENCE_S) -> T:
    """The first true value of ``condition``, asked every 20 ms.

    Raises:
        TimeoutError: ``what`` never came.
    """
    end_s = time.monotonic() + patience_s
    while not (value := condition()):
        if time.monotonic() > end_s:
            raise TimeoutError(f"{what} never came")
        time.sleep(INTERVAL_S)
    return value


async def eventually(condition: Callable[[], T], what: str = "the condition", patience_s: float = PATIENCE_S) -> T:
    """As :func:`wait_until`, while the event loop goes on."""
    end_s = time.monotonic() + patience_s
    while not (value := condition()):
        if time.monotonic() > end_s:
            raise TimeoutError(f"{what} never came")
        await asyncio.sleep(INTERVAL_S)
    return value
