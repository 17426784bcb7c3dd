"""How often a session looks, and how far back."""

import pytest

from joulery.runtime.serving.session import Pace


@pytest.mark.parametrize(
    ("duration_s", "step_s"), [(None, 1.0), (3600.0, 1.0), (60.0, 1.0), (30.0, 0.5), (15.0, 0.25), (2.0, 0.25)]
)
def test_a_short_run_is_looked_at_more_often(duration_s, step_s):
    assert Pace.over(duration_s) == Pace(tick_s=step_s, step_s=step_s)


@pytest.mark.parametrize(("rate_rps", "window_s"), [(10.0, 5.0), (12.5, 4.0), (1000.0, 4.0)])
def test_a_window_holds_fifty_requests_or_four_steps(rate_rps, window_s):
    assert Pace().window_s(rate_rps) == window_s
