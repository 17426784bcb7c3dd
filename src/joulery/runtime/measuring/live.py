"""Power and charge of the last seconds, from the files of a running sampler."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from joulery.accounting.charge import Charged, IdleRule, charge
from joulery.accounting.steps import NS_PER_S, PowerSteps, energy_by_bin, power_steps
from joulery.domain.energy.carbon import CarbonSeries
from joulery.domain.energy.footprint import Footprint
from joulery.domain.energy.power import PowerTrace
from joulery.domain.serving.timeline import MeterNow
from joulery.store.run.readings import RecordingTail, RunReadings, readings_from
from joulery.store.run.samples import SUFFIX

KEEP_S = 30.0
LAG_S = 0.4
"""Delay after which all readings of a moment are on the disk."""


@dataclass(frozen=True, slots=True)
class Window:
    """The charge of one interval of a run.

    Attributes:
        start_s, end_s: Unix seconds.
        run: Footprint charged to the run.
        rest: Metered energy that is not charged to the run: that of other processes.
    """

    start_s: float
    end_s: float
    run: Footprint
    rest: Footprint

    @property
    def power_w(self) -> float:
        """Mean power of all that is metered, other processes included; NaN where nothing was read."""
        return (self.run.energy_j + self.rest.energy_j) / self._metered_s

    @property
    def power_band_w(self) -> float:
        """Half-width of the uncertainty of the mean power; NaN where nothing was read."""
        return (self.run.band_j + self.rest.band_j) / self._metered_s

    @property
    def _metered_s(self) -> float:
        return self.end_s - self.start_s if self.run.covered_s > 0 and self.end_s > self.start_s else math.nan


@dataclass(slots=True)
class LiveMeters:
    """Follows the files of a sampler.

    Attributes:
        folder: Folder into which the sampler writes.
        pue: Facility energy per IT energy.
    """

    folder: Path
    pue: float = 1.0
    _tails: dict[str, RecordingTail] = field(default_factory=dict)
    _readings: RunReadings = field(default_factory=RunReadings)
    _power: tuple[PowerSteps, ...] = ()

    def update(self) -> RunReadings:
        """Read the new samples; return the readings of the last half minute.

        Raises:
            DataError: A file is not in the sampler's format.
        """
        for file in sorted(self.folder.glob(f"*{SUFFIX}")):
            if file.stem not in self._tails:
                self._tails[file.stem] = RecordingTail(file, KEEP_S)
        found = {name: recording for name, tail in self._tails.items() if (recording := tail.update()) is not None}
        self._readings = readings_from(found, self.folder / "notes.jsonl")
        self._power = tuple(power_steps(trace) for trace in self._readings.traces)
        return self._readings

    def window(self, start_s: float, end_s: float, carbon: CarbonSeries | None) -> Window:
        """The charge of an interval of the last half minute by the last :meth:`update`; idle energy is the run's."""
        charged = self._charged(start_s, end_s, carbon)
        return Window(start_s, end_s, charged.run, charged.rest)

    def meters(self, now_s: float) -> tuple[MeterNow, ...]:
        """Every channel: its power over the last second, and how long ago it was read."""
        pairs = zip(self._readings.traces, self._power, strict=True)
        return tuple(_meter_now(trace, power, now_s) for trace, power in pairs)

    def _charged(self, start_s: float, end_s: float, carbon: CarbonSeries | None) -> Charged:
        return charge(
            self._power,
            self._readings.busy,
            start_s,
            end_s,
            idle=IdleRule.WHOLE,
            carbon=carbon,
            pue=self.pue,
        )


def _meter_now(trace: PowerTrace, power: PowerSteps, now_s: float) -> MeterNow:
    channel, end_ns = trace.channel, int(trace.t_ns[-1])
    energy_j, covered_s = energy_by_bin(power, np.array([end_ns - NS_PER_S, end_ns]))
    power_w = float(energy_j[0] / covered_s[0]) if covered_s[0] > 0 else math.nan
    age_s = now_s - end_ns / NS_PER_S
    return MeterNow(channel.device, channel.component, channel.meter, channel.quality, power_w, age_s)
