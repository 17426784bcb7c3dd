"""One worker process as its parent sees it: start it, hand it frames, learn how it ended."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import cast

from joulery.adapters.engines.embedded.failures import rebuilt
from joulery.adapters.engines.embedded.wire import Frame, FrameReader, Piece, encode
from joulery.domain.errors import CapabilityError, DataError
from joulery.domain.serving.engine import ModelRef
from joulery.domain.serving.tensors import TensorSpec

_BUFFER_BYTES = 1 << 22
"""Wanted size of the pipe's buffers: a photograph in one write. The kernel gives what it allows."""
_EOF_PATIENCE_S = 0.5
"""How long the pipe of a dead worker may stay open (in the hands of a process it forked)."""
_EXIT_PATIENCE_S = 2.0
"""How long a worker may live on without its pipe."""


class WorkerProcess(asyncio.Protocol):
    """A worker process and the pipe to it. Make one with ``start``.

    Attributes:
        pid: Its process.
        inputs, outputs, platform: What its model declares, after ``load``.
        note: What went wrong in its warm-up; empty when nothing.
        startup_cpu_s: CPU seconds from its start until it was ready.
        gone: Done when the process has ended and everything it wrote has been read; the result says how it ended.
        on_answer: Called with every frame after the first.
    """

    def __init__(self, process: subprocess.Popen[bytes], on_answer: Callable[[Frame], None]) -> None:
        loop = asyncio.get_running_loop()
        self.pid = process.pid
        self.inputs: tuple[TensorSpec, ...] = ()
        self.outputs: tuple[TensorSpec, ...] = ()
        self.platform = ""
        self.note = ""
        self.startup_cpu_s = 0.0
        self.gone: asyncio.Future[str] = loop.create_future()
        self.on_answer = on_answer
        self._loop = loop
        self._process = process
        self._reader = FrameReader()
        self._transport: asyncio.Transport | None = None
        self._loaded: asyncio.Future[Frame] = loop.create_future()
        self._pipe_ended = False
        self._reason = ""
        self._pidfd = os.pidfd_open(process.pid)
        loop.add_reader(self._pidfd, self._process_ended)

    @classmethod
    async def start(
        cls,
        cores: tuple[int, ...],
        threads: int,
        on_answer: Callable[[Frame], None],
        stderr: int | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> WorkerProcess:
        """Start a process bound to ``cores``; it does nothing until ``load``.

        Args:
            cores: The CPU cores to bind it to.
            threads: Threads inside one operator.
            on_answer: Called with every answer.
            stderr: Where its output goes; this process's standard error when None.
            environ: Variables on top of those it inherits: the part of a GPU it may use.

        Raises:
            CapabilityError: The machine is out of processes, memory or file descriptors.
        """
        try:
            ours, theirs = socket.socketpair()
            with theirs:
                for end in (ours, theirs):
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
                process = _spawn(theirs.fileno(), cores, threads, stderr, environ or {})
        except OSError as error:
            raise CapabilityError(f"a worker process cannot be started: {error.strerror}") from error
        worker = cls(process, on_answer)
        ours.setblocking(False)
        try:
            await worker._loop.create_unix_connection(lambda: worker, sock=ours)
        except BaseException:
            if worker._transport is None:
                ours.close()
                worker._pipe_ended = True
            await worker.end("it was not needed any more")
            raise
        return worker

    async def load(self, model: ModelRef, timeout_s: float) -> None:
        """Have it load and warm up ``model``.

        Raises:
            ConfigError, DataError, CapabilityError: The model cannot be loaded; the worker says why.
            TimeoutError: It took longer than ``timeout_s``.
            ChildProcessError: It died first; the argument says how.
        """
        self.send(encode({"kind": model.kind, "location": model.location, "options": model.options}, {}))
        async with asyncio.timeout(timeout_s):
            await asyncio.wait((self._loaded, self.gone), return_when=asyncio.FIRST_COMPLETED)
        if not self._loaded.done():
            raise ChildProcessError(self.gone.result())
        header = self._loaded.result().header
        if "error" in header:
            raise rebuilt(header["error"])
        self.inputs, self.outputs = (
            tuple(TensorSpec(name, datatype, tuple(shape)) for name, datatype, shape in header[side])
            for side in ("inputs", "outputs")
        )
        self.platform, self.note, self.startup_cpu_s = header["platform"], header["note"], header["cpu_s"]

    def send(self, pieces: list[Piece]) -> None:
        """Write one frame. On a pipe that has ended it goes nowhere: ``gone`` tells."""
        if self._transport is None or self._transport.is_closing():
            return
        if len(pieces) == 1:
            self._transport.write(pieces[0])
        else:
            self._transport.writelines(pieces)

    def close(self) -> None:
        """Let it end by itself: it finishes what it holds and exits."""
        if self._transport is not None:
            self._transport.close()

    def kill(self, reason: str) -> None:
        """End it now, with everything it started; ``gone`` will give ``reason``."""
        if self._process.returncode is None:
            self._reason = self._reason or reason
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    async def end(self, reason: str) -> str:
        """Kill it and wait until it is gone, even if the caller is cancelled meanwhile; how it ended."""
        self.kill(reason)
        while not self.gone.done():
            with suppress(asyncio.CancelledError):
                await asyncio.shield(self.gone)
        return self.gone.result()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio: the pipe is open."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """asyncio: a part of an answer."""
        try:
            frames = self._reader.feed(data)
        except DataError as error:
            self.kill(f"it wrote what is no answer: {error}")
            return
        for frame in frames:
            if self._loaded.done():
                self.on_answer(frame)
            else:
                self._loaded.set_result(frame)

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio: the pipe has ended, from either side. A worker without one is of no use."""
        self._pipe_ended = True
        self._loop.call_later(_EXIT_PATIENCE_S, self.kill, "it did not end with its pipe")
        self._finish()

    def _process_ended(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        with suppress(ProcessLookupError):  # what it started ends with it; its number is ours until it is reaped
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        if not self._pipe_ended and self._transport is not None:
            self._loop.call_later(_EOF_PATIENCE_S, self._transport.abort)
        self._finish()

    def _finish(self) -> None:
        if self._pipe_ended and self._process.returncode is not None and not self.gone.done():
            self.gone.set_result(self._reason or _how_it_ended(self._process.returncode))


def _spawn(
    pipe: int, cores: tuple[int, ...], threads: int, stderr: int | None, environ: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    arguments = (str(pipe), str(os.getpid()), ",".join(map(str, cores)), str(threads))
    return subprocess.Popen(
        (sys.executable, "-m", "joulery.adapters.engines.embedded.worker", *arguments),
        stdin=subprocess.DEVNULL,
        stdout=2 if stderr is None else stderr,
        stderr=stderr,
        pass_fds=(pipe,),
        env={**os.environ, **environ},
        process_group=0,  # Ctrl-C in the terminal is for the engine, which lets its workers finish
    )


def _how_it_ended(status: int) -> str:
    if status >= 0:
        return f"it exited with status {status}"
    try:
        return f"it was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"it was ended by signal {-status}"
