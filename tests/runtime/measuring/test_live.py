import os
import time

import numpy as np
import pytest

from joulery.domain.energy.carbon import CarbonSeries
from joulery.domain.energy.channel import MeterSpec
from joulery.runtime.measuring.live import LiveMeters
from joulery.runtime.measuring.sampler_config import SamplerConfig
from joulery.runtime.measuring.sampling import SamplerProcess
from joulery.store.run.readings import RecordingTail, read_recording, read_samples
from joulery.store.run.samples import SampleWriter
from tests.waiting import wait_until

HEADER = {"unix_ns": 1_700_000_000_000_000_000, "monotonic_ns": 1_000, "period_s": 0.1}


@pytest.fixture
def writer(tmp_path):
    samples = SampleWriter(tmp_path / "0-fake.samples", ["a", "b"], HEADER)
    yield samples
    samples.close()


def test_a_tail_reads_on_where_it_was_and_forgets_what_is_old(tmp_path, writer):
    tail = RecordingTail(tmp_path / "0-fake.samples", keep_s=1.0)
    seen = []
    for second in range(4):
        for tenth in range(10):
            writer.record(1_000 + (10 * second + tenth) * 100_000_000, (float(second), float(tenth)))
        writer.flush()
        found = tail.update()
        whole = read_recording(tmp_path / "0-fake.samples")
        kept = whole.t_ns >= whole.t_ns[-1] - 1_000_000_000
        np.testing.assert_array_equal(found.t_ns, whole.t_ns[kept])
        np.testing.assert_array_equal(found.values, whole.values[kept])
        seen.append(len(found.t_ns))
    assert seen == [10, 11, 11, 11]
    assert len(tail.update().t_ns) == 11, "nothing new, nothing lost"


def test_a_tail_waits_for_its_file_and_for_whole_records(tmp_path):
    file = tmp_path / "later.samples"
    tail = RecordingTail(file, keep_s=10.0)
    assert tail.update() is None
    samples = SampleWriter(file, ["a"], HEADER)
    samples.record(2_000, (1.0,))
    samples.record(3_000, (2.0,))
    samples.close()
    whole = file.read_bytes()
    file.write_bytes(whole[:20])
    assert tail.update() is None, "half a header"
    file.write_bytes(whole[:-5])
    assert tail.update().values.ravel().tolist() == [1.0]
    file.write_bytes(whole)
    assert tail.update().values.ravel().tolist() == [1.0, 2.0]


def sampler(folder, **changes) -> SamplerProcess:
    fields = {
        "folder": str(folder),
        "parent": os.getpid(),
        "root": os.getpid(),
        "include_root": True,
        "period_s": 0.02,
        "max_cpu_ratio": 1.0,
        "meters": (MeterSpec("cpu-model", {"idle_w": 20.0, "max_w": 60.0, "band_ratio": 0.3}),),
    }
    process = SamplerProcess.start(SamplerConfig(**{**fields, **changes}))
    process.wait_ready()
    return process


def busy(seconds: float) -> None:
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        pass


def test_windows_of_a_running_sampler_add_up_to_what_is_charged_in_the_end(tmp_path):
    live = LiveMeters(tmp_path, pue=1.2)
    start_s = time.time()
    grid = CarbonSeries("X", [start_s - 10, start_s + 100], [200.0], source="test")
    process = sampler(tmp_path)
    try:
        busy(1.2)
        time.sleep(0.5)
        live.update()
        parts = [live.window(start_s + 0.3 * k, start_s + 0.3 * (k + 1), grid) for k in range(4)]
        whole = live.window(start_s, start_s + 1.2, grid)
        (meter,) = live.meters(time.time())
    finally:
        process.stop()
    assert sum(part.run.energy_j for part in parts) == pytest.approx(whole.run.energy_j, rel=1e-6)
    assert sum(part.run.carbon_g for part in parts) == pytest.approx(whole.run.carbon_g, rel=1e-6)
    assert whole.run.carbon_g == pytest.approx(whole.run.energy_j * 1.2 * 200 / 3.6e6, rel=1e-6)
    assert 20.0 < whole.power_w < 61.0 and whole.run.idle_j > 0 and whole.run.attributed_j > 0
    assert meter.meter == "cpu-model" and 19 < meter.power_w < 63.0 and meter.age_s >= 0


def test_a_window_without_readings_has_no_power(tmp_path):
    live = LiveMeters(tmp_path)
    live.update()
    nothing = live.window(0.0, 1.0, None)
    assert (
        np.isnan(nothing.power_w)
        and np.isnan(nothing.power_band_w)
        and nothing.run.energy_j == 0
        and live.meters(1.0) == ()
    )


def test_a_sampler_that_slows_itself_down_is_understood(tmp_path):
    process = sampler(tmp_path, max_cpu_ratio=1e-6, period_s=0.01)
    try:
        # What costs most is read less often first: that may be the CPU times of processes.
        slower = "of a core: it reads 0-cpu-model every"
        wait_until(lambda: any(slower in note for note in read_samples(tmp_path).notes), "a longer period of the meter")
    finally:
        process.stop()
    readings = read_samples(tmp_path)
    assert readings.traces[0].period_s >= 0.02, "held across the longer period"
