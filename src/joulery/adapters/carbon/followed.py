"""A file of carbon intensity that is followed: read again whenever it has changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from joulery.adapters.carbon.file import SeriesSource
from joulery.domain.energy.carbon import CarbonSeries
from joulery.domain.errors import DataError

_Mark = tuple[tuple[int, int, int] | None, ...]


class FollowedFile:
    """A source that reads its files when it is asked first, and again after they changed.

    A file that is being written is left alone: it is read once two looks in a row find it the same. A file that cannot
    be read keeps the source without an answer until it changes again. Implements
    :class:`joulery.domain.ports.Following`.

    Args:
        read: Reads the files.
        paths: The files.
    """

    def __init__(self, read: Callable[[], SeriesSource], paths: Sequence[Path]) -> None:
        self._read, self._paths = read, paths
        self._found: SeriesSource | DataError | None = None
        self._mark: _Mark | None = None
        self._seen: _Mark | None = None

    def changed(self) -> bool:
        """Whether the files differ from those read, and have not changed since the last look."""
        now, before = self._marks(), self._seen
        self._seen = now
        return now != self._mark and now == before

    def known(self) -> CarbonSeries:
        """All that the file holds.

        Raises:
            DataError: It is not there, or cannot be used.
        """
        return self._source().actual

    def history(self, t0_s: float, t1_s: float) -> CarbonSeries:
        """As :meth:`joulery.domain.ports.CarbonSource.history`.

        Raises:
            DataError: The file is not there or cannot be used, or holds nothing for the interval.
        """
        return self._source().history(t0_s, t1_s)

    def forecast(self, t0_s: float, t1_s: float) -> CarbonSeries:
        """As :meth:`joulery.domain.ports.CarbonSource.forecast`.

        Raises:
            DataError: As ``history``.
            CapabilityError: There is no forecast.
        """
        return self._source().forecast(t0_s, t1_s)

    def _source(self) -> SeriesSource:
        mark = self._marks()
        if self._found is None or (mark != self._mark and mark == self._seen):
            self._mark = self._seen = mark
            try:
                self._found = self._read()
            except DataError as error:
                self._found = error
        if isinstance(self._found, DataError):
            raise self._found
        return self._found

    def _marks(self) -> _Mark:
        return tuple(map(_mark, self._paths))


def _mark(path: Path) -> tuple[int, int, int] | None:
    """Time, size and number of a file, which differ between versions; None while it cannot be seen."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
