"""A year of one channel's power at 1 Hz over hourly carbon intensity, against the plain ways of doing it."""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Callable

import numpy as np

from benchmarks import Result
from joulery.accounting.charge import IdleRule, charge
from joulery.accounting.steps import power_steps
from joulery.domain.energy.carbon import CarbonSeries
from joulery.domain.energy.channel import Channel, ReadingKind
from joulery.domain.energy.footprint import Footprint
from joulery.domain.energy.power import PowerTrace
from joulery.domain.quality import Quality

SECONDS = 365 * 86400
START_S = 1_700_000_000
LOOP_SHARE = 100
"""The loop over samples runs over one hundredth of the year, and its time is multiplied."""


def trace(kind: ReadingKind, *, gaps: bool = False) -> PowerTrace:
    """A year of readings once a second, 100 to 150 W."""
    watts = 100 + 50 * np.random.default_rng(0).random(SECONDS)
    stamps = (START_S + np.arange(SECONDS, dtype=np.int64)) * 1_000_000_000
    values = np.cumsum(watts) if kind is ReadingKind.COUNTER else watts
    if gaps:
        values[:: 86400 // 4] = np.nan
    return PowerTrace(Channel("cpu:0", "package", kind, "fake", Quality.MEASURED), stamps, values, 1.0)


def carbon() -> CarbonSeries:
    """A year of hourly carbon intensity; no hour begins with the trace."""
    hours = SECONDS // 3600 + 2
    values = 300 * np.random.default_rng(1).random(hours)
    return CarbonSeries("GB", START_S - 1800.0 + 3600.0 * np.arange(hours + 1), values, source="random")


def lookup(readings: PowerTrace, series: CarbonSeries) -> float:
    """Grams by NumPy, the intensity looked up for each sample: right only where no hour begins between two samples."""
    t_s = readings.t_ns / 1e9
    intensity = series.g_per_kwh[np.searchsorted(series.edges_s, t_s, "right") - 1]
    return float(np.sum(readings.values[:-1] * np.diff(t_s) * intensity[:-1])) / 3.6e6


def loop(readings: PowerTrace, series: CarbonSeries) -> float:
    """Grams by a loop over samples, as trackers count that add up ``power * interval * intensity`` at each reading."""
    count = len(readings) // LOOP_SHARE
    grams, t_s, watts = 0.0, (readings.t_ns[: count + 1] / 1e9).tolist(), readings.values[:count].tolist()
    edges, values, at = series.edges_s.tolist(), series.g_per_kwh.tolist(), 0
    for number in range(count):
        while edges[at + 1] <= t_s[number]:
            at += 1
        grams += watts[number] * (t_s[number + 1] - t_s[number]) * values[at] / 3.6e6
    return grams


def timed(work: Callable[[], object], repeats: int = 5) -> tuple[float, float]:
    """Median user CPU seconds and median wall seconds."""
    user, wall = [], []
    for _ in range(repeats):
        before, start = resource.getrusage(resource.RUSAGE_SELF).ru_utime, time.perf_counter()
        work()
        wall.append(time.perf_counter() - start)
        user.append(resource.getrusage(resource.RUSAGE_SELF).ru_utime - before)
    return statistics.median(user), statistics.median(wall)


def integrate(readings: PowerTrace, t0_s: float, t1_s: float, carbon: CarbonSeries) -> Footprint:
    """Joules and grams of a device that one run uses exclusively."""
    power, devices = [power_steps(readings)], {readings.channel.device}
    return charge(power, {}, t0_s, t1_s, idle=IdleRule.WHOLE, exclusive=devices, carbon=carbon).run


def run() -> Result:
    """Time joulery and the plain ways in this process."""
    series, end_s = carbon(), float(START_S + SECONDS)
    ours = {
        "joulery, power readings": _ours(ReadingKind.POWER, series),
        "joulery, counter readings": _ours(ReadingKind.COUNTER, series),
        "joulery, power readings with gaps": _ours(ReadingKind.POWER, series, gaps=True),
    }
    readings = trace(ReadingKind.POWER)
    exact_g, looked_up_g = integrate(readings, START_S, end_s - 1, carbon=series).carbon_g, lookup(readings, series)
    loop_user_s, loop_wall_s = timed(lambda: loop(readings, series))
    peers = {
        "plain NumPy, intensity looked up for each sample": timed(lambda: lookup(readings, series)),
        f"loop over samples ({LOOP_SHARE} x 1/{LOOP_SHARE} of the year)": (
            LOOP_SHARE * loop_user_s,
            LOOP_SHARE * loop_wall_s,
        ),
    }
    difference = abs(exact_g - looked_up_g) / exact_g
    slowest_s = max(user for user, _ in ours.values())
    return Result(
        "Integration of a year of 1 Hz power over hourly intensity",
        ("way", "user CPU", "wall"),
        [(name, f"{user:.2f} s", f"{wall:.2f} s") for name, (user, wall) in (ours | peers).items()],
        notes=[
            f"{SECONDS:,} samples, {len(series):,} hours, medians of five; reading the trace from disk is not counted. "
            f"The account converts the readings to steps, splits them at every hour, and returns joules, grams and "
            f"both coverages. The looked-up grams differ by {difference:.1e} here, where hours begin on a sample; on "
            "a trace that they split, only the account is right.",
        ],
        checks=[("at most 1 s of user CPU, whatever the meter", slowest_s <= 1.0)],
    )


def _ours(kind: ReadingKind, series: CarbonSeries, *, gaps: bool = False) -> tuple[float, float]:
    readings = trace(kind, gaps=gaps)
    return timed(lambda: integrate(readings, START_S, START_S + SECONDS, carbon=series))
