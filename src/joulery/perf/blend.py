"""Blends of the profiles of several variants behind one replica, by the share of requests that each answers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from joulery.domain.arrays import FloatArray
from joulery.domain.errors import DataError
from joulery.domain.serving.profile import Profile, SliceProfile, Timings
from joulery.perf.layouts import Predictor

_SAMPLES = 1000
"""Samples of a blend: a share of 0.1 % has one sample."""


def blended(predictor: Predictor, shares: Sequence[tuple[str, float]], name: str) -> Predictor:
    """The predictor of a service whose replicas answer with several variants by fixed shares.

    Args:
        predictor: Predictor of the variants.
        shares: ``((variant, share), …)``, which sum to 1.
        name: Name of the blend as a variant, on the slices where all variants were measured.

    Raises:
        DataError: There is no slice on which all the variants were measured.
    """
    entries = {(entry.variant, entry.slice): entry for entry in predictor.profile.entries}
    pieces = dict.fromkeys(entry.slice for entry in predictor.profile.entries)
    mixed = [
        _blend([(entries[variant, piece], share) for variant, share in shares], name)
        for piece in pieces
        if all((variant, piece) in entries for variant, _ in shares)
    ]
    if not mixed:
        raise DataError(f"{' and '.join(variant for variant, _ in shares)} were measured on no common slice")
    accuracy_ratio = math.fsum(share * predictor.accuracy_ratio[variant] for variant, share in shares)
    return replace(
        predictor,
        profile=replace(predictor.profile, entries=tuple(mixed)),
        accuracy_ratio={**predictor.accuracy_ratio, name: accuracy_ratio},
    )


def with_assumed_variant(profile: Profile, variant: str, like: str, seen: Mapping[str, Timings]) -> Profile:
    """Add a variant that was not measured to a profile, with its live times or else those of a measured variant.

    Watts, startup and memory are those of the measured variant.

    Args:
        profile: The profile.
        variant: The variant; nothing changes where it was measured.
        like: A measured variant.
        seen: Times of live answers by variant.
    """
    if any(entry.variant == variant for entry in profile.entries):
        return profile
    times = seen.get(variant)
    added = [
        replace(entry, variant=variant, alone=times or entry.alone, loaded=times or entry.loaded)
        for entry in profile.entries
        if entry.variant == like
    ]
    return replace(profile, entries=(*profile.entries, *added))


def stretched(profile: Profile, variant: str, like: str, ratio: float, active_w: float = math.nan) -> Profile:
    """Replace a variant's entries in a profile by those of another variant, with times multiplied by a ratio.

    Args:
        profile: The profile.
        variant: The variant.
        like: A measured variant.
        ratio: Its times over those of ``like``, above 0.
        active_w: Watts of a core that is busy with it; NaN for those of ``like``.
    """
    added = [
        replace(
            entry,
            variant=variant,
            alone=_times(entry.alone, ratio),
            loaded=_times(entry.loaded, ratio),
            active_w=entry.active_w if math.isnan(active_w) else active_w,
            batches=_batches(entry, ratio),
        )
        for entry in profile.entries
        if entry.variant == like
    ]
    others = tuple(entry for entry in profile.entries if entry.variant != variant)
    return replace(profile, entries=(*others, *added))


def rescaled(profile: Profile, variant: str, ratio: float) -> Profile:
    """The profile with all times of a variant multiplied by a ratio.

    Args:
        profile: The profile.
        variant: The variant.
        ratio: The ratio, above 0.
    """
    entries = [
        replace(
            entry,
            alone=_times(entry.alone, ratio),
            loaded=_times(entry.loaded, ratio),
            batches=_batches(entry, ratio),
        )
        if entry.variant == variant
        else entry
        for entry in profile.entries
    ]
    return replace(profile, entries=tuple(entries))


def _batches(entry: SliceProfile, ratio: float) -> dict[int, Timings]:
    return {size: _times(times, ratio) for size, times in entry.batches.items()}


def _times(times: Timings, ratio: float) -> Timings:
    return Timings(times.service_s * ratio, times.cpu_s * ratio)


def _blend(parts: Sequence[tuple[SliceProfile, float]], name: str) -> SliceProfile:
    """Blend several entries of one slice into one; joules a request are their mean by shares."""
    loaded = _mixture([(entry.loaded, share) for entry, share in parts])
    energy_j = math.fsum(share * entry.energy_j for entry, share in parts)
    first = max(parts, key=lambda one: one[1])[0]
    return replace(
        first,
        variant=name,
        alone=_mixture([(entry.alone, share) for entry, share in parts]),
        loaded=loaded,
        active_w=energy_j / loaded.mean_cpu_s if loaded.mean_cpu_s > 0 and energy_j > 0 else first.active_w,
        startup_s=math.fsum(entry.startup_s for entry, _ in parts),
        startup_cpu_s=math.fsum(entry.startup_cpu_s for entry, _ in parts),
        memory_bytes=sum(entry.memory_bytes for entry, _ in parts),
        awake_w=max(entry.awake_w for entry, _ in parts),
    )


def _mixture(parts: Sequence[tuple[Timings, float]]) -> Timings:
    """Samples of a mixture: a number of each part in proportion to its share, evenly over its quantiles."""
    ends = np.rint(np.cumsum([share for _, share in parts]) * _SAMPLES).astype(int)
    service_s: list[FloatArray] = []
    cpu_s: list[FloatArray] = []
    for (times, _), count in zip(parts, np.diff(ends, prepend=0).tolist(), strict=True):
        order = np.argsort(times.service_s, kind="stable")
        chosen = order[((np.arange(count) + 0.5) * len(times) / max(count, 1)).astype(int)]
        service_s.append(times.service_s[chosen])
        cpu_s.append(times.cpu_s[chosen])
    return Timings(np.concatenate(service_s), np.concatenate(cpu_s))
