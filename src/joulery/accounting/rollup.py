"""Tables of footprints by owner, device or component; every table adds up to the total of its footprints."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from joulery.domain.energy.footprint import Footprint, Part, Row
from joulery.domain.errors import DataError
from joulery.domain.quality import Quality, weakest
from joulery.domain.serving.timeline import Tick

_LONGEST_S = 100 * 366 * 86400.0
IDLE = "idle"
UNATTRIBUTED = "unattributed"


PART_KEYS: dict[str, Callable[[Part], str]] = {
    "device": lambda part: part.device,
    "component": lambda part: f"{part.device} {part.component}",
    "quality": lambda part: part.quality.value,
    "meter": lambda part: part.meter,
}


def total(footprints: Iterable[tuple[str, Footprint]]) -> Footprint:
    """The sum of all footprints.

    Args:
        footprints: Pairs of a name for messages and a footprint.

    Raises:
        DataError: Their grams count different things; the message names the first one that does not fit.
    """
    summed = Footprint()
    for name, footprint in footprints:
        try:
            summed = summed + footprint
        except DataError as error:
            raise DataError(f"{name} does not fit the others: {error.message}", hint=error.hint) from error
    return summed


def by_part(footprint: Footprint, by: str) -> tuple[Row, ...]:
    """A footprint by ``device``, ``component``, ``quality`` or ``meter``, idle and unattributed as their own lines.

    Grams are NaN without a carbon source, and where an older run did not keep them by part.
    """
    key_of, known = PART_KEYS[by], footprint.signal is not None
    groups: dict[str, list[Part]] = {}
    for part in footprint.parts:
        groups.setdefault(key_of(part), []).append(part)
    rows = [
        Row(
            key,
            math.fsum(part.energy_j for part in parts),
            math.fsum(part.carbon_g for part in parts) if known else math.nan,
            weakest(part.quality for part in parts),
            math.fsum(part.band_j for part in parts),
        )
        for key, parts in sorted(groups.items())
    ]
    rest_j = footprint.idle_j + footprint.unattributed_j
    for key, energy_j, carbon_g in (
        (IDLE, footprint.idle_j, footprint.idle_g),
        (UNATTRIBUTED, footprint.unattributed_j, footprint.unattributed_g),
    ):
        band_j = footprint.idle_band_j * energy_j / rest_j if rest_j > 0 else 0.0
        rows.append(Row(key, energy_j, carbon_g if known else math.nan, footprint.idle_quality, band_j))
    return tuple(rows)


def by_name(footprints: Iterable[tuple[str, Footprint]]) -> tuple[Row, ...]:
    """Footprints added up by their name (an owner, a run), sorted by it.

    Raises:
        DataError: As :func:`total`.
    """
    groups: dict[str, list[Footprint]] = {}
    for name, footprint in footprints:
        groups.setdefault(name, []).append(footprint)
    return tuple(_row(name, total((name, one) for one in group)) for name, group in sorted(groups.items()))


def _row(name: str, footprint: Footprint) -> Row:
    grams = footprint.counted_g if footprint.signal is not None else math.nan
    return Row(name, footprint.energy_j, grams, footprint.quality, footprint.band_j)


def by_time(ticks: Sequence[Tick], key: Callable[[float], str]) -> tuple[Row, ...]:
    """Ticks by a key of their time (the hour), in the order of time.

    A tick's joules and grams are what it added to the cumulative values; a tick with NaN values adds to the next
    known one. The lines add up to the last known cumulative value.
    """
    groups: dict[str, list[tuple[float, float, Quality]]] = {}
    last_j = last_g = 0.0
    for tick in ticks:
        added_j = added_g = math.nan
        if not math.isnan(tick.energy_j):
            added_j, last_j = tick.energy_j - last_j, tick.energy_j
        if not math.isnan(tick.carbon_g):
            added_g, last_g = tick.carbon_g - last_g, tick.carbon_g
        groups.setdefault(key(tick.t_s - tick.period_s / 2), []).append((added_j, added_g, tick.quality))
    return tuple(
        Row(name, _known_sum(j for j, _, _ in group), _known_sum(g for _, g, _ in group), weakest(q for *_, q in group))
        for name, group in groups.items()
    )


def _known_sum(values: Iterable[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return math.fsum(known) if known else math.nan


def hourly(footprint: Footprint, ticks: Sequence[Tick]) -> dict[int, tuple[float, float]]:
    """The share of a footprint's joules and of its grams that belongs to each hour.

    Ticks show when energy and grams flowed; without them, both are spread evenly over the window. The shares of each
    add up to 1.

    Returns:
        Start of the hour in Unix seconds to ``(share of joules, share of grams)``; empty for an empty footprint.

    Raises:
        DataError: The window is longer than a century, or not known and there is energy.
    """
    hours = {int(row.key): row for row in by_time(ticks, lambda t_s: str(int(t_s // 3600) * 3600))}
    energy_j = _known_sum(row.energy_j for row in hours.values())
    if energy_j > 0:
        carbon_g = _known_sum(row.carbon_g for row in hours.values())
        return {
            hour_s: (
                _share(row.energy_j, energy_j),
                _share(row.carbon_g, carbon_g) if carbon_g > 0 else _share(row.energy_j, energy_j),
            )
            for hour_s, row in hours.items()
        }
    if math.isnan(footprint.start_s) or math.isnan(footprint.end_s):
        if footprint.energy_j > 0:
            raise DataError(f"{footprint.energy_j:g} J of a run that states no start and end are not split into hours")
        return {}
    return _evenly(footprint)


def _evenly(footprint: Footprint) -> dict[int, tuple[float, float]]:
    """The shares of the hours where joules and grams flow evenly over the window."""
    length_s = footprint.end_s - footprint.start_s
    if length_s > _LONGEST_S:
        raise DataError(f"a run of {length_s / 86400:.0f} days is not split into hours")
    first, last = int(footprint.start_s // 3600), int(footprint.end_s // 3600)
    shares = {}
    for hour in range(first, last + 1):
        inside_s = min(footprint.end_s, (hour + 1) * 3600.0) - max(footprint.start_s, hour * 3600.0)
        share = inside_s / length_s if length_s > 0 else 1.0
        if share > 0:
            shares[hour * 3600] = (share, share)
    return shares


def _share(value: float, whole: float) -> float:
    return 0.0 if math.isnan(value) else value / whole
