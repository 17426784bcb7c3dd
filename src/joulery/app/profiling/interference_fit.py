"""``joulery profile --from``: fit an interference profile to the user's measurements in CSV files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from joulery.app.planning.shares import read_interference
from joulery.perf import catalog
from joulery.perf.interference.calibration import PairLatency, SoloLatency, calibrate, starting_profile
from joulery.perf.interference.document import as_document, check_profile
from joulery.perf.interference.model import InterferenceProfile
from joulery.store.columns import read_rows

SOLO_COLUMNS = ("model", "batch", "r_pct", "latency_ms")
PAIR_COLUMNS = ("model1", "batch1", "r1_pct", "latency1_ms", "model2", "batch2", "r2_pct", "latency2_ms")


def fitted(solo_file: Path, pairs_file: Path, base: str) -> InterferenceProfile:
    """Fit the profile to two files of measurements.

    Args:
        solo_file: CSV with columns ``model, batch, r_pct, latency_ms``: each model alone.
        pairs_file: CSV with columns ``model1, batch1, r1_pct, latency1_ms, model2 ...``: two side by side.
        base: Profile with the values to keep of the GPU and of known models: a name in the catalog, or a profile file.

    Raises:
        DataError: A file cannot be read, lacks a column, or has a value that is not a measurement.
        ConfigError: No such name in the catalog.
    """
    solo = read_solo(solo_file)
    start = read_interference(Path(base)) if base.endswith(".json") else catalog.profile(base)
    source = f"fitted on {solo_file.name} and {pairs_file.name}"
    profile = calibrate(starting_profile(start, solo), solo, read_pairs(pairs_file), source=source)
    check_profile(profile)
    return profile


def read_solo(file: Path) -> list[SoloLatency]:
    """Read the solo latencies in a CSV file.

    Raises:
        DataError: The file cannot be read, lacks a column, or a row has a value that is not a measurement.
    """
    return [
        SoloLatency(
            row["model"],
            row.whole("batch"),
            row.positive("r_pct"),
            row.positive("latency_ms"),
        )
        for row in read_rows(file, SOLO_COLUMNS)
    ]


def read_pairs(file: Path) -> list[PairLatency]:
    """Read the latencies of co-located pairs in a CSV file.

    Raises:
        DataError: As :func:`read_solo`.
    """
    return [
        PairLatency(
            row["model1"],
            row.whole("batch1"),
            row.positive("r1_pct"),
            row.positive("latency1_ms"),
            row["model2"],
            row.whole("batch2"),
            row.positive("r2_pct"),
            row.positive("latency2_ms"),
        )
        for row in read_rows(file, PAIR_COLUMNS)
    ]


def profile_document(profile: InterferenceProfile) -> dict[str, Any]:
    """The profile as one JSON object, with its errors over all models."""
    return {**as_document(profile), "totals": totals(profile)}


def totals(profile: InterferenceProfile) -> dict[str, Any]:
    """Errors over all models, for each kind of data."""
    result = {}
    for data in dict.fromkeys(fit.data for fit in profile.fits):
        errors = np.abs([error for fit in profile.fits if fit.data == data for error in fit.error_ratio])
        result[data] = {
            "points": len(errors),
            "mape_ratio": float(errors.mean()),
            "p95_ratio": float(np.percentile(errors, 95)),
            "max_ratio": float(errors.max()),
        }
    return result
