"""Files of agents that have ended: taken over, deleted, and no joule lost or counted twice by it."""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from joulery.domain.cluster import ClusterJob, ClusterSnapshot, JobEnergy, JobState
from joulery.domain.gpu.device import Owner
from joulery.domain.quality import Quality
from joulery.runtime.schedule import spool
from joulery.runtime.schedule.spool import KEEP_S, SpoolReader, SpoolWriter, machine_id
from joulery.store.leases import owner_of

DAY_S = 86_400.0


class Killed(BaseException):
    """What kills a process here."""


class Node:
    """A node whose agents a test starts and kills; its clocks are moved by hand."""

    def __init__(self, folder: Path, name: str = "g1", largest_bytes: int = spool.LARGEST_BYTES) -> None:
        self.folder, self.name, self.largest_bytes = folder, name, largest_bytes
        self.session, self.wall_s, self.clock_s = 0, 1.7e9, 0.0
        self.start()

    def start(self, *, session: str = "", machine: str = "m", owner: Owner | None = None) -> SpoolWriter:
        """Kill the agent and start another."""
        self.session += 1
        self.totals: dict[int, float] = {}
        self.writer = SpoolWriter(
            self.folder,
            self.name,
            session or f"s{self.session}",
            machine=machine,
            owner=owner or Owner(os.getpid(), self.session, "an earlier boot"),
            clock_s=lambda: self.clock_s,
            largest_bytes=self.largest_bytes,
        )
        return self.writer

    def draw(self, **joules: float) -> bool:
        """Jobs (``j1``) draw so much more, and the agent takes a sample."""
        for name, more_j in joules.items():
            self.totals[int(name[1:])] = self.totals.get(int(name[1:]), 0.0) + more_j
        return self.writer.write(
            self.wall_s, {n: JobEnergy(e, e / 2, Quality.MEASURED, "m") for n, e in self.totals.items()}
        )

    @property
    def files(self) -> list[str]:
        """What is there of this node and others."""
        return sorted(file.name for file in self.folder.glob("*.jsonl"))


def snapshot(*numbers: int) -> ClusterSnapshot:
    jobs = tuple(ClusterJob(n, "job", "ada", 0.0, JobState.RUNNING, slots=1) for n in numbers)
    return ClusterSnapshot(4, jobs)


def seen(reader: SpoolReader) -> dict[int, float]:
    found = reader.read(snapshot(*range(1, 10)))
    assert all(total.slot_j == pytest.approx(total.energy_j / 2) for total in found.values())
    return {job: total.energy_j for job, total in found.items()}


def fresh(folder: Path) -> dict[int, float]:
    """What a scheduler that was away reads."""
    return seen(SpoolReader(folder, pytest.fail))


def test_the_next_agent_takes_over_and_deletes(tmp_path: Path) -> None:
    node, reader = Node(tmp_path), SpoolReader(tmp_path, pytest.fail)
    node.draw(j1=10.0, j2=5.0)
    assert seen(reader) == {1: 10.0, 2: 5.0}
    node.start()
    assert node.draw(j1=7.0, j3=1.0)
    assert node.files == ["g1.s2.jsonl"]
    for read in (seen(reader), fresh(tmp_path)):
        assert read == {1: 17.0, 2: 5.0, 3: 1.0}
    node.draw(j2=2.0)
    assert seen(reader) == fresh(tmp_path) == {1: 17.0, 2: 7.0, 3: 1.0}


def test_a_scheduler_that_was_away_finds_everything_in_one_file(tmp_path: Path) -> None:
    node = Node(tmp_path)
    for _ in range(6):
        node.draw(j1=10.0, j2=1.0)
        node.draw(j1=10.0)
        node.start()
    node.draw(j3=4.0)
    assert node.files == ["g1.s7.jsonl"]
    assert fresh(tmp_path) == {1: 120.0, 2: 6.0, 3: 4.0}


@pytest.mark.parametrize("jump_s", [-10 * 365 * DAY_S, 10 * 365 * DAY_S])
def test_a_clock_that_jumped_drops_nothing(tmp_path: Path, jump_s: float) -> None:
    node, reader = Node(tmp_path), SpoolReader(tmp_path, pytest.fail)
    node.start(session="s5")
    node.draw(j1=10.0)
    seen(reader)
    node.wall_s += jump_s
    node.start(session="s4" if jump_s < 0 else "s6")
    node.draw(j2=3.0)
    assert len(node.files) == 1
    assert seen(reader) == fresh(tmp_path) == {1: 10.0, 2: 3.0}


def test_killed_between_write_and_delete_counts_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node, reader = Node(tmp_path), SpoolReader(tmp_path, pytest.fail)
    node.draw(j1=10.0, j2=5.0)
    seen(reader)
    node.start()
    with monkeypatch.context() as deadly:
        unlink = Path.unlink

        def killed(path: Path, missing_ok: bool = False) -> None:
            if path.suffix == ".jsonl":
                raise Killed
            unlink(path, missing_ok)

        deadly.setattr(Path, "unlink", killed)
        with pytest.raises(Killed):
            node.draw(j1=7.0)
    assert node.files == ["g1.s1.jsonl", "g1.s2.jsonl"]
    assert seen(reader) == fresh(tmp_path) == {1: 10.0, 2: 5.0}, "what it never wrote is its own loss"
    node.start()
    node.draw(j1=1.0)
    assert node.files == ["g1.s3.jsonl"]
    assert seen(reader) == fresh(tmp_path) == {1: 11.0, 2: 5.0}


def test_killed_over_a_draft_changes_nothing_and_the_draft_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(tmp_path)
    node.draw(j1=10.0)
    node.start()
    with monkeypatch.context() as deadly:
        deadly.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(Killed))
        with pytest.raises(Killed):
            node.draw(j1=7.0)
    assert node.files == ["g1.s1.jsonl"]
    draft = tmp_path / ".g1.s2.jsonl.77.tmp"
    draft.write_bytes(b"half a li")
    assert fresh(tmp_path) == {1: 10.0}
    node.start()
    node.draw(j1=1.0)
    assert (node.files, draft.exists()) == (["g1.s3.jsonl"], False)
    assert fresh(tmp_path) == {1: 11.0}


def test_a_file_that_cannot_be_deleted_stays_out_of_the_sum_whatever_comes_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also once the file that carried it first was itself begun anew, and of an agent that lives."""
    node, reader = Node(tmp_path), SpoolReader(tmp_path, pytest.fail)
    node.draw(j1=10.0)
    seen(reader)
    node.largest_bytes = 1
    node.start()
    unlink = Path.unlink

    def refused(path: Path, missing_ok: bool = False) -> None:
        if path.name == "g1.s1.jsonl":
            raise PermissionError(1, "not permitted")
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", refused)
    assert node.draw(j1=7.0)
    for _ in range(40):
        node.draw(j1=1.0)
    assert len(node.files) == 2 and "g1.s1.jsonl" in node.files
    assert seen(reader) == fresh(tmp_path) == {1: 57.0}
    monkeypatch.undo()
    node.start()
    node.draw(j2=1.0)
    assert len(node.files) == 1
    assert seen(reader) == fresh(tmp_path) == {1: 57.0, 2: 1.0}


def test_what_a_living_agent_still_carries_is_not_taken(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.draw(j1=10.0)
    left = (tmp_path / "g1.s1.jsonl").read_bytes()
    node.start(owner=owner_of(os.getpid()))
    node.draw(j1=7.0)
    (tmp_path / "g1.s1.jsonl").write_bytes(left)
    node.start()
    node.draw(j2=1.0)
    assert node.files == ["g1.s1.jsonl", "g1.s2.jsonl", "g1.s3.jsonl"]
    assert fresh(tmp_path) == {1: 17.0, 2: 1.0}


def test_a_stopped_job_keeps_its_total_for_thirty_days_of_a_monotonic_clock(tmp_path: Path) -> None:
    node, reader = Node(tmp_path), SpoolReader(tmp_path, pytest.fail)
    node.draw(j1=10.0, j2=5.0)
    for days in (16, 13):
        node.clock_s += days * DAY_S
        node.draw(j2=1.0)
        node.start()
        node.clock_s = 0.0  # the machine was restarted
        node.draw(j2=1.0)
        assert seen(reader)[1] == fresh(tmp_path)[1] == 10.0
    node.clock_s += 2 * DAY_S
    node.draw(j2=1.0)
    node.start()
    node.draw(j2=1.0)
    assert fresh(tmp_path) == {2: 11.0}, "31 days after its last joule"
    assert seen(reader) == {1: 10.0, 2: 11.0}, "who has read it still knows it"


def test_a_file_that_grows_is_begun_anew(tmp_path: Path) -> None:
    node, reader = Node(tmp_path, largest_bytes=2000), SpoolReader(tmp_path, pytest.fail)
    sizes = []
    for sample in range(300):
        node.clock_s += 30.0
        assert node.draw(j1=1.0, **{f"j{2 + sample // 100}": 2.0})
        sizes.append(sum(file.stat().st_size for file in tmp_path.iterdir()))
        if sample % 7 == 0:
            seen(reader)
    assert max(sizes) < 2 * 2000
    assert len(node.files) == 1 and node.files[0] != "g1.s1.jsonl"
    assert seen(reader) == fresh(tmp_path) == {1: 300.0, 2: 200.0, 3: 200.0, 4: 200.0}
    node.clock_s += KEEP_S - 150 * 30.0
    for _ in range(60):
        assert node.draw(j1=1.0)
    assert fresh(tmp_path) == {1: 360.0, 3: 200.0, 4: 200.0}, "a grown file leaves out what is long over, too"
    assert seen(reader)[2] == 200.0
    node.draw(j2=1.0)
    assert seen(reader)[2] == fresh(tmp_path)[2] == 201.0, "and has it back if it draws after all"


def test_what_many_jobs_need_is_not_begun_anew_at_every_sample(tmp_path: Path) -> None:
    node = Node(tmp_path, largest_bytes=100)
    names = set()
    for _ in range(100):
        node.draw(**{f"j{n}": 1.0 for n in range(1, 10)})
        names |= set(node.files)
    assert len(names) < 60
    assert fresh(tmp_path) == dict.fromkeys(range(1, 10), 100.0)


def leave(folder: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> Node:
    """A node whose first agent left a file that the next must not take."""
    node = Node(folder)
    if how == "it lives":
        node.start(owner=owner_of(os.getpid()))
    elif how == "another machine of this name":
        node.start(machine="another")
    elif how == "a machine that does not say which":
        node.start(machine="")
    node.draw(j1=10.0)
    if how == "it lives, hidden from this user":
        monkeypatch.setattr(spool, "owner_of", lambda pid: None)
        monkeypatch.setattr(os, "kill", lambda *_: (_ for _ in ()).throw(PermissionError(1, "not permitted")))
    elif how == "an earlier version wrote it":
        (folder / node.files[0]).write_text('{"t_s": 1, "jobs": {"1": [10, 5, "measured"]}}\n')
    elif how == "another node":
        node.name = "g"
    elif how == "another node with a dot":
        node.name = "g1.x"
    node.start(machine="" if how == "a machine that does not say which" else "m", owner=owner_of(os.getpid()))
    return node


@pytest.mark.parametrize(
    "how",
    [
        "it lives",
        "it lives, hidden from this user",
        "another machine of this name",
        "a machine that does not say which",
        "an earlier version wrote it",
        "another node",
        "another node with a dot",
    ],
)
def test_files_that_may_belong_to_others_are_left_alone(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = leave(tmp_path, how, monkeypatch)
    assert node.draw(j1=1.0)
    assert len(node.files) == 2
    assert fresh(tmp_path) == {1: 11.0}


def test_one_agent_takes_over_at_a_time(tmp_path: Path) -> None:
    node = Node(tmp_path, largest_bytes=1)
    node.draw(j1=10.0)
    node.start()
    with (tmp_path / ".g1.lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        for _ in range(30):
            assert node.draw(j1=1.0)
        assert node.files == ["g1.s1.jsonl", "g1.s2.jsonl"], "neither taken over nor begun anew"
        assert fresh(tmp_path) == {1: 40.0}
    node.draw(j1=1.0)
    assert node.files == ["g1.s1.jsonl", "g1.s2-1.jsonl"]
    node.start()
    node.draw(j1=1.0)
    assert node.files == ["g1.s3.jsonl"]
    assert fresh(tmp_path) == {1: 42.0}


def test_a_process_of_that_number_that_is_another_does_not_keep_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(tmp_path)
    node.draw(j1=10.0)
    monkeypatch.setattr(os, "kill", lambda *_: (_ for _ in ()).throw(PermissionError(1, "not permitted")))
    node.start()
    node.draw(j1=1.0)
    assert node.files == ["g1.s2.jsonl"], "it is seen, and began at another time"


def test_nothing_is_taken_while_a_file_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(tmp_path)
    node.draw(j1=10.0)
    node.start(machine="another")
    node.draw(j1=5.0)
    node.start()
    read_on = spool.SpoolFileState.read_on

    def away(state: spool.SpoolFileState, file: Path) -> str:
        if file.name == "g1.s2.jsonl":
            raise OSError(116, "Stale file handle")
        return read_on(state, file)

    with monkeypatch.context() as broken:
        broken.setattr(spool.SpoolFileState, "read_on", away)
        assert node.draw(j1=1.0)
    assert len(node.files) == 3
    assert fresh(tmp_path) == {1: 16.0}


def test_a_file_that_goes_while_the_folder_is_read_is_found_in_the_next_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, looks = Node(tmp_path), []
    node.draw(j1=10.0)
    files = spool._files

    def meanwhile(folder: Path) -> list[Path]:
        found = files(folder)
        if not looks:
            looks.append(1)
            node.start()
            node.draw(j1=7.0)
        return found

    monkeypatch.setattr(spool, "_files", meanwhile)
    assert fresh(tmp_path) == {1: 17.0}


def test_a_scheduler_that_looks_seldom_counts_what_was_taken_over_several_times_once(tmp_path: Path) -> None:
    node, reader = Node(tmp_path), SpoolReader(tmp_path, pytest.fail)
    node.draw(j1=10.0)
    seen(reader)
    for _ in range(3):
        node.start()
        node.draw(j1=1.0)
    assert seen(reader) == fresh(tmp_path) == {1: 13.0}


def test_a_folder_that_is_emptied_takes_nothing_from_a_scheduler_that_has_read_it(tmp_path: Path) -> None:
    node, reader = Node(tmp_path), SpoolReader(tmp_path, pytest.fail)
    node.draw(j1=10.0, j2=5.0)
    seen(reader)
    node.start(machine="another")
    node.draw(j1=4.0)
    assert seen(reader) == {1: 14.0, 2: 5.0}
    (tmp_path / node.files[0]).unlink()
    assert seen(reader) == {1: 14.0, 2: 5.0}
    node.draw(j1=20.0)
    assert seen(reader) == {1: 24.0, 2: 5.0}


def test_the_last_line_of_an_agent_that_just_ended_is_taken_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(tmp_path)
    node.draw(j1=10.0)

    def ends_now(owner: Owner) -> bool:
        with (tmp_path / "g1.s1.jsonl").open("a") as last:
            last.write('{"t_s": 2.0, "up_s": 1.0, "jobs": {"1": [15.0, 7.5, "measured"]}}\n')
        return True

    monkeypatch.setattr(spool, "_ended", ends_now)
    node.start()
    node.draw(j1=1.0)
    assert fresh(tmp_path) == {1: 16.0}


def test_a_machine_says_which_it_is_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "machine-id").write_text("abc\n")
    monkeypatch.setattr(spool, "_MACHINE", tmp_path / "machine-id")
    assert machine_id() == "abc"
    monkeypatch.setattr(spool, "_MACHINE", tmp_path / "nothing")
    assert machine_id() == ""


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("draw"), st.integers(0, 1), st.integers(1, 4)),
        st.tuples(st.just("restart"), st.integers(0, 1), st.booleans()),
        st.tuples(st.just("look"), st.just(0), st.just(0)),
        st.tuples(st.just("leftover"), st.integers(0, 1), st.just(0)),
    ),
    max_size=25,
)


@given(STEPS, st.sampled_from([1, 400, 10_000]))
def test_no_history_loses_or_doubles_a_joule(steps: list[tuple[str, int, int]], largest_bytes: int) -> None:
    """Agents of two nodes start, live on beside others and die, deleted files come back, a scheduler looks."""
    with tempfile.TemporaryDirectory() as folder:
        path, truth = Path(folder), dict.fromkeys(range(1, 5), 0.0)
        nodes = [Node(path, name, largest_bytes) for name in ("g1", "g2")]
        reader, kept = SpoolReader(path, pytest.fail), {}
        for what, at, value in steps:
            if what == "draw":
                kept |= {file: file.read_bytes() for file in path.glob("*.jsonl")}
                assert nodes[at].draw(**{f"j{value}": float(value)})
                truth[value] += value
            elif what == "restart":
                nodes[at].start(owner=owner_of(os.getpid()) if value else None)
            elif what == "look":
                assert seen(reader) == {job: joules for job, joules in truth.items() if joules}
            else:
                listed = {
                    name
                    for file in path.glob(f"{nodes[at].name}.*.jsonl")
                    for name in json.loads(file.read_text().splitlines()[0])["carries"]
                }
                for name in listed & {file.name for file in kept}:
                    (path / name).write_bytes(kept[path / name])
        expected = {job: joules for job, joules in truth.items() if joules}
        assert seen(reader) == expected
        assert fresh(path) == expected
