import pytest

from joulery.domain.energy.channel import Channel, ReadingKind
from joulery.domain.energy.power import PowerTrace
from joulery.domain.errors import DataError
from joulery.domain.quality import Quality, weakest

CHANNEL = Channel("cpu:0", "package", ReadingKind.POWER, "fake", Quality.MEASURED)


@pytest.mark.parametrize(
    ("t_ns", "values", "period_s", "says"),
    [
        ([0, 1], [1.0], 1.0, "2 stamps but 1 readings"),
        ([1, 1], [1.0, 1.0], 1.0, "reading 1 at 1 ns"),
        ([0, 1], [1.0, -2.0], 1.0, "reading 1 is -2.0"),
        ([0], [float("inf")], 1.0, "reading 0 is inf"),
        ([0], [1.0], 0.0, "period is 0.0"),
    ],
)
def test_a_bad_trace_is_refused(t_ns: list[int], values: list[float], period_s: float, says: str) -> None:
    with pytest.raises(DataError, match=says):
        PowerTrace(CHANNEL, t_ns, values, period_s)


def test_missing_readings_are_kept_and_columns_are_read_only() -> None:
    trace = PowerTrace(CHANNEL, [0, 5], [1.0, float("nan")], 0.004)
    assert len(trace) == 2
    with pytest.raises(ValueError, match="read-only"):
        trace.values[0] = 3.0


def test_weakest_quality() -> None:
    assert weakest([]) is Quality.MEASURED
    assert weakest([Quality.MODELLED, Quality.MEASURED]) is Quality.MODELLED
    assert weakest([Quality.ASSUMED, Quality.MODELLED]) is Quality.ASSUMED
