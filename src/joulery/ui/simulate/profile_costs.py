"""What a request costs, from a profile folder: ``profile.csv`` beside ``model.json``.

The columns are those of the calibrated stand-in of the Clover services: per variant and slice whether it fits
(``allowed``), its host and device time and its dynamic joules. The noise of service times, contention and idle power
are in ``model.json``. Accuracies are those of the exhaustive table's pure configurations.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from joulery.domain.errors import DataError
from joulery.domain.mig import A100_40GB
from joulery.domain.variant_table import VariantTable
from joulery.perf.pull_costs import ServiceCosts, VariantCosts

FILE = "profile.csv"
_COLUMNS = ("service", "char", "slice", "allowed", "host_s", "gpu_s", "dynamic_energy_j_per_request")


def read_costs(folder: Path, tables: Mapping[str, VariantTable]) -> dict[str, ServiceCosts]:
    """The services of a folder whose costs are told; none where there is no ``profile.csv``.

    Raises:
        DataError: A file lacks a column, or holds what is no cost; file and row are named.
    """
    file, path = folder / FILE, folder / "model.json"
    if not file.exists():
        return {}
    try:
        model = json.loads(path.read_text(encoding="utf-8"))
        with file.open(newline="", encoding="utf-8") as lines:
            reader = csv.DictReader(lines)
            missing = [name for name in _COLUMNS if name not in (reader.fieldnames or ())]
            if missing:
                raise DataError(f"no column {', '.join(missing)}", file=str(file), row=1)
            rows = [(number, row) for number, row in enumerate(reader, 2)]
    except OSError as error:
        raise DataError(f"cannot read: {error.strerror}", file=str(file)) from None
    found = {}
    for name, table in tables.items():
        mine = [(number, row) for number, row in rows if row["service"] == name]
        if mine:
            found[name] = _service(name, table, model, mine, file, path)
    return found


def _service(
    name: str,
    table: VariantTable,
    model: Mapping[str, Any],
    rows: list[tuple[int, dict[str, str]]],
    file: Path,
    path: Path,
) -> ServiceCosts:
    noise = model["per_service"][name]
    numbers = {key: _model_number(noise, key, path) for key in ("kappa", "cv", "sd_s")}
    accuracy = {
        entry.instances[0][0]: entry.accuracy_ratio
        for entry in table.entries
        if len({variant for variant, _ in entry.instances}) == 1
    }
    letters = dict.fromkeys(row["char"] for _, row in rows)
    variants = [_variant(letter, accuracy[letter], rows, file) for letter in letters if letter in accuracy]
    return ServiceCosts(
        name=name,
        variants=tuple(sorted(variants, key=lambda variant: (variant.accuracy_ratio, variant.name))),
        contention=numbers["kappa"],
        size_cv=numbers["cv"],
        jitter_s=numbers["sd_s"],
        idle_w=_model_number(model, "p_idle_w_per_gpu", path),
        gpus=table.gpus,
        loads_s=table.loads_s,
        source=f"{file.name} of {file.parent.name}",
    )


def _variant(letter: str, accuracy: float, rows: list[tuple[int, dict[str, str]]], file: Path) -> VariantCosts:
    sizes = {profile.size: profile.name for profile in A100_40GB.profiles}
    mine = [(number, row) for number, row in rows if row["char"] == letter and row["allowed"] != "0"]
    device = {}
    for number, row in mine:
        if row["slice"] not in sizes:
            raise DataError(f"no slice {row['slice']!r} on a {A100_40GB.gpu}", file=str(file), row=number)
        device[sizes[row["slice"]]] = _number(row, "gpu_s", file, number)
    whole = A100_40GB.profiles[0].name
    if whole not in device:
        raise DataError(f"variant {letter!r} has no row for the whole GPU", file=str(file))
    number, row = mine[0]
    return VariantCosts(
        name=letter,
        accuracy_ratio=accuracy,
        host_s=_number(row, "host_s", file, number),
        gpu_s=device[whole],
        dynamic_j=_number(row, "dynamic_energy_j_per_request", file, number),
        slowdown={profile: gpu_s / device[whole] for profile, gpu_s in device.items()},
    )


def _model_number(data: Mapping[str, Any], key: str, path: Path) -> float:
    try:
        value = float(data[key])
    except (KeyError, TypeError, ValueError):
        value = math.nan
    if not 0 <= value < math.inf:
        raise DataError(f"{key} is {data.get(key)!r}, expected a number of 0 or more", file=str(path))
    return value


def _number(row: Mapping[str, str], key: str, file: Path, number: int) -> float:
    try:
        value = float(row[key])
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise DataError(f"{key} is {row[key]!r}, expected a number above 0", file=str(file), row=number)
    return value
