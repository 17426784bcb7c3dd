"""Fewer ticks for the same course: neighbours merged, nothing that matters averaged away."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from joulery.domain.quality import weakest
from joulery.domain.serving.timeline import ServiceTick, Tick


def thin(ticks: Sequence[Tick], limit: int) -> tuple[Tick, ...]:
    """At most ``limit`` ticks that show the same course.

    Neighbours are merged in equal numbers: power and intensity are means over time, requests are summed, attainment,
    accuracy and mix are weighted by answers, latency is the worst, cumulative values are the last known.

    Raises:
        ValueError: ``limit`` is not positive.
    """
    if limit < 1:
        raise ValueError(f"need room for at least one tick, got {limit}")
    size = math.ceil(len(ticks) / limit)
    if size <= 1:
        return tuple(ticks)
    return tuple(merge(ticks[at : at + size]) for at in range(0, len(ticks), size))


def merge(ticks: Sequence[Tick]) -> Tick:
    """Consecutive ticks as one."""
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
    """Weighted mean of what is known; NaN when nothing is."""
    known = [(value, weight) for value, weight in zip(values, weights, strict=True) if not math.isnan(value)]
    whole = math.fsum(weight for _, weight in known)
    return math.fsum(value * weight for value, weight in known) / whole if whole > 0 else math.nan


def _last(values: Iterable[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return known[-1] if known else math.nan
