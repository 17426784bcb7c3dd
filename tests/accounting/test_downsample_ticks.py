import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from joulery.accounting.power_timeline import downsample_ticks, merge_ticks
from joulery.domain.quality import Quality
from joulery.domain.serving.timeline import ServiceTick, Tick


def tick(t_s, power_w=10.0, energy_j=math.nan, services=(), **more):
    return Tick(t_s, 1.0, power_w=power_w, energy_j=energy_j, services=services, **more)


@given(st.integers(0, 300), st.integers(1, 50))
def test_never_more_than_the_limit_and_never_a_second_lost(count, limit):
    ticks = [tick(float(i + 1), energy_j=float(i)) for i in range(count)]
    thinned = downsample_ticks(ticks, limit)
    assert len(thinned) <= limit
    assert math.fsum(one.period_s for one in thinned) == count
    if count:
        assert (thinned[-1].t_s, thinned[-1].energy_j) == (ticks[-1].t_s, ticks[-1].energy_j)


@given(st.lists(st.floats(0, 1e5), min_size=1, max_size=100), st.integers(1, 20))
def test_the_energy_under_the_power_stays(powers, limit):
    thinned = downsample_ticks([tick(float(i + 1), power) for i, power in enumerate(powers)], limit)
    assert math.fsum(one.power_w * one.period_s for one in thinned) == pytest.approx(math.fsum(powers))


def test_few_ticks_are_left_alone():
    ticks = (tick(1.0), tick(2.0))
    assert downsample_ticks(ticks, 2) == ticks
    with pytest.raises(ValueError, match="0 ticks"):
        downsample_ticks(ticks, 0)


def test_requests_add_up_and_shares_are_weighted_by_answers():
    one = ServiceTick("s", 11, 1, 0.02, 1.0, 0.8, (("small", 1.0),))
    other = ServiceTick("s", 30, 0, 0.09, 0.5, 0.6, (("large", 1.0),))
    (merged,) = merge_ticks([tick(1.0, services=(one,)), tick(2.0, services=(other,))]).services
    assert (merged.requests, merged.failed, merged.latency_s) == (41, 1, 0.09)
    assert merged.attainment_ratio == pytest.approx((10 * 1.0 + 30 * 0.5) / 40)
    assert merged.accuracy_ratio == pytest.approx((10 * 0.8 + 30 * 0.6) / 40)
    assert dict(merged.mix) == pytest.approx({"small": 0.25, "large": 0.75})


def test_periods_without_answers_have_no_say():
    silent = ServiceTick("s", 0)
    one = ServiceTick("s", 4, 0, 0.02, 1.0, 0.8, (("small", 1.0),))
    (merged,) = merge_ticks([tick(1.0, services=(silent,)), tick(2.0, services=(one,))]).services
    assert merged == one
    (merged,) = merge_ticks([tick(1.0, services=(silent,)), tick(2.0, services=(silent,))]).services
    assert math.isnan(merged.latency_s)
    assert merged.mix == ()


def test_one_answer_is_an_answer():
    one = ServiceTick("s", 1, 0, 0.02, 1.0, 0.8, (("small", 1.0),))
    (merged,) = merge_ticks([tick(1.0, services=(one,)), tick(2.0)]).services
    assert merged == one


def test_what_is_known_survives_what_is_not_and_the_weakest_quality_shows():
    a = tick(1.0, power_w=math.nan, energy_j=5.0, carbon_g=1.0, quality=Quality.ASSUMED, g_per_kwh=100.0)
    b = tick(2.0, power_w=20.0, energy_j=math.nan, g_per_kwh=200.0, power_band_w=2.0)
    merged = merge_ticks([a, b])
    assert (merged.power_w, merged.energy_j, merged.carbon_g, merged.g_per_kwh) == (20.0, 5.0, 1.0, 150.0)
    assert merged.quality is Quality.ASSUMED
    assert math.isnan(merged.baseline_g)
