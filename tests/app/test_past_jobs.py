"""Past jobs as a simulation takes them."""

from __future__ import annotations

import csv
import math
from dataclasses import replace
from pathlib import Path

import pytest

from joulery.app.past_jobs import PastJobsRequest, held_gpus, hourly_from, report_past, write_trace
from joulery.domain.cluster import PastJob
from joulery.domain.energy.carbon import CarbonSeries
from joulery.domain.errors import DataError


def past(submit_s: float, start_s: float, gpus: int = 1) -> PastJob:
    return PastJob(
        "1", "job", "ada", "lab", "gpu", "COMPLETED", submit_s, start_s, start_s + 60.0, 60.0, gpus, 4, 1, math.nan
    )


def test_they_come_in_order_of_submission_from_the_hour_of_the_first() -> None:
    jobs = [past(7300.0, 9000.0, 2), past(4000.0, 5000.0), past(5.0, 10.0, 0), past(math.nan, 8000.0, 3)]
    held = held_gpus(jobs)

    assert held.first_s == 3600.0
    assert held.submit_s.tolist() == [1400.0, 3700.0, 4400.0]
    assert held.start_s.tolist() == [1400.0, 5400.0, 4400.0]
    assert held.gpus.tolist() == [1, 2, 3]


def test_the_past_begins_when_the_first_job_started_however_long_one_was_held() -> None:
    month_s = 30 * 86_400.0
    held = held_gpus([past(100.0, 3 * month_s, 1), past(3 * month_s - 50.0, 3 * month_s + 60.0, 2)])

    assert held.first_s == 3 * month_s
    assert held.submit_s.tolist() == [0.0, 0.0] and held.gpus.tolist() == [1, 2]


def test_a_trace_is_what_the_past_is_played_from(tmp_path: Path) -> None:
    """One job held for months before the log's first start puts nothing before it, in either."""
    month_s = 30 * 86_400.0
    jobs = [
        past(3 * month_s + 400.4, 3 * month_s + 900.0, 4),
        past(100.0, 3 * month_s + 700.0, 2),
        past(3 * month_s + 50.0, 3 * month_s + 60.0, 1),
        past(5.0, 10.0, 0),
    ]
    jobs = [replace(job, id=f"{n}") for n, job in enumerate(jobs)]
    held, file = held_gpus(jobs), tmp_path / "trace.csv"
    assert write_trace(jobs, file) == 3
    rows = list(csv.DictReader(file.read_text().splitlines()))
    assert [row["job_id"] for row in rows] == list(held.ids) == ["1", "2", "0"]
    assert [int(row["submit_s"]) for row in rows] == [0, 0, 340]
    assert (held.submit_s - held.submit_s[0]).tolist() == pytest.approx([0.0, 0.0, 340.4])
    assert [float(row["duration_s"]) for row in rows] == [120.0, 60.0, 240.0]
    assert [int(row["num_gpus"]) for row in rows] == held.gpus.tolist() == [2, 1, 4]


def test_the_intensity_of_the_months_before_the_first_start_is_not_needed(tmp_path: Path) -> None:
    """A file of one day answers for the jobs of that day, however long one of them was held before."""
    day = "2026-10-05"
    (tmp_path / "grid.csv").write_text("time,g\n" + "".join(f"{day}T{h:02}:00:00Z,200\n" for h in range(24)))
    row = f"|train|ada|lab|gpu|COMPLETED|2026-07-01T00:00:00|{day}T02:00:00|{day}T03:00:00|3600|gres/gpu=1\n"
    header = "JobID|JobName|User|Account|Partition|State|Submit|Start|End|ElapsedRaw|AllocTRES\n"
    (tmp_path / "jobs.txt").write_text(f"{header}1{row}")
    carbon = {"carbon": str(tmp_path / "grid.csv"), "column": "g"}
    report = report_past(PastJobsRequest(tmp_path / "jobs.txt", None, "owner", 250.0, 0.0, 0.0, 1.0, "UTC", carbon))
    assert report.total.carbon_g == pytest.approx(50.0)
    assert report.intensity is not None
    assert report.intensity.start_s == held_gpus(report.jobs).first_s


def test_no_job_begins_before_it_is_submitted_despite_two_clocks() -> None:
    assert held_gpus([past(5000.0, 4000.0)]).submit_s.tolist() == [400.0]


def test_without_gpus_there_is_nothing_to_play() -> None:
    with pytest.raises(DataError, match="no job held a GPU"):
        held_gpus([past(0.0, 0.0, 0)])


def test_hours_are_means_and_one_that_is_unknown_is_named() -> None:
    half = [1800.0 * n for n in range(9)]
    series = CarbonSeries("X", half, [100.0, 300.0, 50.0, 50.0, math.nan, 10.0, 7.0, 7.0], source="test")

    known = CarbonSeries("X", half[:6], [100.0, 300.0, 50.0, 50.0, 9.0], source="test")
    assert hourly_from(known, 0.0).tolist() == [200.0, 50.0], "what is left of an hour is none"
    with pytest.raises(DataError, match=r"1970-01-01 02:00 UTC .*not known"):
        hourly_from(series, 0.0)
    assert hourly_from(series, 10_800.0).tolist() == [7.0]
    with pytest.raises(DataError, match=r"1970-01-01 04:00 UTC .*not known"):
        hourly_from(series, 14_400.0)
