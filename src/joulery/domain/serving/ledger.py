"""The ledger of requests from several gateways: it records the end of each request that reaches the engine once.

A gateway opens an entry when it passes a request on, and closes it with the request's record. If a gateway is gone, its
open entries are closed as cancelled. The law: for each gateway, the received requests equal the ended plus the open
ones. Ended entries are numbered without a gap; a controller takes them by number, and the stored ones are dropped.
"""

from __future__ import annotations

from collections import Counter, deque
from itertools import islice
from typing import NamedTuple

from joulery.domain.serving.engine import Outcome, RequestRecord

MOST_ENTRIES = 1_000_000
"""Ended entries that are kept until a controller takes them; older ones are only counted by outcome."""
BATCH_ENTRIES = 20_000
"""Entries that a controller takes at once."""


class LedgerEntry(NamedTuple):
    """One request that ended.

    Attributes:
        gateway: The gateway that it came through.
        record: Its record, times in seconds on the engine server's monotonic clock; not charged yet.
        process: Identifies the gateway's process; empty where the gateway did not report the record.
        number: Number of the record among those of that process; 0 where the gateway did not report it.
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
        marks: Marks of the gateways' records, by which the gateways choose the records to keep.
        entries: Ledger entries below these numbers, by engine server.
    """

    marks: RecordMarks
    entries: dict[str, int]


def advance(marks: RecordMarks, further: RecordMarks) -> None:
    """Raise each mark to the one in ``further`` where that is higher."""
    for server, processes in further.items():
        mine = marks.setdefault(server, {})
        for process, number in processes.items():
            mine[process] = max(number, mine.get(process, 0))


class LedgerBatch(NamedTuple):
    """Consecutive ledger entries, in the order in which they ended.

    Attributes:
        first: Number of the first entry.
        entries: The entries; the next batch begins at ``first + len(entries)``.
        unknown: Requests so far that named no existing service.
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
        unknown: Ended requests that named no existing service: they have no entry.
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
        """Number of a gateway's open requests, counted one by one, so that received = ended + open checks all three."""
        return sum(passed_by == gateway for passed_by, _ in self._open.values())

    def open(self, gateway: str, connection: int, number: int, service: str, arrival_s: float) -> None:
        """Open an entry for a request that a gateway passes on.

        Args:
            gateway: The gateway.
            connection: Its connection; another one after each loss.
            number: The request's number there; no two open requests have the same.
            service: The service called.
            arrival_s: When it arrived, on the engine server's clock.
        """
        self.received[gateway] += 1
        gone = RequestRecord(service, "", "", arrival_s, float("nan"), arrival_s, Outcome.CANCELLED, 0.0, 0.0, 0, None)
        self._open[connection, number] = (gateway, gone)

    def answered(
        self, connection: int, number: int, variant: str, replica: str, service_s: float, cpu_s: float
    ) -> None:
        """Store the costs of an answered request, for an entry that is closed because its gateway is gone."""
        held = self._open.get((connection, number))
        if held is not None:
            gateway, record = held
            costs = record._replace(variant=variant, replica=replica, service_s=service_s, cpu_s=cpu_s, attempts=1)
            self._open[connection, number] = (gateway, costs)

    def close(
        self, gateway: str, connection: int, number: int, record: RequestRecord, source: tuple[str, int] = ("", 0)
    ) -> bool:
        """Close the entry of a request that a gateway reports as ended; False where it is closed already.

        Args:
            gateway: The gateway.
            connection: Its connection.
            number: The request's number; 0 for one that ended in the gateway and was never passed on.
            record: Record of the ended request.
            source: The gateway's process, and the record's number there.
        """
        if number and self._open.pop((connection, number), None) is None:
            return False
        if not number:
            self.received[gateway] += 1
        self._end(LedgerEntry(gateway, record, *source))
        return True

    def lose(self, connection: int, now_s: float) -> int:
        """Close the open entries of an ended connection as cancelled. Returns their number."""
        held = [key for key in self._open if key[0] == connection]
        for key in held:
            gateway, record = self._open.pop(key)
            self._end(LedgerEntry(gateway, record._replace(end_s=now_s)))
        return len(held)

    def take(self, first: int, most: int = BATCH_ENTRIES) -> LedgerBatch:
        """The entries from number ``first`` on, at most ``most``."""
        skip = max(0, first - self.first)
        entries = tuple(islice(self._entries, skip, skip + most))
        folded = tuple((service, outcome, count) for (service, outcome), count in sorted(self._folded.items()))
        return LedgerBatch(self.first + min(skip, len(self._entries)), entries, self.unknown, folded)

    def drop(self, before: int) -> None:
        """Drop all entries below a number, which a controller has stored."""
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
