"""One replica's life: started, ready, restarted when it dies, drained, gone."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from joulery.adapters.cgroups import CpuGroups
from joulery.adapters.engines.embedded.process import WorkerProcess
from joulery.adapters.engines.embedded.slices import limited
from joulery.adapters.engines.embedded.wire import Frame, Piece
from joulery.domain.errors import ActuationError, JouleryError
from joulery.domain.gpu.device import DeviceSlice
from joulery.domain.serving.dispatch import Server
from joulery.domain.serving.engine import ReplicaSpec, ReplicaState, ReplicaView
from joulery.domain.serving.tensors import TensorSpec


@dataclass(frozen=True, slots=True)
class Launch:
    """How workers are started.

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


class Replica:
    """One replica across all its worker processes.

    Args:
        name: Unique within the engine.
        spec: What it is.
        cores: What it is bound to.
        launch: How to start its workers.
        answered: Called with the replica and every answer.
        came: Called when a worker of it is ready, the first excepted.
        went: Called when its worker is gone, with the reason.
        place: The part of a GPU it runs on; None off the GPU.
    """

    def __init__(
        self,
        name: str,
        spec: ReplicaSpec,
        cores: tuple[int, ...],
        launch: Launch,
        *,
        answered: Callable[[Replica, Frame], None],
        came: Callable[[Replica], None],
        went: Callable[[Replica, str], None],
        place: DeviceSlice | None = None,
    ) -> None:
        self.name = name
        self.spec = spec
        self.cores = cores
        self.place = place
        self.state = ReplicaState.STARTING
        self.server = self._server()
        self.served = 0
        self.restarts = 0
        self.busy_since_s = float("inf")
        self.startup_cpu_s = 0.0
        self.inputs: tuple[TensorSpec, ...] = ()
        self.outputs: tuple[TensorSpec, ...] = ()
        self.platform = ""
        self.last_error = ""
        self._launch = launch
        self._answered = answered
        self._came = came
        self._went = went
        self._failures = 0
        self._worker: WorkerProcess | None = None
        self._life: asyncio.Task[None] | None = None

    @property
    def threads(self) -> int:
        """Threads inside one operator."""
        return self.spec.threads or self.spec.slice.cores or 1

    def _server(self) -> Server[Any, Replica]:
        """This replica as a queue sees it, from its next worker on."""
        return Server(self, self.spec.variant, batch=self.spec.batch, max_delay_s=self.spec.max_delay_s)

    async def start(self) -> None:
        """Start the first worker and have it load its model.

        Raises:
            ConfigError, DataError, CapabilityError: It cannot be; the message says why.
            ActuationError: It died, or took too long.
        """
        worker, group = await self._start_worker()
        self._life = asyncio.get_running_loop().create_task(self._live(worker, group), name=f"replica {self.name}")

    def send(self, pieces: list[Piece], now_s: float) -> None:
        """Hand it a request."""
        self.busy_since_s = now_s
        if self._worker is not None:
            self._worker.send(pieces)

    def kill(self, reason: str) -> None:
        """End its worker now; it is started again unless the replica leaves."""
        if self._worker is not None:
            self._worker.kill(reason)

    def leave(self, *, now: bool = False) -> None:
        """End for good: after what it holds, or at once."""
        already, self.state = self.state is ReplicaState.DRAINING, ReplicaState.DRAINING
        if self._worker is None:
            if self._life is not None and not already:
                self._life.cancel()
        elif now:
            self._worker.kill("it was told to end at once")
        elif self.server.ticket is None:
            self._worker.close()

    async def gone(self) -> None:
        """Wait until it has ended for good."""
        if self._life is not None:
            await asyncio.wait((self._life,))

    def view(self) -> ReplicaView:
        """What can be seen of it."""
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
        self._answered(self, frame)
        if self.state is ReplicaState.DRAINING and self._worker is not None:
            self._worker.close()

    async def _live(self, worker: WorkerProcess, group: Path | None) -> None:
        """From one worker to the next until the replica leaves."""
        while True:
            reason = await asyncio.shield(worker.gone)
            self._forget(group)
            leaving = self.state is ReplicaState.DRAINING
            if not leaving:
                self.state, self.last_error = ReplicaState.RESTARTING, reason
            self._went(self, reason)
            if leaving:
                return
            try:
                worker, group = await self._restarted()
            except asyncio.CancelledError:
                self._went(self, self.last_error)
                raise
            self.server = self._server()
            self._came(self)

    async def _restarted(self) -> tuple[WorkerProcess, Path | None]:
        """The next worker, however many attempts it takes."""
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
                if self.state is ReplicaState.DRAINING:  # it was told to leave while a failed worker was cleared away
                    raise asyncio.CancelledError from error

    async def _start_worker(self) -> tuple[WorkerProcess, Path | None]:
        """A worker that is ready, and the group that limits it."""
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
            await worker.load(self.spec.model, self._launch.load_s)
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
        self._worker = worker
        self.state = ReplicaState.READY
        self.inputs, self.outputs, self.platform = worker.inputs, worker.outputs, worker.platform
        self.last_error, self.startup_cpu_s = worker.note, worker.startup_cpu_s
        return worker, group

    def _forget(self, group: Path | None) -> None:
        self._worker = None
        self.busy_since_s = float("inf")
        if group is not None and self._launch.groups is not None:
            self._launch.groups.remove(group)


async def gone_within(limit_s: float | None, replicas: Sequence[Replica]) -> None:
    """Wait until they have ended for good, or for ``limit_s``; None to wait however long it takes."""
    if replicas:
        await asyncio.wait([asyncio.ensure_future(replica.gone()) for replica in replicas], timeout=limit_s)


def promoted_standbys(kept: Sequence[Replica], target: Sequence[ReplicaSpec]) -> list[Replica]:
    """The replicas that stood by and are to answer from now on."""
    standing = Counter(spec for spec in target if spec.standby)
    roused = []
    for replica in kept:
        if replica.spec.standby:
            if standing[replica.spec] > 0:
                standing[replica.spec] -= 1
            else:
                roused.append(replica)
    return roused
