"""Joules and grams of past jobs."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from joulery.accounting.past import HeldPower, mean_intensity, past_use, within
from joulery.domain.cluster import PastJob
from joulery.domain.energy.carbon import CarbonSeries
from joulery.domain.errors import ConfigError
from joulery.domain.quality import Quality

GRID = CarbonSeries("X", [0.0, 3600.0, 7200.0, 10800.0], [100.0, 300.0, math.nan], source="test")


def past(start_s: float, end_s: float, *, owner: str = "ada", gpus: int = 1, measured_j: float = math.nan) -> PastJob:
    return PastJob(
        "1", "job", owner, "lab", "gpu", "COMPLETED", start_s, start_s, end_s, end_s - start_s, gpus, 4, 1, measured_j
    )


def test_joules_are_power_times_time_and_grams_follow_the_hours() -> None:
    power = HeldPower(200.0, 10.0, 60.0, pue=1.5)
    (use,) = past_use([past(1800.0, 5400.0, gpus=2)], power, GRID, lambda job: job.owner)

    assert use.energy_j == 500.0 * 3600
    assert use.carbon_g == pytest.approx(0.5 * 200 * 1.5)
    assert (use.gpu_s, use.cpu_s, use.jobs) == (7200.0, 14400.0, 1)
    assert use.quality is Quality.MODELLED


def test_a_job_whose_hours_are_not_all_known_has_joules_and_no_grams() -> None:
    for job in (past(7000.0, 7300.0), past(-10.0, 10.0), past(10_000.0, 20_000.0)):
        (use,) = past_use([job], HeldPower(100.0), GRID, lambda _: "all")
        assert use.energy_j > 0
        assert (use.carbon_g, use.carbon_covered_j) == (0.0, 0.0)


def test_what_the_cluster_measured_counts_instead() -> None:
    jobs = [past(0.0, 3600.0, measured_j=7200.0)]
    (use,) = past_use(jobs, HeldPower(100.0), GRID, lambda _: "all")
    assert (use.energy_j, use.quality) == (7200.0, Quality.MEASURED)
    (mixed,) = past_use([*jobs, past(0.0, 10.0)], HeldPower(100.0), GRID, lambda _: "all")

    assert (mixed.energy_j, mixed.measured_j, mixed.quality) == (8200.0, 7200.0, Quality.MODELLED)


def test_the_keys_add_up_and_the_largest_comes_first() -> None:
    jobs = [
        past(0.0, 60.0, owner="ada"),
        past(0.0, 600.0, owner="bob"),
        replace(past(60.0, 120.0, owner="ada"), id="2"),
    ]
    uses = past_use(jobs, HeldPower(100.0), GRID, lambda job: job.owner)

    assert [(use.key, use.jobs, use.energy_j) for use in uses] == [("bob", 1, 60_000.0), ("ada", 2, 12_000.0)]


def test_since_cuts_what_ran_before() -> None:
    jobs = within([past(0.0, 100.0, measured_j=50.0), past(200.0, 300.0), past(150.0, 250.0, measured_j=80.0)], 200.0)

    assert [(job.start_s, job.elapsed_s) for job in jobs] == [(200.0, 100.0), (200.0, 50.0)]
    assert jobs[1].measured_j == 40.0


def test_who_was_submitted_before_a_time_was_waiting_then() -> None:
    waited, unknown = replace(past(250.0, 300.0), submit_s=5.0), replace(past(250.0, 300.0), submit_s=math.nan)
    cut, later = past(100.0, 300.0), past(260.0, 300.0)

    assert [job.submit_s for job in within([waited, cut, later], 200.0)] == [200.0, 200.0, 260.0]
    assert math.isnan(within([unknown], 200.0)[0].submit_s)


@pytest.mark.parametrize("values", [(-1.0, 0.0, 0.0, 1.0), (math.nan, 0.0, 0.0, 1.0), (1.0, 0.0, 0.0, 0.9)])
def test_powers_that_make_no_sense(values: tuple[float, float, float, float]) -> None:
    with pytest.raises(ConfigError):
        HeldPower(*values)


@given(st.lists(st.tuples(st.floats(0, 7000), st.floats(1, 5000)), min_size=1, max_size=20))
def test_many_means_at_once_are_the_means_one_by_one(spans: list[tuple[float, float]]) -> None:
    start = np.array([at for at, _ in spans])
    end = start + np.array([length for _, length in spans])
    expected = [GRID.mean(float(a), float(b)) for a, b in zip(start, end, strict=True)]

    np.testing.assert_allclose(mean_intensity(GRID, start, end), expected, rtol=1e-9)
