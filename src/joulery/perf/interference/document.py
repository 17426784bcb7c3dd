"""Conversion of interference profiles to JSON-ready objects and back (schema ``joulery.interference/1``)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any, TypeVar

from joulery.domain.errors import DataError
from joulery.domain.quality import Quality
from joulery.perf.interference.model import (
    LARGEST_BATCH,
    GpuCoefficients,
    InterferenceProfile,
    ModelCoefficients,
    ModelFit,
    work,
)

SCHEMA = "joulery.interference/1"
T = TypeVar("T", GpuCoefficients, ModelCoefficients)


def as_document(profile: InterferenceProfile) -> dict[str, Any]:
    """The profile as an object that :func:`from_document` reads back equal; an infinite cap is written as null."""
    gpu = {key: None if value == math.inf else value for key, value in asdict(profile.gpu).items()}
    return {
        "schema": SCHEMA,
        "gpu": gpu,
        "models": {name: asdict(model) for name, model in profile.models.items()},
        "form": profile.form,
        "source": profile.source,
        "quality": profile.quality.value,
        "fits": [_fit_document(fit) for fit in profile.fits],
        "notes": list(profile.notes),
        **({"bands": dict(profile.bands)} if profile.bands else {}),
    }


def _fit_document(fit: ModelFit) -> dict[str, Any]:
    return {
        "model": fit.model,
        "data": fit.data,
        "points": len(fit.error_ratio),
        "mape_ratio": fit.mape_ratio,
        "p95_ratio": fit.quantile_ratio(0.95),
        "max_ratio": fit.max_ratio,
        "bias_ratio": fit.bias_ratio,
        "error_ratio": [float(f"{error:.6g}") for error in fit.error_ratio],
    }


def from_document(document: Any, *, file: str | None = None) -> InterferenceProfile:
    """Read a profile from a JSON object.

    Raises:
        DataError: Another schema, a missing or unknown coefficient, or a value with which no prediction is possible.
    """
    if not isinstance(document, Mapping) or document.get("schema") != SCHEMA:
        got = document.get("schema") if isinstance(document, Mapping) else type(document).__name__
        raise DataError(f"not an interference profile: schema is {got!r}, expected {SCHEMA!r}", file=file)
    gpu = _coefficients(GpuCoefficients, document.get("gpu"), "gpu", file)
    models = document.get("models")
    if not isinstance(models, Mapping) or not models:
        raise DataError("an interference profile needs at least one model", file=file)
    profile = InterferenceProfile(
        gpu=gpu,
        models={str(name): _coefficients(ModelCoefficients, model, str(name), file) for name, model in models.items()},
        form=str(document.get("form", "igniter")),
        source=str(document.get("source", "")),
        quality=Quality(document.get("quality", Quality.ASSUMED.value)),
        fits=tuple(
            ModelFit(str(fit["model"]), str(fit["data"]), tuple(map(float, fit["error_ratio"])))
            for fit in document.get("fits", ())
        ),
        notes=tuple(map(str, document.get("notes", ()))),
        bands={str(name): float(band) for name, band in document.get("bands", {}).items()},
    )
    check_profile(profile, file=file)
    return profile


def _coefficients(kind: type[T], values: Any, name: str, file: str | None) -> T:
    if not isinstance(values, Mapping):
        raise DataError(f"{name}: expected an object of coefficients, got {type(values).__name__}", file=file)
    known = {field.name for field in fields(kind)}
    if unknown := sorted(set(values) - known):
        raise DataError(f"{name}: no coefficient is called {', '.join(unknown)}", file=file)
    numbers: dict[str, Any] = {}
    for key, value in values.items():
        if key == "name":
            numbers[key] = str(value)
        elif key == "power_cap_w" and value is None:
            numbers[key] = math.inf
        elif isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            numbers[key] = float(value)
        else:
            raise DataError(f"{name}: {key} is {value!r}, expected a finite number", file=file)
    try:
        return kind(**numbers)
    except TypeError:
        missing = sorted(known - set(numbers))
        raise DataError(f"{name}: missing coefficients: {', '.join(missing)}", file=file) from None


def check_profile(profile: InterferenceProfile, *, file: str | None = None) -> None:
    """Reject coefficients with which the equations are meaningless.

    Raises:
        DataError: A coefficient is out of range; the message names it.
    """
    gpu = profile.gpu
    for name, good in (
        ("power_cap_w", gpu.power_cap_w > 0),
        ("clock_max_mhz", gpu.clock_max_mhz > 0),
        ("idle_w", gpu.idle_w >= 0),
        ("pcie_bytes_per_ms", gpu.pcie_bytes_per_ms > 0),
        ("clock_mhz_per_w", gpu.clock_mhz_per_w <= 0),
        ("unit_percent", 0 < gpu.unit_percent <= 100),
        ("delay_ms_per_neighbour", gpu.delay_ms_per_neighbour >= 0),
        ("delay_offset_ms", 2 * gpu.delay_ms_per_neighbour + gpu.delay_offset_ms >= 0),
    ):
        if not good:
            raise DataError(f"{gpu.name}: {name} of {getattr(gpu, name):g} is impossible", file=file)
    for name, model in profile.models.items():
        if model.k4 <= -gpu.unit_percent:
            raise DataError(f"{name}: k4 of {model.k4:g} makes a share of one unit infinitely slow", file=file)
        # Proofs rest on it that a neighbour more, or a larger share of one, never makes anybody faster.
        for key in (
            *("load_bytes", "feedback_bytes", "kernels", "launch_ms", "k5", "shared_launch_ms"),
            *("power_slope", "cache_slope", "cache_sensitivity"),
        ):
            if getattr(model, key) < 0:
                raise DataError(f"{name}: {key} of {getattr(model, key):g} is impossible, expected >= 0", file=file)
        if model.pcie_contention < 1:
            raise DataError(
                f"{name}: pcie_contention of {model.pcie_contention:g} is impossible, expected >= 1", file=file
            )
        if not all(work(model, batch) > 0 for batch in range(1, LARGEST_BATCH + 1)):
            raise DataError(f"{name}: k1, k2 and k3 give a batch of up to {LARGEST_BATCH} no work to do", file=file)
