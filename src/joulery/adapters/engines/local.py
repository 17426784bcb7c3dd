"""The embedded engine: model replicas as worker processes on CPU slices of this machine.

One queue a service (:mod:`joulery.domain.dispatch`), from which free replicas pull. Everything here runs on one event
loop; models run in processes of their own (:mod:`~joulery.adapters.engines.worker`), which die with that loop's thread.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from joulery.adapters.engines.batches import kind_of
from joulery.adapters.engines.cgroups import CpuGroups
from joulery.adapters.engines.gpu_parts import GpuParts
from joulery.adapters.engines.replica import Launch, Replica, roused_of
from joulery.adapters.engines.service import Call, Service, encoded, parts_of, pieces_of
from joulery.adapters.engines.slices import assign_cores, limited, on_gpu
from joulery.adapters.engines.wire import Frame
from joulery.domain.device import DeviceSlice
from joulery.domain.dispatch import Dispatcher, Ticket
from joulery.domain.engine import (
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
from joulery.domain.errors import ActuationError, ConfigError, DataError
from joulery.domain.ports import Places

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
        self._hang_s = max(_HANG_MIN_S, settings.deadline_s) if settings.hang_s is None else settings.hang_s
        self._groups = groups
        self._services: dict[str, Service] = {}
        self._changing = asyncio.Lock()
        self._starting: list[asyncio.Task[None]] = []
        self._started = 0
        self._closed = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at_s = float("inf")

    def replicas(self) -> tuple[ReplicaView, ...]:
        """Every replica now, sorted by id."""
        every = (replica for service in self._services.values() for replica in service.replicas)
        return tuple(replica.view() for replica in sorted(every, key=lambda r: (len(r.name), r.name)))

    def backlog(self) -> tuple[QueuedRequest, ...]:
        """Every request in a replica or waiting, by arrival."""
        shift_s = time.time() - time.monotonic()
        found = []
        for service in self._services.values():
            for ticket in service.queue.open_tickets():
                call = ticket.payload
                variant = "" if call.replica is None else call.replica.spec.variant
                found.append(QueuedRequest(service.name, ticket.since_s + shift_s, variant, call.start_s))
        return tuple(sorted(found, key=lambda request: request.arrival_s))

    async def infer(self, service: str, request: InferRequest, /) -> InferResponse:
        """The answer of the replica whose turn it is.

        Raises:
            RequestError: It was not answered; ``outcome`` says why.
        """
        arrival_s = time.time()
        loop = asyncio.get_running_loop()
        entry = self._admit(service, request)
        call = Call(request, encoded([request]), loop.create_future())
        patience_s = self.settings.deadline_s
        if request.timeout_s is not None:
            patience_s = min(patience_s, request.timeout_s)
        now_s = time.monotonic()
        kind = kind_of(request, entry.inputs) if entry.batches else None
        ticket = Ticket(call, now_s + patience_s, request.variant, kind=kind, since_s=now_s)
        if not entry.queue.offer(ticket):
            raise RequestError(
                f"{service} has {entry.queue.waiting} requests waiting, which is all it takes",
                Outcome.OVERLOADED,
                retry_after_s=entry.retry_after_s,
            )
        self._pump(entry)
        self._wake_at(ticket.deadline_s)
        try:
            replica, frame, batch = await call.answer
        except asyncio.CancelledError:
            entry.queue.withdraw(ticket)
            self._pump(entry)
            raise
        return _response(replica, frame, arrival_s, call.start_s, ticket.attempts, batch)

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
            ended = [service for service in self._services.values() if service.name not in {s.service for s in target}]
            self._switch(fresh, kept, [replica for replica in surplus if self._of(replica) not in ended], target)
            ready_s = time.monotonic() - start
            await asyncio.gather(*map(self._end_service, ended))
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
        self._closed = True
        for task in self._starting:
            task.cancel()
        replicas = [replica for service in self._services.values() for replica in service.replicas]
        for service in self._services.values():
            self._give_up(service, service.queue.strand(), "the engine is closing")
        for replica in replicas:
            self._retire(replica)
        await _within(self.settings.drain_s, replicas)
        for replica in replicas:
            replica.leave(now=True)
        await _within(None, replicas)
        for service in self._services.values():
            self._give_up(service, service.queue.strand(), "the engine was closed before this request was done")
        if self._timer is not None:
            self._timer.cancel()
        async with self._changing:  # a change that was cut off has cleaned up after itself
            return

    def _admit(self, service: str, request: InferRequest) -> Service:
        entry = self._services.get(service)
        if self._closed:
            raise RequestError("the engine is closing", Outcome.UNAVAILABLE)
        if entry is None or not entry.variants:
            raise RequestError(f"there is no service {service!r}", Outcome.UNKNOWN)
        entry.admit(request)
        return entry

    def _pump(self, service: Service) -> None:
        """Give waiting requests to free replicas."""
        now_s = time.monotonic()
        while (pair := service.queue.pull(now_s)) is not None:
            _, server = pair
            calls = [ticket.payload for ticket in server.held]
            start_s = time.time()
            for call in calls:
                call.start_s, call.replica = start_s, server.payload
            server.payload.send(pieces_of(calls), now_s)
            self._wake_at(now_s + self._hang_s)
        if service.queue.ripe_s < float("inf"):
            self._wake_at(service.queue.ripe_s)
        if not service.queue.waiting:
            service.emptied.set()

    def _answered(self, replica: Replica, frame: Frame) -> None:
        service = self._of(replica)
        held = [ticket.payload for ticket in replica.server.held]
        try:
            frames = parts_of(frame, held)
        except DataError:
            # One of them may be at fault, or the model answers no batches: each alone will tell.
            service.queue.split(replica.server)
            self._pump(service)
            return
        tickets = service.queue.finish_all(replica.server)
        self._pump(service)
        service.took(frame.header["s"])
        for ticket, part in zip(tickets, frames, strict=True):
            if ticket is not None and not ticket.payload.answer.done():
                ticket.payload.answer.set_result((replica, part, len(held)))

    def _came(self, replica: Replica) -> None:
        service = self._of(replica)
        if not replica.spec.standby:
            service.queue.join(replica.server)
        service.describe()
        self._pump(service)

    def _went(self, replica: Replica, reason: str) -> None:
        service = self._services.get(replica.spec.service)
        if service is None or replica not in service.replicas:
            return  # it was stopped before it ever served
        if replica.server in service.queue.servers:
            for ticket in service.queue.lose_all(replica.server):
                message = f"two replicas died under this request; the last: {reason}"
                variant, attempts = replica.spec.variant, ticket.attempts
                ticket.payload.fail(RequestError(message, Outcome.CRASHED, variant=variant, attempts=attempts))
        if replica.state is ReplicaState.DRAINING:
            service.replicas.remove(replica)
        self._pump(service)

    def _difference(self, target: Sequence[ReplicaSpec]) -> tuple[list[Replica], list[ReplicaSpec], list[Replica]]:
        """Replicas to keep, specs to start, replicas to stop; those that run well are kept first."""
        missing = Counter(target)
        kept: list[Replica] = []
        surplus: list[Replica] = []
        others: list[Replica] = []
        present = [r for s in self._services.values() for r in s.replicas if r.state is not ReplicaState.DRAINING]
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
            await self._end_service(self._services[name])
        for replica in leaving:
            if replica in kept:
                kept.remove(replica)
                missing.append(replica.spec)
            if replica.spec.service in self._services:
                self._retire(replica)
        await _within(None, leaving)
        return leaving

    async def _restore(self, cleared: Sequence[Replica]) -> None:
        """Start again what had to go for a change that failed.

        Raises:
            JouleryError: Not even that can be had.
        """
        if not cleared or self._closed:
            return
        specs = [replica.spec for replica in cleared]
        present = [replica for service in self._services.values() for replica in service.replicas]
        await self._gpus.settle([one.spec for one in present] + specs)
        again = self._prepare(specs, present)
        await self._start(again)
        for replica in again:
            service = self._services.get(replica.spec.service)
            if service is None:
                service = Service(replica.spec.service, Dispatcher(self.settings.queue))
                self._services[service.name] = service
            service.variants |= {replica.spec.variant}
            service.replicas.append(replica)
            self._came(replica)

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
        return Replica(
            name, spec, cores, launch, answered=self._answered, came=self._came, went=self._went, place=place
        )

    async def _start(self, fresh: Sequence[Replica]) -> None:
        """Start all of them, or none.

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
            await _within(None, fresh)
            if self._closed and isinstance(error, asyncio.CancelledError):
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
        roused = roused_of(kept, target)
        for spec in target:
            if spec.service not in self._services:
                self._services[spec.service] = Service(spec.service, Dispatcher(self.settings.queue))
        for replica in fresh:
            self._of(replica).replicas.append(replica)
        for replica in surplus:
            self._retire(replica)
        for service in self._services.values():
            service.variants = frozenset(spec.variant for spec in target if spec.service == service.name)
            if service.variants:
                gone = service.queue.strand(service.variants)
                self._give_up(service, gone, f"{service.name} does not run the requested variant any more")
        for replica in fresh:
            self._came(replica)
        for replica in roused:
            replica.spec = replace(replica.spec, standby=False)
            if replica.state is ReplicaState.READY:
                self._came(replica)

    async def _end_service(self, service: Service) -> None:
        """A service leaves: what was accepted is still answered, then its replicas end."""
        service.emptied.clear()
        self._pump(service)
        await service.emptied.wait()
        leaving = list(service.replicas)
        for replica in leaving:
            self._retire(replica)
        await _within(None, leaving)
        self._give_up(service, service.queue.strand(), f"{service.name} is not served any more")
        del self._services[service.name]

    def _retire(self, replica: Replica) -> None:
        queue = self._of(replica).queue
        if replica.server in queue.servers and not replica.server.leaving:
            queue.retire(replica.server)
        replica.leave()

    def _give_up(self, service: Service, tickets: Sequence[Ticket[Call]], message: str) -> None:
        for ticket in tickets:
            ticket.payload.fail(RequestError(message, Outcome.UNAVAILABLE))
        self._pump(service)

    def _wake_at(self, at_s: float) -> None:
        """Have ``_sweep`` called at a time, unless it is called earlier anyway."""
        if at_s >= self._timer_at_s or self._closed:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at_s = at_s
        self._timer = asyncio.get_running_loop().call_later(max(0.0, at_s - time.monotonic()), self._sweep)

    def _sweep(self) -> None:
        """Answer requests whose deadline has come, kill replicas that hang, and set the timer to the next of either."""
        self._timer, self._timer_at_s = None, float("inf")
        now_s, next_s = time.monotonic(), float("inf")
        for service in self._services.values():
            for ticket in service.queue.expire(now_s):
                self._too_late(ticket, "in the queue" if ticket.payload.replica is None else "in a replica")
            self._pump(service)
            for replica in service.replicas:
                if replica.busy_since_s + self._hang_s <= now_s:
                    self._end_hanging(service, replica)
            hanging_s = (replica.busy_since_s + self._hang_s for replica in service.replicas)
            next_s = min(next_s, service.queue.next_deadline_s(), service.queue.ripe_s, *hanging_s)
        self._wake_at(next_s)

    def _end_hanging(self, service: Service, replica: Replica) -> None:
        """Kill a replica that does not come back. Its request would hang the next one too: it is not tried again."""
        reason = f"it was busy with one request for {self._hang_s:g} s"
        for ticket in replica.server.held:
            if service.queue.withdraw(ticket):
                self._too_late(ticket, f"in a replica, which was ended: {reason}")
        replica.busy_since_s = float("inf")
        replica.kill(reason)

    def _too_late(self, ticket: Ticket[Call], where: str) -> None:
        replica = ticket.payload.replica
        variant = replica.spec.variant if replica is not None else ""
        message = f"the deadline came {where}"
        ticket.payload.fail(RequestError(message, Outcome.DEADLINE, variant=variant, attempts=ticket.attempts))

    def _of(self, replica: Replica) -> Service:
        return self._services[replica.spec.service]


def _response(
    replica: Replica, frame: Frame, arrival_s: float, start_s: float, attempts: int, batch: int
) -> InferResponse:
    """What a replica answered.

    Raises:
        RequestError: It answered with an error.
    """
    header, variant = frame.header, replica.spec.variant
    service_s, cpu_s = header["s"], header["c"]
    if "e" in header:
        outcome = Outcome(header["o"])
        raise RequestError(header["e"], outcome, variant=variant, service_s=service_s, cpu_s=cpu_s, attempts=attempts)
    end_s = time.time()
    return InferResponse(
        frame.tensors, variant, replica.name, arrival_s, start_s, end_s, service_s, cpu_s, attempts, batch
    )


async def _within(limit_s: float | None, replicas: Sequence[Replica]) -> None:
    """Wait until they are gone, or for ``limit_s``."""
    if replicas:
        await asyncio.wait([asyncio.ensure_future(replica.gone()) for replica in replicas], timeout=limit_s)
