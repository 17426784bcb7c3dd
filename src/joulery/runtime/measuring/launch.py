"""Run a command transparently, and report when it ran and its CPU time.

The command gets the caller's standard streams, open files, environment, terminal and signal mask. Signals sent to this
process are passed on; those the terminal sends to the whole foreground group reach the command by themselves and are
not sent twice. Its exit code is reported as by a shell: 128 + n when signal n killed it, 127 when there is no such
command, 126 when it may not be run.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

NOT_FOUND, NOT_EXECUTABLE = 127, 126

_FORWARDED = frozenset(
    {
        signal.SIGHUP,
        signal.SIGINT,
        signal.SIGQUIT,
        signal.SIGTERM,
        signal.SIGUSR1,
        signal.SIGUSR2,
        signal.SIGWINCH,
        *range(signal.SIGRTMIN, signal.SIGRTMAX + 1),
    }
)


@dataclass(frozen=True, slots=True)
class LaunchOutcome:
    """Outcome of a command.

    Attributes:
        exit_code: Exit code, as a shell reports it.
        started_ns, ended_ns: On the monotonic clock.
        cpu_s: CPU seconds of the command and every descendant that was waited for.
        error: Reason why it never ran; None when it did.
    """

    exit_code: int
    started_ns: int
    ended_ns: int
    cpu_s: float
    error: str | None = None


def run_command(
    argv: Sequence[str],
    *,
    in_child: Callable[[], None] = lambda: None,
    started: Callable[[int, int], None] = lambda pid, at_ns: None,
    not_ours: Collection[int] = (),
    environment: Mapping[str, str] | None = None,
) -> LaunchOutcome:
    """Run a command to its end.

    Must be called from the main thread, with no other thread running: the child runs Python until it executes.

    Args:
        argv: The command and its arguments; looked up in PATH.
        in_child: Called in the child before the command is executed; must not raise.
        started: Called with the process id and the monotonic nanoseconds of the start.
        not_ours: Children of this process that are waited for elsewhere.
        environment: Of the command; this process's own when not given.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED | {signal.SIGCHLD})

    def prepare() -> None:
        in_child()
        # A signal that waits must find the command's dispositions, not Python's handlers.
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    started_ns = time.monotonic_ns()
    try:
        try:
            child = _spawn(list(argv), prepare, environment)
        except OSError as error:
            code = NOT_FOUND if isinstance(error, FileNotFoundError | NotADirectoryError) else NOT_EXECUTABLE
            return LaunchOutcome(code, started_ns, started_ns, 0.0, f"{argv[0]}: {os.strerror(error.errno or 0)}")
        started(child.pid, started_ns)
        status, cpu_s = _attend(child.pid, frozenset(not_ours))
        ended_ns = time.monotonic_ns()
        child.returncode = os.waitstatus_to_exitcode(status)
    finally:
        _discard_pending()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    code = child.returncode
    return LaunchOutcome(code if code >= 0 else 128 - code, started_ns, ended_ns, cpu_s)


def _spawn(
    argv: list[str], prepare: Callable[[], None], environment: Mapping[str, str] | None
) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(argv, preexec_fn=prepare, close_fds=False, env=environment)
    except OSError as error:
        if error.errno != errno.ENOEXEC:
            raise
        # A script without a first line that names its interpreter: what execvp(3) does.
        return subprocess.Popen(["/bin/sh", *argv], preexec_fn=prepare, close_fds=False, env=environment)


def _attend(pid: int, not_ours: frozenset[int]) -> tuple[int, float]:
    """Pass signals on until the command has ended; return its wait status and the CPU seconds of reaped processes."""
    cpu_s = 0.0
    while True:
        info = signal.sigwaitinfo(_FORWARDED | {signal.SIGCHLD})
        if info.si_signo != signal.SIGCHLD:
            from_a_process = info.si_code <= 0
            if from_a_process and info.si_pid != pid:
                with suppress(PermissionError):  # the command became another user (sudo): it is not ours to signal
                    os.kill(pid, info.si_signo)
            continue
        status = None
        for candidate in (pid, *_orphans(not_ours | {pid})):
            ended, candidate_status, usage = os.wait4(candidate, os.WNOHANG)
            if ended:
                cpu_s += usage.ru_utime + usage.ru_stime
            if ended == pid:
                status = candidate_status
        if status is not None:
            return status, cpu_s


def _orphans(known: frozenset[int]) -> list[int]:
    """Descendants of the command that became children of this process when their parent died."""
    own = os.getpid()
    try:
        children = Path(f"/proc/{own}/task/{own}/children").read_text()
    except OSError:
        return []
    return [int(child) for child in children.split() if int(child) not in known]


def _discard_pending() -> None:
    """Discard signals that arrived too late to be passed on, so that they do not end this process."""
    while signal.sigtimedwait(_FORWARDED | {signal.SIGCHLD}, 0) is not None:
        pass


def become(argv: Sequence[str]) -> tuple[int, str]:
    """Replace this process by a command, unmeasured; if that fails, return the exit code and the reason."""
    try:
        os.execvp(argv[0], list(argv))
    except FileNotFoundError:
        return NOT_FOUND, f"{argv[0]}: command not found"
    except OSError as error:
        return NOT_EXECUTABLE, f"{argv[0]}: {error.strerror}"
