"""Jobs as processes of this machine: real processes, small ones."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from joulery.adapters.clusters.local import LocalBackend, Slot, _alive
from joulery.adapters.clusters.progress import output_pattern
from joulery.domain.cluster import ClusterJob, Hold, JobRun, JobState, Order, Release, Start, Stop
from joulery.domain.errors import ActuationError, CapabilityError
from joulery.store.jobs import JobBook
from tests.waiting import wait_until

SLEEP = "import time\nwhile True: time.sleep(0.02)"
SAVES = (
    "import os, signal, sys, time\n"
    "signal.signal(signal.SIGTERM, lambda *_: (print('saved', flush=True), sys.exit(99)))\n"
    "print('start', os.environ['JOULERY_GPUS'], os.environ['JOULERY_RESTART_COUNT'], flush=True)\n"
    "while True: time.sleep(0.02)\n"
)
STUBBORN = (
    "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "while True: print('on', flush=True); time.sleep(0.02)\n"
)


def awaited(lock: Path) -> bool:
    """Whether a thread or process waits for a locked file."""
    entries = Path("/proc/locks").read_text().splitlines()
    return any("->" in entry and f":{lock.stat().st_ino} " in entry for entry in entries)


class Machine:
    """A backend with its book, and patience."""

    def __init__(self, folder: Path) -> None:
        self.book = JobBook(folder)
        self.boot_s = 0.0
        core = min(os.sched_getaffinity(0))
        self.slots = (Slot(cores=(core,)), Slot(cores=(core,)), Slot(cores=(core,)))
        self.backend = self.another()

    def another(self) -> LocalBackend:
        return LocalBackend(self.book, self.slots, grace_s=10.0, boot_s=lambda: self.boot_s)

    def submit(self, program: str, least: int = 1, most: int = 1, **more: Any) -> int:
        return self.book.add(
            {
                "command": [sys.executable, "-c", program],
                "cwd": "/tmp",
                "environment": {"PATH": os.environ["PATH"], **more.pop("environment", {})},
                "name": "job",
                "owner": "ada",
                "min_slots": least,
                "max_slots": most,
                "submit_s": 5.0,
                **more,
            }
        )

    def job(self, number: int, backend: LocalBackend | None = None) -> ClusterJob:
        return {job.id: job for job in (backend or self.backend).snapshot().jobs}[number]

    def until(
        self, number: int, ready: Callable[[ClusterJob], bool], backend: LocalBackend | None = None
    ) -> ClusterJob:
        wait_until(lambda: ready(self.job(number, backend)), f"the awaited state of job {number}")
        return self.job(number, backend)

    def output(self, number: int) -> str:
        file = self.book.folder(number) / "output.log"
        return file.read_text() if file.exists() else ""

    def said(self, number: int, text: str) -> None:
        wait_until(lambda: text in self.output(number), f"{text!r} in the output of job {number}")


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    machine = Machine(tmp_path)
    yield machine
    for placement in machine.backend.placements():
        for pid in placement.pids:
            os.killpg(pid, signal.SIGKILL)
    wait_until(lambda: not machine.backend.placements(), "the end of all jobs")
    machine.backend.snapshot()


def test_a_job_waits_until_it_is_started_and_ends(machine: Machine) -> None:
    number = machine.submit("print('hello')")

    waiting = machine.job(number)
    assert (waiting.state, waiting.slots, waiting.owner, waiting.submit_s) == (JobState.WAITING, 0, "ada", 5.0)
    machine.backend.apply(Start(number, 1))
    done = machine.until(number, lambda job: job.state.over)
    assert (done.state, done.exit_code, done.slots) == (JobState.DONE, 0, 0)
    assert machine.output(number) == "hello\n"


def run_of(job: ClusterJob) -> JobRun:
    assert job.run is not None
    return job.run


def ended_after(machine: Machine, number: int, seconds: float) -> ClusterJob:
    """The job as the next look finds it: its runner wrote the exit code so long after the start."""
    run = machine.book.read(number, "run")
    assert run is not None
    wait_until(lambda: not _alive(run), "the end of the run")
    at_s = run["since_s"] + seconds
    os.utime(machine.book.folder(number) / f"exit.{run['restarts']}", (at_s, at_s))
    return machine.job(number)


def test_a_run_lasts_until_its_runner_ended_whenever_the_next_look_is(machine: Machine) -> None:
    number = machine.submit("", most=2)
    machine.backend.apply(Start(number, 2))
    machine.boot_s = 300.0

    done = ended_after(machine, number, 1.5)
    assert (done.state, run_of(done).slots) == (JobState.DONE, 2)
    assert run_of(done).held_s == pytest.approx(1.5, abs=1e-5)
    assert machine.job(number, machine.another()).run == done.run, "and another process says the same"


def test_a_clock_that_is_set_makes_no_run_longer_than_it_can_have_been(machine: Machine) -> None:
    number = machine.submit("")
    machine.backend.apply(Start(number, 1))
    machine.boot_s = 20.0

    assert run_of(ended_after(machine, number, 3600.0)).held_s == 20.0


def test_a_run_under_way_has_held_its_slots_until_now_and_a_stopped_one_until_its_end(machine: Machine) -> None:
    number = machine.submit(SAVES)
    assert machine.job(number).run is None
    machine.backend.apply(Start(number, 1))
    machine.said(number, "start")
    machine.boot_s = 40.0
    assert run_of(machine.job(number)).held_s == 40.0

    machine.backend.apply(Stop(number))
    machine.boot_s = 45.0
    stopped = ended_after(machine, number, 42.0)
    assert (stopped.state, stopped.slots) == (JobState.WAITING, 0)
    assert run_of(stopped).held_s == pytest.approx(42.0, abs=1e-5)
    machine.backend.apply(Start(number, 1))
    again = run_of(machine.job(number))
    assert again.start_s > run_of(stopped).start_s and again.held_s == 0.0


def test_a_killed_run_ends_when_it_is_found_gone_and_of_others_the_end_is_unknown(machine: Machine) -> None:
    number = machine.submit(SLEEP)
    machine.backend.apply(Start(number, 1))
    (placement,) = machine.backend.placements()
    machine.boot_s = 30.0
    machine.job(number)
    os.killpg(placement.pids[0], signal.SIGKILL)
    run = machine.book.read(number, "run")
    assert run is not None
    wait_until(lambda: not _alive(run), "the end of the run")
    machine.boot_s = 35.0

    assert machine.another()._held(number, run) is None
    assert run_of(machine.job(number)).held_s == 35.0


def test_every_run_is_placed_once_after_its_end_with_its_processor_time(machine: Machine) -> None:
    assert machine.backend.metered() == ()
    short = machine.submit("")
    machine.backend.apply(Start(short, 1))
    machine.boot_s = 300.0
    ended_after(machine, short, 2.0)

    (placement,) = machine.backend.metered()
    assert (placement.job, placement.ended, placement.slots) == (short, True, 1)
    assert placement.run is not None and placement.run.held_s == pytest.approx(2.0, abs=1e-5)
    assert placement.cpu_s > 0, "an interpreter was started"
    assert machine.backend.metered() == ()


def test_on_a_full_disk_a_job_that_ended_is_listed_and_neither_over_nor_started_again(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = machine.submit("")
    machine.backend.apply(Start(number, 1))
    machine.boot_s = 300.0
    run = machine.book.read(number, "run")
    assert run is not None
    wait_until(lambda: not _alive(run), "the end of the run")

    def refuse(job: int, fact: str, document: object) -> None:
        raise CapabilityError(f"cannot write {fact}.json: No space left on device")

    with monkeypatch.context() as full:
        full.setattr(machine.book, "write", refuse)
        seen = machine.job(number)
        assert (seen.state, seen.slots) == (JobState.WAITING, 0)
        assert seen.exempt == "it ended, which is not recorded yet: cannot write over.json: No space left on device"
        with pytest.raises(ActuationError, match="not recorded"):
            machine.backend.apply(Start(number, 1))
    assert machine.job(number).state is JobState.DONE


def test_a_job_whose_exit_code_the_disk_refused_has_that_of_its_runner(machine: Machine) -> None:
    number = machine.submit("raise SystemExit(3)")
    draft = machine.book.folder(number) / "exit.0.tmp"
    draft.mkdir()  # the runner cannot write there, as on a full disk
    machine.backend.apply(Start(number, 1))

    failed = machine.until(number, lambda job: job.state.over)
    assert (failed.state, failed.exit_code, failed.restarts) == (JobState.FAILED, 3, 0)


def test_a_job_that_ends_during_the_look_keeps_its_exit_code_without_a_file(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = machine.submit("raise SystemExit(3)")
    (machine.book.folder(number) / "exit.0.tmp").mkdir()
    machine.backend.apply(Start(number, 1))
    pid = machine.book.read(number, "run")["pid"]
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    wait, looks = os.wait4, []

    def not_yet(child: int, options: int) -> Any:
        looks.append(child)
        return (0, 0, None) if len(looks) == 1 else wait(child, options)

    monkeypatch.setattr(os, "wait4", not_yet)
    seen = machine.job(number)
    assert (seen.state, seen.exit_code, seen.restarts) == (JobState.FAILED, 3, 0)


def test_a_job_that_fails_by_itself_is_not_started_again(machine: Machine) -> None:
    number = machine.submit("raise SystemExit(3)")
    machine.backend.apply(Start(number, 1))

    failed = machine.until(number, lambda job: job.state.over)
    assert (failed.state, failed.exit_code, failed.restarts) == (JobState.FAILED, 3, 0)


def test_a_command_that_is_not_there_fails_and_says_so(machine: Machine) -> None:
    number = machine.submit("", command=["no-such-program-here"])
    machine.backend.apply(Start(number, 1))

    assert machine.until(number, lambda job: job.state.over).exit_code == 127
    assert "no-such-program-here" in machine.output(number)


def test_a_job_that_ended_before_anybody_saw_it_start_is_over(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    spawn = os.posix_spawn

    def ended(*arguments: Any, **more: Any) -> int:
        pid = spawn(*arguments, **more)
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        return pid

    monkeypatch.setattr(os, "posix_spawn", ended)
    number = machine.submit("print('begun')")
    machine.backend.apply(Start(number, 1))
    assert machine.backend.placements() == ()
    after = machine.job(number)
    assert (after.state, after.restarts, machine.output(number)) == (JobState.WAITING, 1, "")


class Killed(BaseException):
    """The scheduler was killed at this point."""


def test_a_scheduler_killed_before_it_wrote_down_what_it_started_started_nothing(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = machine.submit("print('begun')")
    write, spawn, pids = machine.book.write, os.posix_spawn, []

    def killed(job: int, fact: str, document: Any) -> None:
        if fact == "run":
            raise Killed
        write(job, fact, document)

    def spawned(*arguments: Any, **more: Any) -> int:
        pids.append(spawn(*arguments, **more))
        return pids[-1]

    monkeypatch.setattr(os, "posix_spawn", spawned)
    monkeypatch.setattr(machine.book, "write", killed)
    with pytest.raises(Killed):
        machine.backend.apply(Start(number, 1))
    monkeypatch.undo()
    os.waitid(os.P_PID, pids[0], os.WEXITED | os.WNOWAIT)
    assert machine.output(number) == "" and machine.job(number).state is JobState.WAITING
    machine.backend.apply(Start(number, 1))
    assert machine.until(number, lambda job: job.state.over).restarts == 0
    assert machine.output(number) == "begun\n", "it ran once"


def test_a_scheduler_killed_before_it_sent_sigterm_sends_it_when_it_is_back(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = machine.submit(SAVES)
    machine.backend.apply(Start(number, 1))
    machine.said(number, "start")

    def killed(*_: Any) -> None:
        raise Killed

    monkeypatch.setattr("joulery.adapters.clusters.local._signal", killed)
    with pytest.raises(Killed):
        machine.backend.apply(Stop(number))
    monkeypatch.undo()
    later = machine.another()
    assert machine.until(number, lambda job: job.state is JobState.WAITING, later).restarts == 1
    assert "saved" in machine.output(number)


def test_a_job_with_damaged_documents_is_left_alone_and_blocks_no_other(machine: Machine) -> None:
    lost, running, fine = machine.submit(SLEEP), machine.submit(SLEEP), machine.submit("print('begun')")
    machine.backend.apply(Start(running, 1))
    (machine.book.folder(lost) / "job.json").write_text("{")
    (machine.book.folder(running) / "job.json").write_text('{"name": "x"}')
    seen = {job.id: job for job in machine.backend.snapshot().jobs}

    assert "not JSON" in seen[lost].exempt and seen[lost].state is JobState.WAITING
    assert "lacks command" in seen[running].exempt and seen[running].slots == 1
    machine.backend.apply(Start(fine, 1))
    assert machine.until(fine, lambda job: job.state.over).state is JobState.DONE
    (machine.book.folder(lost) / "run.json").write_text("{")
    assert machine.job(lost).exempt
    with pytest.raises(ActuationError, match="which slots are free"):
        machine.backend.apply(Start(machine.submit(SLEEP), 1))


def test_who_looks_and_acts_does_so_alone(machine: Machine) -> None:
    number = machine.submit("print('begun')")
    seen: list[str] = []

    def cancel() -> None:
        seen.append(machine.another().cancel(number))

    other = threading.Thread(target=cancel)
    with machine.book.locked():
        other.start()
        wait_until(lambda: awaited(machine.book.folder(number).parent / "lock"), "the wait for the lock")
        assert not seen and machine.book.read(number, "cancel") is None
    other.join(20)
    assert seen == ["cancelled"]


def test_fewer_slots_than_before_and_running_jobs_are_still_metered(machine: Machine) -> None:
    machine.slots = tuple(Slot(gpu=board) for board in (4, 5, 6))
    machine.backend = machine.another()
    first, second = machine.submit(SLEEP), machine.submit(SLEEP)
    machine.backend.apply(Start(first, 1))
    machine.backend.apply(Start(second, 1))
    machine.slots = machine.slots[:1]
    machine.backend = machine.another()

    assert [placement.gpus for placement in machine.backend.placements()] == [(4,), (5,)]
    with pytest.raises(ActuationError, match="0 are free"):
        machine.backend.apply(Start(machine.submit(SLEEP), 1))


def test_stopped_it_saves_waits_and_starts_again_wider_with_its_output_whole(machine: Machine) -> None:
    number = machine.submit(SAVES, 1, 3)
    machine.backend.apply(Start(number, 1))
    machine.said(number, "start 1 0")
    assert machine.job(number).slots == 1
    machine.backend.apply(Stop(number))

    again = machine.until(number, lambda job: job.state is JobState.WAITING)
    assert (again.restarts, again.slots) == (1, 0)
    machine.backend.apply(Start(number, 3))
    machine.said(number, "start 3 1")
    assert machine.output(number) == "start 1 0\nsaved\nstart 3 1\n"
    assert machine.job(number).slots == 3
    assert machine.backend.snapshot().free == 0


def test_a_job_that_ignores_sigterm_is_killed_after_its_grace_and_not_before(machine: Machine) -> None:
    number = machine.submit(STUBBORN)
    machine.backend.apply(Start(number, 1))
    machine.said(number, "on")
    machine.backend.apply(Stop(number))
    machine.boot_s = 9.9
    for _ in range(2):
        assert machine.job(number).state is JobState.STOPPING
        said = machine.output(number)
        wait_until(lambda: len(machine.output(number)) > len(said) + 6, "a job that goes on")  # noqa: B023
    assert machine.job(number).slots == 1, "it keeps its slot until it is gone"

    machine.boot_s = 10.1
    assert machine.until(number, lambda job: job.state is JobState.WAITING).restarts == 1


def test_a_job_begins_with_the_signals_of_a_shell(machine: Machine) -> None:
    says = "import signal; print(signal.getsignal(signal.SIGINT) is signal.SIG_IGN)"
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        number = machine.submit(says)
        machine.backend.apply(Start(number, 1))
    finally:
        signal.signal(signal.SIGINT, before)
    machine.until(number, lambda job: job.state.over)
    assert machine.output(number) == "False\n"


def test_a_stop_that_is_left_over_stops_no_later_start(machine: Machine) -> None:
    number = machine.submit(SLEEP)
    machine.book.write(number, "stop", {"boot_s": -1e9, "at_s": 0.0, "told": True})
    machine.backend.apply(Start(number, 1))
    assert machine.job(number).state is JobState.RUNNING


def test_a_jobs_own_word_counts_before_its_output(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.backend = LocalBackend(machine.book, machine.slots, pattern=output_pattern(r"Epoch (\d+)/(\d+)"))
    number = machine.submit(SLEEP)
    (machine.book.folder(number) / "output.log").write_text("Epoch 1/10\n")
    assert machine.job(number).progress_ratio == 0.1
    (machine.book.folder(number) / "progress").write_text("9/10\n")
    assert machine.job(number).progress_ratio == 0.9


def test_the_scheduler_keeps_its_own_cores(machine: Machine) -> None:
    before = os.sched_getaffinity(0)
    machine.backend.apply(Start(machine.submit(SLEEP), 1))
    assert os.sched_getaffinity(0) == before and machine.slots[0].cores == (min(before),)


def test_stopping_twice_sends_one_sigterm(machine: Machine) -> None:
    number = machine.submit(STUBBORN)
    machine.backend.apply(Start(number, 1))
    machine.said(number, "on")
    machine.backend.apply(Stop(number))
    stop = machine.book.read(number, "stop")

    assert machine.backend.apply(Stop(number)) == "it is stopping already"
    assert machine.book.read(number, "stop") == stop


def test_a_job_that_finishes_while_it_is_stopped_is_done_when_its_progress_says_so(machine: Machine) -> None:
    finishing = (
        "import os, signal, sys, time\n"
        "def end(*_):\n open(os.environ['JOULERY_PROGRESS'], 'a').write('epoch 9/9\\n')\n sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, end)\nprint('on', flush=True)\n" + SLEEP
    )
    number = machine.submit(finishing)
    machine.backend.apply(Start(number, 1))
    machine.said(number, "on")
    machine.backend.apply(Stop(number))

    assert machine.until(number, lambda job: job.state.over).state is JobState.DONE


def test_a_polite_exit_code_after_sigterm_is_no_end(machine: Machine) -> None:
    number = machine.submit(SAVES.replace("99", "0"))
    machine.backend.apply(Start(number, 1))
    machine.said(number, "start")
    machine.backend.apply(Stop(number))

    assert machine.until(number, lambda job: job.state is not JobState.STOPPING).state is JobState.WAITING


def test_a_scheduler_that_comes_back_finds_its_jobs(machine: Machine) -> None:
    running, ended = machine.submit(SLEEP), machine.submit("print('bye')")
    machine.backend.apply(Start(running, 1))
    machine.backend.apply(Start(ended, 1))
    machine.said(ended, "bye")
    later = machine.another()

    assert machine.job(running, later).state is JobState.RUNNING
    assert machine.until(ended, lambda job: job.state.over, later).exit_code == 0
    assert later.snapshot().free == 2


def test_a_machine_that_went_down_starts_its_jobs_again(machine: Machine) -> None:
    number = machine.submit(SLEEP)
    machine.backend.apply(Start(number, 1))
    run = machine.book.read(number, "run")
    assert run is not None
    assert _alive(run) and not _alive({**run, "boot": "another boot"}), "numbers and ticks begin anew with a boot"
    os.killpg(run["pid"], signal.SIGKILL)
    machine.book.write(number, "run", {**run, "boot": "another boot"})

    after = machine.job(number)
    assert (after.state, after.restarts) == (JobState.WAITING, 1)


def test_another_process_with_its_number_is_not_taken_for_it(machine: Machine) -> None:
    number = machine.submit(SLEEP)
    machine.backend.apply(Start(number, 1))
    run = machine.book.read(number, "run")
    assert run is not None
    os.killpg(run["pid"], signal.SIGKILL)
    machine.book.write(number, "run", {**run, "pid": os.getpid()})

    assert machine.job(number).state is JobState.WAITING


def test_slots_are_never_given_twice(machine: Machine) -> None:
    first, second, third = (machine.submit(SLEEP, 1, 3) for _ in range(3))
    machine.backend.apply(Start(first, 2))
    machine.backend.apply(Start(second, 1))

    with pytest.raises(ActuationError, match="0 are free"):
        machine.backend.apply(Start(third, 1))
    with pytest.raises(ActuationError, match="it is running"):
        machine.backend.apply(Start(first, 2))
    taken = [machine.book.read(job, "run")["slots"] for job in (first, second)]  # type: ignore[index]
    assert sorted(taken[0] + taken[1]) == [0, 1, 2]


def test_a_size_beyond_what_the_owner_allows_is_refused(machine: Machine) -> None:
    with pytest.raises(ActuationError, match="1 to 2 slots, not 3"):
        machine.backend.apply(Start(machine.submit(SLEEP, 1, 2), 3))


def test_a_job_larger_than_the_machine_is_left_alone_and_says_why(machine: Machine) -> None:
    assert machine.job(machine.submit(SLEEP, 4, 4)).exempt == "needs 4 slots, there are 3"


def test_gpus_and_cores_are_handed_over(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    core = max(os.sched_getaffinity(0))
    machine.slots = (Slot(gpu=4), Slot(gpu=6, cores=(core,)))
    machine.backend = machine.another()
    before = os.sched_getaffinity(0)
    number = machine.submit(
        "import os; print(os.environ['CUDA_VISIBLE_DEVICES'], os.environ['OMP_NUM_THREADS'], os.sched_getaffinity(0))",
        1,
        2,
    )
    machine.backend.apply(Start(number, 2))
    assert [placement.gpus for placement in machine.backend.placements()] in ([(4, 6)], [])
    machine.until(number, lambda job: job.state.over)

    assert machine.output(number) == f"4,6 1 {{{core}}}\n"
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize("action", [Hold(1), Release(1), Order((1,))])
def test_holding_releasing_and_ordering_need_nothing(machine: Machine, action: Hold) -> None:
    machine.submit(SLEEP)
    assert machine.backend.apply(action).startswith("nothing to do")


def test_cancelled_while_it_waits_or_runs(machine: Machine) -> None:
    waiting, running, stubborn = machine.submit(SLEEP), machine.submit(SAVES), machine.submit(STUBBORN)
    machine.backend.apply(Start(running, 1))
    machine.backend.apply(Start(stubborn, 1))
    machine.said(running, "start")
    machine.said(stubborn, "on")

    assert machine.backend.cancel(waiting) == "cancelled"
    machine.another().cancel(running)
    machine.backend.cancel(stubborn)
    machine.boot_s = 11.0
    for number in (waiting, running, stubborn):
        assert machine.until(number, lambda job: job.state.over).state is JobState.CANCELLED
    with pytest.raises(ActuationError, match="is over: cancelled"):
        machine.backend.cancel(waiting)
    with pytest.raises(ActuationError, match="no job 77"):
        machine.backend.cancel(77)


def test_jobs_that_ended_long_ago_are_not_shown(tmp_path: Path) -> None:
    book, now = JobBook(tmp_path), [1e6]
    backend = LocalBackend(book, (Slot(),), now_s=lambda: now[0])
    machine = Machine(tmp_path)
    number = machine.submit(SLEEP)
    backend.cancel(number)

    assert len(backend.snapshot().jobs) == 1
    now[0] += 90_000
    assert backend.snapshot().jobs == ()


def killed(machine: Machine, number: int) -> None:
    """Kill the process group of a running job from outside, and see that it ended."""
    run = machine.book.read(number, "run")
    assert run is not None
    machine.said(number, "on")
    os.killpg(run["pid"], signal.SIGKILL)
    wait_until(lambda: not _alive(run), f"the end of job {number}")


def test_a_job_that_is_killed_again_and_again_pauses_longer_each_time_and_fails_at_last(machine: Machine) -> None:
    number = machine.submit(f"print('on', flush=True)\n{SLEEP}")
    pauses = []
    for _ in range(5):
        machine.backend.apply(Start(number, 1))
        killed(machine, number)
        assert "killed" in machine.job(number).exempt
        before_s = machine.boot_s
        while machine.job(number).exempt:
            machine.boot_s += 1.0
        pauses.append(machine.boot_s - before_s)
        (machine.book.folder(number) / "output.log").unlink()
    assert pauses == [5.0, 10.0, 20.0, 40.0, 80.0]
    machine.backend.apply(Start(number, 1))
    killed(machine, number)
    assert machine.job(number).state is JobState.FAILED


def test_a_job_that_outlives_its_grace_and_reports_no_progress_is_not_stopped_again(machine: Machine) -> None:
    number = machine.submit(STUBBORN)
    machine.backend.apply(Start(number, 1))
    machine.said(number, "on")
    machine.backend.apply(Stop(number))
    machine.boot_s += 11.0
    machine.until(number, lambda job: job.state is JobState.WAITING)
    machine.backend.apply(Start(number, 1))

    assert not machine.until(number, lambda job: job.state is JobState.RUNNING).stoppable


def test_a_job_may_be_submitted_as_never_to_be_stopped(machine: Machine) -> None:
    assert not machine.job(machine.submit(SLEEP, stoppable=False)).stoppable
    assert machine.job(machine.submit(SLEEP)).stoppable
