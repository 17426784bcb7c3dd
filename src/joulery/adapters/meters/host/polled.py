"""Meter of a source that is too slow for a sampler: a thread polls it, and readings come from memory."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

from joulery.domain.energy.channel import Channel
from joulery.domain.errors import JouleryError

STALE_PERIODS = 3.0
"""A reading older than this many periods is no longer given."""

DIVIDED = "the host's energy is divided among processes by their CPU time alone, that of its GPUs and fans too"
"""Note for a reader of a host's joules."""


class PolledMeter:
    """Meter that gives the latest answer of a slow source, while the answer is fresh.

    Args:
        channels: Channels of the values in an answer.
        fetch: Reads one value for each channel, NaN where there is none. Raises JouleryError if the source fails.
        name: Name of the source, for notes.
        period_s: Seconds between two requests.
        now_s: A monotonic clock, seconds.
        background: Whether a thread polls the source; otherwise ``read`` does so when a period is over.
        notes: The first notes.
        first: An answer that was fetched already.
    """

    def __init__(
        self,
        channels: tuple[Channel, ...],
        fetch: Callable[[], tuple[float, ...]],
        name: str,
        period_s: float,
        *,
        now_s: Callable[[], float] = time.monotonic,
        background: bool = True,
        notes: tuple[str, ...] = (),
        first: tuple[float, ...] | None = None,
    ) -> None:
        self._channels = channels
        self._fetch, self._name, self._period_s, self._now_s = fetch, name, period_s, now_s
        self._background = background
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._notes = list(notes)
        self._values: tuple[float, ...] = first or (math.nan,) * len(channels)
        self._asked_at_s = self._answered_at_s = now_s() if first else -math.inf
        self._failure = ""

    @property
    def channels(self) -> tuple[Channel, ...]:
        """Channels that ``read`` returns."""
        return self._channels

    def read(self) -> tuple[float, ...]:
        """The latest answer, joules or watts by the kind of each channel; NaN without a fresh one."""
        if self._closed.is_set():
            return (math.nan,) * len(self._channels)
        if not self._background:
            if self._now_s() - self._asked_at_s >= self._period_s:
                self.ask()
        elif self._thread is None:
            self._thread = threading.Thread(target=self._ask_on, name=self._name, daemon=True)
            self._thread.start()
        with self._lock:
            fresh = self._now_s() - self._answered_at_s <= STALE_PERIODS * self._period_s
            if not fresh and self._answered_at_s > -math.inf:
                self._fail("no answer in time")
            return self._values if fresh else (math.nan,) * len(self._channels)

    def ask(self) -> None:
        """Poll the source once, now."""
        self._asked_at_s = self._now_s()
        try:
            values = self._fetch()
        except JouleryError as error:
            with self._lock:
                self._values = (math.nan,) * len(self._channels)
                self._fail(str(error))
            return
        with self._lock:
            self._values, self._answered_at_s = values, self._now_s()
            if self._failure:
                self._failure = ""
                self._notes.append(f"{self._name} answers again")

    def notes(self) -> tuple[str, ...]:
        """New notes: the first ones, and that the source stopped answering or answers again."""
        with self._lock:
            notes, self._notes = tuple(self._notes), []
        return notes

    def close(self) -> None:
        """Stop polling the source. Safe to call twice."""
        self._closed.set()

    def _ask_on(self) -> None:
        while not self._closed.is_set():
            started_s = self._now_s()
            self.ask()
            self._closed.wait(max(0.0, self._period_s - (self._now_s() - started_s)))

    def _fail(self, why: str) -> None:
        """Note once that the source does not answer. The caller holds the lock."""
        if not self._failure:
            self._notes.append(f"{self._name} cannot be read: {why}")
        self._failure = why
