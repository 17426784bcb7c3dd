"""Error of the joules of operations by sensor and estimator, in simulation with known truth."""

from __future__ import annotations

import statistics

import numpy as np

from benchmarks import Result
from joulery.accounting.operations.align import align
from joulery.accounting.operations.estimators import device_power
from joulery.accounting.operations.precision import pearson
from joulery.accounting.operations.regression import regress
from joulery.accounting.operations.session import session
from tests.accounting.simulated_step import DEVICE, Simulated, simulate

SEEDS = 8
SENSORS_S = ((0.004, 14.0), (0.020, 14.0), (0.100, 14.0), (0.100, 140.0))


def error(energies: dict[str, float], truth: dict[str, float]) -> float:
    """Median relative error over the operations."""
    return float(np.median([abs(joules / truth[op] - 1) for op, joules in energies.items()]))


def _estimated(sim: Simulated) -> dict[str, float]:
    """Joules by operation from regression, also where joulery would decline to use it."""
    cut = session(sim.trace, sim.window_ns)
    found = regress(cut, cut.on(DEVICE), device_power([sim.meter], sim.window_ns))
    return dict(zip(cut.rows.op, found.energy_j.tolist(), strict=True))


def run() -> Result:
    """Simulate some steps with each sensor."""
    rows, means = [], {}
    for update_s, seconds in SENSORS_S:
        recency, ridge, alike = [], [], []
        for seed in range(SEEDS):
            sim = simulate(seed, update_s, seconds)
            got = align(sim.trace, {DEVICE: [sim.meter]}, sim.window_ns).energy_by_op
            recency.append(error(got, sim.truth_j))
            alike.append(pearson(got, sim.truth_j))
            ridge.append(error(_estimated(sim), sim.truth_j))
        means[update_s, seconds] = statistics.fmean(recency), statistics.fmean(ridge)
        cells = (f"{statistics.fmean(values):.1%} (worst {max(values):.1%})" for values in (recency, ridge))
        got = align(sim.trace, {DEVICE: [sim.meter]}, sim.window_ns, estimator="regression")
        offered = "yes" if got.devices[0].estimator == "regression" else "no"
        rows.append((f"{update_s * 1e3:g} ms, {seconds:g} s", *cells, f"{statistics.fmean(alike):.3f}", offered))
    return Result(
        "Joules by operation against known truth",
        ("counter renewed every, recorded for", "recency", "regression", "PCC of recency", "regression offered"),
        rows,
        notes=[
            f"A training step of 28 operations of 0.2 to 2.5 ms at 80 to 130 W, 40 W between steps, counter readings "
            f"with 1 % of noise; median error over the operations, mean (and worst) of {SEEDS} random steps. "
            "A correlation near 1 goes with errors of a tenth.",
        ],
        checks=[
            ("recency is off by at most 13 %", all(recency <= 0.13 for recency, _ in means.values())),
            ("regression by at most 3 % at 4 ms", means[0.004, 14.0][1] <= 0.03),
            ("regression by at most 6 % at 20 ms", means[0.020, 14.0][1] <= 0.06),
        ],
    )
