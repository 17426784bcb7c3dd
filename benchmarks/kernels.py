"""Joules of public CUDA kernels with measured watts, recovered from slow sensors of every kind."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Mapping
from pathlib import Path

from benchmarks import Result, data_folder
from joulery.accounting.operations.align import Estimator, align
from tests.accounting.simulated_step import DEVICE, Simulated, simulate

SEEDS = 6
SENSORS_S = ((0.020, 14.0, 0.05), (0.100, 60.0, 0.10))
KINDS = {"instant": "instant watts", "mean": "means of the period", "meter": "energy counter"}
_CLOCK_MHZ = "1380"


def kernels_w(folder: Path) -> list[float]:
    """Measured watts of 20 real CUDA kernels and 97 microbenchmarks on a V100 at 1380 MHz."""
    with (folder / "v100_dvfs_measured.csv").open(newline="") as file:
        return [float(row["power_w"]) for row in csv.DictReader(file) if row["sm_mhz"] == _CLOCK_MHZ]


def weighted_error(energies: Mapping[str, float], truth: Mapping[str, float]) -> float:
    """Sum of the absolute errors over the sum of the true joules."""
    return sum(abs(joules - truth[op]) for op, joules in energies.items()) / sum(truth.values())


def top_ten(energies: Mapping[str, float], truth: Mapping[str, float]) -> int:
    """Number of the ten operations that used most joules that are among the ten found."""
    found, true = (set(sorted(joules, key=joules.__getitem__)[-10:]) for joules in (energies, truth))
    return len(found & true)


def found_ratio(energies: Mapping[str, float], truth: Mapping[str, float]) -> float:
    """True joules of the ten operations found to use most, over those of the ten that truly use most."""
    found, true = (sorted(joules, key=joules.__getitem__)[-10:] for joules in (energies, truth))
    return sum(truth[op] for op in found) / sum(truth[op] for op in true)


def accounted(sim: Simulated, kind: str, estimator: Estimator) -> tuple[dict[str, float], str]:
    """Joules by operation, and the estimator that was used."""
    got = align(sim.trace, {DEVICE: [getattr(sim, kind)]}, sim.window_ns, estimator=estimator)
    return got.energy_by_op, got.devices[0].estimator


def run() -> Result:
    """Simulate steps of 28 of the kernels under each sensor."""
    known_w = kernels_w(data_folder("muserve"))
    rows, checks = [], []
    for update_s, seconds, bar in SENSORS_S:
        for kind, text in KINDS.items():
            recency, found, hits, held, used = [], [], [], [], ""
            for seed in range(SEEDS):
                sim = simulate(seed, update_s, seconds, kernels_w=known_w)
                recency.append(weighted_error(accounted(sim, kind, "recency")[0], sim.truth_j))
                energies, used = accounted(sim, kind, "regression")
                found.append(weighted_error(energies, sim.truth_j))
                hits.append(top_ten(energies, sim.truth_j))
                held.append(found_ratio(energies, sim.truth_j))
            cells = (f"{statistics.fmean(values):.1%} (worst {max(values):.1%})" for values in (recency, found))
            sensor = f"{text}, {update_s * 1e3:g} ms, {seconds:g} s"
            top = f"{statistics.fmean(hits):.1f} (least {min(hits)})"
            rows.append((sensor, *cells, used, top, f"{statistics.fmean(held):.2%} (least {min(held):.2%})"))
            where = f"{text} at {update_s * 1e3:g} ms"
            checks.append((f"{where}: energy-weighted error at most {bar:.0%}", statistics.fmean(found) <= bar))
            checks.append((f"{where}: the ten largest are found in every step", min(hits) == 10))
    return Result(
        "Joules of public kernels against their measured watts",
        ("sensor, recorded for", "recency", "regression", "used", "of the ten largest", "their joules"),
        rows,
        notes=[
            "Steps of 28 kernels with the watts measured on a V100 (20 CUDA programs and 97 microbenchmarks at "
            "1380 MHz), 0.2 to 2.5 ms each, 40 W between steps; readings simulated with 1 % of noise. "
            f"Energy-weighted error over the operations, mean (and worst) of {SEEDS} random steps. "
            "*Their joules*: true joules of the ten operations that the regression puts first, over those of the ten "
            "that used most: where one is missed, its joules are near those of the one in its place.",
        ],
        checks=checks,
    )
