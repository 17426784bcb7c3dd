"""The services of the embedded engine: requests on their way to free replicas and back, none beyond its deadline.

What replicas there are is not decided here: they come, answer and go, and the engine says which of them leave.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence

from joulery.adapters.engines.embedded.replica import Replica, gone_within
from joulery.adapters.engines.embedded.service import Call, Service, parts_of, pieces_of
from joulery.adapters.engines.embedded.wire import Frame
from joulery.domain.errors import DataError
from joulery.domain.serving.dispatch import Dispatcher, Ticket
from joulery.domain.serving.engine import InferRequest, Outcome, QueuedRequest, ReplicaState, RequestError


class Services:
    """Every service by name, and the one timer of their deadlines.

    Args:
        queue: Requests that may wait for one service.
        hang_s: A replica busy with one request for longer is killed and started again.

    Attributes:
        closed: True when no request is taken any more; what is under way goes on.
    """

    def __init__(self, queue: int, hang_s: float) -> None:
        self.closed = False
        self._queue = queue
        self._hang_s = hang_s
        self._by_name: dict[str, Service] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at_s = float("inf")

    def __iter__(self) -> Iterator[Service]:
        return iter(self._by_name.values())

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def __getitem__(self, name: str) -> Service:
        return self._by_name[name]

    def of(self, replica: Replica) -> Service:
        """Whose requests a replica answers."""
        return self._by_name[replica.spec.service]

    def named(self, name: str) -> Service:
        """The service of a name, made where there is none."""
        if name not in self._by_name:
            self._by_name[name] = Service(name, Dispatcher(self._queue))
        return self._by_name[name]

    def replicas(self) -> list[Replica]:
        """Every replica, in any state."""
        return [replica for service in self for replica in service.replicas]

    def backlog(self) -> tuple[QueuedRequest, ...]:
        """Every request in a replica or waiting, by arrival."""
        shift_s = time.time() - time.monotonic()
        found = []
        for service in self:
            for ticket in service.queue.open_tickets():
                call = ticket.payload
                variant = "" if call.replica is None else call.replica.spec.variant
                found.append(QueuedRequest(service.name, ticket.since_s + shift_s, variant, call.start_s))
        return tuple(sorted(found, key=lambda request: request.arrival_s))

    def admit(self, name: str, request: InferRequest) -> Service:
        """The service that is to answer a request.

        Raises:
            RequestError: It cannot be answered here.
        """
        service = self._by_name.get(name)
        if self.closed:
            raise RequestError("the engine is closing", Outcome.UNAVAILABLE)
        if service is None or not service.variants:
            raise RequestError(f"there is no service {name!r}", Outcome.UNKNOWN)
        service.admit(request)
        return service

    def offer(self, service: Service, ticket: Ticket[Call]) -> None:
        """A request arrives; its answer or error comes through its call.

        Raises:
            RequestError: As many wait as may.
        """
        if not service.queue.offer(ticket):
            raise RequestError(
                f"{service.name} has {service.queue.waiting} requests waiting, which is all it takes",
                Outcome.OVERLOADED,
                retry_after_s=service.retry_after_s,
            )
        self.pump(service)
        self._wake_at(ticket.deadline_s)

    def withdraw(self, service: Service, ticket: Ticket[Call]) -> None:
        """Nobody waits for this request any more."""
        service.queue.withdraw(ticket)
        self.pump(service)

    def pump(self, service: Service) -> None:
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

    def answered(self, replica: Replica, frame: Frame) -> None:
        """A replica has answered what it held."""
        service = self.of(replica)
        held = [ticket.payload for ticket in replica.server.held]
        try:
            frames = parts_of(frame, held)
        except DataError:
            # One of them may be at fault, or the model answers no batches: each alone will tell.
            service.queue.split(replica.server)
            self.pump(service)
            return
        tickets = service.queue.finish_all(replica.server)
        self.pump(service)
        service.took(frame.header["s"])
        for ticket, part in zip(tickets, frames, strict=True):
            if ticket is not None and not ticket.payload.answer.done():
                ticket.payload.answer.set_result((replica, part, len(held)))

    def came(self, replica: Replica) -> None:
        """A replica is ready to answer, or to stand by."""
        service = self.of(replica)
        if not replica.spec.standby:
            service.queue.join(replica.server)
        service.describe()
        self.pump(service)

    def went(self, replica: Replica, reason: str) -> None:
        """A replica's worker is gone; what it held is tried once more elsewhere."""
        service = self._by_name.get(replica.spec.service)
        if service is None or replica not in service.replicas:
            return  # it was stopped before it ever served
        if replica.server in service.queue.servers:
            for ticket in service.queue.lose_all(replica.server):
                message = f"two replicas died under this request; the last: {reason}"
                variant, attempts = replica.spec.variant, ticket.attempts
                ticket.payload.fail(RequestError(message, Outcome.CRASHED, variant=variant, attempts=attempts))
        if replica.state is ReplicaState.DRAINING:
            service.replicas.remove(replica)
        self.pump(service)

    def retire(self, replica: Replica) -> None:
        """Have a replica finish what it holds and end."""
        queue = self.of(replica).queue
        if replica.server in queue.servers and not replica.server.leaving:
            queue.retire(replica.server)
        replica.leave()

    async def end(self, service: Service) -> None:
        """A service leaves: what was accepted is still answered, then its replicas end."""
        service.emptied.clear()
        self.pump(service)
        await service.emptied.wait()
        leaving = list(service.replicas)
        for replica in leaving:
            self.retire(replica)
        await gone_within(None, leaving)
        self.give_up(service, service.queue.strand(), f"{service.name} is not served any more")
        del self._by_name[service.name]

    def give_up(self, service: Service, tickets: Sequence[Ticket[Call]], message: str) -> None:
        """Tell requests that nobody will answer them."""
        for ticket in tickets:
            ticket.payload.fail(RequestError(message, Outcome.UNAVAILABLE))
        self.pump(service)

    def give_up_all(self, message: str) -> None:
        """Tell all that wait that nobody will answer them."""
        for service in self:
            self.give_up(service, service.queue.strand(), message)

    def forget_deadlines(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()

    def _wake_at(self, at_s: float) -> None:
        """Have ``_sweep`` called at a time, unless it is called earlier anyway."""
        if at_s >= self._timer_at_s or self.closed:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at_s = at_s
        self._timer = asyncio.get_running_loop().call_later(max(0.0, at_s - time.monotonic()), self._sweep)

    def _sweep(self) -> None:
        """Answer requests whose deadline has come, kill replicas that hang, and set the timer to the next of either."""
        self._timer, self._timer_at_s = None, float("inf")
        now_s, next_s = time.monotonic(), float("inf")
        for service in self:
            for ticket in service.queue.expire(now_s):
                _too_late(ticket, "in the queue" if ticket.payload.replica is None else "in a replica")
            self.pump(service)
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
                _too_late(ticket, f"in a replica, which was ended: {reason}")
        replica.busy_since_s = float("inf")
        replica.kill(reason)


def _too_late(ticket: Ticket[Call], where: str) -> None:
    replica = ticket.payload.replica
    variant = replica.spec.variant if replica is not None else ""
    message = f"the deadline came {where}"
    ticket.payload.fail(RequestError(message, Outcome.DEADLINE, variant=variant, attempts=ticket.attempts))
