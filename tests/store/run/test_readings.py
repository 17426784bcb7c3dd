import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from joulery.accounting.steps import NS_PER_S
from joulery.domain.energy.channel import Channel, ReadingKind
from joulery.domain.energy.power import BusyTimes
from joulery.domain.quality import Quality
from joulery.runtime.measuring.account import _coarser as coarser
from joulery.store.run.channels import channel_to_dict
from joulery.store.run.directory import create_run, open_run
from joulery.store.run.readings import RunReadings, load_readings, read_recordings, read_samples, save_readings
from joulery.store.run.samples import BUFFER_COLUMNS, SampleWriter

UNIX_NS = 1_700_000_000 * NS_PER_S
CLOCK = {"unix_ns": UNIX_NS, "monotonic_ns": 50}
COUNTER = Channel("cpu:0", "package", ReadingKind.COUNTER, "rapl", Quality.MEASURED, wrap_j=1000.0)
POWER = Channel("gpu:0", "board", ReadingKind.POWER, "nvml", Quality.MEASURED)


def samples(folder: Path, *, notes: list[dict[str, Any]] | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    power = SampleWriter(
        folder / "0-rapl.samples",
        ["cpu:0:package", "gpu:0:board"],
        {**CLOCK, "period_s": 0.5, "channels": [channel_to_dict(COUNTER), channel_to_dict(POWER)]},
    )
    cpu = SampleWriter(
        folder / "cpu.samples", ["busy_s:cpu:0", "run_s:cpu:0", "self_s"], {**CLOCK, "cpus": {"cpu:0": 4}}
    )
    gpu = SampleWriter(folder / "gpu.samples", ["busy_ratio:gpu:0", "run_ratio:gpu:0"], CLOCK)
    for tick in range(5):
        at_ns = 50 + tick * NS_PER_S // 2
        power.record(at_ns, (100.0 + 10 * tick, math.nan if tick == 2 else 300.0))
        cpu.record(at_ns, (50.0 + 2 * tick, 7.0 + tick, 0.1))
        gpu.record(at_ns, (1.0, math.nan if tick == 3 else 0.25))
    for writer in (power, cpu, gpu):
        writer.close()
    said = notes if notes is not None else [{"kind": "meter", "text": "a note"}, {"kind": "done", "late": 3}]
    (folder / "notes.jsonl").write_text("".join(json.dumps(note) + "\n" for note in said))
    return folder


def test_what_the_sampler_wrote_becomes_traces_and_busy_times(tmp_path: Path) -> None:
    readings = read_samples(samples(tmp_path / "samples"))
    package, board = readings.traces
    assert (repr(package.channel), repr(board.channel)) == (repr(COUNTER), repr(POWER))
    assert package.t_ns[0] == UNIX_NS
    assert package.values.tolist() == [100, 110, 120, 130, 140]
    assert np.isnan(board.values).tolist() == [False, False, True, False, False]
    assert package.period_s == 0.5
    cpu, gpu = readings.busy["cpu:0"], readings.busy["gpu:0"]
    assert (cpu.cpus, cpu.app_s.tolist(), cpu.all_s.tolist()) == (4, [1.0] * 4, [2.0] * 4)
    assert gpu.all_s.tolist() == [0.5] * 4
    np.testing.assert_array_equal(gpu.app_s, [0.125, 0.125, math.nan, 0.125])
    assert readings.offset_ns == UNIX_NS - 50
    assert readings.end_ns == UNIX_NS + 2 * NS_PER_S
    assert readings.notes == ("a note",)
    assert readings.sampler == {"kind": "done", "late": 3}


def test_a_sampler_that_slowed_down_has_longer_periods(tmp_path: Path) -> None:
    notes = [{"kind": "slower", "factor": factor, "text": f"{factor}"} for factor in (2, 4)]
    readings = read_samples(samples(tmp_path / "samples", notes=notes))
    assert readings.traces[0].period_s == 2.0
    assert readings.notes == ("2", "4")
    assert readings.sampler == {}


def test_only_the_stream_that_slowed_down_has_longer_periods(tmp_path: Path) -> None:
    folder = samples(tmp_path / "samples")
    names = sorted(read_recordings(folder))
    assert names
    before = read_samples(folder).traces[0].period_s
    other = {"kind": "slower", "stream": "another", "factor": 8, "text": ""}
    mine = [{"kind": "slower", "stream": name, "factor": 4, "text": ""} for name in names]
    for notes, factor in (([other], 1), ([other, *mine], 4)):
        (folder / "notes.jsonl").write_text("".join(json.dumps(note) + "\n" for note in notes))
        assert read_samples(folder).traces[0].period_s == before * factor


def test_a_counter_is_refined_by_what_its_device_buffered(tmp_path: Path) -> None:
    folder = samples(tmp_path / "samples")
    coarse = read_samples(folder)
    header = {**CLOCK, "channels_of": "0-rapl"}
    buffer = SampleWriter(folder / "0-rapl-buffer.samples", BUFFER_COLUMNS, header)
    for number in range(101):
        buffer.record(50 + number * NS_PER_S // 50, (0, 40.0 if number % 50 < 25 else 10.0))
        buffer.record(51 + number * NS_PER_S // 50, (1, 300.0))
    buffer.close()
    fine = read_samples(folder)
    assert len(fine.traces) == len(coarse.traces)
    assert (len(fine.traces[0]), fine.traces[0].period_s) == (102, pytest.approx(0.02))
    assert fine.traces[0].values[[0, -1]].tolist() == coarse.traces[0].values[[0, -1]].tolist()
    same_power = fine.traces[1]
    assert same_power.channel.kind is ReadingKind.POWER and len(same_power) == len(coarse.traces[1])
    assert list(fine.busy) == list(coarse.busy)


def test_buffered_readings_stand_before_their_stamps_as_their_header_says(tmp_path: Path) -> None:
    stamps = []
    for late_s in (0.0, 0.006):
        folder = samples(tmp_path / f"samples-{late_s}")
        header = {**CLOCK, "channels_of": "0-rapl", "late_s": late_s}
        buffer = SampleWriter(folder / "0-rapl-buffer.samples", BUFFER_COLUMNS, header)
        for number in range(101):
            buffer.record(50 + number * NS_PER_S // 50, (0, 40.0))
        buffer.close()
        stamps.append(read_samples(folder).traces[0].t_ns[2:50])
    assert (stamps[0] - stamps[1] == 6_000_000).all()


def test_what_is_absent_is_no_note_and_a_torn_note_is_left_out(tmp_path: Path) -> None:
    folder = samples(tmp_path / "samples", notes=[{"kind": "absent", "text": "x"}, {"kind": "refused", "text": "y"}])
    with (folder / "notes.jsonl").open("a") as file:
        file.write('{"kind": "meter", "te')
    assert read_samples(folder).notes == ("y",)


def test_nothing_is_evidence_of_nothing(tmp_path: Path) -> None:
    readings = read_samples(tmp_path / "nothing")
    assert (readings.traces, dict(readings.busy), readings.offset_ns, readings.end_ns) == ((), {}, None, None)


def same(a: RunReadings, b: RunReadings) -> None:
    assert (a.offset_ns, a.end_ns, a.notes, a.sampler) == (b.offset_ns, b.end_ns, b.notes, b.sampler)
    for mine, other in zip(a.traces, b.traces, strict=True):
        assert repr(mine.channel) == repr(other.channel)
        assert mine.period_s == other.period_s
        np.testing.assert_array_equal(mine.t_ns, other.t_ns)
        np.testing.assert_array_equal(mine.values, other.values)
    assert list(a.busy) == list(b.busy)
    for device, times in a.busy.items():
        for name in ("edges_ns", "app_s", "all_s"):
            np.testing.assert_array_equal(getattr(times, name), getattr(b.busy[device], name))
        assert times.cpus == b.busy[device].cpus


def test_a_run_keeps_its_evidence_whole(tmp_path: Path) -> None:
    readings = read_samples(samples(tmp_path / "samples"))
    with create_run(tmp_path / "run", kind="measure") as writer:
        save_readings(readings, writer)
    run = open_run(tmp_path / "run")
    same(load_readings(run), readings)
    assert run.series("power")["unit"].tolist() == ["J"] * 5 + ["W"] * 5
    assert set(run.series("power")["device"].tolist()) == {"cpu:0", "gpu:0"}


def test_a_run_of_nothing_keeps_nothing(tmp_path: Path) -> None:
    with create_run(tmp_path / "run", kind="measure") as writer:
        save_readings(RunReadings(), writer)
    same(load_readings(open_run(tmp_path / "run")), RunReadings())


@pytest.mark.parametrize("left", [("power",), ("power", "busy"), ()])
def test_a_run_killed_while_it_was_folded_is_read_from_the_samples(tmp_path: Path, left: tuple[str, ...]) -> None:
    writer = create_run(tmp_path / "run", kind="measure")
    folder = samples(tmp_path / "run" / "samples")
    for name in left:
        writer.write_series(name, {"t_ns": [1]})
    same(load_readings(open_run(tmp_path / "run")), read_samples(folder))
    writer.close()


@given(
    gaps_ms=st.lists(st.integers(1, 3000), min_size=1, max_size=60),
    seed=st.integers(0, 100),
    window_s=st.floats(0.05, 5),
)
def test_coarser_intervals_keep_the_hull_and_the_sums(gaps_ms: list[int], seed: int, window_s: float) -> None:
    rng = np.random.default_rng(seed)
    edges = np.concatenate([[5], 5 + np.cumsum(gaps_ms) * 1_000_000])
    times = BusyTimes(edges, rng.random(len(gaps_ms)), rng.random(len(gaps_ms)) + 1, 2)
    fewer = coarser(times, window_s)
    assert (fewer.edges_ns[0], fewer.edges_ns[-1]) == (edges[0], edges[-1])
    assert set(fewer.edges_ns.tolist()) <= set(edges.tolist())
    assert fewer.app_s.sum() == pytest.approx(times.app_s.sum())
    assert fewer.all_s.sum() == pytest.approx(times.all_s.sum())
    assert fewer.cpus == 2
    lengths_s = np.diff(fewer.edges_ns) / NS_PER_S
    if len(lengths_s) > 1:
        assert lengths_s[-1] >= window_s * (1 - 1e-6)
    # None is much longer than asked for, unless its readings were so far apart or it took in the last rest.
    longest_gap_s = max(gaps_ms) / 1000
    assert all(length <= 2 * window_s + 2 * longest_gap_s + 1e-6 for length in lengths_s)


def test_readings_every_100_ms_become_seconds() -> None:
    edges = np.arange(0, 36) * (NS_PER_S // 10)
    fewer = coarser(BusyTimes(edges, np.full(35, 0.01), np.full(35, 0.1)), 1.0)
    assert (np.diff(fewer.edges_ns) / NS_PER_S).tolist() == [1.0, 1.0, 1.5]
    assert fewer.app_s == pytest.approx([0.1, 0.1, 0.15])
