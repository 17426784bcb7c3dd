import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from joulery.adapters.meters.fake import FakeMeter, Script
from joulery.domain.energy.channel import ReadingKind
from joulery.domain.errors import ConfigError
from joulery.domain.quality import Quality

STEPS = ((0.0, 10.0), (2.0, 50.0), (3.0, 0.0))


class Clock:
    now_s = 50.0

    def __call__(self) -> float:
        return self.now_s


def meter(clock: Clock, **script: object) -> FakeMeter:
    return FakeMeter([Script(STEPS, **script)], clock)  # type: ignore[arg-type]


@pytest.mark.parametrize(("at_s", "joules"), [(0, 0), (1, 10), (2, 20), (2.5, 45), (3, 70), (100, 70)])
def test_a_counter_counts_what_the_script_draws(at_s: float, joules: float) -> None:
    clock = Clock()
    fake = meter(clock)
    clock.now_s += at_s
    assert fake.read() == pytest.approx((joules,))


@pytest.mark.parametrize(("at_s", "watts"), [(0, 10), (1.9, 10), (2, 50), (2.9, 50), (3, 0), (9, 0)])
def test_power_is_the_step_that_holds(at_s: float, watts: float) -> None:
    clock = Clock()
    fake = meter(clock, kind=ReadingKind.POWER)
    clock.now_s += at_s
    assert fake.read() == (watts,)


@pytest.mark.parametrize(("at_s", "watts"), [(0, 10), (0.5, 10), (1.5, 10), (2.5, 30), (3, 50), (3.5, 25), (4, 0)])
def test_an_average_looks_back_one_second_or_to_the_beginning(at_s: float, watts: float) -> None:
    clock = Clock()
    fake = meter(clock, kind=ReadingKind.AVERAGE)
    clock.now_s += at_s
    assert fake.read() == pytest.approx((watts,))
    assert fake.channels[0].averaging_s == 1.0


@given(at_s=st.floats(0, 100), wrap_j=st.floats(1, 60), start_j=st.floats(0, 60))
def test_a_counter_wraps(at_s: float, wrap_j: float, start_j: float) -> None:
    clock = Clock()
    plain, wrapping = meter(clock), meter(clock, wrap_j=wrap_j, start_j=start_j)
    clock.now_s += at_s
    assert wrapping.read()[0] == pytest.approx((start_j + plain.read()[0]) % wrap_j, abs=1e-9)
    assert 0 <= wrapping.read()[0] < wrap_j


def test_silence_is_missing_and_noted_once_and_so_is_its_end() -> None:
    clock = Clock()
    fake = meter(clock, silent_s=((1.0, 2.0),))
    assert "scripted" in fake.notes()[0]
    clock.now_s += 1.0
    assert math.isnan(fake.read()[0])
    assert math.isnan(fake.read()[0])
    assert fake.notes() == ("cpu:0 package: the fake gives nothing",)
    clock.now_s += 1.0
    assert fake.read() == (20.0,)
    assert fake.notes() == ("cpu:0 package: the fake answers again",)


def test_it_is_assumed_whatever_it_plays() -> None:
    (channel,) = meter(Clock(), device="gpu:3", component="board", wrap_j=5.0, idle_w=2.0).channels
    assert (channel.device, channel.component, channel.meter) == ("gpu:3", "board", "fake")
    assert (channel.quality, channel.wrap_j, channel.idle_w) == (Quality.ASSUMED, 5.0, 2.0)


@pytest.mark.parametrize("watts", [(), ((1.0, 5.0),), ((0.0, 1.0), (0.0, 2.0)), ((0.0, 1.0), (5.0, 1.0), (2.0, 1.0))])
def test_a_script_starts_at_zero_and_goes_forward(watts: tuple[tuple[float, float], ...]) -> None:
    with pytest.raises(ConfigError, match="start at 0 s"):
        Script(watts)


@pytest.mark.parametrize("watts", [-1.0, math.inf, math.nan])
def test_watts_are_watts(watts: float) -> None:
    with pytest.raises(ConfigError, match="finite and not negative"):
        Script(((0.0, watts),))


def test_a_fake_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one channel"):
        FakeMeter([])
