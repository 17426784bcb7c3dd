"""Requests that ended without a controller: counted apart from a session's, for their energy was not metered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from joulery.domain.serving.engine import RequestRecord
from joulery.runtime.results.finish import write_requests
from joulery.runtime.session.requests import RequestRecorder
from joulery.store.run.directory import RunWriter

UNMETERED, UNMETERED_SERIES = "requests-without-controller.rows", "requests-without-controller.parquet"


class UnmeteredRequests:
    """The requests without a controller, in a file of the run folder.

    Args:
        writer: The run folder.

    Attributes:
        recorder: Writes the file.

    Raises:
        CapabilityError: The file cannot be written.
    """

    def __init__(self, writer: RunWriter) -> None:
        self._writer, self.recorder = writer, RequestRecorder(writer.path / UNMETERED)
        self._outcomes: Counter[str] = Counter()
        self._folded: Counter[str] = Counter()
        self._first_s = self._last_s = float("nan")

    @property
    def count(self) -> int:
        """Number of these requests."""
        return self._outcomes.total()

    def add(self, record: RequestRecord) -> None:
        """Count one request that ended."""
        self.recorder.add(record)
        self._outcomes[record.outcome.value] += 1
        if not self._first_s <= record.arrival_s:
            self._first_s = record.arrival_s
        self._last_s = record.end_s

    def count_folded(self, by_outcome: Mapping[str, int]) -> None:
        """Count requests that an engine server only has as totals; ``by_outcome`` has the totals of one server."""
        folded = Counter(by_outcome)
        self._outcomes += folded - self._folded
        self._folded = folded

    def next_server(self) -> None:
        """Reset the totals for a new engine server."""
        self._folded.clear()

    def flush(self) -> None:
        """Write the buffered requests.

        Raises:
            CapabilityError: The file cannot be written.
        """
        self.recorder.flush()

    def report(self) -> dict[str, Any]:
        """Entry of the report on these requests; writes those known individually as a series.

        Raises:
            CapabilityError: The file cannot be written.
        """
        columns = self.recorder.columns()
        if len(columns):
            write_requests(self._writer, columns, UNMETERED_SERIES)
        self.recorder.remove()
        return {
            "requests": self.count,
            "outcomes": dict(sorted(self._outcomes.items())),
            "from_s": self._first_s,
            "until_s": self._last_s,
        }
