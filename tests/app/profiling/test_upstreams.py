"""The watts of upstreams: fitted by variant where a meter sees them, as stated where none does."""

import numpy as np
import pytest

from joulery.app.profiling.upstreams import upstream_profile
from joulery.domain.energy.channel import Channel, ReadingKind
from joulery.domain.energy.power import PowerTrace
from joulery.domain.errors import DataError
from joulery.domain.quality import Quality
from joulery.domain.serving.engine import InferResponse, ModelKind, ModelRef
from joulery.domain.serving.profile import Profile, Timings
from joulery.domain.serving.service import Slice, SliceKind
from joulery.runtime.profiling.slice_timings import MeasuredSlice
from joulery.store.run.readings import RunReadings

WATTS = {"large": 60.0, "small": 15.0}
IDLE_W = 30.0


def answer(variant: str, start_s: float, took_s: float) -> InferResponse:
    return InferResponse({}, variant, "u0", start_s, start_s, start_s + took_s, took_s, took_s)


def played() -> tuple[RunReadings, list[InferResponse]]:
    """Two seconds idle, then ten of each variant with one request after the other and two at once, metered."""
    t_s = np.arange(0.0, 23.0, 0.05)
    answers = [answer("large", 2.0 + 0.1 * k, 0.08) for k in range(100)]
    answers += [answer("large", 7.0 + 0.1 * k, 0.08) for k in range(50)]
    answers += [answer("small", 12.0 + 0.1 * k, 0.05) for k in range(100)]
    fine_s = np.arange(0.0, 23.0, 0.001)
    power_w = np.full(len(fine_s), IDLE_W)
    for one in answers:
        power_w[(fine_s >= one.start_s) & (fine_s < one.end_s)] += WATTS[one.variant]
    energy_j = np.interp(t_s, fine_s, np.cumsum(power_w) * 0.001)
    channel = Channel("gpu:0", "board", ReadingKind.COUNTER, "nvml", Quality.MEASURED)
    return RunReadings((PowerTrace(channel, (t_s * 1e9).astype(np.int64), energy_j, 0.05),)), answers


def profiled(readings: RunReadings, answers: list[InferResponse], options: dict[str, str]) -> Profile:
    times = Timings([0.08, 0.08], [0.08, 0.08])
    models = {name: ModelRef(ModelKind.REMOTE, f"http://{name}/net", options.get(name, "")) for name in WATTS}
    measured = [MeasuredSlice(name, Slice(SliceKind.WHOLE), times, times, 0.0, 0.0) for name in WATTS]
    return upstream_profile(models, measured, readings, 1, answers)


def test_each_variant_has_the_watts_that_the_meter_saw_while_it_answered() -> None:
    found = profiled(*played(), {})
    watts = {entry.variant: entry.active_w for entry in found.entries}
    assert watts == pytest.approx(WATTS, rel=0.05)
    assert found.quality is Quality.MEASURED
    assert found.idle_w == pytest.approx(IDLE_W, rel=0.05)


def test_stated_watts_are_called_assumed() -> None:
    readings, answers = played()
    found = profiled(readings, answers, {"large": '{"power_w": 7.0}', "small": '{"power_w": 3.0}'})
    watts = {entry.variant: entry.active_w for entry in found.entries}
    assert watts == {"large": 7.0, "small": 3.0}
    assert found.quality is Quality.ASSUMED


def test_servers_that_no_meter_sees_need_stated_watts() -> None:
    readings, answers = played()
    (trace,) = readings.traces
    flat = PowerTrace(trace.channel, trace.t_ns, np.linspace(0.0, IDLE_W * 23.0, len(trace.t_ns)), 0.05)
    with pytest.raises(DataError, match="do not see the server") as caught:
        profiled(RunReadings((flat,)), answers, {})
    assert "power: 60 W" in caught.value.hint
    with pytest.raises(DataError, match="no meter sees the servers"):
        profiled(RunReadings(()), answers, {})
