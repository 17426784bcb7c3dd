import math
from typing import Any

import numpy as np
import pytest

from joulery.accounting.charge import IdleRule, ShareRule, split
from joulery.domain.energy.carbon import CarbonSeries
from joulery.domain.energy.power import BusyTimes
from joulery.domain.errors import DataError
from joulery.domain.quality import Quality
from tests.accounting.readings import S, charge_readings, counter, integrate, power

NAN = math.nan
SOCKET = counter([0, 1, 2, 3], [0, 10, 30, 60])
"""10, 20 and 30 joules in three seconds."""


def times(app: list[float], total: list[float], cpus: int = 4, device: str = "cpu:0") -> dict[str, BusyTimes]:
    return {device: BusyTimes(np.arange(len(app) + 1) * S, app, total, cpus)}


def charged(busy: dict[str, BusyTimes], **fields: Any) -> tuple[float, float, float, float, float]:
    """Run's parts, run's idle, run's unattributed, others, idle left out."""
    result = charge_readings([SOCKET], busy, 0.0, 3.0, **{"idle": IdleRule.WHOLE, **fields})
    run, rest = result.run, result.rest
    assert result.other_j == rest.attributed_j
    assert run.energy_j + rest.energy_j == pytest.approx(60.0, rel=1e-12)
    return run.attributed_j, run.idle_j, run.unattributed_j, rest.attributed_j, rest.idle_j


def test_each_interval_is_divided_by_its_own_share() -> None:
    assert charged(times([1, 0, 1], [2, 1, 4])) == (12.5, 0.0, 0.0, 47.5, 0.0)


def test_an_interval_without_work_is_idle() -> None:
    busy = times([1, 0, 1], [2, 0, 2])
    assert charged(busy) == (20.0, 20.0, 0.0, 20.0, 0.0)
    assert charged(busy, idle=IdleRule.SHARE) == (20.0, 10.0, 0.0, 20.0, 10.0)
    assert charged(busy, idle=IdleRule.NONE) == (20.0, 0.0, 0.0, 20.0, 20.0)


def test_by_capacity_the_unused_rest_is_idle() -> None:
    busy = times([1, 0, 2], [2, 0, 2])
    assert charged(busy, by=ShareRule.CAPACITY) == (10 / 4 + 30 / 2, 10 / 2 + 20 + 30 / 2, 0.0, 10 / 4, 0.0)
    with pytest.raises(DataError, match=r"cpu:0: a capacity share .* CPUs"):
        charged({"cpu:0": BusyTimes([0, S], [1.0], [1.0])}, by=ShareRule.CAPACITY)


def test_by_capacity_an_interval_counts_its_own_length() -> None:
    busy = {"cpu:0": BusyTimes([0, 2 * S, 3 * S], [2.0, 1.0], [4.0, 1.0], cpus=2)}
    assert charged(busy, by=ShareRule.CAPACITY)[:2] == (30 / 2 + 30 / 2, 15.0)


def test_unknown_busy_time_leaves_energy_unattributed() -> None:
    assert charged(times([1, NAN, 1], [1, 1, NAN])) == (10.0, 0.0, 50.0, 0.0, 0.0)
    assert charged(times([1], [1])) == (10.0, 0.0, 50.0, 0.0, 0.0)
    late = {"cpu:0": BusyTimes([2 * S, 3 * S], [1.0], [1.0])}
    assert charged(late) == (30.0, 0.0, 30.0, 0.0, 0.0)


def test_a_device_without_shares_is_unattributed_unless_exclusive() -> None:
    assert charged({}) == (0.0, 0.0, 60.0, 0.0, 0.0)
    assert charged({}, exclusive=["cpu:0"]) == (60.0, 0.0, 0.0, 0.0, 0.0)
    assert charged(times([0] * 3, [1] * 3), exclusive={"cpu:0"}) == (60.0, 0.0, 0.0, 0.0, 0.0)


def test_known_idle_power_comes_first_and_only_the_rest_is_divided() -> None:
    modelled = power([0, 1, 2], [10, 20, 4], idle_w=8.0, quality=Quality.MODELLED)
    busy = times([1, 1, 0], [1, 2, 0])
    result = charge_readings([modelled], busy, 0.0, 3.0, idle=IdleRule.SHARE)
    assert result.run.attributed_j == 2 + 6
    assert result.other_j == 6
    idle_j = 8 + 8 + 4
    assert result.run.idle_j == pytest.approx(idle_j * 2 / 3)
    assert result.rest.idle_j == pytest.approx(idle_j / 3)
    assert result.run.idle_quality is result.run.quality is Quality.MODELLED
    by_capacity = charge_readings([modelled], busy, 0.0, 3.0, idle=IdleRule.WHOLE, by=ShareRule.CAPACITY)
    assert by_capacity.run.attributed_j == 10 / 4 + 20 / 4


def test_known_idle_power_where_busy_times_are_not_known() -> None:
    modelled = power([0, 1, 2], [10, 20, 4], idle_w=8.0)
    result = charge_readings([modelled], times([1], [1]), 0.0, 3.0, idle=IdleRule.WHOLE)
    assert (result.run.attributed_j, result.run.idle_j, result.run.unattributed_j) == (2.0, 8.0, 24.0)


@pytest.mark.parametrize(("idle", "paid"), [(IdleRule.WHOLE, 1.0), (IdleRule.SHARE, 1.0), (IdleRule.NONE, 0.0)])
def test_the_idle_power_of_an_exclusive_device(idle: IdleRule, paid: float) -> None:
    gpu = power([0, 1, 2], [100, 40, 300], device="gpu:0", idle_w=60.0)
    result = charge_readings([gpu], {}, 0.0, 3.0, idle=idle, exclusive={"gpu:0"})
    assert result.run.attributed_j == 40 + 0 + 240
    assert result.run.idle_j == paid * 160
    assert result.rest.idle_j == (1 - paid) * 160


def test_clocks_that_disagree_never_charge_more_than_everything() -> None:
    assert charged(times([2, 0, 0], [1, 1, 1])) == (10.0, 0.0, 0.0, 50.0, 0.0)
    assert times([2, 1], [1, 3])["cpu:0"].app_ratio == 3 / 5
    assert times([0.125, 0], [0.25, 0.25])["cpu:0"].app_ratio == 0.25


def test_the_share_of_all_busy_time_leaves_unknown_intervals_out() -> None:
    assert times([1, 9, NAN], [4, NAN, 9])["cpu:0"].app_ratio == 0.25
    assert times([0, 0], [0, 0])["cpu:0"].app_ratio == 0.0


def test_grams_are_divided_where_they_fall() -> None:
    series = CarbonSeries("GB", [0.0, 1.0, 3.0], [100.0, 400.0], source="test")
    result = charge_readings(
        [SOCKET], times([1, 0, 1], [2, 1, 2]), 0.0, 3.0, idle=IdleRule.NONE, carbon=series, pue=2.0, embodied_g=7.0
    )
    assert result.run.carbon_g == pytest.approx(2 * (5 * 100 + 15 * 400) / 3.6e6)
    assert result.rest.carbon_g == pytest.approx(2 * (5 * 100 + 35 * 400) / 3.6e6)
    assert (result.run.embodied_g, result.rest.embodied_g) == (7.0, 0.0)
    assert (result.run.pue, result.rest.pue) == (2.0, 2.0)


def test_run_and_rest_make_the_metered_total() -> None:
    result = charge_readings([SOCKET], times([1, 0, 1], [2, 0, 2]), 0.5, 2.5, idle=IdleRule.SHARE)
    total, both = integrate([SOCKET], 0.5, 2.5), result.run + result.rest
    assert both.energy_j == pytest.approx(total.energy_j, rel=1e-12)
    assert (both.duration_s, both.covered_s, both.start_s, both.end_s) == (2.0, 2.0, 0.5, 2.5)
    assert (result.rest.duration_s, result.rest.covered_s) == (0.0, 0.0)


def test_nothing_metered_is_nothing_charged() -> None:
    result = charge_readings([], {}, 0.0, 1.0, idle=IdleRule.WHOLE)
    assert (result.run.energy_j, result.run.coverage_ratio, result.other_j) == (0.0, 0.0, 0.0)


def test_shares_of_plain_numbers() -> None:
    assert [float(part) for part in split(10.0, 1.0, 4.0)] == [2.5, 7.5, 0.0, 0.0]
    assert [float(part) for part in split(10.0, 1.0, 2.0, by=ShareRule.CAPACITY, capacity_s=4.0)] == [
        2.5,
        2.5,
        5.0,
        0.0,
    ]
    unknown = split(10.0, 1.0, 2.0, by=ShareRule.CAPACITY)
    assert [float(part) for part in unknown] == [0.0, 0.0, 0.0, 10.0]
    full = split(10.0, 1.0, 5.0, by=ShareRule.CAPACITY, capacity_s=4.0)
    assert [float(part) for part in full] == [2.0, 8.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("edges", "app", "total", "says"),
    [
        ([0, 1], [1.0, 1.0], [1.0], "do not fit"),
        ([0, 1], [1.0], [1.0, 1.0], "do not fit"),
        ([0], [1.0], [1.0], "do not fit"),
        ([1, 1], [1.0], [1.0], "increase"),
        ([0, 1, 2], [0.0, -1.0], [1.0, 1.0], "app_s holds -1.0"),
        ([0, 1], [1.0], [math.inf], "all_s holds inf"),
    ],
)
def test_busy_times_that_make_no_sense_are_refused(
    edges: list[int], app: list[float], total: list[float], says: str
) -> None:
    with pytest.raises(DataError, match=says):
        BusyTimes(edges, app, total)


def test_no_joules_are_known_as_well_as_they_were_looked_for() -> None:
    """A row of 0 J in a run that nothing measured is not measured."""
    replayed = power([0, 1, 2], [10, 20, 4], quality=Quality.ASSUMED)
    assumed = charge_readings([replayed], {}, 0.0, 3.0, idle=IdleRule.WHOLE, exclusive=["cpu:0"])
    assert (assumed.run.idle_j, assumed.run.unattributed_j) == (0.0, 0.0)
    assert assumed.run.idle_quality is Quality.ASSUMED
