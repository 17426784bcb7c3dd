"""Folders of exhaustive profiles: ``model.json`` and one ``exhaustive_SERVICE.csv`` a service.

The form is that of a calibrated profile of the Clover services; ``partition_code`` counts the partitions of the A100
menu from 0 and ``models`` gives one character a slice, in the order in which the slices are created.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from joulery.domain.errors import DataError
from joulery.domain.gpu.mig import A100_40GB, MigMenu
from joulery.domain.serving.variant_table import TableEntry, VariantTable
from joulery.store.columns import CsvRow, read_rows

_COLUMNS = ("mean_interarrival_s", "partition_code", "models", "accuracy_pct", "p95_ms", "energy_j_per_request")


def read_tables(folder: Path, menu: MigMenu = A100_40GB) -> dict[str, VariantTable]:
    """Every service of a profile folder, by name.

    Raises:
        DataError: ``model.json`` or a table is missing, or holds an invalid value; the error names file and row.
    """
    path = folder / "model.json"
    try:
        model = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(
            f"cannot be read: {error.strerror}",
            file=str(path),
            hint="name a folder with model.json and exhaustive_*.csv",
        ) from None
    except ValueError as error:
        raise DataError(f"not JSON: {error}", file=str(path)) from None
    services = model.get("per_service") if isinstance(model, dict) else None
    if not isinstance(services, dict) or not services:
        raise DataError("no services: expected an object per_service with one object a service", file=str(path))
    gpus = model.get("n_gpus", 2)
    if not isinstance(gpus, int) or gpus < 1:
        raise DataError(f"n_gpus is {gpus!r}, expected a whole number of 1 or more", file=str(path))
    return {name: _table(folder, name, base, path, menu, gpus) for name, base in services.items()}


def _table(folder: Path, name: str, base: Any, model: Path, menu: MigMenu, gpus: int) -> VariantTable:
    if not isinstance(base, dict):
        raise DataError(f"service {name!r} is not an object", file=str(model))
    file = folder / f"exhaustive_{name}.csv"
    entries = tuple(_entry(row, menu) for row in read_rows(file, _COLUMNS))
    return VariantTable(
        service=name,
        gpus=gpus,
        entries=entries,
        base_accuracy_ratio=model_number(base, "base_acc", model, positive=True) / 100,
        base_latency_s=model_number(base, "base_p95_ms_sla", model, positive=True) / 1000,
        base_energy_j=model_number(base, "base_energy_j", model, positive=True),
        quality=f"table {file.name} of {folder.name}",
    )


def _entry(row: CsvRow, menu: MigMenu) -> TableEntry:
    code, models = row["partition_code"], row["models"]
    if not code.isdigit() or int(code) >= len(menu.partitions):
        raise row.wrong(f"partition {code!r}: expected 0 to {len(menu.partitions) - 1}")
    slices = menu.partitions[int(code)]
    if len(models) != len(slices):
        raise row.wrong(f"{len(slices)} slices but models {models!r}")
    return TableEntry(
        interarrival_s=row.positive("mean_interarrival_s"),
        instances=tuple(zip(models, slices, strict=True)),
        accuracy_ratio=row.positive("accuracy_pct") / 100,
        latency_s=row.positive("p95_ms") / 1000,
        energy_j=row.positive("energy_j_per_request"),
    )


def model_number(model: Mapping[str, Any], key: str, file: Path, *, positive: bool = False) -> float:
    """A number of ``model.json``, or of a service in it.

    Args:
        model: The object that holds it.
        key: Its name.
        file: The file, for errors.
        positive: Refuse 0 too.

    Raises:
        DataError: It is missing, not a number, not finite, or too small.
    """
    try:
        value = float(model[key])
    except (KeyError, TypeError, ValueError):
        value = math.nan
    if not 0 <= value < math.inf or (positive and not value):
        expected = "a positive number" if positive else "a number of 0 or more"
        raise DataError(f"{key} is {model.get(key)!r}, expected {expected}", file=str(file))
    return value
