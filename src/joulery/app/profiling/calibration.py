"""``joulery profile --fit``: fit the cost of a service's requests to a few measured runs of the whole service."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from joulery.domain.arrays import FloatArray
from joulery.domain.gpu.mig import A100_40GB
from joulery.perf.catalog.clover_services import CLOVER_POINTS, CLOVER_SERVICES
from joulery.perf.catalog.starting_costs import starting_costs
from joulery.perf.queues.pull_costs import PullPoint, ServiceCosts
from joulery.perf.queues.pull_document import as_document
from joulery.sim.queues.pull_fit import PointError, errors, fit
from joulery.store.columns import CsvRow, read_rows

BUILT_IN = "clover"
"""Name of the eighteen published points of the catalog."""
POINTS_FILE, VARIANTS_FILE = "measured_arrival_sweep.csv", "variants.csv"
_POINTS = (
    "service", "partition_code", "models", "n_gpus_physical", "mean_interarrival_s", "n_requests", "accuracy_pct",
    "p95_latency_ms", "energy_j_per_request",
)  # fmt: skip
_VARIANTS = ("service", "char", "variant", "accuracy_pct", "in_search_space")


@dataclass(frozen=True, slots=True)
class MeasuredPoints:
    """Measured runs of one service.

    Attributes:
        name: The service.
        gpus: Number of GPUs of the service.
        accuracy_ratio: Accuracy of each variant alone.
        points: The runs.
        source: Source of the runs.
    """

    name: str
    gpus: int
    accuracy_ratio: Mapping[str, float]
    points: tuple[PullPoint, ...]
    source: str


@dataclass(frozen=True, slots=True)
class Calibration:
    """Fitted costs of a service, with the errors on the runs that they were fitted to."""

    costs: ServiceCosts
    errors: tuple[PointError, ...]


def calibrated(what: str) -> list[Calibration]:
    """Fit every service of a source.

    Args:
        what: ``clover`` for the published points, a folder with ``measured_arrival_sweep.csv`` and ``variants.csv``, or
            the first of the two files.

    Raises:
        DataError: A file cannot be read, lacks a column, or has a value that is not a measurement.
    """
    found = []
    for measured in _built_in() if what == BUILT_IN else _read(Path(what)):
        gaps = _published_gaps(max(point.requests for point in measured.points))
        start = starting_costs(
            measured.name, measured.accuracy_ratio, measured.points, measured.gpus, f"a profile of {measured.source}"
        )
        costs = fit(start, measured.points, gaps)
        found.append(Calibration(costs, tuple(errors(costs, measured.points, gaps))))
    return found


def calibration_document(found: Sequence[Calibration]) -> dict[str, Any]:
    """The fitted services as one JSON object, with every measured point and its errors."""
    points = [
        {
            "service": each.costs.name,
            "interarrival_s": error.point.interarrival_s,
            "instances": [f"{variant} on {profile}" for variant, profile in error.point.instances],
            "accuracy_ratio": error.point.accuracy_ratio,
            "p95_s": error.point.p95_s,
            "energy_j": error.point.energy_j,
            "accuracy_error_points": error.accuracy_points,
            "p95_error_ratio": error.p95_ratio,
            "energy_error_ratio": error.energy_ratio,
        }
        for each in found
        for error in each.errors
    ]
    return {
        **as_document({each.costs.name: each.costs for each in found}),
        "quality": "modelled",
        "points": points,
        "totals": totals(found),
    }


def totals(found: Sequence[Calibration]) -> dict[str, Any]:
    """The worst errors over all measured points, and the idle power of each service."""
    every = [error for each in found for error in each.errors]
    return {
        "points": len(every),
        "worst_accuracy_points": max(abs(error.accuracy_points) for error in every),
        "worst_energy_ratio": max(abs(error.energy_ratio) for error in every),
        "worst_p95_ratio": max(abs(error.p95_ratio) for error in every),
        "p95_within_10_percent": sum(abs(error.p95_ratio) <= 0.10 for error in every),
        "idle_w": {each.costs.name: each.costs.gpus * each.costs.idle_w for each in found},
    }


def _published_gaps(requests: int) -> FloatArray:
    """Interarrival times of the published runs in units of their mean: numpy's legacy generator, seed 1."""
    return np.asarray(np.random.RandomState(1).exponential(1.0, requests), np.float64)


def _built_in() -> list[MeasuredPoints]:
    return [
        MeasuredPoints(
            name,
            CLOVER_SERVICES[name].gpus,
            {variant.name: variant.accuracy_ratio for variant in CLOVER_SERVICES[name].variants},
            points,
            "the published points of Clover (SC'23)",
        )
        for name, points in CLOVER_POINTS.items()
    ]


def _read(path: Path) -> list[MeasuredPoints]:
    file = path / POINTS_FILE if path.is_dir() else path
    names: dict[tuple[str, str], tuple[str, float]] = {}
    for row in read_rows(file.parent / VARIANTS_FILE, _VARIANTS):
        if row["in_search_space"] != "0":
            names[row["service"], row["char"]] = row["variant"], row.positive("accuracy_pct") / 100
    points: dict[str, list[PullPoint]] = {}
    gpus: dict[str, int] = {}
    for row in read_rows(file, _POINTS):
        points.setdefault(row["service"], []).append(_point(row, names))
        gpus[row["service"]] = int(row.positive("n_gpus_physical"))
    return [
        MeasuredPoints(
            name,
            gpus[name],
            {variant: accuracy for (service, _), (variant, accuracy) in names.items() if service == name},
            tuple(found),
            file.name,
        )
        for name, found in points.items()
    ]


def _point(row: CsvRow, names: Mapping[tuple[str, str], tuple[str, float]]) -> PullPoint:
    code, models = row["partition_code"], row["models"]
    if not code.isdigit() or int(code) >= len(A100_40GB.partitions):
        expected = f"0 to {len(A100_40GB.partitions) - 1}"
        raise row.wrong(f"partition {code!r}: expected {expected}")
    slices = A100_40GB.partitions[int(code)]
    unknown = [letter for letter in models if (row["service"], letter) not in names]
    if unknown or len(models) != len(slices):
        hint = f"one letter of {VARIANTS_FILE} a slice"
        raise row.wrong(f"models {models!r} on {len(slices)} slices", hint=hint)
    return PullPoint(
        interarrival_s=row.positive("mean_interarrival_s"),
        requests=int(row.positive("n_requests")),
        instances=tuple(
            (names[row["service"], letter][0], piece) for letter, piece in zip(models, slices, strict=True)
        ),
        accuracy_ratio=row.positive("accuracy_pct") / 100,
        p95_s=row.positive("p95_latency_ms") / 1000,
        energy_j=row.positive("energy_j_per_request"),
    )
