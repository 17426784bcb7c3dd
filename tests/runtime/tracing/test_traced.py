"""Traced runs: sessions of one process and of several, the run's share of a shared device, clocks in words."""

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from joulery.accounting.charge import divide_power
from joulery.accounting.operations.align import align, canonical, matched
from joulery.accounting.steps import PowerSteps
from joulery.adapters.tracers.inject.jax_recorder import JaxRecorder
from joulery.adapters.tracers.recordings import clock_fit
from joulery.adapters.tracers.torch import TorchTracer
from joulery.app.wiring.tracers import open_tracer
from joulery.domain.energy.carbon import CarbonSeries, Scope, Signal
from joulery.domain.energy.channel import Channel, ReadingKind
from joulery.domain.energy.power import BusyTimes
from joulery.domain.energy.tensor_footprint import DeviceEnergy
from joulery.domain.errors import ConfigError, DataError
from joulery.domain.quality import Quality
from joulery.domain.trace.events import EventTrace, with_devices
from joulery.domain.trace.threads import ThreadTimes
from joulery.domain.trace.tracing import ClockFit, TracedSession
from joulery.runtime.measuring.account import Basis
from joulery.runtime.measuring.terms import Terms
from joulery.runtime.tracing.traced import clock_note, dissect
from tests.adapters.tracers.kineto.kineto_file import KinetoFile

S = 10**9


def session(start_s: float, end_s: float, process: int = 1, op: str = "net/mm") -> TracedSession:
    """One operation that fills the whole session."""
    start, end = round(start_s * S), round(end_s * S)
    trace = EventTrace(
        [op], ["CPU"], ["forward"], op=[0], start_ns=[start], dur_ns=[end - start], device=[0], lane=[0], phase=[0]
    )
    return TracedSession(trace, (start, end), 2, process, ClockFit(1500, 200, 3000))


def basis(watts: float = 100.0, busy: BusyTimes | None = None, idle_w: float = math.nan, carbon=None) -> Basis:
    channel = Channel("cpu:0", "package", ReadingKind.POWER, "fake", Quality.MEASURED, idle_w=idle_w)
    item = PowerSteps(channel, [0, 100 * S], [watts])
    return Basis((item,), {"cpu:0": busy} if busy else {}, 0.0, 100.0, frozenset(), carbon, Terms())


def test_sessions_add_up() -> None:
    got = dissect([session(1, 2), session(5, 7)], basis(), "recency").footprint
    assert got.energy_by_op == pytest.approx({"net/mm": 300.0})
    assert got.devices[0].total_j == pytest.approx(300.0) and got.devices[0].device == "cpu:0"


def test_a_run_pays_its_share_and_the_rest_is_reported() -> None:
    busy = BusyTimes([0, 100 * S], [25.0], [100.0], cpus=4)
    (device,) = dissect([session(0, 10)], basis(busy=busy), "recency").footprint.devices
    assert device.attributed_j == pytest.approx(250.0)
    assert device.other_j == pytest.approx(750.0) and device.idle_j == 0
    assert device.total_j == pytest.approx(1000.0)
    assert device.attributed_j + device.unattributed_j == pytest.approx(device.total_j, rel=1e-12)


def test_what_idles_is_idle_first() -> None:
    busy = BusyTimes([0, 5 * S, 100 * S], [25.0, 0.0], [50.0, 0.0])
    anatomy = dissect([session(0, 10)], basis(busy=busy, idle_w=20.0), "recency")
    (device,) = anatomy.footprint.devices
    assert device.attributed_j == pytest.approx(80 * 0.5 * 5)
    assert device.other_j == pytest.approx(80 * 0.5 * 5)
    assert device.idle_j == pytest.approx(20 * 5 + 100 * 5)
    assert any("the idle device's" in note for note in anatomy.footprint.notes)


def test_where_the_busy_process_is_unknown_energy_is_missing_not_zero() -> None:
    busy = BusyTimes([0, 5 * S], [1.0], [1.0])
    got = dissect([session(0, 10)], basis(busy=busy), "recency").footprint
    assert got.uncovered_ns.tolist() == [5 * S]
    assert got.energy_by_op == pytest.approx({"net/mm": 500.0})


@pytest.mark.parametrize("name", ["GPU:0", "gpu:0", "cuda:0"])
def test_a_board_that_ran_kernels_of_the_trace_was_not_idle(name: str) -> None:
    """Measured on an H100: a program of five seconds recorded 0.1 s between two looks at the board's processes."""
    channel = Channel("gpu:0", "board", ReadingKind.POWER, "fake", Quality.MEASURED)
    item = PowerSteps(channel, [0, 100 * S], [300.0])
    one = session(10, 12)
    gpu = replace(one, trace=with_devices(one.trace, [name]))

    def got(run_s: list[float], all_s: list[float]) -> DeviceEnergy:
        busy = BusyTimes([0, 8 * S, 16 * S, 100 * S], run_s, all_s)
        known = Basis((item,), {"gpu:0": busy}, 0.0, 100.0, frozenset(), None, Terms())
        return dissect([gpu], known, "recency").footprint.devices[0]

    unseen = got([0.0, 0.0, 0.0], [0.0, 0.0, 0.0])
    assert (unseen.attributed_j, unseen.idle_j, unseen.other_j) == (pytest.approx(600.0), 0.0, 0.0)
    half = got([0.0, 4.0, 0.0], [0.0, 8.0, 0.0])
    assert (half.attributed_j, half.other_j) == (pytest.approx(300.0), pytest.approx(300.0)), "what was seen counts"
    others = got([0.0, 0.0, 0.0], [0.0, 8.0, 0.0])
    assert others.attributed_j == 0.0 and others.uncovered_s == pytest.approx(2.0), "both computed: no share is known"


def test_the_three_parts_of_a_divided_power_add_up() -> None:
    rng = np.random.default_rng(2)
    channel = Channel("cpu:0", "package", ReadingKind.POWER, "fake", Quality.MEASURED, idle_w=30.0)
    item = PowerSteps(channel, np.arange(0, 51), rng.uniform(0, 100, 50))
    app, rest = rng.uniform(0, 1, 9), rng.uniform(0, 1, 9)
    app[3] = rest[3] = 0.0
    parts = divide_power(item, BusyTimes(np.arange(0, 50, 5), app, app + rest))
    at = np.arange(0, 45)
    total = parts.run.at(at) + parts.other.at(at) + parts.idle.at(at)
    np.testing.assert_allclose(total, item.at(at), rtol=1e-12)
    assert float(np.nanmin(parts.run.watts)) >= 0 and float(np.nanmin(parts.other.watts)) >= -1e-12


def test_processes_that_ran_at_once_share_and_are_separated_in_time() -> None:
    both = dissect([session(0, 10, 1, "a/mm"), session(5, 15, 2, "b/mm")], basis(), "recency")
    assert both.footprint.energy_by_op == pytest.approx({"a/mm": 750.0, "b/mm": 750.0})
    assert any("2 processes were traced" in note for note in both.footprint.notes)
    apart = dissect([session(0, 10, 1, "a/mm"), session(20, 30, 2, "b/mm")], basis(), "recency")
    assert apart.footprint.energy_by_op == pytest.approx({"a/mm": 1000.0, "b/mm": 1000.0})


def test_grams_follow_the_intensity_of_the_hours() -> None:
    carbon = CarbonSeries(
        "GB", [0.0, 5.0, 100.0], [360.0, 720.0], signal=Signal.AVERAGE, scope=Scope.LIFECYCLE, source="t"
    )
    got = dissect([session(0, 10)], basis(carbon=carbon), "recency").footprint
    assert got.carbon_g.tolist() == pytest.approx([(500 * 360 + 500 * 720) / 3.6e6])
    assert got.devices[0].carbon_g == pytest.approx(float(got.carbon_g.sum()))
    shared = basis(busy=BusyTimes([0, 100 * S], [25.0], [100.0]), carbon=carbon)
    got = dissect([session(0, 10)], shared, "recency").footprint
    assert got.carbon_g.tolist() == pytest.approx([0.25 * (500 * 360 + 500 * 720) / 3.6e6])
    assert got.devices[0].carbon_g == pytest.approx((500 * 360 + 500 * 720) / 3.6e6)


def test_the_clock_in_words() -> None:
    assert "+1.5 µs" in clock_note([session(0, 1)]) and "± 3.0 µs" in clock_note([session(0, 1)])
    lost = session(0, 1)
    lost = TracedSession(lost.trace, lost.window_ns, 1, 1, ClockFit(None, 0, 0))
    assert "was not compared" in clock_note([lost])


def test_names_of_devices() -> None:
    assert [canonical(name) for name in ("GPU:0", "cuda:1", "hip:2", "/device:GPU:3", " CPU:0 ")] == [
        "gpu:0",
        "gpu:1",
        "gpu:2",
        "gpu:3",
        "cpu:0",
    ]


def test_a_host_without_a_socket_is_the_metered_machine() -> None:
    machine = PowerSteps(Channel("machine", "machine", ReadingKind.POWER, "f", Quality.MEASURED), [0, 9], [1.0])
    trace, channels = matched(session(0, 1).trace, [machine])
    assert trace.devices == ("machine",) and list(channels) == ["machine"]
    trace, _ = matched(session(0, 1).trace, [])
    assert trace.devices == ("CPU",)


def test_a_host_with_two_metered_sockets_is_accounted_with_both() -> None:
    sockets = [
        PowerSteps(Channel(f"cpu:{n}", "package", ReadingKind.POWER, "f", Quality.MEASURED), [0, 9 * S], [watts])
        for n, watts in enumerate((10.0, 30.0))
    ]
    trace, channels = matched(session(0, 9).trace, sockets)
    got = align(trace, channels, (0, 9 * S))
    assert got.energy_by_op == pytest.approx({"net/mm": 360.0})
    assert any("2 sockets are accounted together" in note for note in got.notes)
    only = matched(with_devices(session(0, 9).trace, ["cpu:1"]), sockets)
    got = align(*only, (0, 9 * S))
    assert got.energy_by_op == pytest.approx({"net/mm": 270.0}), "a trace that says which socket is taken at its word"
    assert {entry.device: entry.unattributed_j for entry in got.devices} == pytest.approx({"cpu:0": 90.0, "cpu:1": 0.0})


def test_each_socket_is_divided_by_its_own_busy_times() -> None:
    metered = tuple(
        PowerSteps(Channel(f"cpu:{n}", "package", ReadingKind.POWER, "f", Quality.MEASURED), [0, 100 * S], [watts])
        for n, watts in enumerate((100.0, 40.0))
    )
    busy = {f"cpu:{n}": BusyTimes([0, 100 * S], [app_s], [100.0]) for n, app_s in enumerate((25.0, 50.0))}
    whole = Basis(metered, busy, 0.0, 100.0, frozenset(), None, Terms())
    got = dissect([session(0, 10)], whole, "recency").footprint
    assert got.energy_by_op == pytest.approx({"net/mm": 10 * (0.25 * 100 + 0.5 * 40)})
    (device,) = got.devices
    assert (device.total_j, device.other_j) == pytest.approx((1400.0, 10 * (0.75 * 100 + 0.5 * 40)))


def test_on_a_busy_machine_energy_goes_to_the_times_when_the_runs_threads_ran() -> None:
    """Two CPUs that others keep busy, 30 W each: one thread works for a second, another one for its first half."""
    lanes = [(7, 7), (8, 8)]
    trace = EventTrace(
        ["long", "short"], ["CPU"], ["forward"], op=[0, 1], start_ns=[0, 0], dur_ns=[S, S // 2], device=[0, 0],
        lane=[0, 1], phase=[0, 0], lanes=lanes,
    )  # fmt: skip
    sweeps = np.arange(0.0, 1.01, 0.02)
    spent = np.stack([0.5 * sweeps, 0.5 * np.minimum(sweeps, 0.5)], axis=1)
    rows = [(t, *lanes[at], spent[sweep, at], sweep) for sweep, t in enumerate(sweeps) for at in (0, 1)]
    t_s, process, thread, cpu_s, sweep = map(np.array, zip(*rows, strict=True))
    threads = ThreadTimes(np.rint(t_s * S).astype(np.int64), process, thread, cpu_s, sweep)
    channel = Channel("cpu:0", "package", ReadingKind.POWER, "fake", Quality.MEASURED)
    power = PowerSteps(channel, np.arange(101) * S // 100, np.full(100, 60.0))
    busy = {"cpu:0": BusyTimes([0, S], [0.75], [2.0], 2)}
    shared = Basis((power,), busy, 0.0, 1.0, frozenset(), None, Terms(), threads=threads, fine_busy=busy)
    got = dissect([TracedSession(trace, (0, S), 1, 7, ClockFit(1500, 200, 3000))], shared, "recency").footprint
    assert got.energy_by_op == pytest.approx({"long": 15.0, "short": 7.5}, rel=0.01)
    (device,) = got.devices
    assert (device.total_j, device.other_j) == pytest.approx((60.0, 37.5), rel=1e-6)


# ---- recordings read back


def marks(at_us: list[int], shift_ns: int, width_ns: int = 1000) -> list[list[int]]:
    """Marks around ranges that begin at the given times; the sampler's clock is ``shift_ns`` ahead."""
    rows = []
    for us in at_us:
        middle = us * 1000 + shift_ns
        low, high = middle - width_ns // 2, middle + width_ns // 2
        rows.append([low, low - S, high - S, high])
    return rows


def clocked(folder: Path, at_us: list[int], name: str = "trace.json") -> Path:
    f = KinetoFile()
    for us in at_us:
        f.add("user_annotation", "joulery:clock", us, 1)
    f.module("Net/a", 150, 200)
    f.op("aten::mm", 200, 100)
    return f.write(folder, base=0, name=name)


def test_marks_tie_the_clocks() -> None:
    starts = np.array([10, 100, 400, 500]) * 1000
    fit = clock_fit(starts, np.array(marks([10, 100, 400, 500], 7000)), S)
    assert fit == ClockFit(7000, 0, 500)
    held_up = marks([10, 100], 7000) + marks([400], 90_000, 200_000) + marks([500], 7400)
    fit = clock_fit(starts, np.array(held_up), S)
    assert fit.offset_ns == 7000 and fit.residual_ns == 0
    assert clock_fit(starts, np.array(marks([10], 0)), S).offset_ns is None
    assert clock_fit(starts, np.array(marks([10, 100, 400, 500], 7000)), None).offset_ns == 7000


def cycle(folder: Path, **changes) -> None:
    clocked(folder, [10, 100, 400, 500], "torch-7-1.json")
    entry = {
        "kind": "cycle",
        "file": "torch-7-1.json",
        "pid": 7,
        "steps": 2,
        "partial": False,
        "begin": marks([10, 100], 7000),
        "end": marks([400, 500], 7000),
        **changes,
    }
    lines = [{"kind": "begin", "pid": 7}, entry, {"kind": "note", "text": "something"}]
    lines.append({"kind": "end", "steps": 5, "cycles": 1, "pid": 7})
    (folder / "torch-7.marks").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"kind": "cy')


def test_a_recording_is_read_on_the_samplers_clock(tmp_path: Path) -> None:
    cycle(tmp_path)
    (found,), notes = TorchTracer().recorded(str(tmp_path), S)
    assert found.window_ns == (107_500, 406_500)
    assert found.trace.start_ns.tolist() == [157_000, 207_000]
    assert [found.trace.ops[op] for op in found.trace.op.tolist()] == ["Net/a/<self>", "Net/a/mm"]
    assert notes == ["something", "torch-7.marks ends within a line: the program was killed while it wrote"]
    TorchTracer().leftovers(str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_recording_is_reported(tmp_path: Path) -> None:
    cycle(tmp_path)
    text = (tmp_path / "torch-7-1.json").read_text()
    (tmp_path / "torch-7-1.json").write_text(text[: len(text) // 2])
    with pytest.raises(DataError, match=r"truncated|damaged"):
        TorchTracer().recorded(str(tmp_path), S)


def test_nothing_recorded_says_why(tmp_path: Path) -> None:
    assert TorchTracer().recorded(str(tmp_path), None)[1][-1].startswith("no step was recorded: the program called no")
    (tmp_path / "torch-1.marks").write_text('{"kind": "begin", "pid": 1}\n{"kind": "end", "steps": 3, "pid": 1}\n')
    assert "ended after 3 step(s)" in TorchTracer().recorded(str(tmp_path), None)[1][-1]
    (tmp_path / "torch-1.marks").write_text('{"kind": "begin", "pid": 1}\n')
    assert "killed before a cycle of steps was complete" in TorchTracer().recorded(str(tmp_path), None)[1][-1]


def test_a_recording_that_failed_is_no_program_that_was_killed(tmp_path: Path) -> None:
    recorder = JaxRecorder(tmp_path, 0, 0, 3, 1)
    recorder._mark({"kind": "begin", "pid": recorder._pid})
    recorder._fail(AttributeError("no such session"))
    recorder.finish()
    sessions, notes = open_tracer("jax").recorded(str(tmp_path), None)
    assert sessions == [] and not any("killed" in note for note in notes)
    assert "no such session" in notes[-1] and notes[-1].startswith("no step was recorded")


@pytest.mark.parametrize("name", ["profile_session", "session"])
def test_jax_says_under_either_name_that_a_profile_is_taken(tmp_path: Path, name: str) -> None:
    """``profile_session`` until JAX 0.11, ``session`` since 0.12."""
    recorder = JaxRecorder(tmp_path, 0, 0, 3, 1)
    state = SimpleNamespace(**{name: None})
    recorder._profiling = SimpleNamespace(_profile_state=state)
    assert not recorder._taken()
    setattr(state, name, object())
    assert recorder._taken()


def test_a_program_killed_after_a_cycle_keeps_it_and_says_so(tmp_path: Path) -> None:
    cycle(tmp_path)
    lines = (tmp_path / "torch-7.marks").read_text().splitlines(keepends=True)
    (tmp_path / "torch-7.marks").write_text("".join(line for line in lines if '"end", "steps"' not in line))
    sessions, notes = TorchTracer().recorded(str(tmp_path), S)
    assert len(sessions) == 1 and "the program was killed while recording" in notes[-1]


def test_a_framework_without_a_tracer_is_refused() -> None:
    with pytest.raises(ConfigError, match="not a tracer"):
        open_tracer("caffe")


def test_the_environment_keeps_what_was_there(tmp_path: Path) -> None:
    from joulery.adapters.tracers import inject
    from joulery.domain.trace.tracing import Steps

    made = TorchTracer().environment(str(tmp_path), Steps(1, 2, 3, 4), {"PYTHONPATH": "/mine"})
    start_up, mine = made["PYTHONPATH"].split(":")
    assert mine == "/mine" and (Path(start_up) / "sitecustomize.py").exists()
    assert json.loads(made[inject.SETTINGS]) == {
        "framework": "torch",
        "folder": str(tmp_path.resolve()),
        "skip": 1,
        "warmup": 2,
        "active": 3,
        "repeat": 4,
    }
    assert f'SETTINGS = "{inject.SETTINGS}"' in (Path(start_up) / "sitecustomize.py").read_text()


def test_gpus_are_matched_by_uuid_not_by_number() -> None:
    """CUDA_VISIBLE_DEVICES=1: the program's GPU 0 is the second board; a GPU without a meter is charged to no board."""

    def on_gpu(uuids: dict[str, str]) -> dict[str, float]:
        one = session(0, 10)
        trace = with_devices(one.trace, ["GPU:0"])
        boards = [
            PowerSteps(Channel(f"gpu:{n}", "board", ReadingKind.POWER, "f", Quality.MEASURED), [0, 100 * S], [watts])
            for n, watts in enumerate((50.0, 300.0))
        ]
        known = {"GPU-aaaa": "gpu:0", "GPU-BBBB": "gpu:1"}
        found = dissect(
            [replace(one, trace=trace, uuids=uuids)],
            replace(basis(), power=tuple(boards), exclusive=frozenset({"gpu:0", "gpu:1"}), uuids=known),
            "recency",
        )
        return found.footprint.energy_by_op

    assert on_gpu({"GPU:0": "bbbb"}) == pytest.approx({"net/mm": 3000.0})
    assert on_gpu({}) == pytest.approx({"net/mm": 500.0})
    assert on_gpu({"GPU:0": "cccc"}) == {}
