import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from joulery.accounting.charge import IdleRule, charge
from joulery.accounting.power_timeline import power_timeline
from joulery.accounting.steps import power_steps
from joulery.domain.energy.carbon import CarbonSeries
from joulery.domain.energy.channel import Channel, ReadingKind
from joulery.domain.energy.power import BusyTimes, PowerTrace
from joulery.domain.quality import Quality

CPU = Channel("cpu:0", "package", ReadingKind.POWER, "fake", Quality.MODELLED, idle_w=10.0, band_ratio=0.5)
T0_S = 1000.0


def metered(watts):
    stamps = ((T0_S + np.arange(len(watts))) * 1e9).astype(np.int64)
    return [power_steps(PowerTrace(CPU, stamps, watts, 1.0))]


def busy(shares):
    edges = ((T0_S + np.arange(len(shares) + 1)) * 1e9).astype(np.int64)
    return {"cpu:0": BusyTimes(edges, shares, np.ones(len(shares)))}


CARBON = CarbonSeries("GB", [T0_S, T0_S + 5, T0_S + 30], [100.0, 300.0], source="test")


@settings(max_examples=60)
@given(
    st.lists(st.floats(0, 500), min_size=4, max_size=20),
    st.integers(1, 13),
    st.sampled_from(IdleRule),
    st.floats(1, 2),
    st.data(),
)
def test_the_last_cumulative_values_are_the_charge_of_the_whole(watts, windows, idle, pue, data):
    shares = data.draw(st.lists(st.floats(0, 1), min_size=len(watts), max_size=len(watts)))
    end_s = T0_S + len(watts)
    terms = {"idle": idle, "carbon": CARBON, "pue": pue}
    whole = charge(metered(watts), busy(shares), T0_S, end_s, **terms).run
    ticks = power_timeline(metered(watts), busy(shares), T0_S, end_s, windows=windows, **terms)
    assert len(ticks) == windows
    assert ticks[-1].energy_j == pytest.approx(whole.energy_j, rel=1e-9, abs=1e-9)
    assert ticks[-1].carbon_g == pytest.approx(whole.carbon_g, rel=1e-9, abs=1e-12)
    assert math.fsum(tick.period_s for tick in ticks) == pytest.approx(end_s - T0_S)
    assert all(b.energy_j >= a.energy_j for a, b in itertools.pairwise(ticks))


def test_the_power_is_that_of_what_the_run_pays_for():
    ticks = power_timeline(metered([50.0] * 4), busy([0.5] * 4), T0_S, T0_S + 4, windows=4, idle=IdleRule.NONE)
    assert [tick.power_w for tick in ticks] == pytest.approx([20.0] * 4), "half of what exceeds 10 W idle"
    assert [tick.power_band_w for tick in ticks] == pytest.approx([10.0] * 4)
    ticks = power_timeline(metered([50.0] * 4), busy([0.5] * 4), T0_S, T0_S + 4, windows=2, idle=IdleRule.WHOLE)
    assert [tick.power_w for tick in ticks] == pytest.approx([30.0] * 2)
    assert ticks[0].quality is Quality.MODELLED
    assert math.isnan(ticks[0].g_per_kwh)
    assert math.isnan(ticks[0].carbon_g)


def test_the_intensity_is_the_mean_of_each_window_where_it_is_known():
    ticks = power_timeline(
        metered([50.0] * 40), busy([1.0] * 40), T0_S, T0_S + 40, windows=4, idle=IdleRule.NONE, carbon=CARBON
    )
    assert [tick.g_per_kwh for tick in ticks[:3]] == pytest.approx([200.0, 300.0, 300.0])
    assert math.isnan(ticks[3].g_per_kwh)


def test_where_nothing_was_read_the_power_is_unknown_and_the_energy_stands():
    ticks = power_timeline(metered([50.0] * 4), {}, T0_S, T0_S + 40, windows=4, idle=IdleRule.WHOLE)
    assert not math.isnan(ticks[0].power_w)
    assert math.isnan(ticks[3].power_w)
    assert ticks[3].energy_j == ticks[2].energy_j > 0


def test_a_window_of_no_length_has_no_course():
    assert power_timeline([], {}, T0_S, T0_S, windows=5, idle=IdleRule.WHOLE) == ()
