"""Power, energy and grams of a run over time, as ticks, and merging of ticks for a plot."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from joulery.accounting.charge import IdleRule, charge
from joulery.accounting.steps import PowerSteps
from joulery.domain.energy.carbon import CarbonSeries
from joulery.domain.energy.power import BusyTimes
from joulery.domain.quality import weakest
from joulery.domain.serving.timeline import ServiceTick, Tick


def power_timeline(
    power: Sequence[PowerSteps],
    busy: Mapping[str, BusyTimes],
    t0_s: float,
    t1_s: float,
    *,
    windows: int,
    idle: IdleRule,
    exclusive: Collection[str] = (),
    carbon: CarbonSeries | None = None,
    pue: float = 1.0,
) -> tuple[Tick, ...]:
    """Ticks of equal length over ``[t0_s, t1_s)``; the last cumulative values are the charge of the whole window.

    Power (watts) is that of the energy charged to the run, idle by the rule included; NaN where nothing was read.

    Args:
        power, busy, t0_s, t1_s, idle, exclusive, carbon, pue: As for :func:`~joulery.accounting.charge.charge`, which
            is additive over splits of the window.
        windows: Number of ticks.

    Raises:
        DataError: As :func:`~joulery.accounting.charge.charge`.
    """
    edges = np.linspace(t0_s, t1_s, windows + 1).tolist() if t1_s > t0_s else []
    ticks, energy_j, carbon_g = [], 0.0, 0.0
    for start_s, end_s in itertools.pairwise(edges):
        run = charge(power, busy, start_s, end_s, idle=idle, exclusive=exclusive, carbon=carbon, pue=pue).run
        length_s = end_s - start_s
        energy_j, carbon_g = energy_j + run.energy_j, carbon_g + run.counted_g
        ticks.append(
            Tick(
                end_s,
                length_s,
                power_w=run.energy_j / length_s if run.covered_s > 0 else math.nan,
                power_band_w=run.band_j / length_s,
                quality=run.quality,
                g_per_kwh=_mean_intensity(carbon, start_s, end_s),
                grid_s=end_s,
                energy_j=energy_j,
                carbon_g=math.nan if carbon is None else carbon_g,
            )
        )
    return tuple(ticks)


def _mean_intensity(carbon: CarbonSeries | None, start_s: float, end_s: float) -> float:
    """Mean intensity over the part of a window that the series covers."""
    if carbon is None:
        return math.nan
    low_s, high_s = max(start_s, carbon.start_s), min(end_s, carbon.end_s)
    return carbon.mean(low_s, high_s) if high_s > low_s else math.nan


def downsample_ticks(ticks: Sequence[Tick], limit: int) -> tuple[Tick, ...]:
    """Merge neighbours so that at most ``limit`` ticks remain.

    Equal numbers of neighbours are merged: power and intensity are means over time, requests are summed, attainment,
    accuracy and mix are weighted by answers, latency is the worst, cumulative values are the last known.

    Raises:
        ValueError: ``limit`` is not positive.
    """
    if limit < 1:
        raise ValueError(f"limit is {limit} ticks, expected at least 1")
    size = math.ceil(len(ticks) / limit)
    if size <= 1:
        return tuple(ticks)
    return tuple(merge_ticks(ticks[at : at + size]) for at in range(0, len(ticks), size))


def merge_ticks(ticks: Sequence[Tick]) -> Tick:
    """Merge consecutive ticks into one."""
    last = ticks[-1]
    weights = [tick.period_s for tick in ticks]
    return replace(
        last,
        period_s=math.fsum(weights),
        power_w=_mean((tick.power_w for tick in ticks), weights),
        power_band_w=_mean((tick.power_band_w for tick in ticks), weights),
        quality=weakest(tick.quality for tick in ticks),
        g_per_kwh=_mean((tick.g_per_kwh for tick in ticks), weights),
        energy_j=_last(tick.energy_j for tick in ticks),
        carbon_g=_last(tick.carbon_g for tick in ticks),
        baseline_g=_last(tick.baseline_g for tick in ticks),
        baseline_low_g=_last(tick.baseline_low_g for tick in ticks),
        baseline_high_g=_last(tick.baseline_high_g for tick in ticks),
        services=_services(ticks),
    )


def _services(ticks: Sequence[Tick]) -> tuple[ServiceTick, ...]:
    groups: dict[str, list[ServiceTick]] = {}
    for tick in ticks:
        for service in tick.services:
            groups.setdefault(service.service, []).append(service)
    return tuple(_service(name, group) for name, group in groups.items())


def _service(name: str, group: Sequence[ServiceTick]) -> ServiceTick:
    answered = [float(one.requests - one.failed) for one in group]
    shares: dict[str, float] = {}
    for one, weight in zip(group, answered, strict=True):
        for variant, ratio in one.mix:
            shares[variant] = shares.get(variant, 0.0) + ratio * weight
    whole = math.fsum(shares.values())
    return ServiceTick(
        service=name,
        requests=sum(one.requests for one in group),
        failed=sum(one.failed for one in group),
        latency_s=max((one.latency_s for one in group if not math.isnan(one.latency_s)), default=math.nan),
        attainment_ratio=_mean((one.attainment_ratio for one in group), answered),
        accuracy_ratio=_mean((one.accuracy_ratio for one in group), answered),
        mix=tuple((variant, share / whole) for variant, share in shares.items()) if whole > 0 else (),
    )


def _mean(values: Iterable[float], weights: Sequence[float]) -> float:
    """Weighted mean of the known values; NaN when none is known."""
    known = [(value, weight) for value, weight in zip(values, weights, strict=True) if not math.isnan(value)]
    whole = math.fsum(weight for _, weight in known)
    return math.fsum(value * weight for value, weight in known) / whole if whole > 0 else math.nan


def _last(values: Iterable[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return known[-1] if known else math.nan
