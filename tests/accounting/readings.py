"""Traces for the tests, in seconds and plain lists."""

from collections.abc import Sequence
from typing import Any

from joulery.accounting.charge import Charged, IdleRule, charge
from joulery.accounting.steps import PowerSteps, power_steps
from joulery.domain.energy.carbon import CarbonSeries
from joulery.domain.energy.channel import Channel, ReadingKind
from joulery.domain.energy.footprint import Footprint
from joulery.domain.energy.power import PowerTrace
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


def steps_of(traces: Sequence[PowerTrace | PowerSteps]) -> list[PowerSteps]:
    return [one if isinstance(one, PowerSteps) else power_steps(one) for one in traces]


def charge_readings(traces: Sequence[PowerTrace | PowerSteps], *arguments: Any, **more: Any) -> Charged:
    return charge(steps_of(traces), *arguments, **more)


def integrate(
    traces: Sequence[PowerTrace | PowerSteps], t0_s: float, t1_s: float, carbon: CarbonSeries | None = None, **more: Any
) -> Footprint:
    """All the energy of some channels in a window: a run that has their devices to itself."""
    steps = steps_of(traces)
    devices = {one.channel.device for one in steps}
    return charge(steps, {}, t0_s, t1_s, idle=IdleRule.WHOLE, exclusive=devices, carbon=carbon, **more).run
