"""``joulery profile --from``: an interference profile from anybody's own measurements in CSV files."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import RenderableType
from rich.table import Table

from joulery.domain.errors import DataError
from joulery.perf import catalog
from joulery.perf.interference import InterferenceProfile, ModelFit
from joulery.perf.interference_calibrate import PairLatency, SoloLatency, calibrate, starting_profile
from joulery.perf.interference_document import check_profile
from joulery.ui.format import percent
from joulery.ui.plan.request import read_profile

SOLO_COLUMNS = ("model", "batch", "r_pct", "latency_ms")
PAIR_COLUMNS = ("model1", "batch1", "r1_pct", "latency1_ms", "model2", "batch2", "r2_pct", "latency2_ms")


def fitted(solo_file: Path, pairs_file: Path, base: str) -> InterferenceProfile:
    """The calibrated profile of two files of measurements.

    Args:
        solo_file: CSV with columns ``model, batch, r_pct, latency_ms``: each model alone.
        pairs_file: CSV with columns ``model1, batch1, r1_pct, latency1_ms, model2 ...``: two side by side.
        base: What is kept of the GPU and of known models: a name of the catalog, or a profile file.

    Raises:
        DataError: A file cannot be read, lacks a column, or holds something that is no measurement.
        ConfigError: No such name in the catalog.
    """
    solo = read_solo(solo_file)
    start = read_profile(Path(base)) if base.endswith(".json") else catalog.profile(base)
    source = f"fitted on {solo_file.name} and {pairs_file.name}"
    profile = calibrate(starting_profile(start, solo), solo, read_pairs(pairs_file), source=source)
    check_profile(profile)
    return profile


def read_solo(file: Path) -> list[SoloLatency]:
    """The solo latencies in a CSV file.

    Raises:
        DataError: It cannot be read, lacks a column, or a row holds no measurement.
    """
    return [
        SoloLatency(
            row["model"],
            _whole(row, "batch", file, at),
            _positive(row, "r_pct", file, at),
            _positive(row, "latency_ms", file, at),
        )
        for at, row in _rows(file, SOLO_COLUMNS)
    ]


def read_pairs(file: Path) -> list[PairLatency]:
    """The latencies of co-located pairs in a CSV file.

    Raises:
        DataError: As :func:`read_solo`.
    """
    return [
        PairLatency(
            row["model1"],
            _whole(row, "batch1", file, at),
            _positive(row, "r1_pct", file, at),
            _positive(row, "latency1_ms", file, at),
            row["model2"],
            _whole(row, "batch2", file, at),
            _positive(row, "r2_pct", file, at),
            _positive(row, "latency2_ms", file, at),
        )
        for at, row in _rows(file, PAIR_COLUMNS)
    ]


def _rows(file: Path, columns: tuple[str, ...]) -> Iterator[tuple[int, dict[str, str]]]:
    try:
        with file.open(newline="", encoding="utf-8") as lines:
            reader = csv.DictReader(lines)
            missing = [name for name in columns if name not in (reader.fieldnames or ())]
            if missing:
                raise DataError(
                    f"no column {', '.join(missing)}",
                    file=str(file),
                    row=1,
                    hint=f"columns needed: {', '.join(columns)}",
                )
            yield from enumerate(reader, 2)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"cannot be read: {error}", file=str(file)) from None


def _positive(row: dict[str, str], key: str, file: Path, at: int) -> float:
    try:
        value = float(row[key] or "nan")
    except (TypeError, ValueError):
        value = math.nan
    if not 0 < value < math.inf:
        raise DataError(f"{key} is {row[key]!r}, expected a number above 0", file=str(file), row=at)
    return value


def _whole(row: dict[str, str], key: str, file: Path, at: int) -> int:
    value = _positive(row, key, file, at)
    if value != int(value):
        raise DataError(f"{key} is {row[key]!r}, expected a whole number", file=str(file), row=at)
    return int(value)


def fit_table(profile: InterferenceProfile) -> RenderableType:
    """How well the profile predicts, for each model and for all: what it was fitted on, and what it never saw."""
    table = Table(box=None, pad_edge=False)
    for heading in ("data", "model", "points", "mean error", "95th percentile", "largest", "bias"):
        table.add_column(heading, justify="left" if heading in ("data", "model") else "right")
    for data in dict.fromkeys(fit.data for fit in profile.fits):
        fits = [fit for fit in profile.fits if fit.data == data]
        everything = ModelFit("all", data, tuple(error for fit in fits for error in fit.error_ratio))
        for fit in (*fits, everything):
            table.add_row(
                data,
                fit.model,
                str(len(fit.error_ratio)),
                percent(fit.mape_ratio, 2),
                percent(fit.quantile_ratio(0.95), 1),
                percent(fit.max_ratio, 1),
                f"{100 * fit.bias_ratio:+.1f} %",
                style="bold" if fit is everything else None,
            )
    return table


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
