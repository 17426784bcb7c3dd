import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from joulery.adapters.meters.tree import ProcessTree
from tests.waiting import wait_until

TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class Proc:
    """A /proc on disk with processes that are changed by hand."""

    def __init__(self, root: Path, *, children_files: bool = True) -> None:
        self.root = root
        self.children_files = children_files
        root.mkdir()

    def process(self, pid: int, parent: int, *, own: int = 0, waited: int = 0, cpu: int = 0, threads: int = 1) -> None:
        task = self.root / f"{pid}/task/{pid}"
        task.mkdir(parents=True, exist_ok=True)
        self._stat(self.root / f"{pid}/stat", pid, parent, own, waited, cpu, threads)
        self._stat(task / "stat", pid, parent, own, waited, cpu, threads)
        if self.children_files and not (task / "children").exists():
            (task / "children").write_text("")
        siblings = self.root / f"{parent}/task/{parent}/children"
        if self.children_files and siblings.exists() and str(pid) not in siblings.read_text().split():
            siblings.write_text(f"{siblings.read_text()}{pid} ")

    def thread(self, pid: int, tid: int, own: int, cpu: int) -> None:
        task = self.root / f"{pid}/task/{tid}"
        task.mkdir(parents=True, exist_ok=True)
        self._stat(task / "stat", tid, 1, own, 0, cpu, 2)

    def end(self, pid: int) -> None:
        """The kernel answers ESRCH on an open stat; an empty file stands for that here (see ``gone``)."""
        (self.root / f"{pid}/stat").write_text("")
        for file in (self.root / f"{pid}/task/{pid}").iterdir():
            file.unlink()

    def _stat(self, file: Path, pid: int, parent: int, own: int, waited: int, cpu: int, threads: int) -> None:
        fields = ["0"] * 50
        fields[0], fields[1] = "S", str(parent)
        fields[11], fields[12], fields[13], fields[14] = str(own - own // 2), str(own // 2), str(waited), "0"
        fields[17], fields[36] = str(threads), str(cpu)
        file.write_text(f"{pid} (a (nasty) name) {' '.join(fields)}\n")


@pytest.fixture
def proc(tmp_path: Path) -> Proc:
    return Proc(tmp_path / "proc")


def tree(proc: Proc, root: int = 1, *, include_root: bool = False, sockets: tuple[int, ...] = (0,)) -> ProcessTree:
    socket_of_cpu = {cpu: sockets[cpu % len(sockets)] for cpu in range(4)}
    return ProcessTree(
        root, include_root=include_root, exclude={99}, sockets=sockets, socket_of_cpu=socket_of_cpu, proc=proc.root
    )


def ticks(tree: ProcessTree) -> tuple[int, ...]:
    return tuple(round(seconds / TICK_S) for seconds in tree.read())


@pytest.mark.parametrize("children_files", [True, False])
def test_descendants_count_with_what_they_waited_for_and_the_root_only_when_asked(
    tmp_path: Path, children_files: bool
) -> None:
    proc = Proc(tmp_path / "proc", children_files=children_files)
    proc.process(1, 0, own=1000, waited=7)
    proc.process(2, 1, own=10, waited=3)
    proc.process(3, 2, own=5)
    proc.process(99, 1, own=50_000)
    proc.process(100, 99, own=50_000)
    proc.process(4, 77, own=50_000)
    apart, whole = tree(proc), tree(proc, include_root=True)
    assert ticks(apart) == (7 + 13 + 5,)
    assert ticks(whole) == (1000 + 7 + 13 + 5,)
    assert apart.pids() == {2, 3}
    assert whole.pids() == {1, 2, 3}
    apart.close()
    whole.close()
    whole.close()


def test_a_child_that_was_waited_for_moves_to_its_parent_and_counts_once(proc: Proc) -> None:
    proc.process(1, 0)
    proc.process(2, 1, own=10)
    proc.process(3, 2, own=30)
    seen = tree(proc)
    assert ticks(seen) == (40,)
    proc.process(2, 1, own=12, waited=31)
    proc.end(3)
    assert ticks(seen) == (43,)
    assert seen.pids() == {2}
    seen.close()


def test_a_child_that_ends_just_before_its_parent_counts_once(proc: Proc) -> None:
    """As at the end of every script whose last command took time: both are gone at the next reading."""
    proc.process(1, 0)
    proc.process(2, 1, own=10)
    proc.process(3, 2, own=30)
    proc.process(4, 3, own=5)
    seen = tree(proc)
    assert ticks(seen) == (45,)
    proc.process(1, 0, waited=46)
    for pid in (2, 3, 4):
        proc.end(pid)
    assert ticks(seen) == (46,)
    assert seen.pids() == frozenset()
    seen.close()


def test_orphans_that_end_together_keep_their_time(proc: Proc) -> None:
    proc.process(1, 0)
    proc.process(2, 1, own=10)
    proc.process(3, 2, own=30)
    seen = tree(proc)
    assert ticks(seen) == (40,)
    proc.process(2, 77, own=11)
    assert ticks(seen) == (41,)
    for pid in (2, 3):
        proc.end(pid)
    assert ticks(seen) == (41,), "init has waited for them, which is not in the tree"
    assert ticks(seen) == (41,)
    seen.close()


def test_a_real_script_counts_its_last_command_once() -> None:
    """The time that the kernel gives the script and its children, by another way."""
    burn = "import time\nwhile time.process_time() < 0.3: pass\ninput()"
    script = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {burn!r}])"
    seen = ProcessTree(os.getpid(), include_root=False, exclude=(), sockets=(0,), socket_of_cpu={})
    (before_s,), already_s = seen.read(), waited_s()
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE) as process:

        def burnt() -> bool:
            seen.discover()
            return seen.read()[0] - before_s > 0.15

        wait_until(burnt)
        process.communicate(b"\n")
    seen.discover()
    (after_s,) = seen.read()
    seen.close()
    assert after_s - before_s == pytest.approx(waited_s() - already_s, abs=3 * TICK_S)


def waited_s() -> float:
    """CPU seconds of the children that this process has waited for."""
    times = os.times()
    return times.children_user + times.children_system


def test_a_child_that_came_and_went_between_two_readings_counts(proc: Proc) -> None:
    proc.process(1, 0)
    proc.process(2, 1, own=10)
    seen = tree(proc)
    assert ticks(seen) == (10,)
    proc.process(2, 1, own=10, waited=500)
    assert ticks(seen) == (510,)
    seen.close()


def test_an_orphan_is_kept_with_its_children_and_counts_when_it_ends_elsewhere(proc: Proc) -> None:
    proc.process(1, 0)
    proc.process(2, 1, own=10)
    proc.process(3, 2, own=30)
    seen = tree(proc)
    assert ticks(seen) == (40,)
    # 2 ends and is waited for; 3 goes to init (process 77 here) and has a child of its own.
    proc.process(1, 0, waited=10)
    proc.end(2)
    proc.process(77, 0)
    proc.process(3, 77, own=35)
    proc.process(4, 3, own=5)
    seen.discover()
    assert ticks(seen) == (10 + 35 + 5,)
    assert seen.pids() == {3, 4}
    # Init waits for 3: no process in the tree has its time, so it is remembered.
    proc.end(3)
    proc.process(4, 77, own=6)
    assert ticks(seen) == (10 + 35 + 6,)
    seen.close()


def test_the_count_never_falls(proc: Proc) -> None:
    proc.process(1, 0)
    proc.process(2, 1, own=100)
    seen = tree(proc)
    assert ticks(seen) == (100,)
    # 2 ignored SIGCHLD of its child and the like: less is seen than was.
    proc.process(2, 1, own=90)
    assert ticks(seen) == (100,)
    proc.process(2, 1, own=105)
    assert ticks(seen) == (105,)
    seen.close()


def test_a_process_that_ended_before_it_could_be_opened_is_no_error(proc: Proc) -> None:
    proc.process(1, 0)
    (proc.root / "1/task/1/children").write_text("5 6 ")
    seen = tree(proc)
    assert ticks(seen) == (0,)
    assert seen.pids() == frozenset()
    seen.close()


def test_a_process_is_booked_on_the_socket_it_ran_on_last(proc: Proc) -> None:
    proc.process(1, 0)
    proc.process(2, 1, own=10, cpu=0)
    proc.process(3, 1, own=30, cpu=1)
    seen = tree(proc, sockets=(0, 1))
    assert ticks(seen) == (10, 30)
    proc.process(2, 1, own=20, cpu=1)
    assert ticks(seen) == (10, 40)
    seen.close()


def test_threads_are_booked_each_on_its_own_socket(proc: Proc) -> None:
    proc.process(1, 0)
    proc.process(2, 1, own=0, threads=2)
    seen = tree(proc, sockets=(0, 1))
    assert ticks(seen) == (0, 0)
    proc.process(2, 1, own=40, cpu=0, threads=2)
    proc.thread(2, 2, 10, 0)
    proc.thread(2, 21, 30, 1)
    assert ticks(seen) == (10, 30)
    seen.close()


def test_time_of_children_that_ended_follows_the_threads_at_work(proc: Proc) -> None:
    proc.process(1, 0)
    proc.process(2, 1, own=10, cpu=1)
    seen = tree(proc, sockets=(0, 1))
    assert ticks(seen) == (0, 10)
    proc.process(2, 1, own=20, waited=90, cpu=1)
    assert ticks(seen) == (0, 110)
    proc.process(2, 1, own=20, waited=100, cpu=1)
    assert ticks(seen) == (10, 110)
    seen.close()


BURN = "import time\nend = time.process_time() + {}\nwhile time.process_time() < end: pass\n"


@pytest.fixture
def running() -> Iterator[list[subprocess.Popen[bytes]]]:
    processes: list[subprocess.Popen[bytes]] = []
    yield processes
    for process in processes:
        process.kill()
        process.wait()


def real(root: int, *, include_root: bool) -> ProcessTree:
    return ProcessTree(root, include_root=include_root, exclude=(), sockets=(0,), socket_of_cpu={0: 0})


def test_real_processes_alive_and_waited_for(running: list[subprocess.Popen[bytes]]) -> None:
    script = (
        "import subprocess, sys, time\n"
        f"subprocess.run([sys.executable, '-c', {BURN.format(0.2)!r}])\n"
        f"{BURN.format(0.2)}\nprint('done', flush=True)\ntime.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    running.append(process)
    seen = real(process.pid, include_root=True)
    assert process.stdout is not None
    assert process.stdout.readline() == b"done\n"
    (seconds,) = seen.read()
    usage = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    assert 0.36 <= seconds <= sum(int(usage[i]) for i in (11, 12, 13, 14)) * TICK_S + 1e-9
    process.stdout.close()
    process.kill()
    process.wait()
    (after,) = seen.read()
    assert after >= seconds
    assert seen.pids() == frozenset()
    seen.close()


def test_only_descendants_of_this_very_process(running: list[subprocess.Popen[bytes]]) -> None:
    seen = real(os.getpid(), include_root=False)
    (before,) = seen.read()
    process = subprocess.Popen([sys.executable, "-c", BURN.format(0.3)])
    running.append(process)
    while process.pid not in seen.pids():
        seen.discover()
    process.wait()
    time.sleep(0.02)
    (after,) = seen.read()
    assert 0.25 <= after - before <= 5
    assert process.pid not in seen.pids()
    seen.close()
