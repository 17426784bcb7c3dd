"""Calendar months of Unix times."""

from __future__ import annotations

from datetime import datetime, tzinfo


def month_of(t_s: float, zone: tzinfo | None = None) -> str:
    """The calendar month of a time, as ``2026-11``; in this machine's time zone when None."""
    return f"{datetime.fromtimestamp(t_s, zone):%Y-%m}"


def next_month_s(t_s: float, zone: tzinfo | None = None) -> float:
    """Start of the calendar month after that of a time, Unix seconds."""
    now = datetime.fromtimestamp(t_s, zone)
    year, month = (now.year + 1, 1) if now.month == 12 else (now.year, now.month + 1)
    return datetime(year, month, 1, tzinfo=zone).timestamp()
