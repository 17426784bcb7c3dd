"""Traces for the tests, in seconds and plain lists."""

from collections.abc import Sequence
from typing import Any

from joulery.domain.energy.power import Channel, PowerTrace, ReadingKind
from joulery.domain.quality import Quality

S = 1_000_000_000


def channel(kind: ReadingKind = ReadingKind.POWER, device: str = "cpu:0", **fields: Any) -> Channel:
    fields = {"component": "package", "meter": "fake", "quality": Quality.MEASURED, **fields}
    return Channel(device=device, kind=kind, **fields)


def trace(
    kind: ReadingKind, t_s: Sequence[float], values: Sequence[float], period_s: float = 1.0, **fields: Any
) -> PowerTrace:
    return PowerTrace(channel(kind, **fields), [round(t * S) for t in t_s], values, period_s)


def power(t_s: Sequence[float], watts: Sequence[float], period_s: float = 1.0, **fields: Any) -> PowerTrace:
    return trace(ReadingKind.POWER, t_s, watts, period_s, **fields)


def counter(t_s: Sequence[float], joules: Sequence[float], period_s: float = 1.0, **fields: Any) -> PowerTrace:
    return trace(ReadingKind.COUNTER, t_s, joules, period_s, **fields)


def average(t_s: Sequence[float], watts: Sequence[float], window_s: float, **fields: Any) -> PowerTrace:
    return trace(ReadingKind.AVERAGE, t_s, watts, averaging_s=window_s, **fields)
