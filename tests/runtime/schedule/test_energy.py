"""Whose joules on one node: conservation, GPUs, shares of processors, sources that start anew."""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from joulery.domain.cluster import ClusterJob, ClusterSnapshot, JobEnergy, JobState, Placement
from joulery.domain.energy.channel import Channel, ReadingKind
from joulery.domain.quality import Quality
from joulery.runtime.schedule.energy import FirstSource, JobMeter, MachineShares, StatedPower
from joulery.runtime.schedule.polling import AgentTimes, run_agent
from joulery.runtime.schedule.spool import SpoolReader, SpoolWriter


class Bench:
    """A node whose meters, clocks and processes a test moves by hand."""

    def __init__(self, slots: int = 4, wrap_j: float = 0.0) -> None:
        self.now_s, self.cpu_j, self.gpu_j = 0.0, 100.0, [50.0, 60.0]
        self.all_s, self.job_s = 0.0, {10: 0.0, 20: 0.0}
        self.placed: list[Placement] = []
        self.closed: list[int] = []
        self.channels = (
            Channel("cpu:0", "package", ReadingKind.COUNTER, "fake", Quality.MEASURED, wrap_j=wrap_j),
            Channel("gpu:0", "board", ReadingKind.COUNTER, "fake", Quality.MEASURED),
            Channel("gpu:1", "board", ReadingKind.COUNTER, "fake", Quality.MEASURED),
        )
        shares = MachineShares(Busy(self), lambda pid: Tree(self, pid), slots)
        self.meter = JobMeter((Meter(self),), shares, lambda: tuple(self.placed), clock_s=lambda: self.now_s)

    def totals(self) -> dict[int, JobEnergy]:
        return dict(self.meter.update())


class Meter:
    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.channels = bench.channels

    def read(self) -> tuple[float, ...]:
        return (self.bench.cpu_j, *self.bench.gpu_j)

    def notes(self) -> tuple[str, ...]:
        return ()

    def close(self) -> None:
        return


class Busy:
    sockets, cpus = (0,), (4,)

    def __init__(self, bench: Bench) -> None:
        self.bench = bench

    def read(self) -> tuple[float, ...]:
        return (self.bench.all_s,)

    def close(self) -> None:
        return


class Tree:
    def __init__(self, bench: Bench, pid: int) -> None:
        self.bench, self.pid = bench, pid

    def discover(self) -> None:
        return

    def pids(self) -> frozenset[int]:
        return frozenset({self.pid})

    def read(self) -> tuple[float, ...]:
        return (self.bench.job_s[self.pid],)

    def close(self) -> None:
        self.bench.closed.append(self.pid)


def test_a_board_is_its_holders_and_processors_go_by_time_their_idle_part_by_slots() -> None:
    bench = Bench(slots=4)
    bench.placed = [Placement(1, (10,), 1, (0,)), Placement(2, (20,), 2, (1,))]
    bench.now_s, bench.all_s = 10.0, 20.0
    bench.job_s = {10: 8.0, 20: 4.0}
    bench.cpu_j += 400.0
    bench.gpu_j = [50.0 + 1000.0, 60.0 + 500.0]
    totals = bench.totals()

    # 40 CPU seconds there were: 8, 4 and 8 of others; 20 idle: 200 J, a quarter of it a slot.
    assert totals[1].energy_j == pytest.approx(1000 + 80 + 50)
    assert totals[2].energy_j == pytest.approx(500 + 40 + 100)
    assert (totals[1].slot_j, totals[2].slot_j) == (1000.0, 500.0)
    assert sum(total.energy_j for total in totals.values()) < bench.meter.machine_j == 1900.0


def test_jobs_that_share_share() -> None:
    bench = Bench(slots=1)
    bench.placed = [Placement(1, (10,), 1, (0,)), Placement(2, (20,), 1, (0,))]
    bench.now_s, bench.cpu_j, bench.gpu_j[0] = 10.0, 500.0, 250.0
    totals = bench.totals()

    assert [totals[job].energy_j for job in (1, 2)] == pytest.approx([100.0 + 200.0] * 2)
    assert [totals[job].slot_j for job in (1, 2)] == [100.0, 100.0]


def test_the_weakest_of_what_was_counted_stays() -> None:
    bench = Bench()
    weak = bench.channels[0]._replace(quality=Quality.MODELLED)
    bench.meter._meters[0].channels = (weak, *bench.channels[1:])  # type: ignore[misc]
    bench.placed = [Placement(1, (10,), 1, (0,))]
    bench.now_s, bench.cpu_j, bench.gpu_j[0] = 10.0, 500.0, 250.0

    assert bench.totals()[1].quality is Quality.MODELLED


def test_nodes_that_guess_make_the_sum_a_guess(tmp_path: Path) -> None:
    for node, quality in (("g1", Quality.MODELLED), ("g2", Quality.MEASURED)):
        SpoolWriter(tmp_path, node, "a").write(1.0, {1: JobEnergy(5.0, 5.0, quality, "m")})
    assert SpoolReader(tmp_path, print).read(snapshot(job(1)))[1].quality is Quality.MODELLED


def test_the_agent_samples_at_once_on_a_signal_to_end(tmp_path: Path) -> None:
    bench, said, stop = Bench(), [], threading.Event()
    bench.placed = [Placement(1, (10,), 1, (0,))]

    def say(sample: Mapping[str, object]) -> None:
        said.append(sample["jobs"])
        bench.gpu_j[0] += 30.0
        stop.set()

    run_agent(bench.meter, SpoolWriter(tmp_path, "g1", "a"), AgentTimes(0.01), say, stop, lambda: 1.0)
    assert len(said) == 2, "one when it was due, one at the end"
    assert SpoolReader(tmp_path, print).read(snapshot(job(1)))[1].energy_j == 30.0


def test_a_board_without_a_job_is_charged_to_none() -> None:
    bench = Bench()
    bench.placed = [Placement(1, (10,), 1, (0,))]
    bench.gpu_j = [50.0, 1060.0]

    assert bench.totals()[1].energy_j == 0.0
    assert bench.meter.machine_j == 1000.0


def test_what_a_job_of_cores_draws_itself_is_its_slots() -> None:
    bench = Bench()
    bench.placed = [Placement(1, (10,), 1)]
    bench.now_s, bench.all_s, bench.job_s[10], bench.cpu_j = 10.0, 10.0, 10.0, 500.0

    total = bench.totals()[1]
    assert total.slot_j == pytest.approx(100.0)
    assert total.energy_j == pytest.approx(100.0 + 300.0 / 4)


def test_the_last_stretch_of_a_job_that_ended_is_charged_and_its_files_closed() -> None:
    bench = Bench()
    bench.placed = [Placement(1, (10,), 1, (0,))]
    bench.totals()
    bench.gpu_j[0] += 70.0
    bench.placed = []

    assert bench.totals()[1].energy_j == 70.0
    assert bench.closed == [10]
    bench.gpu_j[0] += 70.0
    assert bench.totals()[1].energy_j == 70.0


def test_a_job_that_is_over_is_reported_once_more_and_dropped() -> None:
    bench = Bench()
    bench.placed = [Placement(1, (10,), 1, (0,))]
    bench.meter.read(snapshot(job(1)))
    bench.gpu_j[0] += 70.0
    bench.placed = []
    over = snapshot(job(1, 0, JobState.DONE))

    assert bench.meter.read(over)[1].energy_j == 70.0
    assert bench.meter.read(over) == {}


@pytest.mark.parametrize(("wrap_j", "now_j", "grown_j"), [(1000.0, 40.0, 940.0), (0.0, 40.0, 40.0)])
def test_a_counter_that_wraps_goes_on_and_one_that_is_reset_starts_anew(
    wrap_j: float, now_j: float, grown_j: float
) -> None:
    bench = Bench(wrap_j=wrap_j)
    bench.now_s, bench.cpu_j = 10.0, now_j

    bench.totals()
    assert bench.meter.machine_j == grown_j


def test_a_reading_that_is_missing_is_made_up_by_the_next() -> None:
    bench = Bench()
    bench.placed = [Placement(1, (10,), 1, (0,))]
    bench.gpu_j[0] = float("nan")
    bench.totals()
    bench.gpu_j[0] = 150.0

    assert bench.totals()[1].energy_j == 100.0


def job(number: int, slots: int = 1, state: JobState = JobState.RUNNING) -> ClusterJob:
    return ClusterJob(number, "job", "ada", 0.0, state, slots=slots)


def snapshot(*jobs: ClusterJob) -> ClusterSnapshot:
    return ClusterSnapshot(4, jobs)


def test_stated_power_is_assumed_and_counts_held_slots() -> None:
    now = [0.0]
    source = StatedPower(200.0, 50.0, lambda: now[0])
    now[0] = 10.0
    total = source.read(snapshot(job(1, 2), job(2, 0, JobState.WAITING)))

    assert total[1].energy_j == 5000.0
    assert total[1].slot_j == 4000.0
    assert total[1].quality is Quality.ASSUMED
    assert 2 not in total


def test_what_agents_measure_is_not_assumed_before_they_say_so(tmp_path: Path) -> None:
    now = [0.0]
    stated = StatedPower(200.0, 50.0, lambda: now[0], after_s=120.0)
    sources = FirstSource([SpoolReader(tmp_path, print).read, stated.read])
    both = snapshot(job(1), job(2))
    for now[0] in (0.0, 15.0, 30.0):
        assert sources.read(both) == {}
    written(tmp_path, "g1", "a", [{1: 10.0}])
    now[0] = 119.0
    assert set(sources.read(both)) == {1}
    now[0] = 121.0
    found = sources.read(both)
    assert (found[1].quality, found[2].quality) == (Quality.MEASURED, Quality.ASSUMED)
    assert found[2].energy_j == 121.0 * 250.0


def test_the_first_source_that_knows_a_job_counts() -> None:
    def reported(**joules: float):
        def read(_: ClusterSnapshot) -> dict[int, JobEnergy]:
            return {int(name[1:]): JobEnergy(value, 0.0, Quality.MEASURED, "x") for name, value in joules.items()}

        return read

    found = FirstSource([reported(j1=1.0), reported(j1=9.0, j2=2.0)]).read(snapshot())
    assert {number: total.energy_j for number, total in found.items()} == {1: 1.0, 2: 2.0}


def written(
    folder: Path, node: str, session: str, lines: Sequence[dict[int, float]], writer: SpoolWriter | None = None
) -> SpoolWriter:
    writer = writer or SpoolWriter(folder, node, session)
    for line in lines:
        assert writer.write(1.0, {n: JobEnergy(e, e / 2, Quality.MEASURED, "m") for n, e in line.items()})
    return writer


def test_the_spool_adds_nodes_and_sessions_and_reads_on(tmp_path: Path) -> None:
    said: list[str] = []
    reader = SpoolReader(tmp_path / "spool", said.append)
    now = snapshot(job(1), job(2))
    assert reader.read(now) == {}
    written(tmp_path / "spool", "g1", "a", [{1: 10.0}, {1: 30.0, 2: 5.0}])
    second = written(tmp_path / "spool", "g2", "a", [{1: 7.0}])
    assert {n: t.energy_j for n, t in reader.read(now).items()} == {1: 37.0, 2: 5.0}
    written(tmp_path / "spool", "g1", "b", [{1: 4.0}])
    written(tmp_path / "spool", "g2", "a", [{1: 9.0}], second)

    found = reader.read(snapshot(job(1)))
    assert found[1] == JobEnergy(43.0, 21.5, Quality.MEASURED, "agents")
    assert 2 not in found
    assert said == []


def test_a_torn_line_waits_for_its_rest_and_a_damaged_one_is_noted_once(tmp_path: Path) -> None:
    said: list[str] = []
    reader = SpoolReader(tmp_path, said.append)
    file = tmp_path / "g1.a.jsonl"
    file.write_bytes(b'{"t_s": 1, "jobs": {"1": [5, 1, "measured"]}}\n{"t_s": 2, "jobs": {"1": [8,')
    assert reader.read(snapshot(job(1)))[1].energy_j == 5.0
    with file.open("ab") as stream:
        stream.write(b' 2, "measured"]}}\nnonsense\n{"jobs": 3}\n')

    assert reader.read(snapshot(job(1)))[1].energy_j == 8.0
    assert len(said) == 1


def test_lines_hold_only_what_is_new(tmp_path: Path) -> None:
    lines = [{1: 10.0}, {1: 10.0, 2: 5.0}, {1: 10.0, 2: 5.0}, {1: 11.0, 2: 5.0}]
    written(tmp_path, "g1", "a", lines)
    reported = [set(json.loads(line)["jobs"]) for line in (tmp_path / "g1.a.jsonl").read_text().splitlines()]

    assert reported == [set(), {"1"}, {"2"}, set(), {"1"}]
    assert SpoolReader(tmp_path, print).read(snapshot(job(1), job(2)))[2].energy_j == 5.0


def test_a_truncated_file_is_read_from_its_beginning(tmp_path: Path) -> None:
    reader = SpoolReader(tmp_path, print)
    writer = written(tmp_path, "g1", "a", [{1: 10.0}, {1: 20.0, 2: 5.0}])
    reader.read(snapshot(job(1)))
    (tmp_path / "g1.a.jsonl").write_bytes(b"")
    written(tmp_path, "g1", "a", [{1: 30.0}], writer)

    assert {n: t.energy_j for n, t in reader.read(snapshot(job(1), job(2))).items()} == {1: 30.0, 2: 5.0}


def test_a_line_that_was_cut_short_is_made_up_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, write = SpoolWriter(tmp_path, "g1", "a"), os.write
    monkeypatch.setattr(os, "write", lambda fd, line: write(fd, line[:10]))
    assert not writer.write(1.0, {1: JobEnergy(5.0, 5.0, Quality.MEASURED, "m")})
    monkeypatch.undo()
    assert writer.write(2.0, {1: JobEnergy(5.0, 5.0, Quality.MEASURED, "m")})

    assert SpoolReader(tmp_path, lambda _: None).read(snapshot(job(1)))[1].energy_j == 5.0


def test_a_shared_disk_that_is_away_stops_no_scheduler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    reader = SpoolReader(tmp_path, said.append)
    writer = written(tmp_path, "g1", "a", [{1: 10.0}])
    assert reader.read(snapshot(job(1)))[1].energy_j == 10.0
    written(tmp_path, "g1", "a", [{1: 30.0}], writer)
    with monkeypatch.context() as away:
        away.setattr(Path, "open", lambda *_: (_ for _ in ()).throw(OSError(errno.ESTALE, "Stale file handle")))
        for _ in range(2):
            assert reader.read(snapshot(job(1)))[1].energy_j == 10.0
    assert [text.partition(": ")[2] for text in said] == ["cannot be read: Stale file handle"]

    assert reader.read(snapshot(job(1)))[1].energy_j == 30.0


def test_a_disk_that_is_away_loses_nothing(tmp_path: Path) -> None:
    (tmp_path / "spool").write_text("in the way")
    writer = SpoolWriter(tmp_path / "spool", "g1", "a")
    assert not writer.write(1.0, {1: JobEnergy(5.0, 5.0, Quality.MEASURED, "m")})
    (tmp_path / "spool").unlink()
    assert writer.write(2.0, {1: JobEnergy(9.0, 9.0, Quality.MEASURED, "m")})

    assert SpoolReader(tmp_path / "spool", print).read(snapshot(job(1)))[1].energy_j == 9.0
