"""Charge requests of language models: read this machine's meters whenever a request begins or ends.

A board renews its energy counter ten times a second, and a reading takes milliseconds (an H100: 2.9 ms, measured). Such
meters are read five times a second while requests run; what a request did after the last reading is charged ahead.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from joulery.accounting.token_energy import EnergyTotals, TokenBook
from joulery.domain.energy.carbon import JOULES_PER_KWH
from joulery.domain.energy.channel import Channel, ReadingKind
from joulery.domain.errors import ConfigError
from joulery.domain.ports import Meter
from joulery.domain.quality import Quality, weakest
from joulery.domain.serving.engine import EnergyShare

_CPUS = "cpus"
_SLOW_S = 0.05
"""A board whose counter is renewed less often than this is read no oftener than every :data:`_UPDATES` renewals."""
_UPDATES = 2
_LATEST_READINGS = 3
"""Readings from which a device's recent power is taken."""


@dataclass(slots=True)
class _Metered:
    """An engine and what it is charged for: its devices, or its share of the CPUs where it has none.

    Attributes:
        cpu_s, last_cpu_s: CPU seconds that it has used, now and at the last reading.
        devices: Its devices.
        unmatched_s: CPU seconds that no tick of the machine's own count covers yet.
        readings: Joules and seconds between the latest readings of its devices while it had requests.
    """

    cpu_s: Callable[[], float]
    devices: tuple[str, ...]
    last_cpu_s: float
    unmatched_s: float = 0.0
    readings: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=_LATEST_READINGS))

    def unread_j(self, seconds: float) -> float:
        """Energy of its devices in so many seconds while it has requests, by the latest readings; inf without any."""
        read_s = math.fsum(each_s for _, each_s in self.readings)
        return seconds * math.fsum(energy_j for energy_j, _ in self.readings) / read_s if read_s > 0 else math.inf


@dataclass(slots=True)
class _Source:
    """A meter, its last values and when they were read."""

    meter: Meter
    values: tuple[float, ...]
    read_s: float

    @property
    def renewed_s(self) -> float:
        """Interval at which the meter has a new value, s; 0 for a meter that is read every time."""
        channels = self.meter.channels
        if any(_of_cpus(channel) for channel in channels):
            return 0.0
        slow_s = max((channel.update_s for channel in channels if channel.kind is ReadingKind.COUNTER), default=0.0)
        return slow_s if slow_s >= _SLOW_S else 0.0


@dataclass(slots=True)
class _Reading:
    """Use of the machine between two readings: ``seconds`` of each device, ``skipped`` those that were not read."""

    busy_s: float = 0.0
    total_j: float = 0.0
    idle_j: float = 0.0
    above_idle_j: dict[str, float] = field(default_factory=dict)
    known: bool = True
    seconds: dict[str, float] = field(default_factory=dict)
    skipped: set[str] = field(default_factory=set)


class RequestMeter:
    """Charges the requests of language models with the energy that this machine's meters read.

    An engine on the CPU is charged its share of the joules above idle, by CPU time; an engine that has devices to
    itself is charged all joules above idle of those devices. The energy of a remote engine is unknown, not zero.

    Args:
        meters: Open meters; this object closes them.
        busy_s: CPU seconds that all processes of this machine have used.
        g_per_kwh: Carbon intensity at a time; NaN while unknown.
        pue: Facility energy per IT energy.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        meters: Sequence[Meter],
        busy_s: Callable[[], float],
        g_per_kwh: Callable[[float], float] = lambda t_s: math.nan,
        *,
        pue: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._busy_s, self._g_per_kwh, self._pue, self._clock = busy_s, g_per_kwh, pue, clock
        self._book = TokenBook()
        self._engines: dict[str, _Metered] = {}
        self._sources = [_Source(meter, meter.read(), clock()) for meter in meters]
        self._last_busy_s = busy_s()
        self._settled_s = clock()

    @property
    def totals(self) -> EnergyTotals:
        """The sums up to the last reading."""
        return self._book.totals

    def join(self, engine: str, cpu_s: Callable[[], float], devices: Sequence[str] = ()) -> None:
        """Add an engine.

        Args:
            engine: Its name.
            cpu_s: CPU seconds it has used; NaN where unknown.
            devices: The devices it has to itself; none for a share of the CPUs.

        Raises:
            ConfigError: Another engine has one of those devices.
        """
        taken = {device for each in self._engines.values() for device in each.devices}
        for device in devices:
            if device in taken:
                raise ConfigError("two engines cannot have one device to themselves", pointer=engine, got=device)
        self._engines[engine] = _Metered(cpu_s, tuple(devices), cpu_s())

    def unmetered(self, engine: str) -> tuple[str, ...]:
        """The devices of an engine that no meter reads: the energy of its requests is unknown."""
        read = {channel.device for channel in self._channels()}
        return tuple(device for device in self._engines[engine].devices if device not in read)

    def quality(self, engine: str) -> Quality:
        """Quality of an engine's joules."""
        found = [channel.quality for channel in self._channels() if self._sees(engine, channel)]
        return weakest(found) if found else Quality.ASSUMED

    def began(self, engine: str, number: int, whole_tokens: float = 0.0) -> None:
        """Record that an engine has got a request; ``whole_tokens`` as in :meth:`TokenBook.began`."""
        self._settle(_UPDATES if self._book.busy(engine) else 1)
        self._book.began(engine, number, whole_tokens)

    def moved(self, engine: str, number: int, *, read: int = 0, written: int = 0) -> None:
        """Record that an engine has read or generated tokens of a request."""
        self._book.moved(engine, number, read=read, written=written)

    def share_engine(self, engine: str, own_ratio: float) -> None:
        """Set the share of an engine's joules that is its requests' from now on; the rest is unattributed."""
        self._book.share_engine(engine, own_ratio)

    def ended(self, engine: str, number: int) -> EnergyShare | None:
        """Record that an engine has finished a request. Returns the request's share; None where unknown."""
        self._settle(_UPDATES if self._book.can_charge_ahead(engine, number) else 0)
        energy_j, carbon_g = self._book.ended(engine, number, self._unread_j(self._engines[engine]))
        return None if energy_j is None else EnergyShare(energy_j, carbon_g, self.quality(engine))

    def settle(self) -> None:
        """Read the meters, slow ones where it is time, and account for the energy since the last reading."""
        self._settle(_UPDATES)

    def _settle(self, renewals: int) -> None:
        """As :meth:`settle`; slow meters are read after so many renewals."""
        now_s = self._clock()
        reading = self._look(now_s, renewals)
        fast = [name for name, engine in self._engines.items() if not self._spans_many_steps(engine)]
        lasts_s = dict.fromkeys(fast, now_s - self._settled_s)
        self._settled_s = now_s
        g_per_j = self._g_per_kwh(time.time()) * self._pue / JOULES_PER_KWH
        engines_j = self._shares(reading)
        self._book.settle(reading.total_j, reading.idle_j, engines_j, g_per_j, lasts_s)

    def _spans_many_steps(self, engine: _Metered) -> bool:
        """Whether a reading of an engine's devices covers many steps."""
        return any(source.renewed_s > 0 for source in self._sources_of(engine))

    def _unread_j(self, engine: _Metered) -> float:
        """Most energy that an engine can have used since its devices were last read."""
        read_s = [source.read_s for source in self._sources_of(engine)]
        return engine.unread_j(self._clock() - min(read_s)) if read_s else math.inf

    def _sources_of(self, engine: _Metered) -> list[_Source]:
        """The meters that read an engine's devices."""
        return [
            source
            for source in self._sources
            if any(channel.device in engine.devices for channel in source.meter.channels)
        ]

    def close(self) -> None:
        """Close the meters. Safe to call twice."""
        for source in self._sources:
            source.meter.close()

    def _channels(self) -> list[Channel]:
        return [channel for source in self._sources for channel in source.meter.channels]

    def _sees(self, engine: str, channel: Channel) -> bool:
        devices = self._engines[engine].devices
        return channel.device in devices if devices else _of_cpus(channel)

    def _look(self, now_s: float, renewals: int) -> _Reading:
        """Read the meters that are due; the energy of each channel since its last reading, idle energy apart."""
        busy_s = self._busy_s()
        owned = {device for engine in self._engines.values() for device in engine.devices}
        reading = _Reading(max(0.0, busy_s - self._last_busy_s))
        self._last_busy_s = busy_s
        for source in self._sources:
            seconds, channels = now_s - source.read_s, source.meter.channels
            if seconds < renewals * source.renewed_s:
                reading.skipped.update(channel.device for channel in channels)
                continue
            before, now = source.values, source.meter.read()
            source.values = tuple(b if math.isnan(n) else n for b, n in zip(before, now, strict=True))
            source.read_s = now_s
            reading.seconds.update((channel.device, seconds) for channel in channels)
            for channel, old, new in zip(channels, before, now, strict=True):
                energy_j = _energy_j(channel, old, new, seconds)
                if math.isnan(energy_j):
                    reading.known = False
                    continue
                idle_j = min(energy_j, channel.idle_w * seconds) if channel.idle_w > 0 else 0.0
                if _of_cpus(channel) and not reading.busy_s > 0:
                    idle_j = energy_j
                reading.total_j += energy_j
                reading.idle_j += idle_j
                where = _CPUS if _of_cpus(channel) and channel.device not in owned else channel.device
                reading.above_idle_j[where] = reading.above_idle_j.get(where, 0.0) + energy_j - idle_j
        return reading

    def _shares(self, reading: _Reading) -> dict[str, float]:
        """Joules of each engine since the last reading; NaN where unknown."""
        on_cpus = [engine for engine in self._engines.values() if not engine.devices]
        for engine in on_cpus:
            cpu_s = engine.cpu_s()
            # The kernel counts CPU time of the machine in ticks of 10 ms: time that no tick covers yet is carried over.
            # The CPU time of an engine whose process died is unknown until the next process runs.
            waited_s = 0.0 if math.isnan(engine.unmatched_s) else engine.unmatched_s
            used_s = cpu_s - engine.last_cpu_s
            engine.unmatched_s = math.nan if math.isnan(used_s) else waited_s + max(0.0, used_s)
            engine.last_cpu_s = cpu_s
        waiting_s = math.fsum(engine.unmatched_s for engine in on_cpus if not math.isnan(engine.unmatched_s))
        covered = min(1.0, reading.busy_s / waiting_s) if waiting_s > 0 else 0.0
        j_per_s = reading.above_idle_j.get(_CPUS, math.nan) / reading.busy_s if reading.busy_s > 0 else 0.0
        shares = {}
        for name, engine in self._engines.items():
            if reading.skipped.intersection(engine.devices):
                continue
            if not reading.known:
                shares[name] = math.nan
            elif engine.devices:
                shares[name] = sum(reading.above_idle_j.get(device, math.nan) for device in engine.devices)
                seconds = max((reading.seconds.get(device, 0.0) for device in engine.devices), default=0.0)
                if self._book.busy(name) and seconds > 0 and not math.isnan(shares[name]):
                    engine.readings.append((shares[name], seconds))
            else:
                shares[name] = covered * engine.unmatched_s * j_per_s
                engine.unmatched_s *= 1.0 - covered
        return shares


def _of_cpus(channel: Channel) -> bool:
    return channel.device.startswith("cpu:") or channel.device == "machine"


def _energy_j(channel: Channel, old: float, new: float, seconds: float) -> float:
    """Joules of a channel between two readings; NaN where one is missing or the counter was reset."""
    if math.isnan(old) or math.isnan(new):
        return math.nan
    if channel.kind is not ReadingKind.COUNTER:
        return new * seconds
    energy_j = new - old
    if energy_j < 0 and channel.wrap_j > 0:
        energy_j += channel.wrap_j
    return energy_j if energy_j >= 0 else math.nan
