"""Training jobs as processes of this machine: slots are GPUs or groups of cores, a stop is SIGTERM, then SIGKILL.

A job is its command line, started in a session of its own with ``JOULERY_GPUS`` (its slots), ``JOULERY_RESTART_COUNT``,
``JOULERY_JOB`` and ``JOULERY_PROGRESS`` (a file to append progress to). One file has the output of all starts. After a
stop the job waits to be started again, unless it exited with 0 and reports a progress of 100 %.

The state is on disk before the scheduler depends on it, and processes are identified by id and start time: a restarted
scheduler finds its running jobs, and a machine that went down starts them again.
"""

from __future__ import annotations

import math
import os
import re
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from joulery.adapters.clusters.progress import read_output, read_progress
from joulery.domain.cluster import (
    ClusterAction,
    ClusterJob,
    ClusterSnapshot,
    Hold,
    JobRun,
    JobState,
    Order,
    Placement,
    Release,
    Split,
    Start,
)
from joulery.domain.errors import ActuationError, CapabilityError, DataError

# The shell starts the command once the scheduler has written its process id to the disk, and exits if the scheduler
# died before. It waits for the command through any signal and writes the exit code in one step.
_RUNNER = (
    'read -r go || exit 125; exec </dev/null; cd "$1" || exit 126; exit_file=$2; shift 2; trap : TERM INT HUP; '
    '"$@"; code=$?; '
    'printf "%s" "$code" >"$exit_file.tmp" && mv "$exit_file.tmp" "$exit_file"; exit "$code"'
)
_ASKED = frozenset({"command", "cwd", "environment", "name", "owner", "min_slots", "max_slots", "submit_s"})
_MOST_KILLS = 5
"""A job that is killed from outside more often in a row has failed."""
_BACK_OFF_S = (5.0, 600.0)
"""Pause before a killed job starts again: the first, doubled with every further kill up to the second."""
_STEADY_S = 600.0
"""A job that ran longer than this before it was killed counts as killed for the first time."""
_KEPT_S = 86_400.0
"""Time for which a job that is over stays in the snapshot."""


class Book(Protocol):
    """Store of documents about jobs."""

    def locked(self) -> AbstractContextManager[None]:
        """Hold the lock of the book; no other process changes it meanwhile."""
        ...

    def ids(self) -> Sequence[int]:
        """Numbers of all jobs."""
        ...

    def folder(self, job: int) -> Path:
        """The folder of a job."""
        ...

    def read(self, job: int, fact: str) -> dict[str, Any] | None:
        """A document; None where there is none."""
        ...

    def write(self, job: int, fact: str, document: Mapping[str, Any]) -> None:
        """Set a document."""
        ...

    def remove(self, job: int, fact: str) -> None:
        """Remove a document."""
        ...


@dataclass(frozen=True, slots=True)
class Slot:
    """One slot of this machine: cores, or a GPU."""

    cores: tuple[int, ...] = ()
    gpu: int | None = None


class LocalBackend:
    """Cluster backend that runs the jobs of one book on the slots of this machine.

    Args:
        book: The jobs.
        slots: The slots of this machine.
        grace_s: Seconds from SIGTERM to SIGKILL.
        pattern: Finds progress in the output of jobs that report none.
        now_s: Clock for recorded times, Unix seconds.
        boot_s: Clock for the grace, seconds since boot: a change of the system time does not affect it.
    """

    def __init__(
        self,
        book: Book,
        slots: Sequence[Slot],
        *,
        grace_s: float = 120.0,
        pattern: re.Pattern[str] | None = None,
        now_s: Callable[[], float] = time.time,
        boot_s: Callable[[], float] = lambda: time.clock_gettime(time.CLOCK_BOOTTIME),
    ) -> None:
        self._book, self._slots, self._grace_s = book, tuple(slots), grace_s
        self._pattern, self._now_s, self._boot_s = pattern, now_s, boot_s
        self._over: dict[int, ClusterJob] = {}
        self._children: set[int] = set()
        self._cpu_s: dict[int, float] = {}
        self._codes: dict[int, int] = {}
        self._metered: dict[int, dict[str, Any]] | None = None
        self._seen: set[int] = set()

    def snapshot(self) -> ClusterSnapshot:
        """The current state of every job; a job that runs beyond its grace is killed."""
        self._reap()
        now_s = self._now_s()
        jobs = []
        with self._book.locked():
            for number in self._book.ids():
                if (job := self._over.get(number)) is None:
                    job = self._state_unless_damaged(number)
                if not job.state.over or now_s - self._ended_s(number) < _KEPT_S:
                    jobs.append(job)
        return ClusterSnapshot(len(self._slots), tuple(jobs), self_starting=False)

    def placements(self) -> tuple[Placement, ...]:
        """The placement of every job with a living process."""
        found = []
        for number in self._book.ids():
            run = None if number in self._over else self._run(number)
            if run is not None and _alive(run):
                found.append(Placement(number, (run["pid"],), len(run["slots"]), tuple(run.get("gpus", ()))))
        return tuple(found)

    def metered(self) -> tuple[Placement, ...]:
        """The placement of every job with a living process, and every run that ended since the last call, once.

        A run that began and ended between two calls is included if this backend started it.
        """
        found, last = [], self._metered or {}
        self._metered = {}
        alive = {placement.job: placement for placement in self.placements()}
        self._reap()
        for number in sorted(alive.keys() | last.keys()):
            run, before = self._run(number), last.get(number)
            if before is not None and (number not in alive or run is None or before["pid"] != run["pid"]):
                held, cpu_s = self._held(number, before), self._cpu_s.pop(before["pid"], math.nan)
                gpus = tuple(before.get("gpus", ()))
                found.append(Placement(number, (before["pid"],), len(before["slots"]), gpus, run=held, ended=True,
                                       cpu_s=cpu_s))  # fmt: skip
            if number in alive and run is not None:
                self._metered[number] = run
                found.append(replace(alive[number], run=self._held(number, run)))
        return tuple(found)

    def apply(self, action: ClusterAction, /) -> str:
        """Start or stop a process; other actions do nothing, because no job here starts by itself."""
        if isinstance(action, (Hold, Release, Split, Order)):
            return "nothing to do: jobs of this machine start only on Start"
        self._reap()
        if action.job not in self._book.ids():
            raise ActuationError(f"there is no job {action.job} here")
        with self._book.locked():
            job = self._look(action.job)
            if isinstance(action, Start):
                if job.state is not JobState.WAITING or self._run(job.id) is not None:
                    raise ActuationError(f"job {job.id} cannot start: {job.exempt or f'it is {job.state}'}")
                return self._start(job, action.slots)
            if job.state is JobState.RUNNING:
                return self._stop(job.id)
            return f"it is {job.state} already"

    def cancel(self, job: int) -> str:
        """End a job for good: at once when it waits, after its grace when it runs.

        Raises:
            ActuationError: There is no such job, or it is over.
        """
        if job not in self._book.ids():
            raise ActuationError(f"there is no job {job} here", hint="joulery jobs lists them")
        self._reap()
        with self._book.locked():
            seen = self._look(job)
            if seen.state.over:
                raise ActuationError(f"job {job} is over: {seen.state}")
            self._book.write(job, "cancel", {"at_s": self._now_s()})
            if seen.state is JobState.RUNNING:
                return self._stop(job)
            if seen.state is JobState.WAITING:
                self._end(job, JobState.CANCELLED, None)
            return f"{self._look(job).state}"

    def close(self) -> None:
        """Reap ended children; jobs continue."""
        self._reap()

    def _state_unless_damaged(self, number: int) -> ClusterJob:
        """The current state of a job; a job with damaged documents is exempt, and does not stop other jobs."""
        try:
            return self._look(number)
        except DataError as damaged:
            lost = ClusterJob(number, "?", "?", 0.0, JobState.WAITING, exempt=str(damaged))
        run = self._run(number)
        if run is None or not _alive(run):
            return lost
        return replace(lost, state=JobState.RUNNING, slots=len(run["slots"]))

    def _run(self, number: int) -> dict[str, Any] | None:
        """The process of a job; None where there is none, or its document is damaged."""
        try:
            return self._book.read(number, "run")
        except DataError:
            return None

    def _look(self, number: int) -> ClusterJob:
        """Update a job and return its current state: record the end of its process, enforce its grace."""
        asked = self._book.read(number, "job") or {}
        if missing := _ASKED - asked.keys():
            file = self._book.folder(number) / "job.json"
            raise DataError(f"lacks {', '.join(sorted(missing))}", file=str(file))
        job = ClusterJob(
            id=number,
            name=asked["name"],
            owner=asked["owner"],
            submit_s=asked["submit_s"],
            state=JobState.WAITING,
            shape=asked["min_slots"],
            min_slots=asked["min_slots"],
            max_slots=asked["max_slots"],
            held_by_us=True,
            exempt=self._too_large(asked["min_slots"]),
            restarts=asked.get("restarts", 0),
            stoppable=asked.get("stoppable", True),
            deadline_s=asked.get("deadline_s") or math.inf,
            limit_s=asked.get("limit_s") or math.nan,
            progress_ratio=self._progress(self._book.folder(number)),
            run=JobRun(**asked["last_run"]) if asked.get("last_run") else None,
        )
        over = self._book.read(number, "over")
        if over is not None:
            job = replace(job, run=JobRun(**over["run"]) if over.get("run") else job.run)
            ended = replace(job, state=JobState(over["state"]), exit_code=over["exit_code"], held_by_us=False)
            self._over[number] = ended
            return ended
        run = self._book.read(number, "run")
        if run is None:
            return replace(job, exempt=job.exempt or self._backing_off(asked))
        started = replace(
            job,
            restarts=run["restarts"],
            slots=len(run["slots"]),
            held_by_us=False,
            start_s=run.get("since_s", math.nan),
            run=self._held(number, run),
        )
        stop = self._book.read(number, "stop")
        if _alive(run):
            if stop is None:
                return replace(started, state=JobState.RUNNING)
            # Without a record of the signal, the scheduler that wrote this ended before it sent one.
            if not stop.get("signalled", stop.get("told", True)):
                self._send_stop(number, run, stop)
            self._enforce(run, stop)
            return replace(started, state=JobState.STOPPING)
        try:
            return self._ended(started, run, stop)
        except CapabilityError as refused:  # a full disk: the end is recorded at a later look
            return replace(job, exempt=f"it ended, which is not recorded yet: {refused}")

    def _progress(self, folder: Path) -> float:
        ratio = read_progress(folder / "progress")
        return ratio if ratio == ratio or self._pattern is None else read_output(folder / "output.log", self._pattern)

    def _backing_off(self, asked: Mapping[str, Any]) -> str:
        """Reason why a job that was killed does not start yet; empty where it may."""
        again = asked.get("again")
        if again is None or again["boot"] != _boot_id() or self._boot_s() >= again["boot_s"]:
            return ""
        return f"killed {asked['kills']} times in a row: it starts again after a pause"

    def _too_large(self, least: int) -> str:
        return f"needs {least} slots, there are {len(self._slots)}" if least > len(self._slots) else ""

    def _ended(self, job: ClusterJob, run: Mapping[str, Any], stop: Mapping[str, Any] | None) -> ClusterJob:
        """Record the end of a job's process: the job is over, or waits for its next start."""
        code = _exit_code(self._book.folder(job.id) / f"exit.{run['restarts']}")
        code = self._reap().get(run["pid"]) if code is None else code  # a full disk has no file; it may end just now
        if self._book.read(job.id, "cancel") is not None:
            return self._end(job.id, JobState.CANCELLED, code, job.run)
        finished = code == 0 and (stop is None or job.progress_ratio >= 1.0)
        failed = code not in (None, 0) and stop is None
        if finished or failed:
            return self._end(job.id, JobState.DONE if finished else JobState.FAILED, code, job.run)
        asked = self._book.read(job.id, "job") or {}
        again: dict[str, Any] = {"restarts": run["restarts"] + 1, "last_run": job.run and asdict(job.run)}
        if stop is not None and code is None and math.isnan(job.progress_ratio):
            again["stoppable"] = False  # it outlived its grace and reports no progress: it saves nothing
        if stop is None and run["boot"] == _boot_id():
            lasted_s = self._now_s() - run.get("since_s", math.nan)
            kills = 1 if lasted_s > _STEADY_S else asked.get("kills", 0) + 1
            if kills > _MOST_KILLS:
                return self._end(job.id, JobState.FAILED, code, job.run)
            wait_s = min(_BACK_OFF_S[1], _BACK_OFF_S[0] * 2.0 ** (kills - 1))
            again |= {"kills": kills, "again": {"boot": _boot_id(), "boot_s": self._boot_s() + wait_s}}
        self._book.write(job.id, "job", {**asked, **again})
        self._book.remove(job.id, "run")
        self._book.remove(job.id, "stop")
        return self._look(job.id)

    def _end(self, number: int, state: JobState, code: int | None, run: JobRun | None = None) -> ClusterJob:
        document = {"state": state, "exit_code": code, "ended_s": self._now_s(), "run": run and asdict(run)}
        self._book.write(number, "over", document)
        return self._look(number)

    def _held(self, number: int, run: Mapping[str, Any]) -> JobRun | None:
        """The run, with the time that it has held its slots until now or until its end; None if that is unknown.

        The runner writes its exit code last: the modification time of that file, or of its draft on a full disk, is
        the end. A killed run ends when this backend, which saw it alive, finds it ended; otherwise its end is
        unknown.
        """
        since_s = run.get("since_s", math.nan)
        if math.isnan(since_s):
            return None
        same_boot = run["boot"] == _boot_id() and "boot_s" in run
        most_s = max(0.0, self._boot_s() - run["boot_s"] if same_boot else self._now_s() - since_s)
        if _alive(run):
            self._seen.add(run["pid"])
            return JobRun(since_s, most_s, len(run["slots"]))
        exit_file = self._book.folder(number) / f"exit.{run['restarts']}"
        ends_s = [file.stat().st_mtime for file in (exit_file, Path(f"{exit_file}.tmp")) if file.exists()]
        if not ends_s:
            return JobRun(since_s, most_s, len(run["slots"])) if run["pid"] in self._seen else None
        return JobRun(since_s, min(most_s, max(0.0, ends_s[0] - since_s)), len(run["slots"]))

    def _ended_s(self, number: int) -> float:
        return float((self._book.read(number, "over") or {"ended_s": 0.0})["ended_s"])

    def _start(self, job: ClusterJob, count: int) -> str:
        if not job.min_slots <= count <= job.max_slots:
            raise ActuationError(f"job {job.id} may use {job.min_slots} to {job.max_slots} slots, not {count}")
        taken = self._taken()
        free = [slot for slot in range(len(self._slots)) if slot not in taken]
        if count > len(free):
            raise ActuationError(f"job {job.id} wants {count} slots, {len(free)} are free")
        mine = free[:count]
        asked = self._book.read(job.id, "job") or {}
        restarts = asked.get("restarts", 0)
        folder = self._book.folder(job.id).absolute()
        self._book.remove(job.id, "stop")
        (folder / f"exit.{restarts}").unlink(missing_ok=True)
        slots = [self._slots[slot] for slot in mine]
        wait, go = os.pipe2(os.O_CLOEXEC)
        try:
            pid = self._spawn(asked, folder, restarts, slots, wait)
            gpus = [slot.gpu for slot in slots if slot.gpu is not None]
            run = {"pid": pid, "start_ticks": _start_ticks(pid), "boot": _boot_id(), "slots": mine, "gpus": gpus,
                   "restarts": restarts, "since_s": self._now_s(), "boot_s": self._boot_s()}  # fmt: skip
            self._book.write(job.id, "run", run)
            self._seen.add(pid)
            if self._metered is not None:
                self._metered[job.id] = run
            os.write(go, b"go\n")
        finally:
            os.close(wait)
            os.close(go)
        return f"on slots {', '.join(map(str, mine))}, process {pid}"

    def _taken(self) -> set[int]:
        """Slots of every living process."""
        try:
            runs = [self._book.read(number, "run") for number in self._book.ids() if number not in self._over]
        except DataError as error:
            hint = "end that job and delete its folder"
            raise ActuationError(f"it is unknown which slots are free: {error}", hint=hint) from error
        return {slot for run in runs if run is not None and _alive(run) for slot in run["slots"]}

    def _spawn(self, asked: Mapping[str, Any], folder: Path, restarts: int, slots: Sequence[Slot], wait: int) -> int:
        """Start the command in a session of its own, on its cores; it begins when it reads a line from ``wait``."""
        environment = {
            **asked["environment"],
            "JOULERY_JOB": str(asked["id"]),
            "JOULERY_GPUS": str(len(slots)),
            "JOULERY_RESTART_COUNT": str(restarts),
            "JOULERY_PROGRESS": str(folder / "progress"),
        }
        cores = sorted({core for slot in slots for core in slot.cores})
        if cores:
            environment["OMP_NUM_THREADS"] = str(len(cores))
        gpus = [str(slot.gpu) for slot in slots if slot.gpu is not None]
        if gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        line = ["sh", "-c", _RUNNER, "joulery-job", asked["cwd"], str(folder / f"exit.{restarts}"), *asked["command"]]
        log = os.open(folder / "output.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        before = os.sched_getaffinity(0)
        try:
            if cores:
                os.sched_setaffinity(0, cores)  # of this thread alone, and inherited
            pid = os.posix_spawn(
                "/bin/sh",
                line,
                environment,
                file_actions=[
                    (os.POSIX_SPAWN_DUP2, wait, 0),
                    (os.POSIX_SPAWN_DUP2, log, 1),
                    (os.POSIX_SPAWN_DUP2, log, 2),
                ],
                setsid=True,
                setsigdef=[signal.SIGINT, signal.SIGTERM, signal.SIGPIPE],
            )
            self._children.add(pid)
            self._codes.pop(pid, None)  # of an earlier process of that number
            return pid
        except OSError as error:
            raise CapabilityError(f"cannot start job {asked['id']}: {os.strerror(error.errno or 0)}") from error
        finally:
            os.sched_setaffinity(0, before)
            os.close(log)

    def _reap(self) -> Mapping[int, int]:
        """Reap ended children of this process, and return all exit codes so far, by process."""
        for pid in tuple(self._children):
            try:
                found, status, used = os.wait4(pid, os.WNOHANG)
                ended = found == pid
                if ended and os.WIFEXITED(status):
                    self._codes[pid] = os.WEXITSTATUS(status)
                if ended and self._metered is not None:
                    self._cpu_s[pid] = used.ru_utime + used.ru_stime
            except ChildProcessError:  # reaped elsewhere in this process
                ended = True
            if ended:
                self._children.discard(pid)
        return self._codes

    def _stop(self, job: int) -> str:
        run = self._book.read(job, "run")
        assert run is not None, "it was running a moment ago"
        self._send_stop(job, run, {"boot_s": self._boot_s(), "at_s": self._now_s()})
        return f"SIGTERM, and {self._grace_s:g} s to save itself"

    def _send_stop(self, job: int, run: Mapping[str, Any], stop: Mapping[str, Any]) -> None:
        """Send SIGTERM, recorded before and after: a scheduler killed in between sends it again."""
        self._book.write(job, "stop", {**stop, "signalled": False})
        _signal(run, signal.SIGTERM)
        self._book.write(job, "stop", {**stop, "signalled": True})

    def _enforce(self, run: Mapping[str, Any], stop: Mapping[str, Any]) -> None:
        if self._boot_s() - stop["boot_s"] > self._grace_s:
            _signal(run, signal.SIGKILL)


def _alive(run: Mapping[str, Any]) -> bool:
    """Whether the process of a run is still alive: same process id, same start time, same boot.

    A process that ended before its start time was read is not alive.
    """
    start_ticks = _start_ticks(run["pid"])
    return start_ticks is not None and bool(run["boot"] == _boot_id() and start_ticks == run["start_ticks"])


def _start_ticks(pid: int) -> int | None:
    """The start time of a process, in ticks since boot; None when it ended (a zombie counts as ended)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _signal(run: Mapping[str, Any], number: signal.Signals) -> None:
    if _alive(run):
        try:
            os.killpg(run["pid"], number)
        except ProcessLookupError:
            return


def _exit_code(file: Path) -> int | None:
    """The exit code that the runner wrote; None without one (it was killed, or the machine went down)."""
    try:
        return int(file.read_text())
    except (FileNotFoundError, ValueError):
        return None
