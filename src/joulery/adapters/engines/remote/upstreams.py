"""Models on other servers as the variants of a service: one queue, slots that send, and a choice for each request.

A slot sends one request at a time, so a service's upstreams get at most as many requests at once as it has slots. The
others wait here, where the policy can still choose the variant that answers. The layout sets how many slots a variant
has; a :class:`~joulery.domain.serving.mix.VariantMix` steers requests at any time. Neither starts or stops anything on
the servers. A request whose upstream is not reached, is not ready or is full goes to another variant, unless it names
one; a server that was lost gets no more requests until it reports that it is ready.

Some of the variants may run on this machine (:mod:`~joulery.adapters.engines.remote.beside_upstreams`): a slot sends
to them as it sends to a server.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import httpx

from joulery.adapters.engines.remote.beside_upstreams import LocalVariants
from joulery.adapters.engines.remote.open_inference import OpenInferenceEngine, OpenInferenceSettings
from joulery.domain.errors import ConfigError
from joulery.domain.serving.dispatch import Dispatcher, QueueLimit, QueueLimits, Server, Ticket
from joulery.domain.serving.engine import (
    InferRequest,
    InferResponse,
    ModelKind,
    ModelRef,
    Outcome,
    QueuedRequest,
    ReplicaSpec,
    ReplicaState,
    ReplicaView,
    RequestError,
    Transition,
)
from joulery.domain.serving.mix import MixCounter, ServiceMixes
from joulery.domain.serving.service import Slice, SliceKind
from joulery.steady_time import unix_s

_TRIED_ELSEWHERE = (Outcome.UNAVAILABLE, Outcome.OVERLOADED)
_SMOOTHING = 0.1
"""Weight of the newest time in the mean that ``Retry-After`` is computed from."""
_UNBOUNDED = 1_000_000
_WHOLE = Slice(SliceKind.WHOLE)
_Models = Collection[tuple[str, str, ModelRef]]
"""``(service, variant, model)`` of each."""


@dataclass(slots=True, eq=False)
class _Call:
    """One accepted request.

    Attributes:
        request: The request.
        answer: Its answer.
        arrival_s, start_s: When it arrived and when a slot took it, Unix seconds.
        until_s: Its deadline, monotonic seconds.
        variant: The variant that has it; empty before one has.
        sending: The slot's task for it.
    """

    request: InferRequest
    answer: asyncio.Future[InferResponse]
    arrival_s: float
    until_s: float
    start_s: float = math.nan
    variant: str = ""
    sending: asyncio.Task[None] | None = None


@dataclass(slots=True, eq=False)
class _Slot:
    """One slot of a service, which sends one request at a time.

    Attributes:
        name: Its identity in views and answers.
        spec: The variant it belongs to, and the others that may answer.
        served: Requests answered.
    """

    name: str
    spec: ReplicaSpec
    served: int = 0


class _Service:
    """One service: its queue and its slots."""

    def __init__(self, name: str, limit: QueueLimit, steering: MixCounter) -> None:
        self.name = name
        self.queue: Dispatcher[_Call, _Slot] = Dispatcher(limit.waiting, limit.wait_s)
        self.steering = steering
        self.mean_s = 0.0

    @property
    def slots(self) -> list[Server[_Call, _Slot]]:
        """The slots that are not leaving."""
        return [server for server in self.queue.servers if not server.leaving]

    @property
    def variants(self) -> list[str]:
        """Every variant that may answer, those with most slots first."""
        counts = Counter(server.variant for server in self.slots)
        for server in self.slots:
            counts.update(dict.fromkeys(server.warm, 0))
        return [name for name, _ in counts.most_common()]

    @property
    def retry_after_s(self) -> float:
        """Estimated seconds until the present queue is served."""
        return self.queue.waiting * self.mean_s / max(1, len(self.queue.servers))


class UpstreamEngine(ServiceMixes):
    """Upstream models as variants. Implements the ports ``Engine``, ``Steering``, ``Admission`` and ``Backlog``.

    Args:
        settings: Its limits; ``queue`` bounds the requests that wait for one service.
        transport: Replaces the connection to the servers in tests.
        local: The variants that run on this machine; None where all are on other servers.
    """

    def __init__(
        self,
        settings: OpenInferenceSettings | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
        local: LocalVariants | None = None,
    ) -> None:
        super().__init__()
        self._local = local
        self.settings = settings or OpenInferenceSettings()
        self._wire = OpenInferenceEngine(replace(self.settings, queue=_UNBOUNDED, absent_ok=True), transport)
        self._services: dict[str, _Service] = {}
        self._limits = QueueLimits(self.settings.queue)
        self._changing = asyncio.Lock()
        self._started = 0
        self._closed = False

    def replicas(self) -> tuple[ReplicaView, ...]:
        """Every slot now; one whose upstream is lost is shown as restarting."""
        upstream = {(view.spec.service, view.spec.variant): view for view in self._wire.replicas()}
        views = []
        for service in self._services.values():
            for server in service.queue.servers:
                slot = server.payload
                here = None if self._local is None else self._local.view(service.name, server.variant)
                there = here or upstream.get((service.name, server.variant)) or _starting(slot)
                lost = [name for name in server.warm if not self._is_up(service.name, name)]
                views.append(
                    replace(
                        there,
                        id=slot.name,
                        spec=slot.spec,
                        state=ReplicaState.DRAINING if server.leaving else there.state,
                        busy=bool(server.held),
                        served=slot.served,
                        warm=tuple(sorted(server.warm.difference(lost))),
                    )
                )
        return tuple(sorted(views, key=lambda view: (len(view.id), view.id)))

    def backlog(self) -> tuple[QueuedRequest, ...]:
        """Every request that waits or was sent, by arrival."""
        found = [
            QueuedRequest(service.name, call.arrival_s, call.variant, call.start_s)
            for service in self._services.values()
            for call in (ticket.payload for ticket in service.queue.open_tickets())
        ]
        return tuple(sorted(found, key=lambda request: request.arrival_s))

    def limit_queue(self, service: str, limit: QueueLimit | None, /) -> None:
        """Set the limit past which requests for a service are refused; None for the engine's own limit."""
        found = self._services.get(service)
        self._limits.change(service, limit, found.queue if found else None)

    async def infer(self, service: str, request: InferRequest, /) -> InferResponse:
        """The answer of an upstream of the service.

        Raises:
            RequestError: The request was not answered; ``outcome`` gives the reason.
        """
        if self._closed:
            raise RequestError("the engine is closing", Outcome.UNAVAILABLE)
        here = self._services.get(service)
        if here is None or not here.slots:
            raise RequestError(f"there is no service {service!r}", Outcome.UNKNOWN)
        self._check(here, request)
        limit_s = min(self.settings.deadline_s, request.timeout_s or math.inf)
        until_s = time.monotonic() + limit_s
        call = _Call(request, asyncio.get_running_loop().create_future(), unix_s(), until_s)
        ticket = Ticket(call, until_s, request.variant, since_s=time.monotonic())
        if not here.queue.offer(ticket):
            raise _overloaded(here, f"{service} has {here.queue.waiting} requests waiting, its limit")
        self._pump(here)
        try:
            async with asyncio.timeout(limit_s):
                return await call.answer
        except TimeoutError as error:
            where = f"at {call.variant}" if call.variant else "in the queue"
            raise RequestError(
                f"the deadline passed {where}", Outcome.DEADLINE, variant=call.variant, attempts=ticket.attempts
            ) from error
        finally:
            here.queue.withdraw(ticket)
            if call.sending is not None:
                call.sending.cancel()
            self._pump(here)

    async def apply(self, target: Sequence[ReplicaSpec], /) -> Transition:
        """Make ``target`` the set of slots; see :meth:`joulery.domain.ports.Engine.apply`."""
        async with self._changing:
            start_s, start = unix_s(), time.monotonic()
            every = {(spec.service, name, model) for spec in target for name, model in spec.models}
            models = {one for one in every if one[2].kind is ModelKind.REMOTE}
            for service, name, model in every - models if self._local is None else ():
                raise ConfigError(f"{service}/{name} is a model of this machine", got=model.location)
            ends = {name for name in self._services if name not in {spec.service for spec in target}}
            for name in ends:
                await self._drained(self._services[name])
            startup_cpu_s = await self._reach(models, every - models)
            before = [server.payload.spec for service in self._services.values() for server in service.slots]
            for name in ends:
                del self._services[name]
            for name in dict.fromkeys(spec.service for spec in target):
                self._arrange(name, [spec for spec in target if spec.service == name])
            wanted, had = Counter(target), Counter(before)
            took_s = time.monotonic() - start
            return Transition(
                started=tuple(sorted((wanted - had).elements())),
                stopped=tuple(sorted((had - wanted).elements())),
                kept=tuple(sorted((had & wanted).elements())),
                start_s=start_s,
                ready_s=took_s,
                duration_s=took_s,
                startup_cpu_s=startup_cpu_s,
            )

    async def _reach(self, servers: _Models, here: _Models) -> float:
        """Make the models of servers and of this machine ready; return the CPU seconds spent on this machine.

        Raises:
            JouleryError: A model cannot be loaded, or a service has none; the former models stay.
        """
        specs = [ReplicaSpec(service, name, _WHOLE, model) for service, name, model in servers]
        if self._local is None:
            await self._wire.apply(specs)
            return 0.0
        former = self._local.models
        spent_s = await self._local.apply(here)
        self._wire.served_elsewhere = frozenset(service for service, _, _ in here)
        try:
            await self._wire.apply(specs)
        except BaseException:
            await self._local.apply(former)
            raise
        return spent_s

    async def close(self) -> None:
        """Let sent requests finish within ``drain_s``, fail waiting ones; the servers stay as they are."""
        if self._closed:
            return
        self._closed = True
        for service in self._services.values():
            for ticket in service.queue.drop_waiting():
                _fail(ticket.payload, RequestError("the engine is closing", Outcome.UNAVAILABLE))
        running = [call.sending for call in self._running() if call.sending is not None]
        if running:
            await asyncio.wait(running, timeout=self.settings.drain_s)
        for call in self._running():
            _fail(call, RequestError("the engine was closed before this request was done", Outcome.UNAVAILABLE))
        await self._wire.close()
        if self._local is not None:
            await self._local.close()

    def _running(self) -> list[_Call]:
        servers = [server for service in self._services.values() for server in service.queue.servers]
        return [ticket.payload for server in servers for ticket in server.held]

    async def _drained(self, service: _Service) -> None:
        """Wait until a service that ends has answered what it accepted."""
        while service.queue.open_tickets():
            await asyncio.wait([ticket.payload.answer for ticket in service.queue.open_tickets()])

    def _arrange(self, name: str, specs: Sequence[ReplicaSpec]) -> None:
        """Assign the slots of a service to these specs; a request that was sent is still answered by its variant."""
        if name not in self._services:
            self._services[name] = _Service(name, self._limits.of(name), self._steering_of(name))
        service = self._services[name]
        missing, free = Counter(specs), []
        for server in service.slots:
            if missing[server.payload.spec] > 0:
                missing[server.payload.spec] -= 1
            else:
                free.append(server)
        for spec in missing.elements():
            if free:
                server = free.pop()
            else:
                server = Server(_Slot(f"u{self._started}", spec), spec.variant)
                self._started += 1
                service.queue.join(server)
            server.payload.spec, server.variant = spec, spec.variant
            server.warm = frozenset(other for other, _ in spec.warm)
        for server in free:
            service.queue.retire(server)
        known = frozenset(service.variants)
        for ticket in service.queue.drop_waiting(known):
            message = f"{name} does not run the requested variant any more"
            _fail(ticket.payload, RequestError(message, Outcome.UNAVAILABLE))
        self._pump(service)

    def _is_up(self, service: str, variant: str) -> bool:
        if self._local is not None and self._local.has(service, variant):
            return self._local.is_up(service, variant)
        views = self._wire.replicas()
        return any(
            (view.spec.service, view.spec.variant) == (service, variant) and view.state is ReplicaState.READY
            for view in views
        )

    def _check(self, service: _Service, request: InferRequest) -> None:
        """Raise RequestError where no upstream can answer a request."""
        if request.variant and request.variant not in service.variants:
            raise RequestError(f"{service.name} runs no variant {request.variant!r} now", Outcome.UNKNOWN)
        asked = [request.variant] if request.variant else service.variants
        if not any(self._is_up(service.name, name) for name in asked):
            raise self._unavailable(service.name, asked)

    def _unavailable(self, service: str, asked: Sequence[str]) -> RequestError:
        views = {view.spec.variant: view for view in self._wire.replicas() if view.spec.service == service}
        why = next((views[name].last_error for name in asked if name in views and views[name].last_error), "not ready")
        return RequestError(
            f"no upstream of {service} answers: {why}", Outcome.UNAVAILABLE, retry_after_s=self.settings.probe_max_s
        )

    def _pump(self, service: _Service) -> None:
        """Give waiting requests to free slots."""
        for late in service.queue.overdue(time.monotonic()):
            _fail(late.payload, _overloaded(service, f"{service.name} could not answer this request within its SLO"))
        while not self._closed and (pair := service.queue.pull()) is not None:
            ticket, server = pair
            call = ticket.payload
            waited_s = time.monotonic() - service.queue.oldest_s if service.queue.waiting else 0.0
            chosen = call.request.variant or service.steering.choose(
                server.variant, server.warm, service.queue.waiting, waited_s
            )
            call.start_s, call.variant = unix_s(), chosen
            call.sending = asyncio.get_running_loop().create_task(self._serve(service, server.payload, call))
            # Not at the end of the task: one that is cancelled before it begins has no end of its own.
            call.sending.add_done_callback(lambda _, server=server: self._free(service, server))  # type: ignore[misc]

    def _free(self, service: _Service, server: Server[_Call, _Slot]) -> None:
        """Free a slot that is done with its request."""
        service.queue.finish(server)
        self._pump(service)

    async def _serve(self, service: _Service, slot: _Slot, call: _Call) -> None:
        """Get the answer to a slot's request."""
        try:
            answer = await self._asked(service, call)
        except RequestError as error:
            _fail(call, error)
        else:
            slot.served += 1
            took_s = answer.end_s - answer.start_s
            service.mean_s += (took_s - service.mean_s) * (_SMOOTHING if service.mean_s else 1.0)
            if not call.answer.done():
                # The seconds of a slot are what an upstream is charged by: its profile has the watts of a busy slot.
                # A model of this machine is charged its CPU seconds.
                cost_s = unix_s() - call.start_s if math.isnan(answer.cpu_s) else answer.cpu_s
                call.answer.set_result(
                    answer._replace(replica=slot.name, arrival_s=call.arrival_s, start_s=call.start_s, cpu_s=cost_s)
                )

    async def _asked(self, service: _Service, call: _Call) -> InferResponse:
        """The answer of the chosen variant, or of another where that one cannot answer.

        Raises:
            RequestError: The request was not answered.
        """
        others = [] if call.request.variant else [name for name in service.variants if name != call.variant]
        every = sorted([call.variant, *others], key=lambda name: not self._is_up(service.name, name))
        attempts, busy = 0, None
        for variant in every:
            if attempts and not self._is_up(service.name, variant):
                continue
            attempts += 1
            call.variant = variant
            left_s = max(call.until_s - time.monotonic(), 1e-3)
            try:
                request = call.request._replace(variant=variant, timeout_s=left_s)
                if self._local is not None and self._local.has(service.name, variant):
                    answer = await self._local.infer(service.name, request)
                else:
                    answer = await self._wire.infer(service.name, request)
                return answer._replace(attempts=attempts)
            except RequestError as error:
                if error.outcome not in _TRIED_ELSEWHERE:
                    raise
                if error.outcome is Outcome.UNAVAILABLE:
                    self._wire.avoid_variant(service.name, variant, str(error))
                else:
                    busy = error
        if busy is not None:
            raise busy
        raise self._unavailable(service.name, every)


def _starting(slot: _Slot) -> ReplicaView:
    """The public view of a slot whose model is not available yet."""
    return ReplicaView(slot.name, slot.spec, ReplicaState.STARTING)


def _overloaded(service: _Service, message: str) -> RequestError:
    return RequestError(message, Outcome.OVERLOADED, retry_after_s=service.retry_after_s)


def _fail(call: _Call, error: RequestError) -> None:
    """Answer with an error, unless there is an answer."""
    if not call.answer.done():
        call.answer.set_exception(error)
