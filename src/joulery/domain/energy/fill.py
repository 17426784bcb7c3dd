"""What to do where the carbon intensity is unknown. Missing is an error unless the user names a fill."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from joulery.domain.errors import ConfigError

_UNITS_S = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_WRITTEN = re.compile(r"(error|gap|forecast)|(previous|linear):\s*([0-9]{1,6}(?:\.[0-9]{1,3})?)\s*(s|min|h|d)")


class Fill(StrEnum):
    """The rules."""

    ERROR = "error"
    """Refuse: say where the gap is."""
    GAP = "gap"
    """Keep it: no grams are counted there and ``carbon_coverage_ratio`` drops."""
    PREVIOUS = "previous"
    """Repeat the last known step, flagged as estimated, over a gap of at most the stated length."""
    LINEAR = "linear"
    """A straight line between the known steps on both sides, flagged as estimated, over at most the stated length."""
    FORECAST = "forecast"
    """Use what the same service had forecast, flagged as estimated, where it publishes no actual value."""


@dataclass(frozen=True, slots=True)
class FillRule:
    """A rule and the longest gap it may bridge, seconds (0 where it bridges none).

    Raises:
        ConfigError: ``previous`` or ``linear`` without a positive length.
    """

    kind: Fill = Fill.ERROR
    longest_s: float = 0.0

    def __post_init__(self) -> None:
        bridges = self.kind in {Fill.PREVIOUS, Fill.LINEAR}
        if bridges and not 0 < self.longest_s < float("inf"):
            raise ConfigError(
                f"filling by {self.kind} needs the longest gap it may bridge", expected=f"{self.kind}:3h, for instance"
            )

    @classmethod
    def parse(cls, text: str) -> FillRule:
        """``error``, ``gap``, ``forecast``, ``previous:3h``, ``linear:90min`` as a rule.

        Raises:
            ConfigError: Anything else.
        """
        match = _WRITTEN.fullmatch(text.strip())
        if match is None:
            raise ConfigError(
                "not a rule for gaps in carbon intensity",
                got=text,
                expected="error, gap, forecast, previous:LENGTH or linear:LENGTH (as in linear:3h)",
            )
        plain, kind, length, unit = match.groups()
        return cls(Fill(plain)) if plain else cls(Fill(kind), float(length) * _UNITS_S[unit])

    def __str__(self) -> str:
        return f"{self.kind}:{self.longest_s:g}s" if self.longest_s else str(self.kind)
