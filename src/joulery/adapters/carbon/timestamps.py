"""Conversion between time stamps and Unix seconds: ISO 8601 with an offset, or local time and a time zone."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from joulery.domain.errors import ConfigError, DataError

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def instant_s(text: str) -> float:
    """Unix seconds of an ISO 8601 stamp that carries its offset (``2024-01-31T12:30Z``).

    Raises:
        DataError: The text is not such a time stamp.
    """
    stamp = _parse(text)
    if stamp.tzinfo is None:
        raise DataError(f"time stamp {text!r} has no offset")
    return unix_s(stamp)


def unix_s(stamp: datetime) -> float:
    """Unix seconds of an aware time stamp."""
    return (stamp - _EPOCH) / timedelta(seconds=1)


def iso_utc(t_s: float) -> str:
    """Unix seconds as ``2024-01-31T12:30:00Z``, fractions dropped.

    Raises:
        DataError: The time is outside the years 1 to 9999.
    """
    try:
        return (_EPOCH + timedelta(seconds=t_s // 1)).strftime("%Y-%m-%dT%H:%M:%SZ")
    except (OverflowError, ValueError) as error:
        raise DataError(f"{t_s} is not a time on the calendar") from error


def time_zone(name: str) -> ZoneInfo:
    """The time zone of that name (``Europe/Berlin``).

    Raises:
        ConfigError: No such zone is known here.
    """
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise ConfigError(
            "unknown time zone",
            got=name,
            expected="a name such as Europe/Berlin",
            hint="on a bare system: pip install tzdata",
        ) from error


class StampReader:
    """Reader of the time stamps of one column, in order; resolves ambiguous local times.

    A local hour that the end of summer time repeats is read as the first one, and as the second where the column has
    already reached it. A local time that the beginning of summer time skips does not exist and is refused.

    Args:
        zone: Time zone of stamps without an offset; None to refuse them.
    """

    def __init__(self, zone: ZoneInfo | timezone | None) -> None:
        self._zone = zone
        self._last_s = float("-inf")

    def read(self, text: object) -> float:
        """Unix seconds of the next stamp.

        Raises:
            DataError: Not a time stamp, no offset where no time zone is set, or a local time that does not exist.
        """
        stamp = text if isinstance(text, datetime) else _parse(str(text))
        if stamp.tzinfo is None:
            stamp = self._located(stamp, text)
        self._last_s = unix_s(stamp)
        return self._last_s

    def _located(self, stamp: datetime, text: object) -> datetime:
        if self._zone is None:
            raise DataError(
                f"time stamp {str(text)!r} has no offset, so it could be any hour",
                hint="write it with Z or an offset, or name the time zone of the column (timezone: Europe/Berlin)",
            )
        first, second = (stamp.replace(tzinfo=self._zone, fold=fold) for fold in (0, 1))
        if first.utcoffset() == second.utcoffset():
            return first
        if unix_s(first.astimezone(UTC)) > unix_s(second.astimezone(UTC)):
            raise DataError(f"local time {str(text)!r} does not exist in {self._zone}: clocks skip it")
        repeated = unix_s(first.astimezone(UTC)) <= self._last_s
        return (second if repeated else first).astimezone(UTC)


def _parse(text: str) -> datetime:
    try:
        return datetime.fromisoformat(text.strip())
    except ValueError as error:
        raise DataError(
            f"{text[:40]!r} is not a time stamp", hint="expected ISO 8601, such as 2024-01-31T12:30:00Z"
        ) from error
