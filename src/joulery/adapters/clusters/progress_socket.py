"""Progress over a UNIX socket of a node: the kernel says who sent a line, and the file of its job gets it."""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path

from joulery.domain.errors import CapabilityError

_CREDENTIALS = struct.Struct("3i")
_MOST_BYTES = 4096
_LOOK_S = 0.5


class ProgressSocket:
    """A datagram socket that any process of the node may write to; a message is one or more lines of progress.

    While the folder is away the last message of each job is kept and written when it is back.

    Attributes:
        strangers: Messages that came from no job, and were dropped.

    Args:
        server: Bound, with credentials switched on.
        path: Where it is bound.
        folder: A file a job, named by its number, where its lines are appended.
        job_of: The job of a process; 0 where it has none.
    """

    def __init__(self, server: socket.socket, path: Path, folder: Path, job_of: Callable[[int], int]) -> None:
        self.strangers = 0
        self._server, self._path, self._folder, self._job_of = server, path, folder, job_of
        self._kept: dict[int, bytes] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="progress socket", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening, and take the socket away."""
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
        """Append what came last, and keep what cannot be written now."""
        self._kept = {job: lines for job, lines in self._kept.items() if not self._append(job, lines)}

    def _append(self, job: int, lines: bytes) -> bool:
        """One write of whole lines, so that readers never see half of one; False where the folder is away."""
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
    """Listen at ``path``; a socket without a listener is replaced.

    Raises:
        CapabilityError: The place or the folder cannot be used.
    """
    server = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        server.settimeout(_LOOK_S)
        server.bind(str(path))
        path.chmod(0o666)
    except OSError as error:
        server.close()
        raise CapabilityError(f"cannot listen at {path}: {error.strerror or error}", resource=str(path)) from error
    return ProgressSocket(server, path, folder, job_of)
