"""Hypothesis strategies: traces of every kind with gaps, repeats, wraps and resets; intensities with gaps."""

import math

import numpy as np
from hypothesis import strategies as st

from joulery.domain.energy.carbon import CarbonSeries
from joulery.domain.energy.channel import Channel, ReadingKind
from joulery.domain.energy.power import PowerTrace
from joulery.domain.quality import Quality

WINDOW_S = st.floats(-5.0, 60.0)
WATTS = st.one_of(st.floats(0.0, 500.0), st.just(math.nan), st.just(0.0))


@st.composite
def traces(draw: st.DrawFn, device: str = "cpu:0", idle_w: float = math.nan) -> PowerTrace:
    kind = draw(st.sampled_from(list(ReadingKind)))
    gaps = draw(st.lists(st.one_of(st.integers(1, 3_000_000_000), st.integers(1, 30_000_000_000)), max_size=12))
    stamps = draw(st.integers(-(10**10), 10**10)) + np.cumsum(np.array([0, *gaps], np.int64))
    wrap_j = averaging_s = 0.0
    if kind is ReadingKind.COUNTER:
        wrap_j = draw(st.sampled_from([0.0, 1000.0, 65536.0]))
        values = _counter_values(draw, len(stamps), wrap_j)
    else:
        values = draw(st.lists(WATTS, min_size=len(stamps), max_size=len(stamps)))
        averaging_s = draw(st.sampled_from([0.1, 1.0])) if kind is ReadingKind.AVERAGE else 0.0
    channel = Channel(device, "package", kind, "fake", Quality.MEASURED, averaging_s, wrap_j, idle_w)
    return PowerTrace(channel, stamps, values, draw(st.sampled_from([0.25, 1.0, 2.0])))


def _counter_values(draw: st.DrawFn, count: int, wrap_j: float) -> list[float]:
    steps = draw(st.lists(st.sampled_from([0.0, 0.5, 3.0, 40.0, 300.0]), min_size=count, max_size=count))
    values = np.cumsum([draw(st.sampled_from([0.0, 990.0, 65500.0])), *steps])[1:]
    if draw(st.booleans()) and count > 1:
        values = values.copy()
        reset = draw(st.integers(1, count - 1))
        values[reset:] -= values[reset]
    if wrap_j:
        values = np.mod(values, wrap_j)
    missing = draw(st.lists(st.booleans(), min_size=count, max_size=count))
    return [
        math.nan if gone and keep % 3 == 0 else float(v)
        for keep, (gone, v) in enumerate(zip(missing, values, strict=True))
    ]


@st.composite
def intensities(draw: st.DrawFn) -> CarbonSeries:
    values = draw(st.lists(st.one_of(st.floats(0.0, 1200.0), st.just(math.nan)), min_size=1, max_size=10))
    steps = draw(st.lists(st.integers(1, 40), min_size=len(values), max_size=len(values)))
    edges = draw(st.integers(-20, 20)) + np.cumsum([0, *steps]) / 4.0
    return CarbonSeries("GB", edges, values, source="test")
