"""Meter that replays a script: for demonstrations, for tests of code that uses meters, and to simulate a failure.

Its numbers are not from hardware and are labelled accordingly (meter ``fake``, quality assumed).
"""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from joulery.domain.energy.channel import Channel, ReadingKind
from joulery.domain.errors import ConfigError
from joulery.domain.quality import Quality

AVERAGING_S = 1.0
"""Window of a scripted channel of kind ``average``."""


@dataclass(frozen=True, slots=True)
class Script:
    """Behaviour of one channel over time, in seconds since the meter was opened.

    Attributes:
        watts: (start_s, watts) steps, starts increasing from 0; the last step has no end.
        device, component, kind: As in ``Channel``.
        wrap_j: Joules at which the counter restarts from 0; 0 for never.
        start_j: Joules on the counter at the beginning.
        silent_s: [start, end) intervals in which the device gives no reading.
        idle_w: Power of the idle device; NaN if the script does not state it.
    """

    watts: tuple[tuple[float, float], ...]
    device: str = "cpu:0"
    component: str = "package"
    kind: ReadingKind = ReadingKind.COUNTER
    wrap_j: float = 0.0
    start_j: float = 0.0
    silent_s: tuple[tuple[float, float], ...] = ()
    idle_w: float = math.nan

    def __post_init__(self) -> None:
        starts = [start_s for start_s, _ in self.watts]
        if not starts or starts[0] != 0 or starts != sorted(set(starts)):
            raise ConfigError("a fake's watts start at 0 s and increase in time", got=str(self.watts))
        if any(not 0 <= watts < math.inf for _, watts in self.watts):
            raise ConfigError("a fake's watts are finite and not negative", got=str(self.watts))

    @property
    def channel(self) -> Channel:
        """The channel's description."""
        average_s = AVERAGING_S if self.kind is ReadingKind.AVERAGE else 0.0
        return Channel(
            self.device, self.component, self.kind, "fake", Quality.ASSUMED, average_s, self.wrap_j, self.idle_w
        )

    def power_w(self, at_s: float) -> float:
        """The scripted power at a time, watts."""
        return self.watts[bisect_right(self.watts, (at_s, math.inf)) - 1][1]

    def energy_j(self, at_s: float) -> float:
        """Joules since the beginning, not wrapped."""
        ends = [*(start_s for start_s, _ in self.watts[1:]), math.inf]
        return math.fsum(
            watts * (min(at_s, end_s) - start_s)
            for (start_s, watts), end_s in zip(self.watts, ends, strict=True)
            if at_s > start_s
        )

    def reading(self, at_s: float) -> float:
        """The device's reading at a time, joules or watts; NaN while it is silent."""
        if any(start_s <= at_s < end_s for start_s, end_s in self.silent_s):
            return math.nan
        if self.kind is ReadingKind.POWER:
            return self.power_w(at_s)
        if self.kind is ReadingKind.AVERAGE:
            window_s = min(at_s, AVERAGING_S)
            past_j = self.energy_j(at_s) - self.energy_j(at_s - window_s)
            return past_j / window_s if window_s > 0 else self.power_w(0.0)
        shown_j = self.start_j + self.energy_j(at_s)
        return shown_j % self.wrap_j if self.wrap_j > 0 else shown_j


class FakeMeter:
    """Meter that replays one script for each channel, from its creation on."""

    def __init__(self, scripts: Sequence[Script], clock: Callable[[], float] = time.monotonic) -> None:
        if not scripts:
            raise ConfigError("a fake needs at least one channel")
        self._scripts = tuple(scripts)
        self._clock = clock
        self._start_s = clock()
        self._notes = ["these joules are scripted, nothing was measured (meter: fake)"]
        self._silent = [False] * len(self._scripts)
        self._open = True

    @property
    def channels(self) -> tuple[Channel, ...]:
        """One channel for each script."""
        return tuple(script.channel for script in self._scripts)

    def read(self) -> tuple[float, ...]:
        """The scripts' readings now."""
        at_s = self._clock() - self._start_s
        values = tuple(script.reading(at_s) if self._open else math.nan for script in self._scripts)
        for slot, value in enumerate(values):
            if math.isnan(value) is not self._silent[slot]:
                self._silent[slot] = math.isnan(value)
                verb = "gives nothing" if math.isnan(value) else "answers again"
                self._notes.append(f"{self._scripts[slot].device} {self._scripts[slot].component}: the fake {verb}")
        return values

    def notes(self) -> tuple[str, ...]:
        """New notes: that this meter is a fake, and when a channel stops or resumes."""
        notes, self._notes = tuple(self._notes), []
        return notes

    def close(self) -> None:
        """Stop giving readings. Safe to call twice."""
        self._open = False
