"""The embedded engine: model replicas as worker processes on CPU slices of this machine.

One queue a service (:mod:`joulery.domain.serving.dispatch`), from which free replicas pull: requests on their way are
in :mod:`~joulery.adapters.engines.embedded.services`, what replicas there are is decided here. All of it runs on one
event loop; models run in processes of their own (:mod:`~joulery.adapters.engines.embedded.worker`), which die with that
loop's thread.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from joulery.adapters.cgroups import CpuGroups
from joulery.adapters.engines.embedded.batches import kind_of
from joulery.adapters.engines.embedded.gpu_parts import GpuParts
from joulery.adapters.engines.embedded.replica import Launch, Replica, gone_within, promoted_standbys
from joulery.adapters.engines.embedded.service import Call, encoded, response
from joulery.adapters.engines.embedded.services import Services
from joulery.adapters.engines.embedded.slices import assign_cores, limited, on_gpu
from joulery.domain.errors import ActuationError, ConfigError
from joulery.domain.gpu.device import DeviceSlice
from joulery.domain.ports import Places
from joulery.domain.serving.dispatch import Ticket
from joulery.domain.serving.engine import (
    InferRequest,
    InferResponse,
    ModelKind,
    QueuedRequest,
    ReplicaSpec,
    ReplicaState,
    ReplicaView,
    Transition,
)

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
        """How long a replica may be busy with one request: ``hang_s`` as it applies."""
        return max(_HANG_MIN_S, self.deadline_s) if self.hang_s is None else self.hang_s


class LocalEngine:
    """Replicas on this machine's CPU cores. Implements :class:`joulery.domain.ports.Engine`.

    Args:
        settings: Its limits.
        groups: CPU quotas; found on first use when None.
        places: Hands out parts of GPUs; None where there are none to run on.
    """

    def __init__(
        self,
        settings: LocalSettings = LocalSettings(),
        groups: CpuGroups | None = None,
        places: Places | None = None,
    ) -> None:
        self.settings = settings
        self._gpus = GpuParts(places)
        self._groups = groups
        self._services = Services(settings.queue, settings.longest_s)
        self._changing = asyncio.Lock()
        self._starting: list[asyncio.Task[None]] = []
        self._started = 0

    def replicas(self) -> tuple[ReplicaView, ...]:
        """Every replica now, sorted by id."""
        every = sorted(self._services.replicas(), key=lambda r: (len(r.name), r.name))
        return tuple(replica.view() for replica in every)

    def backlog(self) -> tuple[QueuedRequest, ...]:
        """Every request in a replica or waiting, by arrival."""
        return self._services.backlog()

    async def infer(self, service: str, request: InferRequest, /) -> InferResponse:
        """The answer of the replica whose turn it is.

        Raises:
            RequestError: It was not answered; ``outcome`` says why.
        """
        arrival_s = time.time()
        loop = asyncio.get_running_loop()
        entry = self._services.admit(service, request)
        call = Call(request, encoded([request]), loop.create_future())
        patience_s = self.settings.deadline_s
        if request.timeout_s is not None:
            patience_s = min(patience_s, request.timeout_s)
        now_s = time.monotonic()
        kind = kind_of(request, entry.inputs) if entry.batches else None
        ticket = Ticket(call, now_s + patience_s, request.variant, kind=kind, since_s=now_s)
        self._services.offer(entry, ticket)
        try:
            replica, frame, batch = await call.answer
        except asyncio.CancelledError:
            self._services.withdraw(entry, ticket)
            raise
        return response(replica, frame, arrival_s, call.start_s, ticket.attempts, batch)

    async def apply(self, target: Sequence[ReplicaSpec], /) -> Transition:
        """Make ``target`` the set of replicas; see :meth:`joulery.domain.ports.Engine.apply`."""
        async with self._changing:
            start_s, start = time.time(), time.monotonic()
            kept, missing, surplus = self._difference(target)
            cleared = await self._clear(target, kept, missing, surplus)
            try:
                await self._gpus.settle(target)
                fresh = self._prepare(missing, kept)
                await self._start(fresh)
            except BaseException:
                await self._restore(cleared)
                raise
            surplus = [replica for replica in surplus if replica not in cleared]
            ended = [service for service in self._services if service.name not in {s.service for s in target}]
            staying = [replica for replica in surplus if self._services.of(replica) not in ended]
            self._switch(fresh, kept, staying, target)
            ready_s = time.monotonic() - start
            await asyncio.gather(*map(self._services.end, ended))
            await asyncio.gather(*(replica.gone() for replica in surplus))
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
        """Let running requests finish within ``drain_s``, give up those that wait, leave nothing behind."""
        self._services.closed = True
        for task in self._starting:
            task.cancel()
        replicas = self._services.replicas()
        self._services.give_up_all("the engine is closing")
        for replica in replicas:
            self._services.retire(replica)
        await gone_within(self.settings.drain_s, replicas)
        for replica in replicas:
            replica.leave(now=True)
        await gone_within(None, replicas)
        self._services.give_up_all("the engine was closed before this request was done")
        self._services.forget_deadlines()
        async with self._changing:  # a change that was cut off has cleaned up after itself
            return

    def _difference(self, target: Sequence[ReplicaSpec]) -> tuple[list[Replica], list[ReplicaSpec], list[Replica]]:
        """Replicas to keep, specs to start, replicas to stop; those that run well are kept first."""
        missing = Counter(target)
        kept: list[Replica] = []
        surplus: list[Replica] = []
        others: list[Replica] = []
        present = [replica for replica in self._services.replicas() if replica.state is not ReplicaState.DRAINING]
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
        self, target: Sequence[ReplicaSpec], kept: list[Replica], missing: list[ReplicaSpec], surplus: Sequence[Replica]
    ) -> list[Replica]:
        """Empty the parts of GPUs that have to be cut anew; requests wait meanwhile. Those that went, gone for good."""
        ids = await self._gpus.to_vacate(target)
        leaving = [one for one in (*kept, *surplus) if one.place is not None and one.place.id in ids]
        names = {spec.service for spec in target}
        for name in {replica.spec.service for replica in leaving} - names:
            await self._services.end(self._services[name])
        for replica in leaving:
            if replica in kept:
                kept.remove(replica)
                missing.append(replica.spec)
            if replica.spec.service in self._services:
                self._services.retire(replica)
        await gone_within(None, leaving)
        return leaving

    async def _restore(self, cleared: Sequence[Replica]) -> None:
        """Start again what had to go for a change that failed.

        Raises:
            JouleryError: Not even that can be had.
        """
        if not cleared or self._services.closed:
            return
        specs = [replica.spec for replica in cleared]
        present = self._services.replicas()
        await self._gpus.settle([one.spec for one in present] + specs)
        again = self._prepare(specs, present)
        await self._start(again)
        for replica in again:
            service = self._services.named(replica.spec.service)
            service.variants |= {replica.spec.variant}
            service.replicas.append(replica)
            self._services.came(replica)

    def _prepare(self, missing: Sequence[ReplicaSpec], kept: Sequence[Replica]) -> list[Replica]:
        """Replicas for ``missing``, not yet started.

        Raises:
            ConfigError, CapabilityError: One of them cannot be.
        """
        for spec in missing:
            if spec.model.kind is ModelKind.REMOTE:
                raise ConfigError(
                    f"the model of {spec.service}/{spec.variant} is on another server", got=str(spec.model)
                )
            if spec.model.kind is ModelKind.ONNX and not os.access(spec.model.location, os.R_OK):
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

    def _replica(self, spec: ReplicaSpec, cores: tuple[int, ...], launch: Launch, place: DeviceSlice | None) -> Replica:
        name = f"r{self._started}"
        self._started += 1
        to = self._services
        return Replica(name, spec, cores, launch, answered=to.answered, came=to.came, went=to.went, place=place)

    async def _start(self, fresh: Sequence[Replica]) -> None:
        """Start all of them, or none.

        Raises:
            JouleryError: The first that failed; the others were stopped again.
        """
        self._starting = [asyncio.create_task(replica.start()) for replica in fresh]
        try:
            await asyncio.gather(*self._starting)
            if self._services.closed:
                raise asyncio.CancelledError
        except BaseException as error:
            for task in self._starting:
                task.cancel()
            await asyncio.gather(*self._starting, return_exceptions=True)
            for replica in fresh:
                replica.leave(now=True)
            await gone_within(None, fresh)
            if self._services.closed and isinstance(error, asyncio.CancelledError):
                raise ActuationError("the engine was closed before the new replicas were ready") from error
            raise
        finally:
            self._starting = []

    def _switch(
        self,
        fresh: Sequence[Replica],
        kept: Sequence[Replica],
        surplus: Sequence[Replica],
        target: Sequence[ReplicaSpec],
    ) -> None:
        """The new replicas take over; from here on the old ones only finish what they hold."""
        roused = promoted_standbys(kept, target)
        for spec in target:
            self._services.named(spec.service)
        for replica in fresh:
            self._services.of(replica).replicas.append(replica)
        for replica in surplus:
            self._services.retire(replica)
        for service in self._services:
            service.variants = frozenset(spec.variant for spec in target if spec.service == service.name)
            if service.variants:
                gone = service.queue.strand(service.variants)
                self._services.give_up(service, gone, f"{service.name} does not run the requested variant any more")
        for replica in fresh:
            self._services.came(replica)
        for replica in roused:
            replica.spec = replace(replica.spec, standby=False)
            if replica.state is ReplicaState.READY:
                self._services.came(replica)
