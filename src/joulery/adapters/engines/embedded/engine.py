"""The embedded engine: model replicas as worker processes on CPU slices and GPU slices of this machine.

Each service has one queue, from which free replicas pull (:mod:`joulery.domain.serving.dispatch`, driven by
:mod:`~joulery.adapters.engines.embedded.service`); this module decides which replicas there are. All of it runs on one
event loop; models run in processes of their own (:mod:`~joulery.adapters.engines.embedded.worker`), which the kernel
ends with that loop's thread.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from joulery.adapters.cgroups import CpuGroups
from joulery.adapters.engines.embedded.replica import Launch, WorkerReplica, promoted_standbys, wait_all_ended
from joulery.adapters.engines.embedded.service import INFINITY, ServiceQueue
from joulery.adapters.engines.embedded.slice_assignment import GpuParts, assign_cores, limited, on_gpu
from joulery.domain.errors import ActuationError, ConfigError
from joulery.domain.gpu.device import DeviceSlice
from joulery.domain.ports import Places
from joulery.domain.serving.dispatch import QueueLimit, QueueLimits
from joulery.domain.serving.engine import (
    InferRequest,
    InferResponse,
    ModelKind,
    Outcome,
    QueuedRequest,
    ReplicaSpec,
    ReplicaState,
    ReplicaView,
    RequestError,
    Transition,
)
from joulery.domain.serving.mix import ServiceMixes
from joulery.steady_time import unix_s

_HANG_MIN_S = 5.0


@dataclass(frozen=True, slots=True)
class LocalSettings:
    """Limits of the engine.

    Attributes:
        cores: The CPU cores replicas may use; empty for all of this process.
        queue: Requests that may wait for one service.
        deadline_s: A request that names no shorter limit is answered within this.
        hang_s: A replica busy with one request for longer is killed and started again; None for ``deadline_s``, but at
            least 5 s.
        drain_s: How long ``close`` waits for running requests.
        launch_s: How long a model may take to load.
        stderr: File descriptor for what models print; None for standard error.
    """

    cores: tuple[int, ...] = ()
    queue: int = 1024
    deadline_s: float = 30.0
    hang_s: float | None = None
    drain_s: float = 10.0
    launch_s: float = 120.0
    stderr: int | None = None

    @property
    def longest_s(self) -> float:
        """Longest time that a replica may be busy with one request: ``hang_s`` as it applies."""
        return max(_HANG_MIN_S, self.deadline_s) if self.hang_s is None else self.hang_s


class LocalEngine(ServiceMixes):
    """Engine with replicas on this machine's CPU cores and GPUs. Implements :class:`joulery.domain.ports.Engine`.

    Args:
        settings: Its limits.
        groups: CPU quotas; found on first use when None.
        places: Assigns GPU slices; None where there are no GPUs to run on.
    """

    def __init__(
        self,
        settings: LocalSettings = LocalSettings(),
        groups: CpuGroups | None = None,
        places: Places | None = None,
    ) -> None:
        super().__init__()
        self.settings = settings
        self._gpus = GpuParts(places)
        self._groups = groups
        self._services: dict[str, ServiceQueue] = {}
        self._limits = QueueLimits(settings.queue)
        self._closed = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at_s = INFINITY
        self._changing = asyncio.Lock()
        self._starting: list[asyncio.Task[None]] = []
        self._started = 0

    def replicas(self) -> tuple[ReplicaView, ...]:
        """Every replica now, sorted by id."""
        every = sorted(self._replicas(), key=lambda r: (len(r.name), r.name))
        return tuple(replica.view() for replica in every)

    def backlog(self) -> tuple[QueuedRequest, ...]:
        """Every request in a replica or waiting, by arrival."""
        at_0_s = unix_s() - time.monotonic()
        found = [request for service in self._services.values() for request in service.backlog(at_0_s)]
        return tuple(sorted(found, key=lambda request: request.arrival_s))

    def limit_queue(self, service: str, limit: QueueLimit | None, /) -> None:
        """Set the limit past which requests for a service are refused; None for the engine's own limit."""
        found = self._services.get(service)
        self._limits.change(service, limit, found.queue if found else None)

    async def infer(self, service: str, request: InferRequest, /) -> InferResponse:
        """The answer of the next free replica.

        Raises:
            RequestError: The request was not answered; ``outcome`` gives the reason.
        """
        if self._closed:
            raise RequestError("the engine is closing", Outcome.UNAVAILABLE)
        queue = self._services.get(service)
        if queue is None or not queue.variants:
            raise RequestError(f"there is no service {service!r}", Outcome.UNKNOWN)
        limit_s, now_s = self.settings.deadline_s, time.monotonic()
        if request.timeout_s is not None:
            limit_s = min(limit_s, request.timeout_s)
        return await queue.infer(request, now_s + limit_s, now_s)

    async def apply(self, target: Sequence[ReplicaSpec], /) -> Transition:
        """Make ``target`` the set of replicas; see :meth:`joulery.domain.ports.Engine.apply`."""
        async with self._changing:
            start_s, start = unix_s(), time.monotonic()
            kept, missing, surplus = self._difference(target)
            becoming = _convertible(missing, surplus)
            kept += becoming
            cleared = await self._clear(target, kept, missing, surplus, becoming)
            try:
                await self._gpus.settle(target)
                fresh = self._prepare(missing, kept)
                await self._start(fresh)
            except BaseException:
                await self._restore(cleared)
                raise
            surplus = [replica for replica in surplus if replica not in cleared]
            names = {spec.service for spec in target}
            ended = [service for service in self._services.values() if service.name not in names]
            staying = [replica for replica in surplus if replica.spec.service in names]
            for replica in kept:
                if replica in becoming:
                    replica.become(becoming[replica])
            self._switch(fresh, kept, staying, target)
            ready_s = time.monotonic() - start
            await asyncio.gather(*map(self._end, ended))
            await asyncio.gather(*(replica.wait_ended() for replica in surplus))
            return Transition(
                started=tuple(sorted(missing)),
                stopped=tuple(sorted(replica.spec for replica in (*surplus, *cleared))),
                kept=tuple(sorted(replica.spec for replica in kept)),
                start_s=start_s,
                ready_s=ready_s,
                duration_s=time.monotonic() - start,
                startup_cpu_s=sum(replica.startup_cpu_s for replica in fresh),
            )

    async def close(self) -> None:
        """Let running requests finish within ``drain_s``, fail waiting ones, and end all replicas."""
        self._closed = True
        for task in self._starting:
            task.cancel()
        replicas = self._replicas()
        self._drop_all("the engine is closing")
        for replica in replicas:
            self._services[replica.spec.service].retire(replica)
        await wait_all_ended(self.settings.drain_s, replicas)
        for replica in replicas:
            replica.leave(now=True)
        await wait_all_ended(None, replicas)
        self._drop_all("the engine was closed before this request was done")
        if self._timer is not None:
            self._timer.cancel()
        async with self._changing:  # a change that was cancelled has cleaned up after itself
            return

    def _replicas(self) -> list[WorkerReplica]:
        """Every replica, in any state."""
        return [replica for service in self._services.values() for replica in service.replicas]

    def _service(self, name: str) -> ServiceQueue:
        """The service of a name; it is created where it does not exist."""
        if name not in self._services:
            hang_s = self.settings.longest_s
            steering = self._steering_of(name)
            self._services[name] = ServiceQueue(name, self._limits.of(name), hang_s, self._wake_at, steering)
        return self._services[name]

    async def _end(self, service: ServiceQueue) -> None:
        await service.close()
        del self._services[service.name]

    def _drop_all(self, message: str) -> None:
        for service in self._services.values():
            service.drop(message)

    def _wake_at(self, at_s: float) -> None:
        """Schedule a call of ``_sweep`` at a time, unless it is called earlier anyway."""
        if at_s >= self._timer_at_s or self._closed:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at_s = at_s
        self._timer = asyncio.get_running_loop().call_later(max(0.0, at_s - time.monotonic()), self._sweep)

    def _sweep(self) -> None:
        """Enforce deadlines, and set the timer to the next one."""
        self._timer, self._timer_at_s = None, INFINITY
        now_s = time.monotonic()
        self._wake_at(min((service.sweep(now_s) for service in list(self._services.values())), default=INFINITY))

    def _difference(
        self, target: Sequence[ReplicaSpec]
    ) -> tuple[list[WorkerReplica], list[ReplicaSpec], list[WorkerReplica]]:
        """Replicas to keep, specs to start, replicas to stop; ready ones are kept first."""
        missing = Counter(target)
        kept: list[WorkerReplica] = []
        surplus: list[WorkerReplica] = []
        others: list[WorkerReplica] = []
        present = [replica for replica in self._replicas() if replica.state is not ReplicaState.DRAINING]
        for replica in sorted(present, key=lambda r: (r.state is not ReplicaState.READY, r.name)):
            if missing[replica.spec] > 0:
                missing[replica.spec] -= 1
                kept.append(replica)
            else:
                others.append(replica)
        for replica in others:
            active = replace(replica.spec, standby=False)
            if replica.spec.standby and missing[active] > 0:
                missing[active] -= 1
                kept.append(replica)
            else:
                surplus.append(replica)
        return kept, list(missing.elements()), surplus

    async def _clear(
        self,
        target: Sequence[ReplicaSpec],
        kept: list[WorkerReplica],
        missing: list[ReplicaSpec],
        surplus: Sequence[WorkerReplica],
        becoming: Mapping[WorkerReplica, ReplicaSpec],
    ) -> list[WorkerReplica]:
        """End and return the replicas on GPU slices that are repartitioned; their requests wait meanwhile."""
        ids = await self._gpus.slices_to_empty(target)
        leaving = [one for one in (*kept, *surplus) if one.place is not None and one.place.id in ids]
        alone = self._gpus.alone(missing) - ids
        leaving += [one for one in surplus if one.place is not None and one.place.id in alone]
        names = {spec.service for spec in target}
        for name in {replica.spec.service for replica in leaving} - names:
            await self._end(self._services[name])
        for replica in leaving:
            if replica in kept:
                kept.remove(replica)
                missing.append(becoming.get(replica, replica.spec))
            if replica.spec.service in self._services:
                self._services[replica.spec.service].retire(replica)
        await wait_all_ended(None, leaving)
        return leaving

    async def _restore(self, cleared: Sequence[WorkerReplica]) -> None:
        """Start the replicas again that a failed change has ended.

        Raises:
            JouleryError: They cannot be started again.
        """
        if not cleared or self._closed:
            return
        specs = [replica.spec for replica in cleared]
        present = self._replicas()
        await self._gpus.settle([one.spec for one in present] + specs)
        again = self._prepare(specs, present)
        await self._start(again)
        for replica in again:
            service = self._service(replica.spec.service)
            service.variants |= {replica.spec.variant}
            service.replicas.append(replica)
            service.ready(replica)

    def _prepare(self, missing: Sequence[ReplicaSpec], kept: Sequence[WorkerReplica]) -> list[WorkerReplica]:
        """Replicas for ``missing``, not yet started.

        Raises:
            ConfigError, CapabilityError: One of them cannot be made.
        """
        for spec in missing:
            if spec.model.kind is ModelKind.REMOTE:
                raise ConfigError(
                    f"the model of {spec.service}/{spec.variant} is on another server", got=str(spec.model)
                )
            if spec.model.kind.is_file and not os.access(spec.model.location, os.R_OK):
                why = "may not be read" if Path(spec.model.location).exists() else "does not exist"
                raise ConfigError(f"the model of {spec.service}/{spec.variant} {why}", file=spec.model.location)
        if self._groups is None and any(limited(spec.slice) for spec in missing):
            self._groups = CpuGroups.find()
            self._groups.sweep()
        launch = Launch(self._groups, load_s=self.settings.launch_s, stderr=self.settings.stderr)
        cores = self.settings.cores or tuple(sorted(os.sched_getaffinity(0)))
        on_cpu = [spec for spec in missing if not on_gpu(spec)]
        taken = [
            (replica.cores, replica.spec.slice.share_ratio)
            for replica in kept
            if not replica.spec.standby and replica.place is None
        ]
        bound = assign_cores([spec.slice for spec in on_cpu], cores, taken, [spec.cores for spec in on_cpu])
        fresh = [self._replica(spec, chosen, launch, None) for spec, chosen in zip(on_cpu, bound, strict=True)]
        held = [one.place for one in kept if one.place is not None and not one.spec.standby]
        for spec, place in self._gpus.assign(missing, held):
            fresh.append(self._replica(spec, cores, launch, place))
        return fresh

    def _replica(
        self, spec: ReplicaSpec, cores: tuple[int, ...], launch: Launch, place: DeviceSlice | None
    ) -> WorkerReplica:
        name = f"r{self._started}"
        self._started += 1
        return WorkerReplica(name, spec, cores, launch, owner=lambda: self._services.get(spec.service), place=place)

    async def _start(self, fresh: Sequence[WorkerReplica]) -> None:
        """Start all of the new replicas, or none.

        Raises:
            JouleryError: The first that failed; the others were stopped again.
        """
        self._starting = [asyncio.create_task(replica.start()) for replica in fresh]
        try:
            await asyncio.gather(*self._starting)
            if self._closed:
                raise asyncio.CancelledError
        except BaseException as error:
            for task in self._starting:
                task.cancel()
            await asyncio.gather(*self._starting, return_exceptions=True)
            for replica in fresh:
                replica.leave(now=True)
            await wait_all_ended(None, fresh)
            if self._closed and isinstance(error, asyncio.CancelledError):
                raise ActuationError("the engine was closed before the new replicas were ready") from error
            raise
        finally:
            self._starting = []

    def _switch(
        self,
        fresh: Sequence[WorkerReplica],
        kept: Sequence[WorkerReplica],
        surplus: Sequence[WorkerReplica],
        target: Sequence[ReplicaSpec],
    ) -> None:
        """Let the new replicas take over; the old ones only finish the requests they hold."""
        self._turn_mixes()
        promoted = promoted_standbys(kept, target)
        for spec in target:
            self._service(spec.service)
        for replica in fresh:
            self._services[replica.spec.service].replicas.append(replica)
        for replica in surplus:
            self._services[replica.spec.service].retire(replica)
        for service in self._services.values():
            service.variants = frozenset(spec.variant for spec in target if spec.service == service.name)
            service.variants |= {name for replica in kept if replica in service.replicas for name in replica.loaded}
            if service.variants:
                service.drop(f"{service.name} does not run the requested variant any more", service.variants)
        for replica in fresh:
            self._services[replica.spec.service].ready(replica)
        for replica in promoted:
            replica.spec = replace(replica.spec, standby=False)
            if replica.state is ReplicaState.READY:
                self._services[replica.spec.service].ready(replica)


def _convertible(missing: list[ReplicaSpec], surplus: list[WorkerReplica]) -> dict[WorkerReplica, ReplicaSpec]:
    """Replicas that become others without a new process; they are removed from ``missing`` and ``surplus``."""
    found: dict[WorkerReplica, ReplicaSpec] = {}
    for replica in list(surplus):
        spec = next((spec for spec in missing if replica.becomes(spec)), None)
        if spec is not None:
            missing.remove(spec)
            surplus.remove(replica)
            found[replica] = spec
    return found
