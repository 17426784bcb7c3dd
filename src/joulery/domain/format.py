"""Format numbers for people: three significant digits, SI prefixes, an en dash for unknown values."""

from __future__ import annotations

import math

import numpy as np

UNKNOWN = "–"
EARLIEST_S, LATEST_S = -6e10, 1e11
"""Bounds of Unix seconds, in the years 68 and 5138; times outside them are surely wrong."""
_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""), (1e-3, "m"), (1e-6, "µ"), (1e-9, "n"))


def si(value: float | None, unit: str) -> str:
    """Format a value with an SI prefix: ``3210`` J as ``3.21 kJ``; :data:`UNKNOWN` for None and NaN."""
    if value is None or math.isnan(value):
        return UNKNOWN
    if value == 0 or math.isinf(value):
        return f"{value:g} {unit}".replace("inf", "∞")
    for factor, prefix in _PREFIXES:
        digits = _three(value / factor)
        if abs(float(digits.replace(",", ""))) >= 1:
            return f"{digits} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def grams(value: float | None) -> str:
    """Format grams of CO2-equivalent in mg, g, kg or tonnes."""
    if value is not None and abs(value) >= 0.9995e6:
        return si(value / 1e6, "t")
    return si(value, "g")


def number(value: float | None, unit: str = "") -> str:
    """Format a value with three significant digits and the unit, without a prefix."""
    if value is None or math.isnan(value):
        return UNKNOWN
    return f"{_three(value)} {unit}".strip()


def percent(ratio: float | None, digits: int = 1) -> str:
    """Format a ratio as a percentage: ``0.751`` as ``75.1 %``."""
    if ratio is None or math.isnan(ratio):
        return UNKNOWN
    return f"{round(ratio * 100, digits) + 0.0:.{digits}f} %"


def duration(seconds: float | None) -> str:
    """Format a duration: ``5400`` as ``1 h 30 min``; below a minute with three digits, milliseconds below a second."""
    if seconds is None or math.isnan(seconds):
        return UNKNOWN
    if seconds < 59.95:
        return si(seconds, "s")
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, minutes = divmod(round(seconds / 60), 60)
    if hours < 48:
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    days, hours = divmod(round(seconds / 3600), 24)
    return f"{days} d {hours} h" if hours else f"{days} d"


def latency(seconds: float | None) -> str:
    """Format a latency: ``0.031`` as ``31 ms``, in seconds from ten seconds on; ``unbounded`` where it is infinite."""
    if seconds is None or math.isnan(seconds):
        return UNKNOWN
    if math.isinf(seconds):
        return "unbounded"
    return f"{1e3 * seconds:.0f} ms" if seconds < 9.9995 else f"{_three(seconds)} s"


def moment(t_s: float | None) -> str:
    """Format Unix seconds as ``2026-11-20 05:12:03 UTC``."""
    if t_s is None or not math.isfinite(t_s):
        return UNKNOWN
    return f"{np.datetime64(math.floor(t_s), 's')} UTC".replace("T", " ", 1)


def count(value: float) -> str:
    """Format a count: ``12345`` as ``12,345``."""
    return f"{round(value):,}"


def _three(value: float) -> str:
    """Format a value with three significant digits, without an exponent, thousands grouped."""
    if value == 0:
        return "0"
    decimals = 2 - math.floor(math.log10(abs(value)))
    rounded = round(value, decimals)
    if rounded != 0:
        decimals = 2 - math.floor(math.log10(abs(rounded)))
    return f"{rounded:,.{min(max(decimals, 0), 12)}f}"
