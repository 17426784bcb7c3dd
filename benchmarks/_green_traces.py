"""Traces and grids that GREEN is evaluated on; ``JOULERY_DATA`` names their folder."""

from __future__ import annotations

import csv

import numpy as np

from benchmarks import data_folder
from benchmarks._pollux_workload import training_s
from joulery.domain.arrays import FloatArray
from joulery.sim.core.hourly_intensity import Intensity
from joulery.sim.core.streams import Streams
from joulery.sim.training.plant import Jobs
from joulery.sim.training.study import jobs_from_trace

DAY_S = 86_400.0
LONGEST_S = 133_200.0
DAY_WORK_S = 3130 * 3600.0
"""GPU time of the testbed's day, on one GPU a job."""
YEAR_LOAD = 0.62
_AUGUST_H = slice(212 * 24, 243 * 24)
_GAVEL_UNSEEN = ("103959", "6214e9", "7f04ca", "ed69ec")


def direct(region: str, year: int) -> Intensity:
    """Hourly carbon intensity of a region in a year, direct emissions, g/kWh."""
    with (data_folder("carbon") / f"{region}_{year}.csv").open() as rows:
        return Intensity(np.array([float(row["ci_direct"]) for row in csv.DictReader(rows)]))


def august(carbon: Intensity) -> Intensity:
    """Hourly carbon intensity of the mean day of a year's August."""
    return Intensity(np.array(carbon.values)[_AUGUST_H].reshape(31, 24).mean(axis=0))


def trace(name: str) -> tuple[FloatArray, FloatArray]:
    """Submissions and durations of a trace's file, in order, s."""
    with (data_folder("green") / name).open() as rows:
        read = np.array([(float(row["submit_s"]), float(row["duration_s"])) for row in csv.DictReader(rows)])
    read = read[np.argsort(read[:, 0], kind="stable")]
    return read[:, 0], read[:, 1]


def trace_jobs(name: str, until_s: float = np.inf) -> Jobs:
    """The jobs of a trace's file that are submitted before ``until_s``."""
    submit_s, duration_s = trace(name)
    return jobs_from_trace(submit_s[submit_s < until_s], duration_s[submit_s < until_s], Streams(0))


def philly() -> tuple[FloatArray, FloatArray]:
    """Microsoft's Philly jobs that last from a minute up to the testbed's longest duration."""
    return _fitting(*trace("philly_jobs.csv"))


def gavel() -> tuple[FloatArray, FloatArray]:
    """Gavel's jobs of Philly's virtual clusters, lengths as measured on a V100: every second of the nine clusters with
    900 jobs and more. The other clusters were used in development."""
    with (data_folder("green") / "gavel_traces.csv").open() as rows:
        read = np.array(
            [
                (float(row["submit_s"]), float(row["v100_duration_s"]))
                for row in csv.DictReader(rows)
                if row["trace"].rpartition("/")[2] in _GAVEL_UNSEEN and row["v100_duration_s"]
            ]
        )
    read = read[np.argsort(read[:, 0], kind="stable")]
    return _fitting(read[:, 0], read[:, 1])


def alibaba() -> tuple[FloatArray, FloatArray]:
    """Alibaba's GPU jobs of 2023 (cluster-trace-gpu-v2023), those that ran."""
    with (data_folder("green") / "alibaba_gpu2023_openb.csv").open() as rows:
        read = np.array(
            [(float(row["submit_s"]), float(row["duration_s"])) for row in csv.DictReader(rows) if row["duration_s"]]
        )
    read = read[np.argsort(read[:, 0], kind="stable")]
    return _fitting(read[:, 0], read[:, 1])


def pollux() -> tuple[FloatArray, FloatArray]:
    """The eight workloads of Pollux's artifact, in sequence by number; each job lasts as long as its training takes on
    one T4 from its first batch size on."""
    with (data_folder("green") / "pollux_workloads.csv").open() as rows:
        read = [row for row in csv.DictReader(rows) if row["set"] == "workloads"]
    lasts_s = {name: training_s(data_folder("green"), name) for name in {row["application"] for row in read}}
    spans_s = {
        number: max(float(row["submit_s"]) for row in read if row["workload"] == number)
        for number in sorted({row["workload"] for row in read}, key=int)
    }
    start_s = dict(zip(spans_s, np.cumsum([0.0, *spans_s.values()]).tolist(), strict=False))
    jobs = sorted((start_s[row["workload"]] + float(row["submit_s"]), lasts_s[row["application"]]) for row in read)
    submit_s, duration_s = np.array(jobs).T
    return _fitting(submit_s, duration_s)


def _fitting(submit_s: FloatArray, duration_s: FloatArray) -> tuple[FloatArray, FloatArray]:
    fit = (duration_s >= 60) & (duration_s <= LONGEST_S)
    return submit_s[fit], duration_s[fit]


def folded(submit_s: FloatArray, duration_s: FloatArray, seed: int) -> Jobs:
    """Jobs sampled from a trace with as much work as the testbed's day, moved into one day."""
    sampled = np.random.default_rng(seed).permutation(len(duration_s))
    rows = sampled[: int(np.searchsorted(np.cumsum(duration_s[sampled]), DAY_WORK_S))]
    at_s = submit_s[rows] % DAY_S
    order = np.argsort(at_s, kind="stable")
    return jobs_from_trace(at_s[order], duration_s[rows][order], Streams(seed))


def spread(submit_s: FloatArray, duration_s: FloatArray, days: float, load: float = YEAR_LOAD) -> Jobs:
    """The jobs of a trace, stretched to at most ``days`` days in which they load 64 GPUs by ``load``."""
    at_s, day_work_s = submit_s - submit_s[0], load * 64 * DAY_S
    days = min(days, float(duration_s.sum()) / day_work_s)
    keep = int(np.searchsorted(np.cumsum(duration_s), day_work_s * days))
    return jobs_from_trace(at_s[:keep] * (days * DAY_S / at_s[keep - 1]), duration_s[:keep], Streams(0))


def first(all_jobs: Jobs, until_s: float) -> Jobs:
    """The jobs that are submitted before ``until_s``."""
    rows = all_jobs.submit_s < until_s
    return Jobs(*(column[rows] for column in (all_jobs.submit_s, all_jobs.work_s, all_jobs.kind, all_jobs.requested)),
                all_jobs.max_gpus[rows])  # fmt: skip
