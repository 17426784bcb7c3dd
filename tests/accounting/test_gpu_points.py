"""Power of boards against how busy they were."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from joulery.accounting.load_line import gpu_channels, gpu_points, work_by_bin
from joulery.domain.energy.channel import Channel, ReadingKind
from joulery.domain.energy.power import PowerTrace
from joulery.domain.quality import Quality
from tests.accounting.readings import steps_of


def board(device: str, watts: float) -> PowerTrace:
    channel = Channel(device, "board", ReadingKind.COUNTER, "nvml", Quality.MEASURED)
    t_ns = np.arange(0, 4_000_000_001, 100_000_000)
    return PowerTrace(channel, t_ns, watts * t_ns / 1e9, 0.1)


def test_work_is_spread_over_its_time_and_power_summed_over_boards() -> None:
    traces = [board("gpu:0", 100.0), board("gpu:1", 50.0)]
    work = np.array([[0.5, 1.5, 0.6], [1.0, 2.0, 1.0]])
    busy, watts = gpu_points(steps_of(traces), work, np.array([0, 1, 2, 3, 6]) * 1_000_000_000)
    assert busy == pytest.approx([0.3, 1.3, 0.0, 0.0])
    assert watts[:3] == pytest.approx([150.0, 150.0, 150.0])
    assert np.isnan(watts[3]), "the meters had ended"


def test_only_the_boards_that_are_meant() -> None:
    channels = [board(device, 1.0).channel for device in ("gpu:0", "gpu:1", "machine")]
    assert [channel.device for channel in gpu_channels(channels, ["gpu:1"])] == ["gpu:1"]


def test_no_work_is_no_work() -> None:
    busy, _ = gpu_points(steps_of([board("gpu:0", 1.0)]), np.zeros((0, 3)), np.array([0, 1_000_000_000]))
    assert busy.tolist() == [0.0]


SPANS = st.lists(st.tuples(st.floats(0, 20), st.floats(0, 5), st.floats(0, 1)), max_size=12)


@given(SPANS, st.integers(0, 2**31))
def test_work_is_kept_bin_by_bin(spans: list[tuple[float, float, float]], base_s: int) -> None:
    """Nothing lost, nothing invented, and exactly nothing where nothing ran."""
    work = np.array([(base_s + start, base_s + start + long, part * long) for start, long, part in spans])
    work = work.reshape(-1, 3)
    edges_s = np.array([0.0, 2.0, 3.5, 7.0, 12.0])
    busy = work_by_bin(work, np.rint((base_s + edges_s) * 1e9).astype(np.int64))
    for low, high, got in zip(edges_s[:-1], edges_s[1:], busy, strict=True):
        inside = [(max(0.0, min(high, s + d) - max(low, s)), part) for s, d, part in spans]
        assert got == pytest.approx(sum(seconds * part for seconds, part in inside), abs=2e-5)
        if not any(seconds for seconds, _ in inside) and not any(abs(s + d - low) < 1e-3 for s, d, _ in spans):
            assert got == 0.0
