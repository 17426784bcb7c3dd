"""Statements by calendar month: jobs are cut at its end, and the months add up."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from itertools import pairwise
from zoneinfo import ZoneInfo

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from joulery.accounting.past import HeldPower, past_use, split_at
from joulery.domain.cluster import PastJob
from joulery.domain.energy.carbon import CarbonSeries, Scope, Signal
from joulery.months import month_of, next_month_s

T0_S = datetime(2026, 1, 1, tzinfo=UTC).timestamp()
YEAR_S = 366 * 86_400.0
ZONES = st.sampled_from([ZoneInfo("UTC"), ZoneInfo("Europe/Berlin"), ZoneInfo("America/Los_Angeles"), None])


@st.composite
def past_jobs(draw: st.DrawFn) -> PastJob:
    start_s = T0_S + draw(st.floats(0, YEAR_S))
    elapsed_s = draw(st.floats(1.0, 200 * 86_400.0))
    measured_j = draw(st.one_of(st.just(math.nan), st.floats(1.0, 1e12)))
    owner, account = draw(st.sampled_from("abc")), draw(st.sampled_from(["lab", "vis"]))
    return PastJob("1", "job", owner, account, "gpu", "COMPLETED", start_s, start_s, start_s + elapsed_s, elapsed_s,
                   draw(st.integers(0, 8)), 4, 1, measured_j)  # fmt: skip


def split_by_month(jobs: list[PastJob], zone: ZoneInfo | None) -> tuple[PastJob, ...]:
    return split_at(jobs, lambda t_s: next_month_s(t_s, zone))


def hours() -> CarbonSeries:
    edges_s = T0_S + 3600.0 * np.arange(0, 24 * 700)
    values = np.random.default_rng(1).uniform(5, 900, len(edges_s) - 1)
    return CarbonSeries("X", edges_s, values, signal=Signal.AVERAGE, scope=Scope.DIRECT, source="made up")


@given(st.lists(past_jobs(), min_size=1, max_size=6), ZONES)
def test_the_months_add_up_to_the_whole(jobs: list[PastJob], zone: ZoneInfo | None) -> None:
    power, carbon = HeldPower(250.0, 3.0, 40.0, 1.2), hours()
    pieces = split_by_month(jobs, zone)
    (whole,) = past_use(jobs, power, carbon, lambda _: "all")
    parts = past_use(pieces, power, carbon, lambda job: f"{month_of(job.start_s, zone)} {job.account} {job.owner}")
    for name in ("gpu_s", "cpu_s", "energy_j", "measured_j", "carbon_g", "carbon_covered_j"):
        added = math.fsum(getattr(part, name) for part in parts)
        assert added == pytest.approx(getattr(whole, name), rel=1e-9, abs=1e-9), name


@given(past_jobs(), ZONES)
def test_every_piece_lies_in_one_month_and_begins_where_the_one_before_ends(
    job: PastJob, zone: ZoneInfo | None
) -> None:
    pieces = split_by_month([job], zone)
    assert (pieces[0].start_s, pieces[-1].end_s) == (job.start_s, job.end_s)
    for piece, after in pairwise(pieces):
        assert piece.end_s == after.start_s == next_month_s(piece.start_s, zone)
    assert all(piece.end_s <= next_month_s(piece.start_s, zone) and piece.elapsed_s > 0 for piece in pieces)


def test_a_job_over_the_end_of_october_by_hand() -> None:
    zone = ZoneInfo("Europe/Berlin")
    begin_s = datetime(2026, 10, 31, 12, tzinfo=zone).timestamp()
    job = PastJob("7", "x", "ada", "lab", "gpu", "COMPLETED", begin_s, begin_s, begin_s + 16 * 3600.0, 16 * 3600.0,
                  2, 8, 1, 1.6e6)  # fmt: skip
    first, second = split_by_month([job], zone)
    assert (first.elapsed_s, second.elapsed_s) == (12 * 3600.0, 4 * 3600.0)
    assert (first.measured_j, second.measured_j) == pytest.approx((1.2e6, 0.4e6))
    assert (month_of(first.start_s, zone), month_of(second.start_s, zone)) == ("2026-10", "2026-11")
