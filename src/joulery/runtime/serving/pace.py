"""How often a session looks, decides and sums up."""

from __future__ import annotations

from dataclasses import dataclass

_ENOUGH = 50
"""Requests that a window should hold on average."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How often things happen.

    Attributes:
        tick_s: Period of ticks.
        step_s: Period of the controllers.
    """

    tick_s: float = 1.0
    step_s: float = 1.0

    @classmethod
    def over(cls, duration_s: float | None) -> Pace:
        """A pace that shows a run of so long: a second, or less for a run of less than a minute."""
        step_s = 1.0 if duration_s is None else min(1.0, max(0.25, duration_s / 60.0))
        return cls(tick_s=step_s, step_s=step_s)

    def window_s(self, rate_rps: float) -> float:
        """How far back a controller looks: enough for a latency quantile to mean something at the rate expected."""
        return max(4.0 * self.step_s, _ENOUGH / rate_rps)
