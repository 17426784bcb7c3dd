"""Carbon intensity from files that are read again whenever they have changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from joulery.adapters.carbon.file import SeriesSource
from joulery.domain.energy.carbon import CarbonSeries
from joulery.domain.errors import DataError

_Mark = tuple[tuple[int, int, int] | None, ...]


class FollowedFile:
    """A source that reads its files on first use, and again after they have changed.

    Changed files are read once two checks in a row find them the same, so that none is read while it is being written.
    A file that cannot be read makes every request fail until it changes again. Implements
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
        """Whether the files differ from those read, and have not changed since the last check."""
        now, before = self._marks(), self._seen
        self._seen = now
        return now != self._mark and now == before

    def known(self) -> CarbonSeries:
        """The whole series in the file.

        Raises:
            DataError: The file is missing or cannot be used.
        """
        return self._source().actual

    def history(self, t0_s: float, t1_s: float) -> CarbonSeries:
        """As :meth:`joulery.domain.ports.CarbonSource.history`.

        Raises:
            DataError: The file is missing or cannot be used, or has no data for the interval.
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
    """Modification time, size and inode of a file, which differ between versions; None where it is not accessible."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
