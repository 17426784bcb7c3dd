"""A tick stands at a time that a calendar has."""

import math
from datetime import UTC, datetime

import pytest

from joulery.domain.errors import DataError
from joulery.domain.format import EARLIEST_S, LATEST_S
from joulery.domain.serving.timeline import Tick


@pytest.mark.parametrize("period_s", [0.0, -1.0, math.nan, math.inf])
def test_a_tick_has_a_length(period_s):
    with pytest.raises(DataError, match="positive period"):
        Tick(1.7e9, period_s)


@pytest.mark.parametrize(
    ("t_s", "period_s"),
    [(LATEST_S, 1.0), (EARLIEST_S, 1.0), (1.7e9, 63_925_596_802.0), (math.nan, 1.0), (math.inf, 1.0)],
)
def test_a_tick_begins_and_ends_within_the_calendar(t_s, period_s):
    with pytest.raises(DataError, match="needs a time"):
        Tick(t_s, period_s)


@pytest.mark.parametrize(("t_s", "period_s"), [(LATEST_S - 1, 1.0), (EARLIEST_S + 2, 1.0), (1.7e9, 1e-12), (0.0, 1.0)])
def test_what_a_tick_takes_a_calendar_has(t_s, period_s):
    tick = Tick(t_s, period_s)
    for seconds in (tick.t_s, tick.t_s - tick.period_s):
        assert 1 <= datetime.fromtimestamp(seconds, UTC).year <= 9999
