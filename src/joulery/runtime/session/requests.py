"""Requests that ended: the latest in memory, all of them in the run folder in rows of 48 bytes.

A session's memory does not grow with the number of requests. The report reads the file as columns, in blocks.
"""

from __future__ import annotations

import math
import struct
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from joulery.domain.serving.engine import Outcome, RequestRecord
from joulery.domain.serving.service import Slo
from joulery.store.files import disk_errors

ROW = np.dtype(
    [
        ("arrival_s", "<f8"),
        ("start_s", "<f8"),
        ("end_s", "<f8"),
        ("service_s", "<f8"),
        ("cpu_s", "<f8"),
        ("service", "<u2"),
        ("variant", "<u2"),
        ("outcome", "u1"),
        ("attempts", "u1"),
        ("unused", "<u2"),
    ]
)
RECENT_S = 1.0
RECENT_REQUESTS = 50
"""Fewest arrivals for a meaningful rate, unless there were no more."""
BLOCK_ROWS = 1 << 18
"""Rows the report reads at once."""
OUTCOMES = tuple(Outcome)
OK = OUTCOMES.index(Outcome.OK)
_pack = struct.Struct("<5d2H2BH").pack
_CODES = {outcome: index for index, outcome in enumerate(OUTCOMES)}
_MAX_ATTEMPTS = 255

Rows = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class RequestColumns:
    """Requests as rows of :data:`ROW`.

    Attributes:
        rows: The rows, in the order in which the requests ended; an array or a read-only map of a file.
        services, variants: Names by code.
    """

    rows: Rows
    services: tuple[str, ...] = ()
    variants: tuple[str, ...] = ()

    @classmethod
    def of(cls, records: Iterable[RequestRecord]) -> RequestColumns:
        """The columns of records in memory."""
        encoder = _Encoder()
        packed = b"".join(map(encoder.row, records))
        return cls(np.frombuffer(packed, ROW), tuple(encoder.services), tuple(encoder.variants))

    def __len__(self) -> int:
        return len(self.rows)

    def blocks(self, service: str | None = None) -> Iterator[Rows]:
        """The rows in blocks of at most :data:`BLOCK_ROWS`, in order; those of one service where it is named."""
        code = None
        if service is not None:
            if service not in self.services:
                return
            code = self.services.index(service)
        for start in range(0, len(self.rows), BLOCK_ROWS):
            block = np.array(self.rows[start : start + BLOCK_ROWS])
            yield block if code is None else block[block["service"] == code]


class RequestRecorder:
    """Appends the requests of a session to a file.

    Rows are buffered until :meth:`flush`, so that a full disk never fails a request.

    Args:
        path: The file; it is made, and replaces an older one.

    Attributes:
        path: The file.
        count: Requests recorded so far: the rows of the file after :meth:`flush`.
        before_write: Called before rows are written.

    Raises:
        CapabilityError: The disk refuses.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.before_write: Callable[[], None] = lambda: None
        self._buffer = bytearray()
        self._encoder = _Encoder()
        self.count = 0
        with disk_errors(path):
            path.write_bytes(b"")

    def add(self, record: RequestRecord) -> None:
        """Record one request that ended."""
        self._buffer += self._encoder.row(record)
        self.count += 1

    def flush(self) -> None:
        """Write what is buffered.

        Raises:
            CapabilityError: The disk refuses; the rows stay buffered.
        """
        if not self._buffer:
            return
        self.before_write()
        with disk_errors(self.path), self.path.open("ab", buffering=0) as file:
            length, written = file.tell(), 0
            try:
                while written < len(self._buffer):  # a disk that is almost full takes a part, and refuses the rest
                    written += file.write(self._buffer[written:])
            finally:
                whole = written - written % ROW.itemsize
                file.truncate(length + whole)
                del self._buffer[:whole]

    def columns(self) -> RequestColumns:
        """Everything recorded so far, as a read-only map of the file.

        Raises:
            CapabilityError: The disk refuses what is still buffered.
        """
        self.flush()
        names = tuple(self._encoder.services), tuple(self._encoder.variants)
        if not self.count:
            return RequestColumns(np.empty(0, ROW), *names)
        return RequestColumns(np.memmap(self.path, ROW, mode="r"), *names)

    def remove(self) -> None:
        """Delete the file: the series ``requests`` has taken its place."""
        self.path.unlink(missing_ok=True)


class _Encoder:
    """Packs records into rows; assigns a code to each new name."""

    def __init__(self) -> None:
        self.services: dict[str, int] = {}
        self.variants: dict[str, int] = {}

    def row(self, record: RequestRecord) -> bytes:
        """One packed row."""
        return _pack(
            record.arrival_s,
            record.start_s,
            record.end_s,
            record.service_s,
            record.cpu_s,
            self.services.setdefault(record.service, len(self.services)),
            self.variants.setdefault(record.variant, len(self.variants)),
            _CODES[record.outcome],
            min(record.attempts, _MAX_ATTEMPTS),
            0,
        )


def series_columns(rows: Rows, names: RequestColumns) -> dict[str, Sequence[Any]]:
    """The columns of the series ``requests`` for a block of rows."""
    numbers = ("arrival_s", "start_s", "end_s", "service_s", "cpu_s")
    services, variants = np.array(names.services, object), np.array(names.variants, object)
    return {
        "service": services[rows["service"]],
        **{name: rows[name] for name in numbers[:3]},
        "variant": variants[rows["variant"]],
        "outcome": np.array([outcome.value for outcome in OUTCOMES], object)[rows["outcome"]],
        **{name: rows[name] for name in numbers[3:]},
        "attempts": rows["attempts"].astype(np.int64),
    }


class RequestWindow:
    """The latest requests of one service.

    Args:
        service: The service; records of others are left out.
        span_s: Its length, seconds.
    """

    def __init__(self, service: str, span_s: float) -> None:
        self.service, self.span_s = service, span_s
        self._records: deque[RequestRecord] = deque()
        self._first_s = math.inf

    def add(self, record: RequestRecord) -> None:
        """Add a request that ended."""
        if record.service == self.service:
            self._records.append(record)
            self._first_s = min(self._first_s, record.arrival_s)
            while self._records[0].end_s < record.end_s - self.span_s:
                self._records.popleft()

    def since(self, now_s: float) -> list[RequestRecord]:
        """The requests that ended within ``span_s`` before ``now_s``; older ones are dropped."""
        while self._records and self._records[0].end_s < now_s - self.span_s:
            self._records.popleft()
        return [record for record in self._records if record.end_s >= now_s - self.span_s]

    def rate_rps(self, now_s: float, pending_s: Sequence[float] = ()) -> float:
        """Arrivals a second over the last ``span_s``, refused requests included.

        Args:
            now_s: Unix seconds.
            pending_s: Arrivals of the requests that have not ended, Unix seconds.

        Returns:
            Requests a second; NaN before ``span_s`` has passed since the first arrival.
        """
        times_s = self._arrivals(now_s, pending_s)
        return math.nan if now_s - self._first_s < self.span_s else len(times_s) / self.span_s

    def recent_rps(self, now_s: float, pending_s: Sequence[float] = ()) -> float:
        """Arrivals a second over the shortest span with a meaningful rate: a second, more at a low rate.

        Args:
            now_s, pending_s: As for :meth:`rate_rps`.

        Returns:
            Requests a second; NaN before that span has passed since the first arrival.
        """
        times_s = self._arrivals(now_s, pending_s)
        enough = times_s[-RECENT_REQUESTS] if len(times_s) >= RECENT_REQUESTS else -math.inf
        span_s = max(RECENT_S, min(now_s - enough, self.span_s))
        if now_s - self._first_s < span_s:
            return math.nan
        return sum(at_s > now_s - span_s for at_s in times_s) / span_s

    def _arrivals(self, now_s: float, pending_s: Sequence[float]) -> list[float]:
        """Arrivals within ``span_s``, sorted: of requests that ended, and of those that have not."""
        if pending_s:
            self._first_s = min(self._first_s, *pending_s)
        ended_s = (record.arrival_s for record in self.since(now_s))
        return sorted(at_s for at_s in (*ended_s, *pending_s) if now_s - self.span_s < at_s <= now_s)


def summarise(records: Sequence[RequestRecord], slo: Slo) -> tuple[float, float, int, dict[str, int]]:
    """Latency quantile (NaN for none), share within the SLO (NaN for none), answers, answers by variant."""
    answered = [record for record in records if record.outcome is Outcome.OK]
    if not answered:
        return math.nan, math.nan, 0, {}
    latency_s = np.array([record.latency_s for record in answered])
    served = Counter(record.variant for record in answered)
    return (
        float(np.quantile(latency_s, slo.quantile)),
        float(np.mean(latency_s <= slo.latency_s)),
        len(answered),
        dict(sorted(served.items())),
    )
