import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from joulery.accounting.charge import window_bins
from joulery.accounting.steps import PowerSteps, power_steps
from joulery.domain.energy.carbon import JOULES_PER_KWH, CarbonSeries, Scope, Signal
from joulery.domain.energy.footprint import Footprint
from joulery.domain.energy.power import BusyTimes
from joulery.domain.errors import DataError
from joulery.domain.quality import Quality
from tests.accounting.readings import channel, counter, integrate, power

NAN = math.nan


def hourly(values: list[float], start_s: float = 0.0, **fields: Any) -> CarbonSeries:
    edges = start_s + 3600.0 * np.arange(len(values) + 1)
    return CarbonSeries("GB", edges, values, source="test", **{"scope": Scope.DIRECT, **fields})


def test_one_kilowatt_hour_at_two_intensities() -> None:
    fp = integrate([power([0, 3600], [1000, 1000], 3600.0)], 1800.0, 5400.0, carbon=hourly([100.0, 300.0]))
    assert fp.energy_j == 3.6e6
    assert fp.carbon_g == pytest.approx(0.5 * 100 + 0.5 * 300, rel=1e-15)
    assert (fp.signal, fp.scope) == (Signal.AVERAGE, Scope.DIRECT)
    assert (fp.start_s, fp.end_s, fp.duration_s, fp.covered_s) == (1800.0, 5400.0, 3600.0, 3600.0)
    assert fp.coverage_ratio == fp.carbon_coverage_ratio == fp.pue == 1.0


def test_carbon_follows_the_power_and_not_its_mean() -> None:
    trace = power([0, 3600], [100, 900], 3600.0)
    fp = integrate([trace], 0.0, 7200.0, carbon=hourly([10.0, 1000.0]))
    assert fp.carbon_g == pytest.approx((100 * 10 + 900 * 1000) * 3600 / JOULES_PER_KWH)


def test_a_counter_interval_that_crosses_the_window_counts_by_its_share() -> None:
    fp = integrate([counter([0, 10], [0, 100], 10.0)], 7.5, 12.0)
    assert (fp.energy_j, fp.covered_s, fp.coverage_ratio) == (25.0, 2.5, 2.5 / 4.5)


def test_a_gap_in_power_lowers_the_coverage() -> None:
    fp = integrate([power([0, 1, 2], [10, NAN, 10])], 0.0, 4.0, carbon=hourly([100.0]))
    assert (fp.energy_j, fp.covered_s, fp.carbon_covered_j) == (30.0, 3.0, 30.0)


def test_a_gap_in_carbon_lowers_the_carbon_coverage() -> None:
    trace = power([0, 3600, 7200], [1000, 2000, 1000], 3600.0)
    fp = integrate([trace], 0.0, 10800.0, carbon=hourly([100.0, NAN, 50.0]))
    assert fp.carbon_g == pytest.approx(150.0)
    assert (fp.carbon_covered_j, fp.energy_j) == (7.2e6, 14.4e6)
    assert fp.carbon_coverage_ratio == 0.5
    beyond = integrate([trace], 0.0, 10800.0, carbon=hourly([100.0], start_s=3600.0))
    assert (beyond.carbon_g, beyond.carbon_covered_j) == (pytest.approx(200.0), 7.2e6)


def test_without_carbon_there_are_no_grams_and_no_scope() -> None:
    fp = integrate([power([0], [10])], 0.0, 1.0)
    assert (fp.carbon_g, fp.carbon_covered_j, fp.signal, fp.scope) == (None, 0.0, None, None)
    assert (fp.embodied_g, fp.pue) == (0.0, 1.0)
    assert fp.energy_j == 10.0


def test_overhead_multiplies_grams_and_facility_but_not_joules() -> None:
    plain = integrate([power([0], [10])], 0.0, 1.0, carbon=hourly([100.0]))
    fp = integrate([power([0], [10])], 0.0, 1.0, carbon=hourly([100.0]), pue=1.5, embodied_g=3.0)
    assert (fp.energy_j, fp.facility_j, fp.pue) == (10.0, 15.0, 1.5)
    assert fp.carbon_g == 1.5 * plain.carbon_g
    assert (fp.carbon_covered_j, fp.embodied_g) == (plain.carbon_covered_j, 3.0)


@pytest.mark.parametrize("pue", [0.99, math.inf, NAN])
def test_an_impossible_overhead_is_refused(pue: float) -> None:
    with pytest.raises(DataError, match="PUE"):
        integrate([], 0.0, 1.0, pue=pue)


@pytest.mark.parametrize("embodied_g", [-1.0, math.inf, NAN])
def test_impossible_embodied_carbon_is_refused(embodied_g: float) -> None:
    with pytest.raises(DataError, match="embodied"):
        integrate([], 0.0, 1.0, embodied_g=embodied_g)


@pytest.mark.parametrize("window", [(1.0, 0.0), (NAN, 1.0), (0.0, NAN), (0.0, math.inf)])
def test_an_impossible_window_is_refused(window: tuple[float, float]) -> None:
    with pytest.raises(DataError):
        integrate([power([0], [10])], *window)


def test_an_empty_window_is_empty() -> None:
    fp = integrate([power([0], [10])], 0.5, 0.5, carbon=hourly([100.0]))
    assert (fp.energy_j, fp.duration_s, fp.covered_s, fp.coverage_ratio) == (0.0, 0.0, 0.0, 1.0)


def test_nothing_metered_is_nothing_covered() -> None:
    fp = integrate([], 0.0, 5.0, carbon=hourly([100.0]))
    assert (fp.energy_j, fp.duration_s, fp.coverage_ratio, fp.parts) == (0.0, 5.0, 0.0, ())


def test_channels_keep_their_names_and_coverage_is_their_mean() -> None:
    traces = [
        power([0, 1], [10, 10], device="cpu:1", quality=Quality.MODELLED, meter="cpu-model", band_ratio=0.5),
        counter([0, 3], [0, 60], device="gpu:0", component="board", meter="nvml"),
    ]
    fp = integrate(traces, 0.0, 4.0)
    assert [(p.device, p.component, p.energy_j, p.band_j, p.meter) for p in fp.parts] == [
        ("cpu:1", "package", 30.0, 15.0, "cpu-model"),
        ("gpu:0", "board", 60.0, 0.0, "nvml"),
    ]
    assert (fp.covered_s, fp.duration_s, fp.quality) == (3.0, 4.0, Quality.MODELLED)


def test_a_converted_channel_serves_many_windows() -> None:
    metered = power_steps(counter([0, 1, 2], [0, 10, 30]))
    assert [integrate([metered], t, t + 1.0).energy_j for t in (0.0, 1.0, 2.0)] == [10.0, 20.0, 0.0]


@pytest.mark.parametrize(
    ("series", "expected"),
    [
        (hourly([1.0, 1.0]), Quality.MEASURED),
        (hourly([1.0, 1.0], estimated=[False, True]), Quality.MODELLED),
        (hourly([1.0, 1.0], estimated=[True, False]), Quality.MEASURED),
        (hourly([1.0, NAN], estimated=[False, True]), Quality.MEASURED),
        (hourly([1.0, 1.0], issued_at_s=0.0), Quality.MODELLED),
        (hourly([1.0, 1.0], quality=Quality.ASSUMED), Quality.ASSUMED),
        (hourly([NAN, NAN], quality=Quality.ASSUMED), Quality.MEASURED),
    ],
)
def test_the_quality_of_the_intensities_that_were_used(series: CarbonSeries, expected: Quality) -> None:
    """The power lies in the second hour alone."""
    fp = integrate([power([3600], [0.001], 60.0)], 0.0, 7200.0, carbon=series)
    assert fp.carbon_quality is expected
    assert integrate([power([3600], [10], 60.0)], 0.0, 7200.0).carbon_quality is Quality.MEASURED


def test_footprints_of_a_split_add_up_to_the_whole() -> None:
    trace, series = power([0, 3600], [500, 700], 3600.0), hourly([10.0, 20.0])
    whole = integrate([trace], 0.0, 7200.0, carbon=series)
    halves = integrate([trace], 0.0, 1000.0, carbon=series) + integrate([trace], 1000.0, 7200.0, carbon=series)
    assert halves.carbon_g == pytest.approx(whole.carbon_g, rel=1e-12)
    assert (halves.energy_j, halves.duration_s, halves.start_s, halves.end_s) == (
        whole.energy_j,
        whole.duration_s,
        whole.start_s,
        whole.end_s,
    )
    assert whole == whole + Footprint()


def test_a_sinusoid_sampled_every_30_s_is_within_half_a_percent() -> None:
    t = np.arange(0, 6 * 3600, 30.0)
    trace = power(t.tolist(), (200 + 150 * np.sin(2 * np.pi * t / 600)).tolist(), 30.0)
    for end_s in (3600.0, 3737.0, 5 * 3600.0 + 211.0):
        exact_j = 200 * end_s + 150 * 600 / (2 * np.pi) * (1 - math.cos(2 * np.pi * end_s / 600))
        assert integrate([trace], 0.0, end_s).energy_j == pytest.approx(exact_j, rel=0.005)


@pytest.mark.parametrize(
    "noun",
    [
        PowerSteps(channel(), [0, 1], [1.0]),
        BusyTimes([0, 1], [1.0], [1.0]),
        power_steps(power([0], [1])),
        window_bins(0, 1, None),
    ],
)
def test_what_accounting_hands_out_cannot_be_changed(noun: Any) -> None:
    name = dataclasses.fields(noun)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(noun, name, None)
    assert {noun: name}[noun] == name, "compared by what they are, not by arrays, which have no hash"
    assert not hasattr(noun, "__dict__")


def test_a_grid_is_cut_where_something_changes_inside_the_window() -> None:
    grid = window_bins(1800.0, 7200.0, hourly([1.0, 2.0, 3.0]), [np.array([0, 2_000_000_000_000, 3_600_000_000_000])])
    assert (grid.edges_ns / 1e9).tolist() == [1800.0, 2000.0, 3600.0, 7200.0]
    assert grid.g_per_kwh.tolist() == [1.0, 1.0, 2.0]
    outside = window_bins(-3600.0, 3600.0, hourly([1.0]))
    assert np.isnan(outside.g_per_kwh[0]) and outside.g_per_kwh[1] == 1.0
