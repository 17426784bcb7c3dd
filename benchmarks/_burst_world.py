"""The service and the five bursts of ``benchmarks bursts``: only numbers, so that an older checkout can read them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

MS = {"small": 2.0, "medium": 6.0, "large": 15.0}
"""Milliseconds of a request on one core: the variants of the burst study."""
ACCURACY = {"small": 0.65, "medium": 0.72, "large": 0.76}
SLO_S = 0.1
LAMBDA = 0.05
BASE_G_PER_KWH = 200.0
ACTIVE_W, IDLE_W = 10.0, 20.0
CALM_RPS, BURST_RPS = 40.0, 300.0
"""A burst has 7.5 times the calm rate; two large variants serve 133 requests/s, two small ones 1000."""
FLASH_RPS = 1500.0
FLOOD_RPS = 3000.0
"""Exceeds the throughput of the small variant in batches."""
BATCHES, FIXED_PART = (2, 4, 8), 0.5
"""Batch sizes of the profile, and the share of a request's time that a batch spends only once (assumed)."""
BATCH_DELAY_S = 0.002
START_S = 1.5
"""Seconds until a new worker process has loaded its model (assumed; 0.2 s to 2.5 s were seen live)."""
QUEUE = 1024
"""Requests that may wait: the default of the site file."""
SEEDS = (0, 1, 2)
HOUR_S = 60.0
"""Simulated seconds for each hour of a 48 h grid."""
GRIDS = ("CISO_March", "CISO_Sep", "ESO_March")
Times = npt.NDArray[np.float64]


def samples(variant: str, cores: int) -> tuple[Times, Times]:
    """200 service times and CPU times of a variant on a slice, seconds: log-normal, 8 % spread, a generated profile."""
    spread = np.random.default_rng(1).lognormal(0.0, 0.08, 200)
    spread /= spread.mean()
    base_s = MS[variant] / 1e3
    return spread * base_s / (1.6 if cores == 2 else 1.0), spread * base_s * (1.2 if cores == 2 else 1.0)


def batches(variant: str, cores: int) -> dict[int, tuple[Times, Times]]:
    """Service times and CPU times of whole batches of a variant, by the number of requests in them; seconds."""
    times_s, cpu_s = samples(variant, cores)
    return {n: tuple(one * (FIXED_PART + (1 - FIXED_PART) * n) for one in (times_s, cpu_s)) for n in BATCHES}


def arrivals(name: str, seed: int) -> tuple[Times, float, tuple[float, ...]]:
    """Arrivals of a trace, its length, and when its bursts begin; seconds."""
    if name == "recorded":
        return recorded()
    rates: dict[str, tuple[Callable[[float], float], float, tuple[float, ...]]] = {
        "step": (lambda t: BURST_RPS if 60 <= t < 100 else CALM_RPS, 180.0, (60.0,)),
        "ramp": (_ramp, 180.0, ()),
        "flood": (lambda t: FLOOD_RPS if 60 <= t < 68 else CALM_RPS, 150.0, (60.0,)),
        "flash": (lambda t: FLASH_RPS if 60 <= t < 68 else CALM_RPS, 150.0, (60.0,)),
    }
    if name == "on-off":
        rng = np.random.default_rng((seed, 7))
        edges, on = [0.0], []
        while edges[-1] < 300.0:
            on.append(len(on) % 2 == 1)
            edges.append(edges[-1] + rng.exponential(8.0 if on[-1] else 20.0))
        begins = tuple(edge for edge, burst in zip(edges, on, strict=False) if burst and edge < 300.0)
        bounds = np.array(edges)
        rate = lambda t: BURST_RPS if on[min(int(np.searchsorted(bounds, t, "right")) - 1, len(on) - 1)] else CALM_RPS  # noqa: E731
        return _poisson(rate, 300.0, seed), 300.0, begins
    rate, length_s, begins = rates[name]
    return _poisson(rate, length_s, seed, FLOOD_RPS if name == "flood" else FLASH_RPS), length_s, begins


def _ramp(t_s: float) -> float:
    rise, fall = min(1.0, max(0.0, (t_s - 40.0) / 60.0)), max(0.0, (t_s - 120.0) / 20.0)
    return max(CALM_RPS, CALM_RPS + (BURST_RPS - CALM_RPS) * (rise - fall))


def _poisson(rate: Callable[[float], float], until_s: float, seed: int, most: float = FLASH_RPS) -> Times:
    """Arrivals of a Poisson process whose rate changes, by thinning; seconds."""
    rng = np.random.default_rng((seed, 1))
    times = np.cumsum(rng.exponential(1.0 / most, int(most * until_s * 1.1) + 100))
    times = times[times < until_s]
    kept = rng.random(len(times)) * most < np.array([rate(float(t)) for t in times])
    return np.asarray(times[kept])


def data(part: str) -> Path:
    """The path of a file of the measured data."""
    return Path(os.environ.get("JOULERY_DATA", Path(__file__).resolve().parents[2] / "shared" / "data")) / part


def recorded() -> tuple[Times, float, tuple[float, ...]]:
    """Azure's inference trace of a code model (November 2023), its first hour's arrivals twelve times as fast.

    Raises:
        FileNotFoundError: The data are not here.
    """
    import pyarrow.parquet as parquet

    path = data("muserve/azure_llm_2023_code.parquet")
    if not path.exists():
        raise FileNotFoundError(path)
    times = np.sort(parquet.read_table(path)["t_s"].to_numpy()) / 12.0
    return np.asarray(times, np.float64), float(times[-1]) + 1.0, ()


def grid(name: str) -> list[float]:
    """The 48 hours of one of Clover's grids, g/kWh.

    Raises:
        FileNotFoundError: The data are not here.
    """
    import csv

    with data("clover/carbon_traces_48h.csv").open() as rows:
        return [float(row[name]) for row in csv.DictReader(rows)][:48]


def day(seed: int) -> tuple[Times, float]:
    """Arrivals of 48 calm hours, each shortened to ``HOUR_S``, and their length; seconds."""
    until_s = 48 * HOUR_S
    times = np.cumsum(np.random.default_rng((seed, 3)).exponential(1.0 / CALM_RPS, int(until_s * CALM_RPS * 1.1)))
    return np.asarray(times[times < until_s]), until_s
