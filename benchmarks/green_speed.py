"""Speed of GREEN's simulations and rounds; ``JOULERY_DATA`` names the folder with its traces and grids.

Run ``python -m benchmarks green_speed`` on a quiet machine of two cores. It measures user CPU and memory of the year in
one region, in its own process; wall time of five regions by three policies on two processes; a round over a long queue.
"""

from __future__ import annotations

import multiprocessing
import resource
import time

import numpy as np

from benchmarks import Result
from benchmarks.green import REGIONS, year
from joulery.policies.training.allocation import ClusterView
from joulery.policies.training.green import Green
from joulery.sim.training.study import Setting, run_scheme

POLICIES = ("green", "tiresias", "gaia")
PROCESSES = 2


def run() -> Result:
    """Measure all figures."""
    context = multiprocessing.get_context("spawn")
    tasks = [(policy, region) for region in REGIONS for policy in POLICIES]
    with context.Pool(1) as pool:
        year_s, peak_mb = pool.apply(one_year, ("green", "GB"))
    began = time.perf_counter()
    with context.Pool(PROCESSES) as pool:
        each_s = [cpu_s for cpu_s, _ in pool.starmap(one_year, tasks, chunksize=1)]
    wall_s, round_s = time.perf_counter() - began, a_round_s()
    found = (
        ("the year, green, one region, user CPU", "<= 10 s", f"{year_s:.1f} s", year_s <= 10),
        ("its process, peak memory", "<= 250 MB", f"{peak_mb:.0f} MB", peak_mb <= 250),
        (f"5 regions x {len(POLICIES)} policies, {PROCESSES} processes, wall", "<= 120 s",
         f"{wall_s:.0f} s ({sum(each_s):.0f} s of CPU)", wall_s <= 120),
        ("a round over 10,000 queued jobs, CPU", "<= 50 ms", f"{1e3 * round_s:.1f} ms", round_s <= 0.05),
    )  # fmt: skip
    return Result(
        "GREEN: speed",
        ("what", "bar", "ours", "met"),
        [[what, bar, ours, "yes" if held else "**no**"] for what, bar, ours, held in found],
        notes=("The year is 146,000 jobs of Alibaba's PAI trace on 64 GPUs, with the real hours of 2023.",),
        checks=tuple((f"{what} {bar}", held) for what, bar, _, held in found),
    )


def one_year(policy: str, region: str) -> tuple[float, float]:
    """User CPU seconds of one policy's year in one region, without reading the trace; peak memory, MB."""
    jobs, carbon = year(region)
    before_s = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    run_scheme(policy, Setting(), jobs, carbon)
    after = resource.getrusage(resource.RUSAGE_SELF)
    return after.ru_utime - before_s, after.ru_maxrss / 1024


def a_round_s(queued: int = 10_000) -> float:
    """CPU seconds of one round over ``queued`` jobs, the best of five."""
    rng = np.random.default_rng(0)
    view = ClusterView(
        now_s=1e6, gpus=64, g_per_kwh=100.0, mean_g_per_kwh=200.0, restart_s=120.0, job=np.arange(queued),
        submit_s=np.sort(rng.uniform(0, 1e6, queued)), running=np.where(np.arange(queued) < 64, 1, 0),
        max_gpus=np.full(queued, 8), requested=np.ones(queued, np.int64), kind=rng.integers(0, 8, queued),
        executed_s=rng.uniform(0, 1e4, queued), attained_gpu_s=rng.uniform(0, 1e4, queued),
        remaining_s=rng.uniform(1e3, 1e5, queued), footprint_kg=rng.uniform(0, 5, queued),
        degradation=np.where(np.arange(queued) < 64, rng.uniform(0.5, 1, queued), np.nan),
        gpu_w=rng.uniform(90, 320, queued),
    )  # fmt: skip
    policy = Green()
    state = policy.step(policy.initial(), view).state
    best = float("inf")
    for _ in range(5):
        began = time.process_time()
        policy.step(state, view)
        best = min(best, time.process_time() - began)
    return best
