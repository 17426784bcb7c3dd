"""Generated jobs that keep their GPUs, some of them as wide as their cluster of 128 GPUs."""

from __future__ import annotations

import numpy as np

from joulery.domain.arrays import FloatArray
from joulery.perf.power.training_power import RTX3090_CLASSES, NodePower, power_table, widened
from joulery.sim.core.hourly_intensity import Intensity
from joulery.sim.training.plant import Cluster, Jobs

GPUS = 128
NODE = NodePower()
CLASSES = widened(RTX3090_CLASSES, GPUS)
TABLE = power_table(CLASSES, NODE)
DAY = np.where((np.arange(24 * 60) % 24 >= 8) & (np.arange(24 * 60) % 24 < 20), 300.0, 100.0)
"""Carbon intensity by hour, g/kWh."""
CLUSTER = Cluster(GPUS // NODE.gpus, NODE, TABLE, Intensity(DAY), silent=True)
WIDTHS = {
    "8 to 128": (8, 16, 32, 64, 128),
    "8 to 64": (8, 16, 32, 64),
    "1 to 128": (1, 2, 4, 8, 16, 32, 64, 128),
    "64 to 128": (64, 96, 128),
    "one of 64 beside 31 of one": (*(1,) * 31, 64),
}
LENGTHS = ("equal", "exponential", "log-normal")
_ARRAY = 48
"""Largest number of tasks in an array."""


def wide_jobs(
    widths: str, lengths: str, seed: int, load: float = 0.7, count: int = 250, arrays: bool = False
) -> tuple[Jobs, FloatArray]:
    """Jobs of two hours on average, and the seconds that each runs; with ``arrays``, arrays of equally wide tasks."""
    rng = np.random.default_rng(seed)
    if arrays:
        tasks = rng.integers(1, _ARRAY + 1, count)
        first = np.repeat(np.arange(count), tasks)[:count]
        gpus = rng.choice(WIDTHS[widths], count)[first]
    else:
        gpus = rng.choice(WIDTHS[widths], count)
    length_s = {
        "equal": np.full(count, 7200.0),
        "exponential": rng.exponential(7200.0, count) + 60.0,
        "log-normal": rng.lognormal(np.log(7200.0) - 1.5**2 / 2, 1.5, count) + 60.0,
    }[lengths]
    kind = rng.integers(0, 8, count)
    submit_s = np.sort(rng.uniform(0, float(length_s @ gpus) / GPUS / load, count))
    if arrays:
        submit_s = submit_s[np.searchsorted(first, first)]
    return Jobs(submit_s, length_s * TABLE.speedup[kind, gpus], kind, gpus, gpus, min_gpus=gpus), length_s
