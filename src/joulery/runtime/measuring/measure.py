"""Measure a command: joules and grams, with nothing of joulery inside the measured program.

A problem of measuring never changes the program: it lowers the coverage and becomes a warning. Only a wrong request (a
flag, a file, a named meter that is absent) is an error, before anything starts.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from joulery.domain.errors import CapabilityError
from joulery.runtime.measuring.job_place import ALONE, JobPlace, detached
from joulery.runtime.measuring.launch import NOT_EXECUTABLE, NOT_FOUND, LaunchOutcome, run_command
from joulery.runtime.measuring.recorder import RunRecorder
from joulery.runtime.measuring.terms import Settings, Terms
from joulery.store.run.directory import RunWriter, create_run, new_run_id

if TYPE_CHECKING:
    from joulery.domain.ports import CarbonSource
    from joulery.runtime.measuring.account import Account
    from joulery.store.run.readings import RunReadings

RUNS = Path("runs")
"""Default folder of runs."""
_PR_SET_CHILD_SUBREAPER = 36


class EnterableGroup(Protocol):
    """A control group of a run."""

    @property
    def path(self) -> Path:
        """Its folder."""
        ...

    @property
    def per_cpu(self) -> bool:
        """Whether the group counts the time of each CPU."""
        ...

    def enter(self) -> None:
        """Move this process into the group.

        Raises:
            OSError: The kernel refuses.
        """
        ...

    def remove(self) -> None:
        """Delete the group."""
        ...


class RunTracing(Protocol):
    """Records the operations of a run besides its power."""

    def folder(self, writer: RunWriter) -> Path:
        """Folder into which the command writes its trace."""
        ...

    def environment(self, writer: RunWriter) -> Mapping[str, str]:
        """Environment in which the command traces its operations into the run."""
        ...

    def keep(self, writer: RunWriter, made: Account, readings: RunReadings) -> object:
        """Account what was recorded and keep it in the run."""
        ...


@dataclass(frozen=True, slots=True)
class Measured:
    """Outcome of a measured command.

    Attributes:
        exit_code: Exit code of the command, as a shell reports it.
        error: Reason why it never ran; None when it did.
        account: Its account; None when it never ran.
        path: Its run directory; None when it never ran.
        manifest: Manifest of the run.
        warnings: Problems of measuring.
    """

    exit_code: int
    error: str | None = None
    account: Account | None = None
    path: Path | None = None
    manifest: Mapping[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


def run_measured(
    argv: Sequence[str],
    *,
    settings: Settings,
    terms: Terms,
    source: CarbonSource | None,
    owner: str | None = None,
    out: Path | None = None,
    ended: Callable[[int], None] = lambda exit_code: None,
    make_group: Callable[[int], EnterableGroup | None] = lambda pid: None,
    tracing: RunTracing | None = None,
    place: JobPlace = ALONE,
) -> Measured:
    """Run a command and measure it and everything it starts.

    Where a launcher started several tasks on this node, the first one measures them all.

    Args:
        argv: The command.
        settings: Settings of the measurement.
        terms: Terms of the charge.
        source: Source of carbon intensity; None for no grams.
        owner: Owner of the run.
        out: The run directory; a new one in :data:`RUNS` when not given.
        ended: Called with the exit code as soon as there is one.
        make_group: Creates a control group for the processes that a process starts; returns None where none may be
            made.
        tracing: Records the operations too.
        place: Place of this process in a job; in a job on several nodes, each leaves a run in the job's folder.

    Raises:
        JouleryError: The folder holds a run or cannot be written, or a named meter cannot be read. Nothing was started.
    """
    refusal = _refusal(argv[0])
    if refusal is not None:
        return refusal
    writer, trouble = _run_directory(argv, terms, owner, out, place)
    recorder = RunRecorder(writer.path, settings, writer)
    for text in (*trouble, *filter(None, [detached(argv)])):
        recorder.warn(text)
    environment = tracing.environment(writer) if tracing is not None else None
    group = make_group(os.getpid()) if place.tasks == 1 else None
    try:
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
        _start(recorder, place, group, None if tracing is None else tracing.folder(writer))
        outcome = run_command(
            argv,
            in_child=lambda: _enter(group),
            started=lambda pid, at_ns: recorder.begin(at_ns, pid),
            not_ours={recorder.sampler_pid or 0},
            environment=environment,
        )
        ended(outcome.exit_code)
        if place.tasks > 1:  # the system's figure is of one task
            outcome = replace(outcome, cpu_s=0.0)
        return _finished(recorder, writer, outcome, terms, source, tracing)
    finally:
        if group is not None:
            group.remove()


def _start(recorder: RunRecorder, place: JobPlace, group: EnterableGroup | None, threads: Path | None) -> None:
    """Start the sampler for what this process starts or, with several tasks on a node, for what their parent starts."""
    try:
        named = (str(group.path), group.per_cpu) if group else None
        root = os.getpid() if place.tasks == 1 else os.getppid()
        recorder.start(root=root, include_root=False, group=named, threads=threads)
    except KeyboardInterrupt:
        recorder.abandon()
        raise


def _enter(group: EnterableGroup | None) -> None:
    """Put this process, about to become the command, into the control group of the run."""
    if group is None:
        return
    try:
        group.enter()
    except OSError as error:  # the group could be entered a moment ago; the command must start all the same
        os.write(2, f"joulery: warning: the run's CPU time is not counted: {error}\n".encode())


def _finished(
    recorder: RunRecorder,
    writer: RunWriter,
    outcome: LaunchOutcome,
    terms: Terms,
    source: CarbonSource | None,
    tracing: RunTracing | None,
) -> Measured:
    if outcome.error is not None:
        recorder.abandon()
        return Measured(outcome.exit_code, outcome.error, warnings=tuple(recorder.warnings))
    made = recorder.finish(
        outcome.started_ns,
        outcome.ended_ns,
        cpu_s=outcome.cpu_s,
        exit_code=outcome.exit_code,
        terms=terms,
        source=source,
        keep_more=None if tracing is None else tracing.keep,
    )
    return Measured(outcome.exit_code, None, made, writer.path, writer.manifest, tuple(recorder.warnings))


def _refusal(command: str) -> Measured | None:
    """The outcome of a command that cannot be run, found before anything starts; None if it can be run."""
    if shutil.which(command) is not None:
        return None
    if os.sep in command and Path(command).exists():
        if Path(command).is_dir():
            return Measured(NOT_EXECUTABLE, f"{command}: is a directory")
        hint = f"name its interpreter, such as python3 {shlex.quote(command)}, or chmod +x it"
        return Measured(NOT_EXECUTABLE, f"{command}: permission denied\n  {hint}")
    reason = "no such file or directory" if os.sep in command else "command not found"
    return Measured(NOT_FOUND, f"{command}: {reason}{_meant(command)}")


def _meant(command: str) -> str:
    """A line that suggests the intended command where one does not exist; empty without a suggestion."""
    program, _, rest = command.strip().partition(" ")
    if rest and shutil.which(program) is not None:
        return f"\n  it is one word: leave the quotes out, or measure sh -c {shlex.quote(command)}"
    if command and Path(command).is_file():
        runner = "python3 " if command.endswith(".py") else "./"
        return f"\n  a file of this folder is run as {runner}{shlex.quote(command)}"
    return ""


def _run_directory(
    argv: Sequence[str], terms: Terms, owner: str | None, out: Path | None, place: JobPlace = ALONE
) -> tuple[RunWriter, list[str]]:
    def create(folder: Path) -> RunWriter:
        zone = terms.carbon.get("zone")
        details = {"terms": terms.to_dict(), **({"job": place.as_dict()} if place.nodes > 1 else {})}
        return create_run(folder, kind="measure", argv=argv, zone=zone, owner=owner, details=details)

    if out is None and place.nodes > 1 and place.name:
        out = RUNS / place.name
    if out is not None:
        return create(out / place.folder if place.nodes > 1 else out), []
    name = new_run_id(time.time())
    try:
        return create(RUNS / name), []
    except CapabilityError as error:
        folder = Path(tempfile.mkdtemp(prefix="joulery-"))
        return create(folder / name), [f"{error}: the run is kept in {folder / name}"]
