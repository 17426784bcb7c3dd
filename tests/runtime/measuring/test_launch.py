"""Running a command in a process of its own, since it takes over signals and children: one driver, many commands."""

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

DRIVER = """
import json, sys
from joulery.runtime.measuring.launch import run_command
def started(pid, at_ns):
    print("started", pid, file=sys.stderr, flush=True)
outcome = run_command(sys.argv[2:], started=started)
fields = {"code": outcome.exit_code, "cpu_s": outcome.cpu_s, "error": outcome.error,
          "wall_s": (outcome.ended_ns - outcome.started_ns) / 1e9}
open(sys.argv[1], "w").write(json.dumps(fields))
sys.exit(outcome.exit_code)
"""


def outcome(tmp_path: Path, *command: str, **options: Any) -> dict[str, Any]:
    note = tmp_path / "outcome.json"
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, str(note), *command], capture_output=True, text=True, **options
    )
    fields: dict[str, Any] = json.loads(note.read_text())
    assert done.returncode == fields["code"], done.stderr
    return {**fields, "stdout": done.stdout, "stderr": done.stderr}


@pytest.fixture
def drivers() -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for driver in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(driver.pid, signal.SIGKILL)
        driver.wait()
        for stream in (driver.stdout, driver.stderr):
            assert stream is not None
            stream.close()


def driven(drivers: list[subprocess.Popen[str]], tmp_path: Path, *command: str) -> tuple[subprocess.Popen[str], int]:
    """A driver with a started command, and the command's process id."""
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(tmp_path / "outcome.json"), *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    drivers.append(driver)
    assert driver.stderr is not None
    return driver, int(driver.stderr.readline().split()[1])


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("exit 0", 0),
        ("exit 7", 7),
        ("exit 255", 255),
        ("kill -TERM $$", 143),
        ("kill -KILL $$", 137),
        ("kill -SEGV $$", 139),
    ],
)
def test_the_exit_code_is_a_shells(tmp_path: Path, script: str, code: int) -> None:
    assert outcome(tmp_path, "sh", "-c", script)["code"] == code


def test_commands_that_cannot_run(tmp_path: Path) -> None:
    missing = outcome(tmp_path, "no-such-command")
    assert (missing["code"], missing["error"]) == (127, "no-such-command: No such file or directory")
    (tmp_path / "data").write_text("not a program")
    refused = outcome(tmp_path, str(tmp_path / "data"))
    assert refused["code"] == 126
    assert refused["error"].endswith("data: Permission denied")


def test_a_script_without_a_first_line_runs_as_in_a_shell(tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text('echo "$1"; exit 5\n')
    script.chmod(0o755)
    done = outcome(tmp_path, str(script), "an argument")
    assert done["code"] == 5
    assert "an argument\n" in done["stdout"]


def test_streams_environment_and_files_are_the_callers(tmp_path: Path) -> None:
    (tmp_path / "three").write_text("three\n")
    with (tmp_path / "three").open() as three:
        os.set_inheritable(three.fileno(), True)
        done = outcome(
            tmp_path,
            "sh",
            "-c",
            f"cat; cat /dev/fd/{three.fileno()}; echo to stderr >&2; echo $COLOUR; pwd",
            input="on stdin\n",
            env={**os.environ, "COLOUR": "green"},
            cwd=tmp_path,
            pass_fds=[three.fileno()],
        )
    assert done["stdout"].splitlines() == ["on stdin", "three", "green", str(tmp_path)]
    assert sorted(done["stderr"].splitlines())[1:] == ["to stderr"]


def test_no_file_of_ours_reaches_the_command(tmp_path: Path) -> None:
    done = outcome(tmp_path, "sh", "-c", "ls -l /proc/$$/fd", stdin=subprocess.DEVNULL)
    descriptors = {line.split()[-3] for line in done["stdout"].splitlines() if "->" in line}
    assert descriptors <= {"0", "1", "2", "3"}  # 3 is the shell's or ls's own


def test_a_closed_pipe_ends_the_command_as_ever(tmp_path: Path) -> None:
    """Python ignores SIGPIPE; the command must not inherit that."""
    command = f"{sys.executable} -c '{DRIVER}' {tmp_path}/outcome.json yes | head -n 3 >/dev/null"
    subprocess.run(["sh", "-c", command], check=True)
    assert json.loads((tmp_path / "outcome.json").read_text())["code"] == 128 + signal.SIGPIPE


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGRTMIN + 3])
def test_signals_are_passed_on_and_the_command_answers(
    drivers: list[subprocess.Popen[str]], tmp_path: Path, number: int
) -> None:
    script = (
        "import os, signal, sys, time\n"
        f"signal.signal({int(number)}, lambda n, f: (os.write(1, b'got %d\\n' % n), sys.exit(33)))\n"
        "os.write(1, b'listening\\n')\n"
        "while True: time.sleep(60)\n"
    )
    driver, _ = driven(drivers, tmp_path, sys.executable, "-c", script)
    assert driver.stdout is not None
    assert driver.stdout.readline() == "listening\n"
    os.kill(driver.pid, number)
    assert driver.stdout.readline() == f"got {int(number)}\n"
    assert driver.wait() == 33


def test_a_command_that_ignores_a_signal_goes_on(drivers: list[subprocess.Popen[str]], tmp_path: Path) -> None:
    driver, _ = driven(drivers, tmp_path, "sh", "-c", "trap '' TERM; echo ready; sleep 0.5; exit 4")
    assert driver.stdout is not None
    assert driver.stdout.readline() == "ready\n"
    os.kill(driver.pid, signal.SIGTERM)
    assert driver.wait() == 4


def test_a_signal_from_the_command_itself_is_not_sent_back(
    drivers: list[subprocess.Popen[str]], tmp_path: Path
) -> None:
    """A program may signal its parent that it is ready; that must not kill it."""
    driver, _ = driven(drivers, tmp_path, "sh", "-c", "kill -USR1 $PPID; sleep 0.2; exit 6")
    assert driver.wait() == 6


def test_a_default_signal_kills_the_command_and_is_reported_as_a_shell_would(
    drivers: list[subprocess.Popen[str]], tmp_path: Path
) -> None:
    driver, pid = driven(drivers, tmp_path, "sleep", "60")
    os.kill(driver.pid, signal.SIGTERM)
    assert driver.wait() == 143
    assert not Path(f"/proc/{pid}").exists()


def test_what_the_terminal_sends_reaches_the_command_once(tmp_path: Path) -> None:
    """Ctrl-C goes to the whole foreground group: passing it on would make it two.

    The driver is held until the command has seen its own interrupt. Then it handles its interrupt and a SIGUSR1, in
    this order (the kernel delivers the lower number first); the SIGUSR1 that it passes on closes the count.
    """
    counter = (
        "import os, signal, sys, time\n"
        "seen = []\n"
        "count = lambda n, f: (seen.append(n), os.write(1, b'interrupt %d\\n' % len(seen)))\n"
        "signal.signal(signal.SIGINT, count)\n"
        "signal.signal(signal.SIGUSR1, lambda n, f: (os.write(1, b'in all %d\\n' % len(seen)), sys.exit(0)))\n"
        "os.write(1, b'listening %d\\n' % sys.stdin.isatty())\n"
        "while True: time.sleep(60)\n"
    )
    driver, terminal = pty.fork()
    if driver == 0:
        os.execv(
            sys.executable, [sys.executable, "-c", DRIVER, str(tmp_path / "o.json"), sys.executable, "-c", counter]
        )
    try:
        read_until(terminal, b"listening 1")
        os.kill(driver, signal.SIGSTOP)
        os.write(terminal, b"\x03")
        read_until(terminal, b"interrupt 1")
        os.kill(driver, signal.SIGUSR1)
        os.kill(driver, signal.SIGCONT)
        assert b"in all 1" in read_until(terminal, b"in all ")
    finally:
        os.kill(driver, signal.SIGKILL)
        os.waitpid(driver, 0)
        os.close(terminal)


def read_until(terminal: int, text: bytes) -> bytes:
    """What a terminal shows up to the end of the line that holds ``text``."""
    seen = b""
    while text not in seen or not seen.endswith(b"\n"):
        seen += os.read(terminal, 4096)
    return seen


def test_cpu_time_holds_children_and_grandchildren(tmp_path: Path) -> None:
    burn = "import time\nend = time.process_time() + 0.2\nwhile time.process_time() < end: pass"
    done = outcome(tmp_path, "sh", "-c", f"{sys.executable} -c '{burn}'; {sys.executable} -c '{burn}'")
    assert done["cpu_s"] >= 0.4


def test_the_callers_own_children_are_left_alone(tmp_path: Path) -> None:
    script = (
        "import subprocess, sys\n"
        "from joulery.runtime.measuring.launch import run_command\n"
        "mine = subprocess.Popen(['sh', '-c', 'exit 7'])\n"
        "run_command(['sleep', '0.2'], not_ours={mine.pid})\n"
        "sys.exit(mine.wait())\n"
    )
    assert subprocess.run([sys.executable, "-c", script]).returncode == 7


def test_the_signal_mask_is_the_callers_before_and_after(tmp_path: Path) -> None:
    script = (
        "import signal\n"
        "from joulery.runtime.measuring.launch import run_command\n"
        "before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])\n"
        "run_command(['grep', 'SigBlk', '/proc/self/status'])\n"
        "assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before | {signal.SIGUSR2}\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert int(done.stdout.split()[1], 16) == 1 << (signal.SIGUSR2 - 1)


def test_an_interrupt_between_fork_and_exec_is_the_commands(tmp_path: Path) -> None:
    """It waits until the command's dispositions are in place, and then kills the child as it would have the command."""
    script = (
        "import os, signal, sys\n"
        "from joulery.runtime.measuring.launch import run_command\n"
        "print(run_command(['sleep', '60'], in_child=lambda: os.kill(os.getpid(), signal.SIGINT)).exit_code)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("130\n", "")


def test_an_ignored_interrupt_stays_ignored(tmp_path: Path) -> None:
    """A job that a shell puts into the background ignores Ctrl-C."""
    done = subprocess.run(
        [
            "sh",
            "-c",
            f"trap '' INT; exec {sys.executable} -c '{DRIVER}' {tmp_path}/o.json sh -c 'kill -INT $$; echo on'",
        ],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, "on\n")
