"""Settings of a measurement and the terms of its charge, as the manifest keeps them, and the category of its warnings.

Imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from joulery.domain.energy.channel import MeterSpec
from joulery.domain.errors import ConfigError

IDLE_RULES = ("whole", "share", "none")
"""The values of ``accounting.charge.IdleRule``."""
PERIOD_S = 0.01
"""Default time between two readings: finer separates no GPU kernels, coarser loses short phases."""
SECONDS_PER_YEAR = 365.25 * 86400
SHORTEST_PERIOD_S, LONGEST_PERIOD_S = 0.001, 1.0
MAX_CPU_RATIO = 0.03
"""Share of one core the sampler may take before it reads less often."""


class MeasureWarning(UserWarning):
    """A problem of measuring; the measured program continued."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a measurement.

    Attributes:
        period_s: Time between two readings of a meter that always has a new value.
        meters: Meters to use; None for those this machine has.
        max_cpu_ratio: Share of one core the sampler may take.

    Raises:
        ConfigError: The period is out of range.
    """

    period_s: float = PERIOD_S
    meters: tuple[MeterSpec, ...] | None = None
    max_cpu_ratio: float = MAX_CPU_RATIO

    def __post_init__(self) -> None:
        if not SHORTEST_PERIOD_S <= self.period_s <= LONGEST_PERIOD_S:
            raise ConfigError(
                "not a sampling period", pointer="period", got=f"{self.period_s:g} s", expected="1 ms to 1 s"
            )


@dataclass(frozen=True, slots=True)
class Terms:
    """Terms on which a run is charged.

    Attributes:
        idle: How much of the idle energy the run pays: one of :data:`IDLE_RULES`.
        pue: Facility energy per IT energy.
        carbon: Flags that describe the source of carbon intensity (``carbon_from_flags``); empty for none.
        carbon_at_s: Unix seconds at which the run is taken to have started, for the intensity alone; None for its real
            start.
        embodied_kg: Kilograms of CO2-equivalent that making the machine emitted; 0 for none stated.
        lifetime_years: Years over which they are spread; 0 where none are stated.

    Raises:
        ConfigError: The idle rule is unknown, the PUE is below 1, or one of embodied carbon and lifetime is missing.
    """

    idle: str = "whole"
    pue: float = 1.0
    carbon: Mapping[str, str] = field(default_factory=dict)
    carbon_at_s: float | None = None
    embodied_kg: float = 0.0
    lifetime_years: float = 0.0

    def __post_init__(self) -> None:
        if self.idle not in IDLE_RULES:
            raise ConfigError(
                "not a rule for idle energy", pointer="idle", got=self.idle, expected=", ".join(IDLE_RULES)
            )
        if not 1 <= self.pue < float("inf"):
            raise ConfigError("not a PUE", pointer="pue", got=f"{self.pue:g}", expected="1 or more")
        stated = (self.embodied_kg, self.lifetime_years)
        if stated != (0.0, 0.0) and not all(0 < each < float("inf") for each in stated):
            raise ConfigError(
                "embodied carbon and lifetime go together, both above 0",
                pointer="embodied",
                got=f"{self.embodied_kg:g} kg over {self.lifetime_years:g} years",
                expected="such as 1500 kg over 5 years",
            )

    def embodied_g(self, duration_s: float) -> float:
        """Grams of the machine's embodied carbon for a duration, spread evenly over its lifetime."""
        if not self.lifetime_years:
            return 0.0
        return self.embodied_kg * 1000.0 * max(0.0, duration_s) / (self.lifetime_years * SECONDS_PER_YEAR)

    def to_dict(self) -> dict[str, Any]:
        """The terms as kept in a manifest."""
        kept = {"idle": self.idle, "pue": self.pue, "carbon": dict(self.carbon), "carbon_at_s": self.carbon_at_s}
        embodied = {"embodied_kg": self.embodied_kg, "lifetime_years": self.lifetime_years}
        return kept | embodied if self.lifetime_years else kept

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Terms:
        """The reverse of :meth:`to_dict`."""
        return cls(**value)


@dataclass(frozen=True, slots=True)
class Span:
    """Time span of a run on the monotonic clock, and the system's account of its use.

    Attributes:
        start_ns, end_ns: Monotonic nanoseconds.
        unix_offset_ns: Unix minus monotonic nanoseconds, as the starting process read them.
        cpu_s: CPU seconds of the run by the system's own account of processes that ended; 0 when not known.
        exit_code: Of the command; None where there was none.
    """

    start_ns: int
    end_ns: int
    unix_offset_ns: int
    cpu_s: float = 0.0
    exit_code: int | None = None
