"""Convert tensor energy footprints to JSON and to series of a run; their keys are defined here only.

A run that holds one has the series ``ops`` (one row an operation, device and phase) and, in its manifest, ``anatomy``
(window, devices, how it was accounted, notes); with its events also ``events`` (one row an event).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from joulery.domain.energy.tensor_footprint import DeviceEnergy, TensorFootprint
from joulery.domain.errors import DataError
from joulery.domain.json_numbers import known_number, or_nan
from joulery.domain.quality import Quality
from joulery.domain.trace.events import EventTrace
from joulery.store.run.directory import Run, RunWriter
from joulery.store.run.series import Labels, read_labelled, series_file

OPS, EVENTS, ANATOMY = "ops", "events", "anatomy"
_WHOLE = ("runtime_ns", "uncovered_ns", "count", "samples", "median_ns", "first_ns", "active_ns")


_REAL = ("energy_j", "active_j", "carbon_g")


def tensor_footprint_to_dict(footprint: TensorFootprint) -> dict[str, Any]:
    """The object that ``joulery account --json`` prints. Unknown is null, never 0.

    ``devices`` maps names to ``total_j``, ``attributed_j``, ``unattributed_j`` (null without a meter), ``uncovered_s``
    and more; ``ops`` lists ``op``, ``device``, ``phase``, ``energy_j``, ``runtime_s``, ``count`` and more, by energy.
    """
    order = np.argsort(-np.nan_to_num(footprint.energy_j), kind="stable").tolist()
    return {
        "schema": "joulery.account/1",
        "window_ns": list(footprint.window_ns),
        "estimator": footprint.estimator,
        "multiplicity": footprint.multiplicity,
        "devices": {entry.device: _device(entry) for entry in footprint.devices},
        "ops": [_row(footprint, at) for at in order],
        "notes": list(footprint.notes),
    }


def _device(entry: DeviceEnergy) -> dict[str, Any]:
    return {
        "total_j": known_number(entry.total_j),
        "attributed_j": known_number(entry.attributed_j),
        "unattributed_j": known_number(entry.unattributed_j),
        "uncovered_s": entry.uncovered_s,
        "covered_s": entry.covered_s,
        "active_s": entry.active_s,
        "resolution_s": known_number(entry.resolution_s),
        "quality": entry.quality.value if entry.metered else None,
        "estimator": entry.estimator if entry.metered else None,
        "other_j": entry.other_j,
        "idle_j": entry.idle_j,
        "carbon_g": known_number(entry.carbon_g),
    }


def _row(footprint: TensorFootprint, at: int) -> dict[str, Any]:
    runtime_s, active_s = float(footprint.runtime_ns[at]) / 1e9, float(footprint.active_ns[at]) / 1e9
    energy_j, active_j = float(footprint.energy_j[at]), float(footprint.active_j[at])
    read = not footprint.unread[at]
    return {
        "op": footprint.op[at],
        "device": footprint.device[at],
        "phase": footprint.phase[at],
        "energy_j": known_number(energy_j),
        "error_j": known_number(float(footprint.error_j[at])),
        "carbon_g": known_number(float(footprint.carbon_g[at])),
        "runtime_s": runtime_s,
        "count": int(footprint.count[at]),
        "samples": int(footprint.samples[at]),
        "uncovered_s": float(footprint.uncovered_ns[at]) / 1e9,
        "median_s": float(footprint.median_ns[at]) / 1e9,
        "share_power_w": known_number(energy_j / runtime_s) if read and runtime_s > 0 else None,
        "device_power_w": known_number(active_j / active_s) if read and active_s > 0 else None,
        "composite": footprint.op[at] in footprint.composite,
    }


def keep_footprint(writer: RunWriter, footprint: TensorFootprint) -> None:
    """Write a footprint into a run.

    Raises:
        CapabilityError: The disk refuses.
    """
    columns: dict[str, Any] = {"op": footprint.op, "device": footprint.device, "phase": footprint.phase}
    columns |= {name: getattr(footprint, name) for name in (*_WHOLE, *_REAL, "error_j")}
    writer.write_series(OPS, columns)
    writer.describe(
        anatomy={
            "window_ns": list(footprint.window_ns),
            "devices": {entry.device: _device(entry) for entry in footprint.devices},
            "estimator": footprint.estimator,
            "multiplicity": footprint.multiplicity,
            "composite": sorted(footprint.composite),
            "feeds": sorted(footprint.feeds),
            "process_j": {str(process): joules for process, joules in footprint.process_j.items()},
            "notes": list(footprint.notes),
        }
    )


def has_footprint(run: Run) -> bool:
    """Whether a run holds a tensor energy footprint."""
    return ANATOMY in run.manifest and OPS in run.series_names


def kept_footprint(run: Run) -> TensorFootprint:
    """The footprint of a run.

    Raises:
        DataError: It holds none, or it is damaged.
    """
    if not has_footprint(run):
        raise DataError(
            "the run was not traced, so it has no operations",
            file=str(run.path),
            hint="record it with joulery measure --trace torch|jax|tensorflow, or joulery account --out",
        )
    columns, about = run.series(OPS), run.manifest[ANATOMY]
    try:
        return TensorFootprint(
            tuple(about["window_ns"]),
            [_device_from(name, entry) for name, entry in about["devices"].items()],
            [str(name) for name in columns["op"]],
            [str(name) for name in columns["device"]],
            [str(name) for name in columns["phase"]],
            **{name: columns[name] for name in (*_WHOLE, *_REAL)},
            error_j=columns.get("error_j"),
            estimator=about["estimator"],
            multiplicity=about["multiplicity"],
            composite=frozenset(about["composite"]),
            feeds=frozenset((str(one), str(other)) for one, other in about.get("feeds", ())),
            process_j={int(process): float(joules) for process, joules in about.get("process_j", {}).items()},
            notes=about["notes"],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"the footprint is damaged: {type(error).__name__} {error}", file=str(run.path)) from error


def _device_from(name: str, entry: dict[str, Any]) -> DeviceEnergy:
    return DeviceEnergy(
        device=name,
        total_j=or_nan(entry["total_j"]),
        attributed_j=or_nan(entry["attributed_j"]),
        unattributed_j=or_nan(entry["unattributed_j"]),
        covered_s=or_nan(entry["covered_s"]),
        uncovered_s=or_nan(entry["uncovered_s"]),
        active_s=or_nan(entry["active_s"]),
        resolution_s=or_nan(entry["resolution_s"]),
        quality=Quality(entry["quality"] or Quality.MEASURED),
        estimator=entry["estimator"] or "recency",
        other_j=or_nan(entry["other_j"]),
        idle_j=or_nan(entry["idle_j"]),
        carbon_g=or_nan(entry["carbon_g"]),
    )


def keep_events(writer: RunWriter, trace: EventTrace) -> None:
    """Write the events of a trace into a run, so that it can be accounted again and plotted.

    Raises:
        CapabilityError: The disk refuses.
    """
    writer.write_series(
        EVENTS,
        {
            "op": Labels(trace.op, trace.ops or [""]),
            "device": Labels(trace.device, trace.devices or [""]),
            "phase": Labels(trace.phase, trace.phases or [""]),
            "lane": trace.lane,
            "start_ns": trace.start_ns,
            "dur_ns": trace.dur_ns,
        },
    )


def kept_events(run: Run) -> EventTrace:
    """The events of a run.

    Raises:
        DataError: It holds none, or they are damaged.
    """
    if EVENTS not in run.series_names:
        raise DataError("the run keeps no events", file=str(run.path), hint="record it with joulery account --out")
    columns, labels = read_labelled(series_file(run.path, EVENTS), ("op", "device", "phase"))
    try:
        op, device, phase = (labels[name] for name in ("op", "device", "phase"))
        return EventTrace(
            list(op.words) or [""],
            list(device.words) or [""],
            list(phase.words) or [""],
            op=op.codes,
            device=device.codes,
            phase=phase.codes,
            lane=columns["lane"],
            start_ns=columns["start_ns"],
            dur_ns=columns["dur_ns"],
            composite=frozenset(run.manifest.get(ANATOMY, {}).get("composite", ())),
            notes=run.manifest.get(ANATOMY, {}).get("notes", ()),
        )
    except KeyError as error:
        raise DataError(f"the events are damaged: {error} is missing", file=str(run.path)) from error
