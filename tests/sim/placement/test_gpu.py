"""The simulated GPU: the planner's equations, the cap, the clock someone sets."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from joulery.domain.errors import ConfigError, InfeasibleError
from joulery.perf.catalog import profile
from joulery.sim.placement.gpu import InterferenceTruth, SimulatedProcess

V100 = profile("v100")
PROCESSES = st.lists(
    st.builds(SimulatedProcess, st.sampled_from(sorted(V100.models)), st.floats(0.05, 0.5), st.integers(1, 16)),
    min_size=1,
    max_size=4,
)


def test_published_example_on_one_gpu():
    """The three services of the paper's motivation, predicted to take 6.9178, 18.9085 and 28.7300 ms a batch."""
    processes = [
        SimulatedProcess("alexnet", 0.10, 4),
        SimulatedProcess("resnet50", 0.30, 8),
        SimulatedProcess("vgg19", 0.375, 6),
    ]
    effects, clock_mhz = InterferenceTruth(V100).conditions(processes)
    assert [1e3 * (effect.load_s + effect.busy_s) for effect in effects] == pytest.approx(
        [6.9178, 18.9085, 28.7300], abs=1e-4
    )
    assert clock_mhz == pytest.approx(1523.7, abs=0.1)
    assert sum(effect.dynamic_w for effect in effects) == pytest.approx(300 - 53.5), "the board draws its cap"


def test_alone_and_below_the_cap_it_runs_at_full_clock_and_its_own_power():
    (effect,), clock_mhz = InterferenceTruth(V100).conditions([SimulatedProcess("ssd", 0.925, 8)])
    assert clock_mhz == 1530.0
    assert effect.dynamic_w == pytest.approx(221.01333, abs=1e-4)
    assert 1e3 * effect.load_s == pytest.approx(0.864)
    assert 1e3 * effect.busy_s == pytest.approx(23.740771 + 2.375104, abs=1e-5)


def test_an_idle_gpu_runs_at_full_clock_and_draws_its_idle_power():
    truth = InterferenceTruth(V100)
    assert truth.conditions([]) == ((), 1530.0)
    assert truth.idle_w == 53.5


@given(PROCESSES)
def test_company_never_helps_and_power_never_exceeds_the_cap(processes):
    truth = InterferenceTruth(profile("v100-refit"))
    together = truth.conditions(processes)
    assert truth.idle_w + sum(effect.dynamic_w for effect in together.effects) <= 300.0 + 1e-9
    for process, effect in zip(processes, together.effects, strict=True):
        alone = truth.conditions([process]).effects[0]
        assert effect.busy_s >= alone.busy_s - 1e-12
        assert effect.load_s >= alone.load_s - 1e-12
        assert effect.dynamic_w <= alone.dynamic_w + 1e-9


@given(PROCESSES, st.floats(300.0, 1530.0))
def test_the_clock_is_the_lower_of_the_one_set_and_the_one_the_cap_leaves(processes, limit_mhz):
    free = InterferenceTruth(V100).conditions(processes)
    held = InterferenceTruth(V100, clock_limit_mhz=limit_mhz).conditions(processes)
    assert held.clock_mhz <= limit_mhz
    if free.clock_mhz >= 1530.0:
        assert held.clock_mhz == limit_mhz
        for before, after in zip(free.effects, held.effects, strict=True):
            assert before.busy_s - 1e-12 <= after.busy_s <= before.busy_s * 1530.0 / limit_mhz + 1e-12
            assert after.dynamic_w == pytest.approx(before.dynamic_w * limit_mhz / 1530.0)
    else:
        assert held.clock_mhz >= min(limit_mhz, free.clock_mhz) - 1e-9, "less power asked for leaves more clock"


def test_half_the_clock_doubles_execution_and_follows_the_power_law_given():
    process = [SimulatedProcess("vgg19", 0.5, 4)]
    full = InterferenceTruth(V100).conditions(process).effects[0]
    half = InterferenceTruth(V100, clock_limit_mhz=765.0, dynamic_ratio=lambda ratio: ratio**3).conditions(process)
    feedback_s = 4 * 4000 / 1e7 / 1e3
    assert half.effects[0].busy_s - feedback_s == pytest.approx(2 * (full.busy_s - feedback_s))
    assert half.effects[0].load_s == full.load_s
    assert half.effects[0].dynamic_w == pytest.approx(full.dynamic_w / 8)


def test_a_gpu_asked_for_far_too_much_power_is_refused():
    with pytest.raises(InfeasibleError, match="no clock is left"):
        InterferenceTruth(V100).conditions([SimulatedProcess("vgg19", 1.0, 32)] * 9)


@pytest.mark.parametrize("limit_mhz", [0.0, -5.0, 1531.0, float("nan")])
def test_clocks_out_of_range_are_refused(limit_mhz):
    with pytest.raises(ConfigError, match="at most 1530"):
        InterferenceTruth(V100, clock_limit_mhz=limit_mhz)
