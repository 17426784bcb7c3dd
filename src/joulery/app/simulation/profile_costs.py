"""What a request costs, from a profile folder: ``profile.csv`` beside ``model.json``.

The columns are those of the calibrated stand-in of the Clover services: per variant and slice whether it fits
(``allowed``), its host and device time and its dynamic joules. The noise of service times, contention and idle power
are in ``model.json``. Accuracies are those of the exhaustive table's pure configurations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from joulery.domain.errors import DataError
from joulery.domain.gpu.mig import A100_40GB
from joulery.domain.serving.variant_table import VariantTable
from joulery.perf.queues.pull_costs import ServiceCosts, VariantCosts
from joulery.store.columns import CsvRow, read_rows
from joulery.store.files import require_json
from joulery.store.variant_tables import model_number

FILE = "profile.csv"
_COLUMNS = ("service", "char", "slice", "allowed", "host_s", "gpu_s", "dynamic_energy_j_per_request")


def read_costs(folder: Path, tables: Mapping[str, VariantTable]) -> dict[str, ServiceCosts]:
    """Costs of the services of a folder; empty where there is no ``profile.csv``.

    Raises:
        DataError: A file lacks a column, or holds what is no cost; file and row are named.
    """
    file, path = folder / FILE, folder / "model.json"
    if not file.exists():
        return {}
    model, rows = require_json(path), read_rows(file, _COLUMNS)
    found = {}
    for name, table in tables.items():
        mine = [row for row in rows if row["service"] == name]
        if mine:
            found[name] = _service(name, table, model, mine, path)
    return found


def _service(
    name: str,
    table: VariantTable,
    model: Mapping[str, Any],
    rows: Sequence[CsvRow],
    path: Path,
) -> ServiceCosts:
    noise = model["per_service"][name]
    numbers = {key: model_number(noise, key, path) for key in ("kappa", "cv", "sd_s")}
    accuracy = {
        entry.instances[0][0]: entry.accuracy_ratio
        for entry in table.entries
        if len({variant for variant, _ in entry.instances}) == 1
    }
    letters = dict.fromkeys(row["char"] for row in rows)
    variants = [_variant(letter, accuracy[letter], rows) for letter in letters if letter in accuracy]
    return ServiceCosts(
        name=name,
        variants=tuple(sorted(variants, key=lambda variant: (variant.accuracy_ratio, variant.name))),
        contention=numbers["kappa"],
        size_cv=numbers["cv"],
        jitter_s=numbers["sd_s"],
        idle_w=model_number(model, "p_idle_w_per_gpu", path),
        gpus=table.gpus,
        loads_s=table.loads_s,
        source=f"{FILE} of {path.parent.name}",
    )


def _variant(letter: str, accuracy: float, rows: Sequence[CsvRow]) -> VariantCosts:
    sizes = {profile.size: profile.name for profile in A100_40GB.profiles}
    mine = [row for row in rows if row["char"] == letter and row["allowed"] != "0"]
    device = {}
    for row in mine:
        if row["slice"] not in sizes:
            raise row.wrong(f"no slice {row['slice']!r} on a {A100_40GB.gpu}")
        device[sizes[row["slice"]]] = row.positive("gpu_s")
    whole = A100_40GB.profiles[0].name
    if whole not in device:
        raise DataError(f"variant {letter!r} has no row for the whole GPU", file=str(rows[0].file))
    row = mine[0]
    return VariantCosts(
        name=letter,
        accuracy_ratio=accuracy,
        host_s=row.positive("host_s"),
        gpu_s=device[whole],
        dynamic_j=row.positive("dynamic_energy_j_per_request"),
        slowdown={profile: gpu_s / device[whole] for profile, gpu_s in device.items()},
    )
