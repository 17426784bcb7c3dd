"""The one queue of a service: who waits, who is free, who serves whom.

A first-in-first-out queue from which free replicas pull. The replica that has been idle longest gets the request that
has waited longest; a replica works on one request at a time and requests are never batched (Clover, section 2). Nothing
here waits, knows a clock or a socket: whoever drives it reports what happened, then calls ``pull`` until it is None.

A request whose replica died goes back to its place in the queue once; when it dies again it is given up.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")
W = TypeVar("W")

MAX_ATTEMPTS = 2
"""How many replicas may die under one request: it is tried again exactly once."""


class Ticket(Generic[T]):
    """One request in the queue or in a replica; compared by identity.

    Attributes:
        payload: Whatever the driver wants back.
        deadline_s: When it is no longer wanted, on the driver's clock.
        variant: The only variant that may serve it; empty for any.
        attempts: How many replicas have had it.
        open: True until it was answered, given up or withdrawn.
        place: Its place in the order of arrival; -1 before ``offer``.
    """

    __slots__ = ("attempts", "deadline_s", "open", "payload", "place", "variant")

    def __init__(self, payload: T, deadline_s: float, variant: str = "") -> None:
        self.payload = payload
        self.deadline_s = deadline_s
        self.variant = variant
        self.attempts = 0
        self.open = True
        self.place = -1


class Server(Generic[T, W]):
    """One replica as the queue sees it; compared by identity.

    Attributes:
        payload: Whatever the driver wants back.
        variant: What it runs.
        ticket: What it works on; a withdrawn request stays here until its replica is done with it.
        leaving: True when it takes no more requests.
    """

    __slots__ = ("leaving", "payload", "ticket", "variant")

    def __init__(self, payload: W, variant: str = "") -> None:
        self.payload = payload
        self.variant = variant
        self.ticket: Ticket[T] | None = None
        self.leaving = False


class Dispatcher(Generic[T, W]):
    """The queue of one service and the replicas that pull from it.

    Args:
        bound: How many requests may wait. A request that comes back from a dead replica does not count.

    Attributes:
        servers: Every replica that joined and is not gone; one that leaves is gone when it holds nothing.
    """

    def __init__(self, bound: int) -> None:
        self.bound = bound
        self.servers: list[Server[T, W]] = []
        self._waiting: deque[Ticket[T]] = deque()
        self._idle: deque[Server[T, W]] = deque()
        self._arrived = 0
        self._returned = 0

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return len(self._waiting)

    @property
    def idle(self) -> int:
        """Replicas that wait."""
        return len(self._idle)

    def offer(self, ticket: Ticket[T]) -> bool:
        """A request arrives. False when the queue is full and no replica is free for it: it is not taken."""
        if len(self._waiting) - self._returned >= self.bound and self._free_for(ticket) is None:
            return False
        ticket.place = self._arrived
        self._arrived += 1
        self._waiting.append(ticket)
        return True

    def pull(self) -> tuple[Ticket[T], Server[T, W]] | None:
        """The next pair of a request and its replica; None when nobody who waits can be served."""
        if not self._idle or not self._waiting:
            return None
        for index, ticket in enumerate(self._waiting):
            server = self._free_for(ticket)
            if server is not None:
                del self._waiting[index]
                self._idle.remove(server)
                self._returned -= ticket.attempts > 0
                ticket.attempts += 1
                server.ticket = ticket
                return ticket, server
        return None

    def finish(self, server: Server[T, W]) -> Ticket[T] | None:
        """A replica is done with its request. The request to answer now; None when it was withdrawn meanwhile."""
        ticket, server.ticket = server.ticket, None
        if server.leaving:
            self.servers.remove(server)
        else:
            self._idle.append(server)
        return self._close(ticket)

    def join(self, server: Server[T, W]) -> None:
        """A replica is ready for its first request."""
        self.servers.append(server)
        self._idle.append(server)

    def retire(self, server: Server[T, W]) -> bool:
        """A replica takes no more requests. True when it holds none; else it may go after ``finish``."""
        server.leaving = True
        if server.ticket is not None:
            return False
        self.servers.remove(server)
        self._idle.remove(server)
        return True

    def lose(self, server: Server[T, W]) -> Ticket[T] | None:
        """A replica died. The request to give up now; None when it held none, or it will be tried again."""
        self.servers.remove(server)
        ticket, server.ticket = server.ticket, None
        if ticket is None:
            self._idle.remove(server)
        if ticket is None or not ticket.open:
            return None
        if ticket.attempts >= MAX_ATTEMPTS:
            return self._close(ticket)
        index = next((i for i, other in enumerate(self._waiting) if other.place > ticket.place), len(self._waiting))
        self._waiting.insert(index, ticket)
        self._returned += 1
        return None

    def withdraw(self, ticket: Ticket[T]) -> bool:
        """Nobody wants the answer any more. True when it was still open; its replica, if any, finishes for nothing."""
        if not ticket.open:
            return False
        ticket.open = False
        if ticket in self._waiting:
            self._waiting.remove(ticket)
            self._returned -= ticket.attempts > 0
        return True

    def expire(self, now_s: float) -> list[Ticket[T]]:
        """Withdraw every request whose deadline has come, waiting or running; in order of arrival."""
        late = [ticket for ticket in self._open() if ticket.deadline_s <= now_s]
        for ticket in late:
            self.withdraw(ticket)
        return sorted(late, key=lambda ticket: ticket.place)

    def strand(self, variants: frozenset[str] | None = None) -> list[Ticket[T]]:
        """Withdraw every waiting request, or those that ask for a variant outside ``variants``."""
        stranded = [t for t in self._waiting if variants is None or (t.variant and t.variant not in variants)]
        for ticket in stranded:
            self.withdraw(ticket)
        return stranded

    def next_deadline_s(self) -> float:
        """The earliest deadline of anything open; infinity when nothing is."""
        return min((ticket.deadline_s for ticket in self._open()), default=float("inf"))

    def _open(self) -> list[Ticket[T]]:
        running = [s.ticket for s in self.servers if s.ticket is not None and s.ticket.open]
        return [*self._waiting, *running]

    def _free_for(self, ticket: Ticket[T]) -> Server[T, W] | None:
        """The longest-idle replica that may serve ``ticket``."""
        if not ticket.variant:
            return self._idle[0] if self._idle else None
        return next((server for server in self._idle if server.variant == ticket.variant), None)

    @staticmethod
    def _close(ticket: Ticket[T] | None) -> Ticket[T] | None:
        if ticket is None or not ticket.open:
            return None
        ticket.open = False
        return ticket
