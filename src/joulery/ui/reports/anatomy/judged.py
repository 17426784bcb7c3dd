"""Precision of traced runs: the paper's two similarities, and the resolution of the sensor."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from joulery.accounting.operations.precision import Sight, mean_energies, pearson, resolution
from joulery.app.runs.anatomies import RunAnatomy, sparser, stef
from joulery.domain.format import duration, percent
from joulery.domain.json_numbers import known_number
from joulery.ui.reports.anatomy.text import plain_table, print_titled


@dataclass(frozen=True, slots=True)
class Seen:
    """Resolution of one device's operations by its sensor.

    Attributes:
        device: Its name.
        resolution_s: Update interval of the sensor; the longest of the runs.
        estimator: Method that attributed energy to the operations.
        share: Share of the energy by how well the sensor resolves the operations.
        error_ratio: Two standard errors over the steps, energy-weighted mean; NaN where no steps are known.
    """

    device: str
    resolution_s: float
    estimator: str
    share: dict[Sight, float]
    error_ratio: float


@dataclass(frozen=True, slots=True)
class Judgement:
    """Precision of runs.

    Attributes:
        names: Names of the runs.
        base_s: Sampling period of each run.
        asss: Mean similarity at each sparser period, seconds to PCC; periods shorter than a run's own are left out.
        assw: Similarity of the mean of the first n runs with the mean of all, n from 1; empty for one run.
        seen: Resolution of each device.
    """

    names: tuple[str, ...]
    base_s: tuple[float, ...]
    asss: dict[float, float]
    assw: tuple[float, ...]
    seen: tuple[Seen, ...]


def judge(runs: Sequence[RunAnatomy], periods_s: Sequence[float]) -> Judgement:
    """Judge the precision of runs; several runs count as repetitions of one program.

    Raises:
        DataError: A run keeps no events, or two share fewer than two operations.
    """
    base = tuple(max((trace.period_s for trace in run.power), default=math.nan) for run in runs)
    asss: dict[float, float] = {}
    references = [stef(sparser(run, 0.0)) for run in runs]
    for period in sorted(periods_s):
        similar = [
            pearson(stef(sparser(run, period)), reference)
            for run, reference, own in zip(runs, references, base, strict=True)
            if period >= own
        ]
        if similar:
            asss[period] = statistics.fmean(similar)
    footprints = [stef(run.footprint) for run in runs]
    whole = mean_energies(footprints)
    widths = range(1, len(runs) + 1) if len(runs) > 1 else ()
    assw = tuple(pearson(mean_energies(footprints[:n]), whole) for n in widths)
    return Judgement(tuple(run.name for run in runs), base, asss, assw, _seen(runs))


def _seen(runs: Sequence[RunAnatomy]) -> tuple[Seen, ...]:
    found: dict[str, list[tuple[float, str, Sight, float, float]]] = {}
    for run in runs:
        entries = {entry.device: entry for entry in run.footprint.devices}
        rows = zip(run.footprint.device, run.footprint.energy_j.tolist(), resolution(run.footprint), strict=True)
        for device, joules, row in rows:
            if joules > 0:
                entry = entries[device]
                found.setdefault(device, []).append(
                    (entry.resolution_s, entry.estimator, row.sight, joules, row.error_ratio)
                )
    result = []
    for device, rows_of in sorted(found.items()):
        total = math.fsum(joules for *_, joules, _ in rows_of)
        share = {sight: math.fsum(j for _, _, s, j, _ in rows_of if s is sight) / total for sight in Sight}
        known_j = math.fsum(j for *_, j, e in rows_of if e == e)
        error = math.fsum(j * e for *_, j, e in rows_of if e == e) / known_j if known_j > 0 else math.nan
        slowest = max(seconds for seconds, *_ in rows_of)
        result.append(Seen(device, slowest, rows_of[0][1], {s: v for s, v in share.items() if v > 0}, error))
    return tuple(result)


def as_object(judgement: Judgement) -> dict[str, Any]:
    """The object that ``joulery precision --json`` prints."""
    return {
        "schema": "joulery.precision/1",
        "runs": list(judgement.names),
        "period_s": [known_number(value) for value in judgement.base_s],
        "asss": [{"period_s": period, "pcc": known_number(value)} for period, value in judgement.asss.items()],
        "assw": [{"runs": n, "pcc": known_number(value)} for n, value in enumerate(judgement.assw, start=1)],
        "devices": {
            entry.device: {
                "resolution_s": known_number(entry.resolution_s),
                "estimator": entry.estimator,
                "share": {sight.value: share for sight, share in entry.share.items()},
                "expected_error_ratio": known_number(entry.error_ratio),
            }
            for entry in judgement.seen
        },
    }


def print_judgement(judgement: Judgement, console: Console) -> None:
    """Print the similarities and the resolution of each device."""
    if judgement.asss:
        table = plain_table("period", "PCC")
        for period, value in judgement.asss.items():
            table.add_row(duration(period), f"{value:.4f}")
        print_titled(console, "sparser sampling (ASSS): similarity with the run as it was read", table)
    else:
        slowest = duration(float(np.nanmax(judgement.base_s)))
        console.print(Text(f"no ASSS: the runs were read every {slowest}, no oftener than the periods asked for\n"))
    if judgement.assw:
        table = plain_table("runs", "PCC")
        for n, value in enumerate(judgement.assw, start=1):
            table.add_row(str(n), f"{value:.4f}")
        print_titled(console, "more repetitions (ASSW): mean of the first n against the mean of all", table)
    columns = ("device", "renewed every", "estimator", "energy by what it sees of the operations", "error")
    table = plain_table(*columns, text_columns=(columns[0], *columns[2:4]))
    for entry in judgement.seen:
        sights = ", ".join(f"{sight} {percent(share)}" for sight, share in entry.share.items())
        error = f"± {percent(entry.error_ratio, 0)}" if entry.error_ratio == entry.error_ratio else "-"
        table.add_row(entry.device, duration(entry.resolution_s), entry.estimator, sights, error)
    print_titled(console, "what the sensor resolves", table)
    text = "Errors are two standard errors over the recorded steps, without the bias of sharing within a reading."
    console.print(Text(text, style="dim"))
