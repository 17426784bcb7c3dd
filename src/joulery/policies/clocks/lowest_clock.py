"""Clock governors: the lowest clock of a device within the SLO (μ-Serve, ATC'24, section 3.4, Alg. 3).

``miad_step`` is the paper's multiplicative-increase, additive-decrease rule for one device and one period, with an
error fixed: the clock falls only when *every* resident partition allows it. ``literal=True`` keeps the pseudo-code's
loop, in which any one partition that allows it is enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from joulery.domain.errors import ConfigError


class ClockAction(StrEnum):
    """Action of the governor in one period."""

    UP = "UP"
    DOWN = "DOWN"
    SAME = "SAME"


@dataclass(frozen=True, slots=True)
class ClockRange:
    """The clocks a governor may set.

    Attributes:
        min_mhz: Lowest clock.
        max_mhz: Highest clock.
        step_mhz: Size of one additive decrease.
        guard_ratio: Slack, as a ratio of the SLO, below which the clock goes up.
    """

    min_mhz: float = 200.0
    max_mhz: float = 1380.0
    step_mhz: float = 100.0
    guard_ratio: float = 0.05

    def __post_init__(self) -> None:
        if not 0 < self.min_mhz <= self.max_mhz:
            raise ConfigError("a clock range needs 0 < minimum <= maximum", got=f"{self.min_mhz} to {self.max_mhz} MHz")
        if not self.step_mhz > 0:
            raise ConfigError("a clock range needs a positive step", got=f"{self.step_mhz} MHz")


@dataclass(frozen=True, slots=True)
class PartitionLatency:
    """Latency of one resident partition.

    Attributes:
        slo_s: Latency target, > 0.
        latency_s: Observed tail latency; 0 when nothing ran and nothing waits.
        elasticity: Relative latency growth per relative clock loss, 0 (insensitive) to 1 (half the sensitivity score,
            times the partition's share of its model's latency).
    """

    slo_s: float
    latency_s: float
    elasticity: float

    @property
    def slack_ratio(self) -> float:
        """Room to the target, as a ratio of it; negative once it is missed."""
        return (self.slo_s - self.latency_s) / self.slo_s

    def allows(self, clock_mhz: float, limits: ClockRange) -> bool:
        """True when the predicted slowdown of one step down stays within the slack beyond the guard."""
        slowdown_ratio = self.elasticity * self.latency_s * limits.step_mhz / clock_mhz / self.slo_s
        return slowdown_ratio < self.slack_ratio - limits.guard_ratio


def miad_step(
    clock_mhz: float, partitions: Sequence[PartitionLatency], limits: ClockRange, *, literal: bool = False
) -> tuple[ClockAction, float]:
    """One period of Alg. 3 on one device: the action, and the new clock in MHz.

    Args:
        clock_mhz: Present clock, > 0.
        partitions: Everything resident on the device; an empty device drifts to the minimum.
        limits: The clocks allowed and the guard.
        literal: Follow the pseudo-code's loop (any partition may lower the clock).
    """
    if any(partition.slack_ratio < limits.guard_ratio for partition in partitions):
        return ClockAction.UP, min(limits.max_mhz, 2.0 * clock_mhz)
    verdicts = [partition.allows(clock_mhz, limits) for partition in partitions]
    if (any(verdicts) or not verdicts) if literal else all(verdicts):
        return ClockAction.DOWN, max(limits.min_mhz, clock_mhz - limits.step_mhz)
    return ClockAction.SAME, clock_mhz


def snap_clock(requested_mhz: float, supported_mhz: Sequence[float]) -> float:
    """The lowest supported clock that is not below the request; the highest one when none is.

    Raises:
        ConfigError: No clock is supported.
    """
    if not supported_mhz:
        raise ConfigError("the device supports no clock", expected="at least one supported clock in MHz")
    return min((clock for clock in supported_mhz if clock >= requested_mhz), default=max(supported_mhz))
