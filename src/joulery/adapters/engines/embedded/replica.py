"""One replica across its worker processes, and the parent's handle of one worker process."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, cast

from joulery.adapters.cgroups import CpuGroups
from joulery.adapters.engines.embedded.models import described
from joulery.adapters.engines.embedded.slice_assignment import limited
from joulery.adapters.engines.embedded.wire import Frame, FrameReader, Piece, encode, unpack_error
from joulery.domain.errors import ActuationError, CapabilityError, DataError, JouleryError
from joulery.domain.gpu.device import DeviceSlice
from joulery.domain.serving.dispatch import Server
from joulery.domain.serving.engine import ReplicaSpec, ReplicaState, ReplicaView
from joulery.domain.serving.tensors import TensorSpec

_BUFFER_BYTES = 1 << 22
"""Requested size of the pipe's buffers: a photograph in one write. The kernel may grant less."""
_EOF_PATIENCE_S = 0.5
"""Time that the pipe of a dead worker may stay open (held by a process it forked)."""
_EXIT_PATIENCE_S = 2.0
"""Time that a worker may run on after its pipe has ended."""


class WorkerProcess(asyncio.Protocol):
    """A worker process and the pipe to it. Make one with ``start``.

    Attributes:
        pid: Its process.
        inputs, outputs, platform: What its model declares, after ``load``.
        warm: Variants that it keeps loaded beside its own.
        note: Errors of its warm-up, and variants that it does not keep warm; empty when there are none.
        startup_cpu_s: CPU seconds from its start until it was ready.
        gone: Done when the process has ended and everything it wrote has been read; the result states how it ended.
        on_answer: Called with every frame after the first.
    """

    def __init__(self, process: subprocess.Popen[bytes], on_answer: Callable[[Frame], None]) -> None:
        loop = asyncio.get_running_loop()
        self.pid = process.pid
        self.inputs: tuple[TensorSpec, ...] = ()
        self.outputs: tuple[TensorSpec, ...] = ()
        self.platform = ""
        self.warm: frozenset[str] = frozenset()
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
            environ: Variables in addition to those it inherits: the GPU slice it may use.

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

    async def load(self, spec: ReplicaSpec, timeout_s: float) -> None:
        """Load and warm up the models of a replica in the worker.

        Raises:
            ConfigError, DataError, CapabilityError: The model cannot be loaded; the message gives the reason.
            TimeoutError: Loading took longer than ``timeout_s``.
            ChildProcessError: The worker died first; the argument states how.
        """
        warm = [[name, described(model)] for name, model in spec.warm]
        own = {"variant": spec.variant, "model": described(spec.model)}
        self.send(encode({**own, "warm": warm, "memory": spec.memory_bytes}, {}))
        async with asyncio.timeout(timeout_s):
            await asyncio.wait((self._loaded, self.gone), return_when=asyncio.FIRST_COMPLETED)
        if not self._loaded.done():
            raise ChildProcessError(self.gone.result())
        header = self._loaded.result().header
        if "error" in header:
            raise unpack_error(header["error"])
        self.inputs, self.outputs = (
            tuple(TensorSpec(name, datatype, tuple(shape)) for name, datatype, shape in header[side])
            for side in ("inputs", "outputs")
        )
        self.platform, self.note, self.startup_cpu_s = header["platform"], header["note"], header["cpu_s"]
        self.warm = frozenset(header["warm"])

    def send(self, pieces: list[Piece]) -> None:
        """Write one frame. A frame for a pipe that has ended is lost; ``gone`` reports that."""
        if self._transport is None or self._transport.is_closing():
            return
        if len(pieces) == 1:
            self._transport.write(pieces[0])
        else:
            self._transport.writelines(pieces)

    def close(self) -> None:
        """Close the pipe: the worker finishes what it holds and exits."""
        if self._transport is not None:
            self._transport.close()

    def kill(self, reason: str) -> None:
        """Kill the worker and its process group now; the result of ``gone`` is then ``reason``."""
        if self._process.returncode is None:
            self._reason = self._reason or reason
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    async def end(self, reason: str) -> str:
        """Kill the worker and wait for its end, even if the caller is cancelled meanwhile; return how it ended."""
        self.kill(reason)
        while not self.gone.done():
            with suppress(asyncio.CancelledError):
                await asyncio.shield(self.gone)
        return self.gone.result()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Handle the opened pipe (asyncio callback)."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Handle received bytes, which may end within an answer (asyncio callback)."""
        try:
            frames = self._reader.feed(data)
        except DataError as error:
            self.kill(f"it wrote an invalid answer: {error}")
            return
        for frame in frames:
            if self._loaded.done():
                self.on_answer(frame)
            else:
                self._loaded.set_result(frame)

    def connection_lost(self, exc: Exception | None) -> None:
        """Handle the end of the pipe, from either side: a worker that does not exit is killed (asyncio callback)."""
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


class ReplicaOwner(Protocol):
    """Receiver of a replica's reports."""

    def ready(self, replica: WorkerReplica) -> None:
        """Handle a replica whose restarted worker is ready; not called for its first worker."""
        ...

    def answered(self, replica: WorkerReplica, frame: Frame) -> None:
        """Handle a replica's answer to the requests it held."""
        ...

    def ended(self, replica: WorkerReplica, reason: str) -> None:
        """Handle the end of a replica's worker."""
        ...


@dataclass(frozen=True, slots=True)
class Launch:
    """Settings for starting workers.

    Attributes:
        groups: CPU quotas; None where no replica needs one.
        load_s: How long a model may take to load.
        restart_s: Pause before the second start in a row; doubles up to ``restart_max_s``. The first is immediate.
        restart_max_s: The longest pause.
        stderr: File descriptor for what workers print; None for this process's standard error.
    """

    groups: CpuGroups | None
    load_s: float = 120.0
    restart_s: float = 0.1
    restart_max_s: float = 10.0
    stderr: int | None = None


class WorkerReplica:
    """One replica across all its worker processes.

    Args:
        name: Unique within the engine.
        spec: Its specification.
        cores: The CPU cores it is bound to.
        launch: How to start its workers.
        owner: Its service; None when the service has ended.
        place: The GPU slice it runs on; None on the CPU.
    """

    def __init__(
        self,
        name: str,
        spec: ReplicaSpec,
        cores: tuple[int, ...],
        launch: Launch,
        *,
        owner: Callable[[], ReplicaOwner | None],
        place: DeviceSlice | None = None,
    ) -> None:
        self.name = name
        self.spec = spec
        self.cores = cores
        self.place = place
        self.state = ReplicaState.STARTING
        self.server = self.new_server()
        self.served = 0
        self.restarts = 0
        self.busy_since_s = float("inf")
        self.startup_cpu_s = 0.0
        self.inputs: tuple[TensorSpec, ...] = ()
        self.outputs: tuple[TensorSpec, ...] = ()
        self.platform = ""
        self.last_error = ""
        self.loaded: frozenset[str] = frozenset()
        self._active = spec.variant
        self._launch = launch
        self._owner = owner
        self._failures = 0
        self._worker: WorkerProcess | None = None
        self._life: asyncio.Task[None] | None = None

    @property
    def threads(self) -> int:
        """Threads inside one operator."""
        return self.spec.threads or self.spec.slice.cores or 1

    @property
    def warm(self) -> frozenset[str]:
        """Variants that it keeps loaded beside its own."""
        return self.loaded - {self.spec.variant}

    def new_server(self) -> Server[Any, WorkerReplica]:
        """A new server of the queue, for its next worker."""
        spec = self.spec
        return Server(self, spec.variant, spec.batch, spec.max_delay_s, dict(spec.warm_batches))

    def becomes(self, spec: ReplicaSpec) -> bool:
        """Whether it can become another replica without a new process: same models, with another one as its own."""
        if self.state is not ReplicaState.READY or spec.variant not in self.loaded or spec.models != self.spec.models:
            return False
        same: dict[str, Any] = {"variant": "", "model": self.spec.model, "warm": (), "batch": 1, "max_delay_s": 0.0}
        return replace(spec, **same, warm_batches=()) == replace(self.spec, **same, warm_batches=())

    def become(self, spec: ReplicaSpec) -> None:
        """Become another replica from the next request on; see :meth:`becomes`."""
        self.spec = spec
        self.server.become(self.new_server(), self.warm)

    async def start(self) -> None:
        """Start the first worker and have it load its model.

        Raises:
            ConfigError, DataError, CapabilityError: It cannot be started; the message gives the reason.
            ActuationError: The worker died, or took too long.
        """
        worker, group = await self._start_worker()
        self._life = asyncio.get_running_loop().create_task(self._live(worker, group), name=f"replica {self.name}")

    def send(self, pieces: list[Piece], now_s: float, variant: str) -> None:
        """Send the worker a request for one of its loaded variants."""
        self.busy_since_s = now_s
        if self._worker is None:
            return
        if variant != self._active:
            self._worker.send(encode({"use": variant}, {}))
            self._active = variant
        self._worker.send(pieces)

    def kill(self, reason: str) -> None:
        """Kill the worker now; it is started again unless the replica is ending."""
        if self._worker is not None:
            self._worker.kill(reason)

    def leave(self, *, now: bool = False) -> None:
        """End the replica for good: after the requests it holds, or at once."""
        already, self.state = self.state is ReplicaState.DRAINING, ReplicaState.DRAINING
        if self._worker is None:
            if self._life is not None and not already:
                self._life.cancel()
        elif now:
            self._worker.kill("the engine ended it at once")
        elif self.server.ticket is None:
            self._worker.close()

    async def wait_ended(self) -> None:
        """Wait until the replica has ended for good."""
        if self._life is not None:
            await asyncio.wait((self._life,))

    def view(self) -> ReplicaView:
        """The public view of this replica."""
        return ReplicaView(
            id=self.name,
            spec=self.spec,
            state=self.state,
            busy=self.server.ticket is not None,
            cores=self.cores,
            pid=self._worker.pid if self._worker is not None else 0,
            served=self.served,
            restarts=self.restarts,
            inputs=self.inputs,
            outputs=self.outputs,
            platform=self.platform,
            last_error=self.last_error,
            place="" if self.place is None else self.place.id,
            warm=tuple(sorted(self.warm)),
        )

    def _on_answer(self, frame: Frame) -> None:
        if self.server.ticket is None:
            self.kill("it answered without being asked")
            return
        if self.place is not None:
            frame.header["c"] = frame.header["s"] * self.place.share_ratio
        self.busy_since_s = float("inf")
        self.served += 1
        self._failures = 0
        if (owner := self._owner()) is not None:
            owner.answered(self, frame)
        if self.state is ReplicaState.DRAINING and self._worker is not None:
            self._worker.close()

    async def _live(self, worker: WorkerProcess, group: Path | None) -> None:
        """Start a new worker whenever one ends, until the replica is ending."""
        while True:
            reason = await asyncio.shield(worker.gone)
            self._forget(group)
            leaving = self.state is ReplicaState.DRAINING
            if not leaving:
                self.state, self.last_error = ReplicaState.RESTARTING, reason
            self._ended(reason)
            if leaving:
                return
            try:
                worker, group = await self._restarted()
            except asyncio.CancelledError:
                self._ended(self.last_error)
                raise
            self.server = self.new_server()
            if (owner := self._owner()) is not None:
                owner.ready(self)

    def _ended(self, reason: str) -> None:
        if (owner := self._owner()) is not None:
            owner.ended(self, reason)

    async def _restarted(self) -> tuple[WorkerProcess, Path | None]:
        """Start the next worker, with as many attempts as it takes."""
        while True:
            if self._failures:
                pause_s = self._launch.restart_s * 2.0 ** min(self._failures - 1, 30)
                await asyncio.sleep(min(self._launch.restart_max_s, pause_s))
            self._failures += 1
            self.restarts += 1
            try:
                return await self._start_worker()
            except JouleryError as error:
                self.last_error = str(error)
                if self.state is ReplicaState.DRAINING:  # it left while a failed worker was cleared away
                    raise asyncio.CancelledError from error

    async def _start_worker(self) -> tuple[WorkerProcess, Path | None]:
        """Start a worker; return it when it is ready, with the control group that limits it."""
        worker = await WorkerProcess.start(
            self.cores,
            self.threads,
            self._on_answer,
            self._launch.stderr,
            None if self.place is None else dict(self.place.environ),
        )
        group: Path | None = None
        try:
            if self._launch.groups is not None and limited(self.spec.slice):
                group = self._launch.groups.add(f"{self.name}.{self.restarts}", worker.pid, self.spec.slice)
            await worker.load(self.spec, self._launch.load_s)
        except BaseException as error:
            reason = await worker.end("it was not needed any more")
            self._forget(group)
            if isinstance(error, TimeoutError):
                reason = f"it was not ready after {self._launch.load_s:g} s"
            if isinstance(error, TimeoutError | ChildProcessError):
                raise ActuationError(
                    f"a replica of {self.spec} did not start: {reason}", hint="see what it printed above"
                ) from error
            raise
        self._worker, self._active = worker, self.spec.variant
        self.loaded = worker.warm | {self.spec.variant}
        self.state = ReplicaState.READY
        self.inputs, self.outputs, self.platform = worker.inputs, worker.outputs, worker.platform
        self.last_error, self.startup_cpu_s = worker.note, worker.startup_cpu_s
        return worker, group

    def _forget(self, group: Path | None) -> None:
        self._worker = None
        self.busy_since_s = float("inf")
        if group is not None and self._launch.groups is not None:
            self._launch.groups.remove(group)


async def wait_all_ended(limit_s: float | None, replicas: Sequence[WorkerReplica]) -> None:
    """Wait until the replicas have ended for good, at most ``limit_s`` seconds; None for no limit."""
    if replicas:
        await asyncio.wait([asyncio.ensure_future(replica.wait_ended()) for replica in replicas], timeout=limit_s)


def promoted_standbys(kept: Sequence[WorkerReplica], target: Sequence[ReplicaSpec]) -> list[WorkerReplica]:
    """The kept standbys that the target does not list as standbys: they answer from now on."""
    standing = Counter(spec for spec in target if spec.standby)
    promoted = []
    for replica in kept:
        if replica.spec.standby:
            if standing[replica.spec] > 0:
                standing[replica.spec] -= 1
            else:
                promoted.append(replica)
    return promoted
