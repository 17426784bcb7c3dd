"""The predictor of one process at a clock: the models it replaces are its limits."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from joulery.domain.errors import ConfigError
from joulery.domain.serving.service import Slo
from joulery.perf import catalog
from joulery.perf.instances import (
    ServingInstance,
    at_clock,
    capacity_rps,
    clocks_mhz,
    neighbourhood,
    predict_gpu,
)
from joulery.perf.interference.model import Neighbourhood, colocated_latency, solo
from joulery.perf.power.clock_curves import V100
from joulery.perf.queues.batch_queue import late_ratio
from joulery.policies.placement.provisioning.gpu_shares import alone

PROFILES = tuple(catalog.profile(name) for name in ("v100", "v100-calibrated", "v100-refit"))
MODELS = ("alexnet", "resnet50", "vgg19", "ssd")
_instances = st.lists(
    st.builds(
        ServingInstance,
        st.sampled_from(MODELS),
        st.integers(1, 40).map(lambda units: 2.5 * units),
        st.integers(1, 32),
        st.floats(0.1, 500),
    ),
    min_size=1,
    max_size=6,
)


@given(st.sampled_from(PROFILES), _instances)
def test_at_full_clock_it_is_the_model_of_the_paper(profile, instances):
    around = Neighbourhood()
    for each in instances:
        around = around.with_process(solo(profile[each.model], each.batch, each.share_percent))
    found = predict_gpu(at_clock(profile), instances)
    for each, times in zip(instances, found.times, strict=True):
        own = solo(profile[each.model], each.batch, each.share_percent)
        assert times == colocated_latency(profile.gpu, profile[each.model], each.batch, own, around)


@given(st.sampled_from(PROFILES), st.sampled_from(MODELS), st.integers(1, 32), st.floats(10, 100))
def test_without_neighbours_at_full_clock_it_is_a_process_alone(profile, model, batch, share):
    found = predict_gpu(at_clock(profile), [ServingInstance(model, share, batch, 1.0)])
    assert found.times[0] == alone(profile, profile[model], batch, share)


@given(st.sampled_from(PROFILES), _instances, st.floats(0.5, 1.0), st.floats(0, 200))
def test_parts_and_idle_are_the_board(profile, instances, ratio, host_w):
    gpu = at_clock(profile, ratio * profile.gpu.clock_max_mhz, host_w=host_w)
    found = predict_gpu(gpu, instances)
    parts = found.idle_w + found.host_w + math.fsum(watts for power in found.powers for watts in power)
    assert abs(parts - found.board_w) <= 1e-9 * found.board_w
    assert found.board_w <= gpu.power_cap_w + host_w + 1e-9


@given(st.sampled_from(PROFILES), _instances, st.floats(0.5, 1.0))
def test_the_clock_is_the_lower_of_the_one_set_and_the_one_the_cap_leaves(profile, instances, ratio):
    set_mhz = ratio * profile.gpu.clock_max_mhz
    gpu = at_clock(profile, set_mhz)
    demand_w = gpu.idle_w + neighbourhood(gpu, instances).power_w
    excess_w = max(0.0, demand_w - profile.gpu.power_cap_w)
    capped = profile.gpu.clock_max_mhz + profile.gpu.clock_mhz_per_w * excess_w
    assert predict_gpu(gpu, instances).clock_mhz == pytest.approx(max(0.0, min(set_mhz, capped)), rel=1e-9, abs=1e-6)


@given(st.sampled_from(PROFILES), st.sampled_from(MODELS), st.integers(1, 32), st.floats(10, 100), st.floats(0.5, 0.99))
def test_a_lower_clock_stretches_the_kernels_and_not_their_launch(profile, model, batch, share, ratio):
    full = alone(profile, profile[model], batch, share)
    held = at_clock(profile, ratio * profile.gpu.clock_max_mhz).profile
    slow = alone(held, held[model], batch, share)
    assert slow.schedule_ms == full.schedule_ms
    assert slow.active_ms == pytest.approx(full.active_ms / ratio)
    assert (slow.load_ms, slow.feedback_ms) == (full.load_ms, full.feedback_ms)


def test_a_model_that_does_not_feel_the_clock_keeps_its_time():
    profile = PROFILES[0]
    held = at_clock(profile, 1113.0, elasticity={"vgg19": 0.0}).profile
    assert held["vgg19"].k1 == profile["vgg19"].k1
    assert held["ssd"].k1 > profile["ssd"].k1


def test_joules_of_a_request_follow_the_square_of_the_voltage_to_the_knee():
    profile = PROFILES[0]
    knee = clocks_mhz(profile, 4)[-1]
    ratio = at_clock(profile, knee).request_j("vgg19") / at_clock(profile).request_j("vgg19")
    assert ratio == pytest.approx(V100.flat_voltage_ratio**2)
    assert ratio == pytest.approx(0.684, abs=5e-4)


def test_clocks_fall_from_the_highest_to_the_knee():
    clocks = clocks_mhz(PROFILES[0], 5)
    assert clocks[0] == 1530.0
    assert clocks[-1] == pytest.approx(1530 * 1004 / 1380)
    assert list(clocks) == sorted(clocks, reverse=True)
    assert clocks_mhz(PROFILES[0], 1) == (1530.0,)


@settings(max_examples=15)
@given(st.sampled_from(MODELS), st.integers(1, 4), st.floats(30, 100), st.floats(20, 200))
def test_capacity_is_where_the_late_share_meets_the_slo(model, batch, share, slo_ms):
    slo = Slo(slo_ms / 1e3, 0.99)
    gpu = at_clock(PROFILES[1], 1300.0).profile
    beside = [Neighbourhood().with_process(solo(gpu[model], size, share)) for size in range(1, batch + 1)]
    times = [
        colocated_latency(gpu.gpu, gpu[model], size, solo(gpu[model], size, share), others).total_ms / 1e3
        for size, others in enumerate(beside, 1)
    ]
    rate = capacity_rps(times, slo)
    if rate > 0:
        assert late_ratio(rate, 1.0, times, slo.latency_s) <= 0.01
        assert late_ratio(rate * 1.05, 1.0, times, slo.latency_s) > 0.01


def test_capacity_of_a_single_server_that_is_never_fast_enough_is_zero():
    assert capacity_rps((0.1,), Slo(0.05, 0.99)) == 0.0
    assert capacity_rps((), Slo(0.05, 0.99)) == 0.0


@pytest.mark.parametrize("mhz", [0.0, -1.0, 1531.0, math.nan])
def test_a_clock_the_type_does_not_have_is_named(mhz):
    with pytest.raises(ConfigError, match="cannot run at this clock"):
        at_clock(PROFILES[0], mhz)


@pytest.mark.parametrize("watts", [-1.0, math.nan, math.inf])
def test_host_watts_are_a_number_from_zero(watts):
    with pytest.raises(ConfigError, match="watts of a host"):
        at_clock(PROFILES[0], host_w=watts)
