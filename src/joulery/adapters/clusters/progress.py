"""Readers of the progress that jobs report: lines ``epoch k/K``, ``k/K`` or a share such as ``0.25``; the last counts.

Where a job reports none, a pattern may find it in the job's output. On a node, jobs may also write to a UNIX socket:
the kernel identifies the sender of a line, and the line is appended to the file of the sender's job.
"""

from __future__ import annotations

import os
import re
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from joulery.domain.errors import CapabilityError, ConfigError
from joulery.unix_sockets import clear_socket_path

_TAIL_BYTES = 4096
_OUTPUT_TAIL_BYTES = 65_536
_OF = re.compile(r"(?:epoch|epochs|step|steps|samples)?\s*:?\s*(\d+(?:\.\d+)?)\s*/\s*(\d+(?:\.\d+)?)", re.IGNORECASE)
_SHARE = re.compile(r"(\d*\.?\d+)(\s*%)?")


@dataclass(frozen=True, slots=True)
class Progress:
    """Source of the progress that jobs report.

    Attributes:
        folder: Folder with one file for each job, named by its number; None where there is none.
        pattern: Finds progress in a job's output where its file contains none: ``(done)``, ``(done) (of how much)``;
            None for no such search.
    """

    folder: Path | None = None
    pattern: re.Pattern[str] | None = None

    def of(self, job: int, output: str = "") -> float:
        """The share of a job's work that is done, 0 to 1; NaN where the job reports none.

        Args:
            job: The job's number.
            output: The file of the job's output; empty where unknown.
        """
        ratio = float("nan") if self.folder is None else read_progress(self.folder / str(job))
        if ratio == ratio or self.pattern is None or not output:
            return ratio
        return read_output(Path(output), self.pattern)


def output_pattern(text: str) -> re.Pattern[str]:
    """Compile a pattern that finds progress in output.

    Raises:
        ConfigError: The text is not a regular expression, or does not have one or two groups.
    """
    try:
        pattern = re.compile(text)
    except re.error as error:
        raise ConfigError(f"is not a regular expression: {error}", pointer="jobs.output_pattern", got=text) from error
    if pattern.groups not in (1, 2):
        raise ConfigError(
            "needs one group (a share or percent) or two (done, and of how much)",
            pointer="jobs.output_pattern",
            got=text,
            expected=r"such as Epoch (\d+)/(\d+)",
        )
    return pattern


def read_output(file: Path, pattern: re.Pattern[str]) -> float:
    """Progress in the last match at the end of a job's output, 0 to 1; NaN where there is none."""
    ratio = float("nan")
    for match in pattern.finditer(_tail(file, _OUTPUT_TAIL_BYTES)):
        found = parse_progress("/".join(group or "" for group in match.groups()))
        ratio = found if found == found else ratio
    return ratio


def read_progress(file: Path) -> float:
    """Progress in the file's last whole line that contains one, 0 to 1; NaN where there is none."""
    lines = _tail(file, _TAIL_BYTES).split("\n")[:-1]
    for line in reversed(lines):
        ratio = parse_progress(line)
        if ratio == ratio:
            return ratio
    return float("nan")


def parse_progress(line: str) -> float:
    """Progress in one line, clamped to 0 … 1; NaN where there is none."""
    text = line.strip()
    if match := _OF.fullmatch(text):
        done, whole = float(match[1]), float(match[2])
        return min(1.0, done / whole) if whole > 0 else float("nan")
    if match := _SHARE.fullmatch(text):
        value = float(match[1]) / (100.0 if match[2] else 1.0)
        return value if value <= 1.0 else float("nan")
    return float("nan")


def _tail(file: Path, size: int) -> str:
    """The last ``size`` bytes of a file as text; empty where the file cannot be read."""
    try:
        with file.open("rb") as stream:
            stream.seek(max(0, stream.seek(0, os.SEEK_END) - size))
            return stream.read().decode("utf-8", "replace")
    except OSError:
        return ""


_CREDENTIALS = struct.Struct("3i")
_MOST_BYTES = 4096
_LOOK_S = 0.5


class ProgressSocket:
    """A datagram socket that any process of the node may write to; a message is one or more lines of progress.

    While the folder cannot be written, the last message of each job is kept and written later.

    Attributes:
        strangers: Number of messages from processes without a job, which were dropped.

    Args:
        server: Bound socket, with credentials enabled.
        path: Path of the socket.
        folder: Folder with one file for each job, named by its number, to which the job's lines are appended.
        job_of: Returns the job of a process; 0 where it has none.
    """

    def __init__(self, server: socket.socket, path: Path, folder: Path, job_of: Callable[[int], int]) -> None:
        self.strangers = 0
        self._server, self._path, self._folder, self._job_of = server, path, folder, job_of
        self._kept: dict[int, bytes] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="progress socket", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening, and remove the socket."""
        self._stop.set()
        self._thread.join()
        self._server.close()
        self._path.unlink(missing_ok=True)

    def _serve(self) -> None:
        while not self._stop.is_set():
            self._write()
            try:
                content, extra, _, _ = self._server.recvmsg(_MOST_BYTES, socket.CMSG_SPACE(_CREDENTIALS.size))
            except TimeoutError:
                continue
            job = 0
            for level, kind, data in extra:
                if level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS:
                    job = self._job_of(_CREDENTIALS.unpack(data)[0])
            if job:
                self._kept[job] = content.rstrip(b"\n") + b"\n"
            else:
                self.strangers += 1
        self._write()

    def _write(self) -> None:
        """Append the last message of each job to its file, and keep those that cannot be written now."""
        self._kept = {job: lines for job, lines in self._kept.items() if not self._append(job, lines)}

    def _append(self, job: int, lines: bytes) -> bool:
        """Append whole lines in one write, so that readers see no partial line; False where that fails."""
        try:
            file = os.open(self._folder / str(job), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            try:
                os.write(file, lines)
            finally:
                os.close(file)
        except OSError:
            return False
        return True


def open_progress_socket(path: Path, folder: Path, job_of: Callable[[int], int]) -> ProgressSocket:
    """Listen at ``path``; a socket there without a listener is replaced.

    Raises:
        ConfigError: The path is something other than a socket, or another process listens there.
        CapabilityError: The socket or the folder cannot be created.
    """
    clear_socket_path(path, socket.SOCK_DGRAM, "--progress-socket")
    server = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        server.settimeout(_LOOK_S)
        server.bind(str(path))
        path.chmod(0o666)
    except OSError as error:
        server.close()
        raise CapabilityError(f"cannot listen at {path}: {error.strerror or error}", resource=str(path)) from error
    return ProgressSocket(server, path, folder, job_of)
