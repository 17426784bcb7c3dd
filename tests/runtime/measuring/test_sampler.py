"""The sampler's loop in virtual time, and its process for real."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from joulery.domain.energy.channel import MeterSpec
from joulery.domain.errors import CapabilityError, ConfigError, DataError, JouleryError
from joulery.runtime.measuring.sampler import (
    HOUSEKEEPING_S,
    NS_PER_S,
    BufferStream,
    Clocks,
    SampleStream,
    SelfLimit,
    Slowed,
    clock_moved,
    sample_until,
)
from joulery.runtime.measuring.sampler_config import SamplerConfig
from joulery.runtime.measuring.sampling import SamplerProcess
from joulery.store.run.readings import read_recordings
from joulery.store.run.samples import SampleWriter
from tests.waiting import ended, wait_until

MS = 1_000_000


class World:
    """Time that passes only by waiting and by reading, and files in memory."""

    def __init__(self) -> None:
        self.ns = 7 * NS_PER_S
        self.cpu_s = 0.0
        self.house: list[tuple[int, float]] = []
        self.clocks = Clocks(lambda: self.ns, lambda: self.cpu_s, self.sleep)

    def sleep(self, seconds: float) -> None:
        self.ns += round(seconds * NS_PER_S)

    def until(self, end_ns: int) -> Callable[[float], bool]:
        def stopped(wait_s: float) -> bool:
            self.ns += max(0, round(wait_s * NS_PER_S))
            return self.ns >= end_ns

        return stopped

    def keep_house(self, slowed: Slowed | None) -> None:
        self.house.append((self.ns, slowed.cpu_ratio if slowed else 0.0))


class Records:
    """Stands in for a file."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, tuple[float, ...]]] = []

    def record(self, at_ns: int, values: tuple[float, ...]) -> None:
        self.rows.append((at_ns, values))

    @property
    def times_ns(self) -> list[int]:
        return [at_ns for at_ns, _ in self.rows]


def stream(
    world: World, every: int = 1, takes_ns: Callable[[int], int] = lambda n: 0, **more: Any
) -> tuple[SampleStream, Records]:
    records = Records()

    def read() -> tuple[float, ...]:
        world.ns += takes_ns(len(records.rows))
        return (float(len(records.rows)),)

    return SampleStream(more.pop("read", read), records, every, clocks=world.clocks, **more), records  # type: ignore[arg-type]


def run(world: World, streams: list[SampleStream], seconds: float, period_s: float = 0.01, bound: float = 1.0) -> int:
    limit = SelfLimit(bound, 100, world.clocks)
    end = world.until(world.ns + round(seconds * NS_PER_S))
    return sample_until(end, streams, period_s, limit, world.keep_house, world.clocks)


def test_ticks_lie_on_the_grid_whatever_a_reading_takes() -> None:
    world = World()
    fast, records = stream(world, takes_ns=lambda n: (n * 37 % 7) * MS)
    start_ns = world.ns
    assert run(world, [fast], 1.0) == 0
    stamps = np.array(records.times_ns[:-1])
    # The stamp is the middle of the reading; the reading began on the grid.
    begun = stamps - np.array([(n * 37 % 7) * MS // 2 for n in range(len(stamps))])
    assert ((begun - start_ns) % (10 * MS) == 0).all()
    assert len(stamps) == 100


def test_late_ticks_are_skipped_and_counted_and_the_phase_is_kept() -> None:
    world = World()
    slow, records = stream(world, takes_ns=lambda n: 35 * MS if n == 3 else 0)
    start_ns = world.ns
    assert run(world, [slow], 0.2) == 3
    offsets_ms = [(at_ns - start_ns) / MS for at_ns in records.times_ns]
    assert offsets_ms[:6] == [0, 10, 20, 30 + 17.5, 70, 80]


@given(st.lists(st.integers(0, 60), min_size=1, max_size=30), st.integers(1, 4))
def test_every_tick_is_read_or_counted_as_late(stalls_ms: list[int], every: int) -> None:
    world = World()
    fast, records = stream(world, takes_ns=lambda n: stalls_ms[n] * MS if n < len(stalls_ms) else 0)
    start_ns, late = world.ns, run(world, [fast], 3.0)
    grid = records.times_ns[:-1]
    last_tick = (records.times_ns[-1] - start_ns) // (10 * MS)
    assert len(grid) + late == last_tick
    assert grid == sorted(set(grid))


def test_streams_of_different_paces_share_one_grid() -> None:
    world = World()
    (fast, quick), (slow, rare) = stream(world), stream(world, every=10)
    start_ns = world.ns
    run(world, [fast, slow], 1.0)
    assert [(at_ns - start_ns) // MS for at_ns in rare.times_ns] == [*range(0, 1000, 100), 1000]
    assert len(quick.rows) == 101


def test_a_slow_stream_keeps_its_phase_after_a_stall() -> None:
    world = World()
    rare, records = stream(world, every=10, takes_ns=lambda n: 130 * MS if n == 2 else 0)
    start_ns = world.ns
    assert run(world, [rare], 0.6) == 4
    # The reading of 200 ms took until 330 ms, past the one of 300 ms: that is made at once, the next on the grid again.
    assert [(at_ns - start_ns) / MS for at_ns in records.times_ns] == [0, 100, 265, 340, 400, 500, 600]


def test_the_end_lies_inside_what_was_read() -> None:
    world = World()
    (fast, quick), (slow, rare) = stream(world), stream(world, every=50)
    run(world, [fast, slow], 0.123)
    assert quick.times_ns[-1] == rare.times_ns[-1] == world.ns


def test_house_is_kept_at_its_own_pace() -> None:
    world = World()
    fast, _ = stream(world)
    run(world, [fast], 2.0)
    gaps = np.diff([at_ns for at_ns, _ in world.house])
    assert len(world.house) in (9, 10)
    assert gaps.min() >= HOUSEKEEPING_S * NS_PER_S


def test_too_much_of_a_core_doubles_the_period_and_keeps_the_phase() -> None:
    world = World()
    records = Records()

    def read() -> tuple[float, ...]:
        world.cpu_s += 0.0005
        return (0.0,)

    fast = SampleStream(read, records, 1, clocks=world.clocks)  # type: ignore[arg-type]
    start_ns = world.ns
    run(world, [fast], 10.0, bound=0.03)
    reported = [(at_ns - start_ns, ratio) for at_ns, ratio in world.house if ratio > 0]
    # 0.5 ms every 10 ms is 5 %: over the bound; every 20 ms is 2.5 %: under it.
    assert len(reported) == 1
    assert reported[0][1] == pytest.approx(0.05, rel=0.1)
    gaps = np.diff(records.times_ns) // MS
    assert set(gaps[:90]) == {10}
    assert set(gaps[150:-1]) == {20}
    assert all((at_ns - start_ns) % (10 * MS) == 0 for at_ns in records.times_ns)


def test_the_costly_stream_is_slowed_down_and_the_others_keep_their_pace() -> None:
    """Seen on an H100: an energy counter that takes milliseconds of CPU a reading made all streams 16 times slower."""
    world = World()

    def read(cost_s: float) -> Callable[[], tuple[float, ...]]:
        def now() -> tuple[float, ...]:
            world.cpu_s += cost_s
            return (0.0,)

        return now

    counter, processes = Records(), Records()
    streams = [
        SampleStream(read(0.004), counter, 2, clocks=world.clocks, name="0-nvml"),  # type: ignore[arg-type]
        SampleStream(read(0.0001), processes, 100, clocks=world.clocks, name="gpu"),  # type: ignore[arg-type]
    ]
    slowed: list[Slowed] = []
    limit = SelfLimit(0.03, 100, world.clocks)
    end = world.until(world.ns + 20 * NS_PER_S)
    sample_until(end, streams, 0.01, limit, lambda one: slowed.extend([one] if one else []), world.clocks)
    assert [one.stream.name for one in slowed] == ["0-nvml"] * 3
    assert [one.cpu_ratio for one in slowed] == pytest.approx([0.2, 0.1, 0.05], rel=0.1)
    assert [stream.slower for stream in streams] == [8, 1]
    assert set(np.diff(processes.times_ns) // MS) == {1000}
    assert set((np.diff(counter.times_ns) // MS)[-20:-1]) == {160}


def test_what_a_device_buffered_is_recorded_once_with_its_own_times_to_the_end() -> None:
    world = World()
    offset_ns = 1_000 * NS_PER_S

    class Meter:
        buffered = (0, 1)
        taken_ns = world.ns

        buffer_late_s = 0.016

        def drain(self) -> list[tuple[int, int, float]]:
            first = self.taken_ns // (20 * MS) + 1
            self.taken_ns = world.ns
            return [
                (at * 20 * MS + offset_ns, n, float(n))
                for at in range(first, world.ns // (20 * MS) + 1)
                for n in (0, 1)
            ]

    records = Records()
    buffer = BufferStream(Meter(), offset_ns, records, 50, world.clocks)  # type: ignore[arg-type]
    counter = SampleStream(lambda: (float(world.ns // (100 * MS)),), Records(), 50, 0.2, world.clocks)  # type: ignore[arg-type]
    start_ns = world.ns
    run(world, [counter, buffer], 3.05)
    zero = [at_ns for at_ns, values in records.rows if values[0] == 0]
    assert set(np.diff(zero)) == {20 * MS}
    assert zero[0] - start_ns <= 20 * MS
    assert world.ns - zero[-1] < 20 * MS, "the readings of the time in which the counter was waited for belong to it"
    assert [at_ns for at_ns, values in records.rows if values[0] == 1] == [at_ns + 1 for at_ns in zero]


def test_the_period_is_not_doubled_for_ever() -> None:
    world = World()
    limit = SelfLimit(0.01, 4, world.clocks)
    only, _ = stream(world)
    reported = []
    for _ in range(6):
        world.ns += NS_PER_S
        world.cpu_s += 0.5
        reported.append(limit.check([only]))
    assert [one is not None for one in reported] == [True, True, False, False, False, False]
    assert only.slower == 4


def test_no_stream_is_slowed_down_beyond_the_longest_interval() -> None:
    """A driver keeps its power readings for 2.4 s (an H100, measured): what is read later is lost."""
    world = World()
    limit = SelfLimit(0.01, 100, world.clocks)
    slow, _ = stream(world, every=50)
    slowest, _ = stream(world, every=100)
    found = []
    for _ in range(3):
        world.ns += NS_PER_S
        world.cpu_s += 0.5
        slow.cost_s, slowest.cost_s = 0.1, 0.4
        found.append(limit.check([slow, slowest]))
    assert [one.stream if one else None for one in found] == [slow, None, None]
    assert (slow.slower, slowest.slower) == (2, 1)


def test_a_slow_counter_is_read_on_until_it_was_renewed() -> None:
    world = World()

    def counter() -> tuple[float, ...]:
        return (float(world.ns // (100 * MS)), 5.0)

    records = Records()
    slow = SampleStream(counter, records, 2, linger_s=0.2, clocks=world.clocks)  # type: ignore[arg-type]
    start_ns = world.ns
    run(world, [slow], 0.150)
    # One value never changes: it is waited for no longer than twice its renewal.
    assert (world.ns - start_ns) // MS in range(350, 371)
    world = World()
    only = SampleStream(lambda: (float(world.ns // (100 * MS)),), Records(), 2, linger_s=0.2, clocks=world.clocks)  # type: ignore[arg-type]
    start_ns = world.ns
    run(world, [only], 0.150)
    assert (world.ns - start_ns) // MS in range(200, 206)


@pytest.mark.parametrize(
    ("by_ns", "says"), [(0, ""), (40 * MS, ""), (-40 * MS, ""), (60 * MS, "+0.060"), (-2_000 * MS, "-2.000")]
)
def test_a_clock_that_was_set_is_noted(by_ns: int, says: str) -> None:
    assert says in clock_moved(by_ns)
    assert bool(clock_moved(by_ns)) is bool(says)


def test_orders_survive_a_command_line() -> None:
    spec = MeterSpec("cpu-model", {"idle_w": 1.0, "max_w": 2.0})
    config = SamplerConfig("/x", 1, 2, True, 0.004, 0.03, (spec,), ("/g", True), boards=("gpu:1",))
    again = SamplerConfig.from_json(config.to_json())
    assert again.meters == (spec,) and again.boards == ("gpu:1",)
    assert again.to_json() == config.to_json()
    assert SamplerConfig.from_json(SamplerConfig("/x", 1, 2, True, 0.004, 0.03).to_json()).meters is None


FAKE = (MeterSpec("fake", {"channels": [{"watts": [[0, 50]]}]}),)


def config(folder: Path, meters: tuple[MeterSpec, ...] | None = FAKE, **change: Any) -> SamplerConfig:
    fields = {
        "folder": str(folder),
        "parent": os.getpid(),
        "root": os.getpid(),
        "include_root": True,
        "period_s": 0.01,
        "max_cpu_ratio": 0.5,
        "meters": meters,
    }
    return SamplerConfig(**{**fields, **change})


def started(folder: Path, **change: Any) -> SamplerProcess:
    sampler = SamplerProcess.start(config(folder, **change))
    try:
        sampler.wait_ready()
    except JouleryError as error:
        error.add_note((folder / "sampler.err").read_text())
        with suppress(OSError):  # it has ended
            error.add_note(Path(f"/proc/{sampler.pid}/stat").read_text())
        with suppress(JouleryError):  # or a later test would find it running, and fail instead
            sampler.stop(timeout_s=1.0)
        raise
    return sampler


def notes(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "notes.jsonl").read_text().splitlines()]


def test_a_real_sampler_reads_until_it_is_stopped(tmp_path: Path) -> None:
    before_ns = time.time_ns()
    sampler = started(tmp_path)
    assert sampler.ready is not None
    assert [channel["device"] for channel in sampler.ready["channels"]] == ["cpu:0"]
    assert sampler.ready["pid"] == sampler.pid
    wait_until(lambda: sampled_s(tmp_path) > 0.3, "readings over 0.3 s")
    sampler.stop()
    after_ns = time.time_ns()
    sampler.stop()
    assert sampler.done is not None
    found = read_recordings(tmp_path)
    assert set(found) == {"0-fake", "cpu"}
    power = found["0-fake"]
    assert before_ns - 1000 * MS < power.t_ns[0] <= power.t_ns[-1] <= after_ns + MS
    joules = power.column("cpu:0:package")
    assert joules[-1] - joules[0] == pytest.approx(50 * (power.t_ns[-1] - power.t_ns[0]) / NS_PER_S, rel=0.02)
    # The first reading is before the grid, the last one after the stop: on a busy machine both may take long.
    due = int((power.t_ns[-2] - power.t_ns[1]) / NS_PER_S / sampler.done["period_s"])
    assert len(power.t_ns) - 2 + sampler.done["late"] >= due, "each reading that was due was made, or counted as late"
    cpu = found["cpu"]
    assert all((np.diff(cpu.column(name)) >= 0).all() for name in cpu.columns)
    assert [note["kind"] for note in notes(tmp_path)] == ["meter", "done"]
    assert (tmp_path / "sampler.err").read_text() == ""


def test_it_says_why_it_cannot_start(tmp_path: Path) -> None:
    cases: list[tuple[MeterSpec, type[Exception], str]] = [
        (MeterSpec("rapl", {"root": str(tmp_path / "nothing")}), CapabilityError, "no RAPL counters"),
        (MeterSpec("replay", {"file": str(tmp_path / "nothing.csv")}), DataError, "No such file"),
        (MeterSpec("cpu-model", {"idle_w": 5.0, "max_w": 1.0}), ConfigError, "0 <= idle < max"),
    ]
    for number, (spec, kind, says) in enumerate(cases):
        folder = tmp_path / str(number)
        folder.mkdir()
        sampler = SamplerProcess.start(config(folder, (spec,)))
        with pytest.raises(kind, match=says):
            sampler.wait_ready()
        with pytest.raises(kind, match=says):
            sampler.stop()


def test_a_sampler_that_has_closed_its_output_is_waited_for_until_its_exit_code_is_known() -> None:
    ends = "import os; os.close(1); sum(range(3_000_000)); os._exit(3)"
    process = subprocess.Popen([sys.executable, "-c", ends], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with process, pytest.raises(CapabilityError, match="exit code 3"):
        SamplerProcess(process).wait_ready()


def test_a_folder_that_is_not_there_is_an_error_at_once(tmp_path: Path) -> None:
    with pytest.raises(CapabilityError, match="the sampler cannot be started"):
        SamplerProcess.start(config(tmp_path / "nothing"))


def test_a_module_of_the_users_folder_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("json", "select", "signal"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported from the folder of the user')")
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "samples"
    folder.mkdir()
    started(folder).stop()
    assert notes(folder)[-1]["kind"] == "done"


def test_ctrl_c_does_not_end_it_and_sigterm_ends_it_cleanly(tmp_path: Path) -> None:
    sampler = started(tmp_path)
    os.kill(sampler.pid, signal.SIGINT)
    os.kill(sampler.pid, signal.SIGUSR1)
    os.kill(sampler.pid, signal.SIGTERM)
    sampler.stop()
    assert sampler.done is not None
    assert notes(tmp_path)[-1]["kind"] == "done"


def test_a_killed_sampler_is_noticed_and_what_it_wrote_stays(tmp_path: Path) -> None:
    sampler = started(tmp_path)
    wait_until(lambda: sampled_s(tmp_path) > 0.15, "readings over 0.15 s")
    os.kill(sampler.pid, signal.SIGKILL)
    with pytest.raises(CapabilityError, match="ended by signal 9"):
        sampler.stop()
    power = read_recordings(tmp_path)["0-fake"]
    assert (power.t_ns[-1] - power.t_ns[0]) / NS_PER_S > 0.15


def test_a_sampler_that_hangs_is_killed(tmp_path: Path) -> None:
    sampler = started(tmp_path)
    os.kill(sampler.pid, signal.SIGSTOP)
    with pytest.raises(CapabilityError, match="the sampler"):
        sampler.stop(timeout_s=0.2)
    assert not Path(f"/proc/{sampler.pid}").exists()


def test_one_that_is_not_ready_in_time_is_said(tmp_path: Path) -> None:
    sampler = SamplerProcess.start(config(tmp_path))
    with pytest.raises(CapabilityError, match=r"not ready after 0\.001 s"):
        sampler.wait_ready(0.001)
    sampler.stop()


def sampled_s(folder: Path) -> float:
    """Seconds from the first reading to the last one on disk."""
    t_ns = read_recordings(folder)["0-fake"].t_ns
    return float(t_ns[-1] - t_ns[0]) / NS_PER_S if len(t_ns) else 0.0


PARENT = """
import os, sys, time
from joulery.runtime.measuring.sampler_config import SamplerConfig
from joulery.runtime.measuring.sampling import SamplerProcess
text = sys.argv[1]
fields = SamplerConfig.from_json(text)
sampler = SamplerProcess.start(fields._replace(parent=os.getpid(), root=os.getpid()))
sampler.wait_ready()
if sys.argv[2] == "fork" and os.fork() == 0:
    time.sleep(60)          # holds the pipe open
    os._exit(0)
print(sampler.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("how", ["alone", "fork"])
def test_it_outlives_nothing(tmp_path: Path, how: str) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, config(tmp_path).to_json(), how], stdout=subprocess.PIPE, start_new_session=True
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    wait_until(lambda: len(read_recordings(tmp_path)["0-fake"].t_ns) > 5, "six readings")
    try:
        parent.kill()
        parent.wait()
        wait_until(lambda: ended(pid), "the end of the sampler after its parent's")
    finally:
        parent.stdout.close()
        try:
            os.killpg(parent.pid, signal.SIGKILL)
        except ProcessLookupError:
            assert how == "alone"
    assert notes(tmp_path)[-1]["kind"] == "done"
    assert len(read_recordings(tmp_path)["0-fake"].t_ns) > 5


@pytest.mark.parametrize(("stated", "ratio"), [((), 0.75), (("gpu:0",), 1.0)])
def test_gpus_are_shared_out_by_who_holds_them_unless_they_are_stated_to_be_the_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stated: tuple[str, ...], ratio: float
) -> None:
    """The driver is a stand-in, in the real process: its one board is held by this process and by another."""
    root = Path(__file__).resolve().parents[3]
    (tmp_path / "gpu_stand_in.py").write_text(
        "import os, pynvml\n"
        "from tests.adapters.meters.nvml_fake import FakeBoard, FakeNvml\n"
        "from joulery.adapters.meters import nvml\n"
        "nvml.sees_host_processes = lambda: True\n"
        f"board = FakeBoard(compute_pids=[{os.getpid()}, 1], utilisation=[(1, {os.getpid()}, 30), (1, 1, 10)])\n"
        "board.samples = [(1, 90_000)]\n"
        "fake = FakeNvml(board)\n"
        "globals().update({n: getattr(fake, n) for n in dir(fake) if n.startswith('nvml')})\n"
        "globals().update({n: getattr(pynvml, n) for n in dir(pynvml) if n.startswith('NVML')})\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(root), os.environ.get("PYTHONPATH", "")]))
    folder = tmp_path / "samples"
    folder.mkdir()
    sampler = started(folder, meters=(MeterSpec("nvml", {"module": "gpu_stand_in"}),), boards=stated)
    sampler.stop()
    recordings = read_recordings(folder)
    assert recordings["0-nvml-buffer"].header["late_s"] == 0.016
    gpu = recordings["gpu"]
    assert gpu.column("busy_ratio:gpu:0")[0] == 1.0
    assert gpu.column("run_ratio:gpu:0")[0] == pytest.approx(ratio)


def test_a_writer_is_what_the_loop_expects(tmp_path: Path) -> None:
    writer = SampleWriter(tmp_path / "a.samples", ["x"], {"unix_ns": 0, "monotonic_ns": 0})
    SampleStream(lambda: (math.pi,), writer).sample()
    writer.close()
    assert (tmp_path / "a.samples").stat().st_size % 8 == 0
