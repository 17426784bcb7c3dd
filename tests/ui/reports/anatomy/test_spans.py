"""The picture of power over time: the line keeps the energy, however short a burst is."""

import re

import numpy as np
import pytest

from joulery.domain.energy.channel import Channel, ReadingKind
from joulery.domain.energy.power import PowerTrace
from joulery.domain.quality import Quality
from joulery.domain.trace.events import EventTrace
from joulery.ui.reports.anatomy.spans import spans_svg

NONE = EventTrace([], [], [], op=[], start_ns=[], dur_ns=[], device=[], lane=[], phase=[])
SECOND_NS = 1_000_000_000


def line(watts: list[float], step_ns: int, window_ns: tuple[int, int]) -> np.ndarray:
    """The power that the line shows, as a ratio of its highest point."""
    channel = Channel("cpu:0", "package", ReadingKind.POWER, Quality.MEASURED, "test")
    power = PowerTrace(channel, np.arange(len(watts)) * step_ns, watts, step_ns / SECOND_NS)
    svg = str(spans_svg(NONE, [power], window_ns))
    points = re.search(r'points="([^"]+)"', svg)
    assert points is not None
    y = np.array([float(point.split(",")[1]) for point in points[1].split()])
    base = 150.0
    return (base - y) / (base - y.min())


def test_a_burst_between_two_points_of_the_line_is_seen() -> None:
    watts = [0.0] * 24_000
    watts[10_007] = 100.0
    shown = line(watts, SECOND_NS // 1000, (0, 24 * SECOND_NS))
    assert len(shown) == 1200 and shown.max() == 1.0
    assert np.flatnonzero(shown > 0.5).tolist() == [500]


def test_the_line_keeps_the_mean_power() -> None:
    watts = np.random.default_rng(3).uniform(10.0, 50.0, 7_000).tolist()
    window_ns = (0, 7 * SECOND_NS)
    shown = line(watts, SECOND_NS // 1000, window_ns)
    bins = np.linspace(0, 7_000, 1201)
    means = np.diff(np.interp(bins, np.arange(7_001), np.concatenate(([0.0], np.cumsum(watts))))) / np.diff(bins)
    assert shown == pytest.approx(means / means.max(), abs=0.002)


def test_a_window_of_fewer_nanoseconds_than_points_is_drawn() -> None:
    assert len(line([5.0, 5.0], 100, (0, 7))) == 7
