"""The queue of a service: waiting requests, free replicas, and the rule that pairs them.

A first-in-first-out queue from which free replicas pull. The replica that has been idle longest gets the request that
has waited longest. A replica works on one request at a time (Clover, section 2), or on one batch: the request and those
behind it that may be answered together with it (equal ``kind``), up to the replica's ``batch``; fewer only when the
first of them has waited for ``max_delay_s`` (iGniter, section 2: Triton's dynamic batching). The queue itself does not
wait and has no clock or socket: its driver reports events, then calls ``pull`` until it returns None.

A request whose replica dies returns to its place in the queue once, to be tried alone. The second time it fails.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Generic, TypeVar

T = TypeVar("T")
W = TypeVar("W")

MAX_ATTEMPTS = 2
"""Number of replicas that may die while they run one request: it is tried again exactly once."""


@dataclass(frozen=True, slots=True)
class QueueLimit:
    """Limit of a service's queue.

    Attributes:
        waiting: Largest number of waiting requests.
        wait_s: Longest time a request may wait for a replica, seconds: after that, a replica would answer too late.
    """

    waiting: int
    wait_s: float = math.inf


class Ticket(Generic[T]):
    """One request in the queue or in a replica; compared by identity.

    Attributes:
        payload: Returned to the driver as it is.
        deadline_s: Time from which its answer is no longer wanted, on the driver's clock.
        variant: The only variant that may serve it; empty for any.
        attempts: Number of replicas that took it.
        open: True until it was answered, given up or withdrawn.
        place: Its place in the order of arrival; -1 before ``offer``.
        kind: Requests of one kind may share a batch; None for one that is answered alone.
        since_s: When it arrived, on the driver's clock: a batch waits ``max_delay_s`` from then.
    """

    __slots__ = ("attempts", "deadline_s", "kind", "open", "payload", "place", "since_s", "variant")

    def __init__(
        self, payload: T, deadline_s: float, variant: str = "", *, kind: Hashable = None, since_s: float = -math.inf
    ) -> None:
        self.payload = payload
        self.deadline_s = deadline_s
        self.variant = variant
        self.kind = kind
        self.since_s = since_s
        self.attempts = 0
        self.open = True
        self.place = -1


class Server(Generic[T, W]):
    """One replica in the queue; compared by identity.

    Attributes:
        payload: Returned to the driver as it is.
        variant: The variant it runs.
        batch: Number of requests it takes at once.
        batches: The same for other variants, where the number differs.
        turn: The variant that answers its next requests that name none; empty for its own.
        max_delay_s: Time a request waits for others before a smaller batch starts.
        held: The requests it runs; a withdrawn request stays here until its replica has finished it.
        leaving: True when it takes no more requests.
        warm: Other variants that it can run too.
        rank: Free replicas of the lowest rank take requests first; see :meth:`Dispatcher.prefer`.
    """

    __slots__ = ("batch", "batches", "held", "leaving", "max_delay_s", "payload", "rank", "turn", "variant", "warm")

    def __init__(
        self,
        payload: W,
        variant: str = "",
        batch: int = 1,
        max_delay_s: float = 0.0,
        batches: Mapping[str, int] | None = None,
    ) -> None:
        self.payload = payload
        self.variant = variant
        self.batch = batch
        self.batches = batches or {}
        self.turn = ""
        self.max_delay_s = max_delay_s
        self.held: list[Ticket[T]] = []
        self.leaving = False
        self.warm: frozenset[str] = frozenset()
        self.rank = 0

    def runs(self, variant: str) -> bool:
        """Whether the replica can run a variant; True where the name is empty."""
        return variant in ("", self.variant) or variant in self.warm

    def become(self, other: Server[T, W], warm: frozenset[str]) -> None:
        """Take over another replica's variant and batches from the next request on, with the given warm variants."""
        self.variant, self.warm, self.turn = other.variant, warm, ""
        self.batch, self.batches, self.max_delay_s = other.batch, other.batches, other.max_delay_s

    def most(self, variant: str) -> int:
        """Largest batch of requests that name a variant, or of those that name none where ``variant`` is empty."""
        return self.batches.get(variant or self.turn, self.batch)

    @property
    def ticket(self) -> Ticket[T] | None:
        """The first of the requests that the replica runs; None when it is free."""
        return self.held[0] if self.held else None


def _rank(server: Server[T, W]) -> int:
    return server.rank


class Dispatcher(Generic[T, W]):
    """The queue of one service and the replicas that pull from it.

    Args:
        bound: Largest number of waiting requests. A request that returns from a dead replica does not count.
        wait_s: Longest time a request may wait, seconds.

    Attributes:
        limit: Largest number and longest wait of waiting requests; it may change at any time.
        servers: Every replica that joined and was not removed; a leaving one is removed when it holds no request.
        ripe_s: After ``pull``: time at which a waiting batch starts without being full, or a request no longer waits
            for a replica of lower rank; infinity when none waits.
    """

    def __init__(self, bound: int, wait_s: float = math.inf) -> None:
        self.limit = QueueLimit(bound, wait_s)
        self.servers: list[Server[T, W]] = []
        self.ripe_s = math.inf
        self._waiting: deque[Ticket[T]] = deque()
        self._idle: deque[Server[T, W]] = deque()
        self._arrived = 0
        self._returned = 0
        self._ranked = False
        self._patience_s = 0.0

    def prefer(self, patience_s: float) -> None:
        """Let free replicas of the lowest :attr:`Server.rank` take requests first.

        Args:
            patience_s: Time a request waits for a busy replica of lower rank while one of higher rank is free. At most
                as many requests wait as there are such replicas; the others are served at once.
        """
        self._ranked, self._patience_s = True, patience_s

    @property
    def waiting(self) -> int:
        """Number of waiting requests."""
        return len(self._waiting)

    @property
    def oldest_s(self) -> float:
        """Arrival of the first of the waiting requests, on the driver's clock; infinity for none."""
        return self._waiting[0].since_s if self._waiting else math.inf

    @property
    def first_idle(self) -> Server[T, W] | None:
        """The longest-idle replica: it takes the next request that names no variant. None when none is free."""
        return self._idle[0] if self._idle else None

    def since_s(self, place: int) -> float:
        """Arrival of a waiting request, by its place in the queue, on the driver's clock; infinity for none."""
        return self._waiting[place].since_s if place < len(self._waiting) else math.inf

    @property
    def idle(self) -> int:
        """Number of idle replicas."""
        return len(self._idle)

    def offer(self, ticket: Ticket[T]) -> bool:
        """Add a request. False, without adding it, when the queue is full and no replica is free for the request."""
        if len(self._waiting) - self._returned >= self.limit.waiting and self._free_for(ticket) is None:
            return False
        ticket.place = self._arrived
        self._arrived += 1
        self._waiting.append(ticket)
        return True

    def pull(self, now_s: float = math.inf) -> tuple[Ticket[T], Server[T, W]] | None:
        """The next pair of a request and its replica; None when no waiting request can be served now.

        The replica's ``held`` contains the whole batch, the request first.

        Args:
            now_s: Present time on the driver's clock; infinity when no batch is to wait for more requests.
        """
        self.ripe_s = math.inf
        if not self._idle or not self._waiting:
            return None
        first = self._waiting[0]
        if first.kind is None and not self._ranked and (server := self._free_for(first)) is not None:
            return self._give([self._waiting.popleft()], server)
        filling: set[tuple[int, Hashable]] = set()
        for index, ticket in enumerate(self._waiting):
            server = self._free_for(ticket)
            if server is None or (filling and (id(server), ticket.kind) in filling):
                continue
            if self._ranked and self._waits(index, ticket, server, now_s):
                continue
            most = server.most(ticket.variant)
            if most == 1 or ticket.kind is None:
                del self._waiting[index]
                return self._give([ticket], server)
            batch = self._batch(index, server, most)
            ripe_s = ticket.since_s + server.max_delay_s
            if len(batch) == most or ripe_s <= now_s:
                for member in batch:
                    self._waiting.remove(member)
                return self._give(batch, server)
            filling.add((id(server), ticket.kind))
            self.ripe_s = min(self.ripe_s, ripe_s)
        return None

    def finish(self, server: Server[T, W]) -> Ticket[T] | None:
        """Free a replica that finished its request. Returns the request to answer; None when it was withdrawn."""
        return self.finish_all(server)[0]

    def finish_all(self, server: Server[T, W]) -> list[Ticket[T] | None]:
        """Free a replica that finished its batch. Returns the requests to answer, in order; None for withdrawn ones."""
        held = self._release(server)
        return [self._close(ticket) for ticket in held]

    def split(self, server: Server[T, W]) -> None:
        """Return the batch that a replica could not answer to the queue, each request to be answered alone."""
        for ticket in self._release(server):
            ticket.kind = None
            if ticket.open:
                self._requeue(ticket)

    def join(self, server: Server[T, W]) -> None:
        """Add a replica that is ready for its first request."""
        self.servers.append(server)
        self._idle.append(server)

    def retire(self, server: Server[T, W]) -> bool:
        """Give a replica no more requests. True when it holds none; else it may end after ``finish``."""
        server.leaving = True
        if server.held:
            return False
        self.servers.remove(server)
        self._idle.remove(server)
        return True

    def lose(self, server: Server[T, W]) -> list[Ticket[T]]:
        """Remove a replica that died. Returns its requests to give up; the others are tried again, each alone."""
        self.servers.remove(server)
        held, server.held = server.held, []
        if not held:
            self._idle.remove(server)
        given_up: list[Ticket[T]] = []
        for ticket in held:
            ticket.kind = None
            if ticket.open and ticket.attempts >= MAX_ATTEMPTS:
                ticket.open = False
                given_up.append(ticket)
            elif ticket.open:
                self._requeue(ticket)
        return given_up

    def withdraw(self, ticket: Ticket[T]) -> bool:
        """Withdraw a request. True when it was still open; a replica that runs it finishes, without an answer."""
        if not ticket.open:
            return False
        ticket.open = False
        if ticket in self._waiting:
            self._waiting.remove(ticket)
            self._returned -= ticket.attempts > 0
        return True

    def expire(self, now_s: float) -> list[Ticket[T]]:
        """Withdraw every request past its deadline, waiting or running; in order of arrival."""
        late = [ticket for ticket in self.open_tickets() if ticket.deadline_s <= now_s]
        for ticket in late:
            self.withdraw(ticket)
        return sorted(late, key=lambda ticket: ticket.place)

    def overdue(self, now_s: float) -> list[Ticket[T]]:
        """Withdraw the requests that have waited for longer than the limit allows; in order of arrival."""
        found = []
        while self._waiting and now_s - self._waiting[0].since_s > self.limit.wait_s:
            found.append(self._waiting[0])
            self.withdraw(self._waiting[0])
        return found

    def drop_waiting(self, variants: frozenset[str] | None = None) -> list[Ticket[T]]:
        """Withdraw every waiting request, or those that name a variant outside ``variants``."""
        dropped = [t for t in self._waiting if variants is None or (t.variant and t.variant not in variants)]
        for ticket in dropped:
            self.withdraw(ticket)
        return dropped

    def next_deadline_s(self) -> float:
        """The earliest deadline of the open requests; infinity without any."""
        return min((ticket.deadline_s for ticket in self.open_tickets()), default=float("inf"))

    def open_tickets(self) -> list[Ticket[T]]:
        """All requests that were accepted and not yet answered: the waiting ones by arrival, then the running ones."""
        running = [ticket for server in self.servers for ticket in server.held if ticket.open]
        return [*self._waiting, *running]

    def _batch(self, index: int, server: Server[T, W], most: int) -> list[Ticket[T]]:
        """The request at an index and those behind it that fit its batch, as many as the replica takes."""
        first = self._waiting[index]
        found = [first]
        for ticket in islice(self._waiting, index + 1, None):
            if len(found) == most:
                break
            # One variant answers a batch: where several are loaded, requests that name one go with their like.
            fits = ticket.variant == first.variant if server.warm else ticket.variant in ("", server.variant)
            if ticket.kind == first.kind and fits:
                found.append(ticket)
        return found

    def _give(self, batch: list[Ticket[T]], server: Server[T, W]) -> tuple[Ticket[T], Server[T, W]]:
        """Assign a batch that left the queue to a free replica."""
        self._idle.remove(server)
        for ticket in batch:
            self._returned -= ticket.attempts > 0
            ticket.attempts += 1
        server.held = batch
        return batch[0], server

    def _release(self, server: Server[T, W]) -> list[Ticket[T]]:
        """Free a replica, or remove it if it was leaving. Returns the requests that it held."""
        held, server.held = server.held, []
        if server.leaving:
            self.servers.remove(server)
        else:
            self._idle.append(server)
        return held

    def _requeue(self, ticket: Ticket[T]) -> None:
        """Return a request to its place in the order of arrival."""
        index = next((i for i, other in enumerate(self._waiting) if other.place > ticket.place), len(self._waiting))
        self._waiting.insert(index, ticket)
        self._returned += 1

    def _free_for(self, ticket: Ticket[T]) -> Server[T, W] | None:
        """The longest-idle replica that may serve ``ticket``; of the lowest rank where replicas are ranked."""
        if self._ranked:
            return min((each for each in self._idle if each.runs(ticket.variant)), key=_rank, default=None)
        if not ticket.variant:
            return self._idle[0] if self._idle else None
        return next((server for server in self._idle if server.runs(ticket.variant)), None)

    def _waits(self, index: int, ticket: Ticket[T], server: Server[T, W], now_s: float) -> bool:
        """Whether the request at an index of the queue waits for a replica of lower rank than the free one."""
        until_s = ticket.since_s + self._patience_s
        if now_s >= until_s:
            return False
        better = (each for each in self.servers if each.rank < server.rank and each.held and not each.leaving)
        if index >= sum(1 for each in better if each.runs(ticket.variant)):
            return False
        self.ripe_s = min(self.ripe_s, until_s)
        return True

    @staticmethod
    def _close(ticket: Ticket[T]) -> Ticket[T] | None:
        if not ticket.open:
            return None
        ticket.open = False
        return ticket


class QueueLimits:
    """Queue limit of each service of an engine: the engine's own, or a lower one.

    Args:
        most: The engine's own limit.
    """

    def __init__(self, most: int) -> None:
        self._own = QueueLimit(most)
        self._lower: dict[str, QueueLimit] = {}

    def of(self, service: str) -> QueueLimit:
        """The limit of a service."""
        return self._lower.get(service, self._own)

    def change(self, service: str, limit: QueueLimit | None, queue: Dispatcher[T, W] | None) -> None:
        """Set the limit of a service, and of its queue where it has one; None for the engine's own."""
        wanted = self._own if limit is None else replace(limit, waiting=min(limit.waiting, self._own.waiting))
        self._lower[service] = wanted
        if queue is not None:
            queue.limit = wanted
