"""Regroups and adds footprints: folds self-similar layers, rolls up by module, combines sessions."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from joulery.domain.arrays import FloatArray, IntArray
from joulery.domain.energy.tensor_footprint import DeviceEnergy, TensorFootprint
from joulery.domain.errors import ConfigError, DataError
from joulery.domain.quality import weakest

SIMILAR = re.compile(r"^(layer|layers|h|block|blocks)[._/]?\d+$")
"""Pattern of components that are one of several similar layers (Smaragdine, Definition 3.5, for whole components)."""

FOLDED = "transformer"
_INDEXED = re.compile(r"^.*\D[._]?\d+$")
_CALL = re.compile(r"@\d+$")
_WHOLE = ("runtime_ns", "uncovered_ns", "count", "samples", "median_ns", "first_ns", "active_ns")
_REAL = ("energy_j", "active_j", "carbon_g")
BY = ("module", "layer", "op", "phase")


@dataclass(frozen=True, slots=True)
class Fold:
    """A rule that gives one name to components that represent the same thing.

    Attributes:
        pattern: Matched against one whole component of a qualified name at a time: ``layer_1`` is not ``layer_10``.
        name: New name of a matching component; may use groups of the pattern. Empty leaves the component out.
    """

    pattern: re.Pattern[str]
    name: str


TRANSFORMERS = (Fold(SIMILAR, FOLDED),)


def fold_from(text: str) -> Fold:
    """Parse a fold, ``PATTERN=NAME`` such as ``group_\\d+=group_k``; ``PATTERN=`` leaves matching components out.

    Raises:
        ConfigError: The text has not this form, or the pattern is not a regular expression.
    """
    pattern, equals, name = text.rpartition("=")
    if not equals or not pattern or "/" in name:
        expected = r"PATTERN=NAME for one path component, such as group_\d+=group"
        raise ConfigError("not a fold", got=text, expected=expected)
    try:
        return Fold(re.compile(pattern), name)
    except re.error as error:
        raise ConfigError(f"not a regular expression: {error}", got=pattern, expected="a regular expression") from error


def folded(footprint: TensorFootprint, folds: Sequence[Fold] = TRANSFORMERS) -> TensorFootprint:
    """The summarised footprint (STEF): rows with equal new names are added up."""
    return regrouped(footprint, lambda op, phase: (fold_name(op, folds), phase))


def fold_name(op: str, folds: Sequence[Fold] = TRANSFORMERS) -> str:
    """A qualified name with every matching component replaced; the first fold that matches a component counts.

    A name of which nothing would be left stays as it is.
    """
    return "/".join(filter(None, (_fold_component(part, folds) for part in op.split("/")))) or op


def rolled_up(footprint: TensorFootprint, by: str, depth: int | None = None) -> TensorFootprint:
    """Combine the rows by a grouping.

    Args:
        footprint: The footprint to regroup.
        by: ``op`` keeps the operations; ``module`` drops the operation; ``layer`` cuts at the first numbered component
            (``encoder/layer_3``), elsewhere as ``module``; ``phase`` keeps the phase alone.
        depth: Number of components after which names are cut.

    Raises:
        ConfigError: ``by`` is none of these, or ``depth`` is not positive.
    """
    if by not in BY:
        raise ConfigError("no such grouping", got=by, expected=" | ".join(BY))
    if depth is not None and depth < 1:
        raise ConfigError("a depth counts path components", got=str(depth), expected="at least 1")

    def name(op: str, phase: str) -> tuple[str, str]:
        if by == "phase":
            return phase or "other", phase
        parts = op.split("/")
        if by != "op" and len(parts) > 1:
            parts = parts[:-1]
        if by == "layer":
            parts = _to_layer(parts)
        return "/".join(parts[:depth]), phase

    return regrouped(footprint, name)


def regrouped(footprint: TensorFootprint, rename: Callable[[str, str], tuple[str, str]]) -> TensorFootprint:
    """Rows under new names and phases; those that become equal (on one device) are added up."""
    keys = [
        (*rename(op, phase), device)
        for op, phase, device in zip(footprint.op, footprint.phase, footprint.device, strict=True)
    ]
    composite = frozenset(rename(op, "")[0] for op in footprint.composite)
    feeds = frozenset(
        renamed
        for one, other in footprint.feeds
        if _still_apart(one, other, *(renamed := (rename(one, "")[0], rename(other, "")[0])))
    )
    return _grouped(footprint, keys, [footprint], composite, feeds)


def _still_apart(one: str, other: str, new_one: str, new_other: str) -> bool:
    """Whether two operations still differ at the same component: an edge between merged layers does not."""
    at = next(
        (i for i, pair in enumerate(zip(one.split("/"), other.split("/"), strict=False)) if pair[0] != pair[1]), None
    )
    return new_one != new_other and (at is None or new_one.split("/")[at : at + 1] != new_other.split("/")[at : at + 1])


def selected(footprint: TensorFootprint, *, phase: str | None = None, device: str | None = None) -> TensorFootprint:
    """The rows of one phase, of one device; everything where neither is named. Devices keep their totals.

    Raises:
        ConfigError: No row has that phase or device.
    """
    kept = [
        at
        for at, (where, when) in enumerate(zip(footprint.device, footprint.phase, strict=True))
        if device in (None, where) and phase in (None, when or "other")
    ]
    if not kept and len(footprint):
        raise ConfigError(
            "no operation of that phase and device",
            got=", ".join(filter(None, (phase, device))),
            expected=f"{' | '.join(sorted({p or 'other' for p in footprint.phase}))}; "
            f"{' | '.join(sorted(set(footprint.device)))}",
        )
    kept_columns: dict[str, Any] = {
        name: tuple(getattr(footprint, name)[at] for at in kept) for name in ("op", "device", "phase")
    }
    kept_columns |= {name: getattr(footprint, name)[kept] for name in (*_WHOLE, *_REAL, "error_j")}
    devices = tuple(entry for entry in footprint.devices if device in (None, entry.device))
    return replace(footprint, devices=devices, **kept_columns)


def added(footprints: Sequence[TensorFootprint]) -> TensorFootprint:
    """Several sessions of one program as one: energies, times and counts add up.

    Raises:
        DataError: There is no session, or their estimators or multiplicities differ.
    """
    if not footprints:
        raise DataError("there is no session to account")
    if len({(f.estimator, f.multiplicity) for f in footprints}) > 1:
        raise DataError("sessions accounted in different ways cannot be added")
    if len(footprints) == 1:
        return footprints[0]
    keys = [(op, phase, device) for f in footprints for op, phase, device in zip(f.op, f.phase, f.device, strict=True)]
    composite = frozenset[str]().union(*(f.composite for f in footprints))
    feeds = frozenset[tuple[str, str]]().union(*(f.feeds for f in footprints))
    return _grouped(footprints[0], keys, footprints, composite, feeds)


def _grouped(
    first: TensorFootprint,
    keys: Sequence[tuple[str, str, str]],
    sources: Sequence[TensorFootprint],
    composite: frozenset[str],
    feeds: frozenset[tuple[str, str]],
) -> TensorFootprint:
    names = sorted(set(keys), key=lambda key: (key[0], key[2], key[1]))
    index = {key: i for i, key in enumerate(names)}
    row = np.array([index[key] for key in keys], np.int64)

    def whole(column: str) -> IntArray:
        values = np.concatenate([getattr(source, column) for source in sources])
        return np.bincount(row, values, len(names)).astype(np.int64)

    def real(column: str) -> FloatArray:
        values = np.concatenate([getattr(source, column) for source in sources])
        return np.asarray(np.bincount(row, values, len(names)), np.float64)

    count = whole("count")
    first_ns = np.full(len(names), np.iinfo(np.int64).max)
    np.minimum.at(first_ns, row, np.concatenate([source.first_ns for source in sources]))
    return TensorFootprint(
        (min(f.window_ns[0] for f in sources), max(f.window_ns[1] for f in sources)),
        _added_devices([device for source in sources for device in source.devices]),
        [key[0] for key in names],
        [key[2] for key in names],
        [key[1] for key in names],
        energy_j=real("energy_j"),
        runtime_ns=whole("runtime_ns"),
        uncovered_ns=whole("uncovered_ns"),
        count=count,
        samples=whole("samples"),
        median_ns=_weighted_median(row, sources, len(names)),
        first_ns=first_ns,
        active_ns=whole("active_ns"),
        active_j=real("active_j"),
        carbon_g=real("carbon_g"),
        error_j=_added_errors(row, sources, len(names)),
        estimator=first.estimator,
        multiplicity=first.multiplicity,
        composite=composite & {key[0] for key in names},
        feeds=feeds,
        process_j=_added_processes(sources),
        notes=list(dict.fromkeys(note for source in sources for note in source.notes)),
    )


def _added_processes(sources: Sequence[TensorFootprint]) -> dict[int, float]:
    processes = sorted({process for source in sources for process in source.process_j})
    return {process: math.fsum(source.process_j.get(process, 0.0) for source in sources) for process in processes}


def _added_errors(row: IntArray, sources: Sequence[TensorFootprint], size: int) -> FloatArray:
    """Standard errors of sums: rows of one session vary together and add up, sessions vary independently."""
    bounds = np.cumsum([0, *(len(source) for source in sources)])
    squares = np.zeros(size)
    for source, begin, end in zip(sources, bounds, bounds[1:], strict=False):
        squares += np.bincount(row[begin:end], source.error_j, size) ** 2
    return np.asarray(np.sqrt(squares), np.float64)


def _weighted_median(row: IntArray, sources: Sequence[TensorFootprint], size: int) -> IntArray:
    """Median of the medians of the combined rows, each counted as often as it has events."""
    median = np.concatenate([source.median_ns for source in sources])
    count = np.concatenate([source.count for source in sources])
    result = np.zeros(size, np.int64)
    order = np.lexsort((median, row))
    edges = np.searchsorted(row[order], np.arange(size + 1))
    for group in range(size):
        members = order[edges[group] : edges[group + 1]]
        reached = np.cumsum(count[members])
        result[group] = median[members[int(np.searchsorted(reached, (reached[-1] + 1) // 2))]]
    return result


def _added_devices(devices: Sequence[DeviceEnergy]) -> list[DeviceEnergy]:
    result: dict[str, DeviceEnergy] = {}
    for one in devices:
        seen = result.get(one.device)
        result[one.device] = one if seen is None else _added_device(seen, one)
    return [result[name] for name in sorted(result)]


def _added_device(a: DeviceEnergy, b: DeviceEnergy) -> DeviceEnergy:
    known = [part for part in (a, b) if part.metered]
    return replace(
        a,
        total_j=math.fsum(part.total_j for part in known) if known else math.nan,
        attributed_j=math.fsum(part.attributed_j for part in known) if known else math.nan,
        unattributed_j=math.fsum(part.unattributed_j for part in known) if known else math.nan,
        covered_s=a.covered_s + b.covered_s,
        uncovered_s=a.uncovered_s + b.uncovered_s,
        active_s=a.active_s + b.active_s,
        resolution_s=float(np.nanmax([a.resolution_s, b.resolution_s])) if known else math.nan,
        quality=weakest((a.quality, b.quality)),
        other_j=a.other_j + b.other_j,
        idle_j=a.idle_j + b.idle_j,
        carbon_g=a.carbon_g + b.carbon_g,
        estimator=a.estimator if a.estimator == b.estimator else "recency and regression",
    )


def _fold_component(part: str, folds: Sequence[Fold]) -> str:
    plain = _CALL.sub("", part)
    for fold in folds:
        if match := fold.pattern.fullmatch(plain):
            return match.expand(fold.name)
    return part


def _to_layer(parts: list[str]) -> list[str]:
    for at, part in enumerate(parts):
        if _INDEXED.match(_CALL.sub("", part)):
            return parts[: at + 1]
    return parts
