"""The ledger of requests that come through several gateways: each request that reaches the engine ends in it once.

A gateway opens an entry when it passes a request on, and closes it with the request's record. Where a gateway is gone,
its open entries are closed as cancelled. The law: of each gateway, what was received equals what has ended plus what is
open. Ended entries are numbered without a gap; a controller takes them by number, and those it has stored are dropped.
"""

from __future__ import annotations

from collections import Counter, deque
from itertools import islice
from typing import NamedTuple

from joulery.domain.serving.engine import Outcome, RequestRecord

MOST_ENTRIES = 1_000_000
"""Ended entries that are kept until a controller takes them; of older ones the count by outcome is kept."""
BATCH_ENTRIES = 20_000
"""Entries that a controller takes at once."""


class LedgerEntry(NamedTuple):
    """One request that ended.

    Attributes:
        gateway: The gateway that it came through.
        record: Its record, times in seconds on the engine server's monotonic clock; not charged yet.
        process: Identifies the gateway's process; empty where the gateway did not report the record.
        number: Of the record among those of that process; 0 where it did not report it.
    """

    gateway: str
    record: RequestRecord
    process: str = ""
    number: int = 0


RecordMarks = dict[str, dict[str, int]]
"""Number of the newest record that a controller has stored, by engine server and gateway process."""


class Stored(NamedTuple):
    """Records that controllers have stored.

    Attributes:
        marks: Of gateways' records, by which they know what to keep.
        entries: Ledger entries below these numbers, by engine server.
    """

    marks: RecordMarks
    entries: dict[str, int]


def advance(marks: RecordMarks, further: RecordMarks) -> None:
    """Raise marks to others where those are higher."""
    for server, processes in further.items():
        mine = marks.setdefault(server, {})
        for process, number in processes.items():
            mine[process] = max(number, mine.get(process, 0))


class LedgerBatch(NamedTuple):
    """Entries in the order in which they ended.

    Attributes:
        first: Number of the first entry.
        entries: The entries; the next batch begins at ``first + len(entries)``.
        unknown: Requests so far that named no service there is.
        folded: Requests by service and outcome that ended before ``first`` and are no longer kept one by one.
    """

    first: int
    entries: tuple[LedgerEntry, ...] = ()
    unknown: int = 0
    folded: tuple[tuple[str, Outcome, int], ...] = ()


class RequestLedger:
    """Open and ended requests, by gateway.

    Args:
        most: Ended entries that are kept.

    Attributes:
        received, ended: Requests by gateway since the ledger began.
        unknown: Of the ended ones those that named no service there is: they have no entry.
        first: Number of the oldest entry that is kept.
    """

    def __init__(self, most: int = MOST_ENTRIES) -> None:
        self.received: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()
        self.unknown = 0
        self.first = 0
        self._most = most
        self._open: dict[tuple[int, int], tuple[str, RequestRecord]] = {}
        self._entries: deque[LedgerEntry] = deque()
        self._folded: Counter[tuple[str, Outcome]] = Counter()

    @property
    def next(self) -> int:
        """Number of the next entry."""
        return self.first + len(self._entries)

    def open_of(self, gateway: str) -> int:
        """Requests of a gateway that have not ended, counted one by one: received = ended + open checks all three."""
        return sum(passed_by == gateway for passed_by, _ in self._open.values())

    def open(self, gateway: str, connection: int, number: int, service: str, arrival_s: float) -> None:
        """A gateway passes a request on.

        Args:
            gateway: The gateway.
            connection: Its connection; another one after each loss.
            number: The request's number there; no two open requests have the same.
            service: The service called.
            arrival_s: When it came, on the engine server's clock.
        """
        self.received[gateway] += 1
        gone = RequestRecord(service, "", "", arrival_s, float("nan"), arrival_s, Outcome.CANCELLED, 0.0, 0.0, 0, None)
        self._open[connection, number] = (gateway, gone)

    def answered(
        self, connection: int, number: int, variant: str, replica: str, service_s: float, cpu_s: float
    ) -> None:
        """The engine has answered: an entry that is closed because its gateway is gone has these costs."""
        held = self._open.get((connection, number))
        if held is not None:
            gateway, record = held
            costs = record._replace(variant=variant, replica=replica, service_s=service_s, cpu_s=cpu_s, attempts=1)
            self._open[connection, number] = (gateway, costs)

    def close(
        self, gateway: str, connection: int, number: int, record: RequestRecord, source: tuple[str, int] = ("", 0)
    ) -> bool:
        """A gateway reports how a request ended; False where its entry is closed already.

        Args:
            gateway: The gateway.
            connection: Its connection.
            number: The request's number; 0 for one that ended in the gateway and was never passed on.
            record: How it ended.
            source: The gateway's process, and the record's number there.
        """
        if number and self._open.pop((connection, number), None) is None:
            return False
        if not number:
            self.received[gateway] += 1
        self._end(LedgerEntry(gateway, record, *source))
        return True

    def lose(self, connection: int, now_s: float) -> int:
        """A connection has ended: close its open entries as cancelled; how many there were."""
        held = [key for key in self._open if key[0] == connection]
        for key in held:
            gateway, record = self._open.pop(key)
            self._end(LedgerEntry(gateway, record._replace(end_s=now_s)))
        return len(held)

    def take(self, first: int, most: int = BATCH_ENTRIES) -> LedgerBatch:
        """The entries from a number on, at most so many."""
        skip = max(0, first - self.first)
        entries = tuple(islice(self._entries, skip, skip + most))
        folded = tuple((service, outcome, count) for (service, outcome), count in sorted(self._folded.items()))
        return LedgerBatch(self.first + min(skip, len(self._entries)), entries, self.unknown, folded)

    def drop(self, before: int) -> None:
        """A controller has stored all entries below a number."""
        while self._entries and self.first < before:
            self._entries.popleft()
            self.first += 1

    def _end(self, entry: LedgerEntry) -> None:
        self.ended[entry.gateway] += 1
        if not entry.record.service:
            self.unknown += 1
            return
        self._entries.append(entry)
        while len(self._entries) > self._most:
            oldest = self._entries.popleft().record
            self._folded[oldest.service, oldest.outcome] += 1
            self.first += 1
