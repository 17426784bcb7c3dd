"""Measured batches on MIG slices: read a CSV file of a GPU type with MIG, with the power that the site states."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from joulery.app.planning.prices import SPOT_SUFFIX
from joulery.config.plan import GpuConfig
from joulery.domain.errors import ConfigError, DataError
from joulery.domain.gpu.gpu_types import GpuTypeFacts, gpu_facts
from joulery.domain.gpu.mig import MigMenu
from joulery.domain.quality import Quality
from joulery.perf.interference.model import GpuCoefficients, InterferenceProfile
from joulery.perf.slice_table import BatchCurve, SlicedGpu, SliceTable
from joulery.store.columns import CsvRow, read_rows
from joulery.tabular import csv_header

_THROUGHPUT, _LATENCY, _PROCESSES = "throughput_items_per_s_per_process", "latency_s", "n_processes_mps"
_NAMED = ("model", "slice", "batch")


def sliced_gpu_of(index: int, gpu: GpuConfig) -> SlicedGpu | None:
    """Read the measurements of the slices of a site's GPU type; None where the site names no measurements.

    Raises:
        ConfigError: The catalog does not contain the type or its MIG partitions, or the site does not state its power.
        DataError: The file cannot be used.
    """
    if gpu.measurements is None:
        return None
    pointer = f"fleet.gpus.{index}"
    facts = _facts(pointer, gpu)
    if facts.mig is None:
        raise ConfigError(
            f"a {facts.name} has no MIG slices, or the catalog does not list them",
            pointer=f"{pointer}.measurements",
            hint="leave measurements out, or name a GPU type with MIG",
        )
    for key, given in (("idle", gpu.idle_w), ("busy", gpu.busy_w)):
        if given is None:
            raise ConfigError(
                f"{gpu.name} states no power: tables of slices have none",
                pointer=f"{pointer}.{key}",
                expected="idle and busy, such as idle: 60 W and busy: 400 W",
            )
    assert gpu.idle_w is not None and gpu.busy_w is not None
    if gpu.busy_w <= gpu.idle_w:
        raise ConfigError(
            f"{gpu.name} draws more when busy than idle",
            pointer=f"{pointer}.busy",
            got=f"idle {gpu.idle_w:g} W, busy {gpu.busy_w:g} W",
            expected="such as idle: 60 W and busy: 400 W",
        )
    return SlicedGpu(read_slice_table(gpu.measurements, facts.mig), facts.mig, gpu.idle_w, gpu.busy_w)


def undivided_profile(index: int, gpu: GpuConfig) -> InterferenceProfile:
    """Profile of a GPU type of which only slices were measured: its clocks and power, without any model.

    Raises:
        ConfigError: The catalog does not contain the type or its highest clock.
    """
    facts = _facts(f"fleet.gpus.{index}", gpu)
    if facts.max_mhz is None:
        raise ConfigError(
            f"the catalog does not know the highest clock of a {facts.name}", pointer=f"fleet.gpus.{index}.name"
        )
    own = GpuCoefficients(facts.name, facts.tdp_w, facts.max_mhz, gpu.idle_w or 0.0, 1.0, 0.0, 0.0, 0.0, 1.0)
    return InterferenceProfile(own, {}, source=facts.source, quality=Quality.ASSUMED)


def _facts(pointer: str, gpu: GpuConfig) -> GpuTypeFacts:
    try:
        return gpu_facts(gpu.name.removesuffix(SPOT_SUFFIX))
    except ConfigError as error:
        raise ConfigError(
            error.message, pointer=f"{pointer}.name", got=error.got, expected=error.expected, hint=error.hint
        ) from None


def read_slice_table(file: Path, menu: MigMenu) -> SliceTable:
    """Read measured batches of models on slices.

    The columns are ``model``, ``slice`` (``3g``, or a profile such as ``3g.40gb``), ``batch``, and the batches a second
    of one process as ``throughput_items_per_s_per_process`` or seconds as ``latency_s``; if both exist, the first is
    used, as it has more digits. ``n_processes_mps`` is the number of processes that shared the slice, 1 where the
    column is left out.

    Args:
        file: The CSV file.
        menu: MIG profiles of the GPU type.

    Raises:
        DataError: A column is missing, a cell is not a number above 0, a slice is not on the menu, or a batch is listed
            twice; the message names the row.
    """
    header = csv_header(file)
    timed = _THROUGHPUT if _THROUGHPUT in header else _LATENCY
    columns = [*_NAMED, timed, *([_PROCESSES] if _PROCESSES in header else [])]
    found: dict[tuple[str, str], dict[int, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for row in read_rows(file, columns):
        batch, value = row.whole("batch"), row.positive(timed)
        processes = row.whole(_PROCESSES) if _PROCESSES in header else 1
        curve = found[(_model(row), _size(row, menu))][processes]
        if batch in curve:
            raise row.wrong("the same model, slice, processes and batch are listed twice", hint="keep one of them")
        curve[batch] = batch / value if timed == _THROUGHPUT else value
    measured = {
        key: tuple(
            BatchCurve(processes, tuple(sorted(times)), tuple(times[batch] for batch in sorted(times)))
            for processes, times in sorted(some.items())
        )
        for key, some in found.items()
    }
    return SliceTable(file.name, measured)


def _model(row: CsvRow) -> str:
    name = row["model"].strip()
    if not name:
        raise row.wrong("the model has no name")
    return name


def _size(row: CsvRow, menu: MigMenu) -> str:
    """The size of a row's slice, such as ``3g``."""
    name = row["slice"].strip()
    for profile in menu.profiles:
        if name in (profile.name, profile.size):
            return profile.size
    known = ", ".join(f"{profile.size} ({profile.name})" for profile in menu.profiles)
    raise DataError(
        f"a {menu.gpu} has no slice {name!r}", file=str(row.file), row=row.number, hint=f"its slices are {known}"
    )
