"""Any interleaving of arrivals, completions, crashes, retirements, deadlines and withdrawals, against a model."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from joulery.domain.serving.dispatch import MAX_ATTEMPTS, Dispatcher, Server, Ticket

VARIANTS = ["small", "large"]
BOUND = 3


class Queue(RuleBasedStateMachine):
    """The model: lists searched from the front, and a fate for every request that was taken."""

    tickets = Bundle("tickets")
    servers = Bundle("servers")

    def __init__(self) -> None:
        super().__init__()
        self.dispatcher: Dispatcher[int, int] = Dispatcher(BOUND)
        self.now_s = 0.0
        self.taken: list[Ticket[int]] = []
        self.fate: dict[int, str] = {}
        self.waiting: list[Ticket[int]] = []
        self.idle: list[Server[int, int]] = []
        self.held: dict[int, Ticket[int]] = {}
        self.present: list[Server[int, int]] = []

    def settle(self, ticket: Ticket[int], fate: str) -> None:
        assert ticket.payload not in self.fate, "ended twice"
        self.fate[ticket.payload] = fate

    def pump(self) -> None:
        while True:
            pairs = [(t, s) for t in self.waiting for s in self.idle if t.variant in ("", s.variant)]
            got = self.dispatcher.pull()
            if not pairs:
                assert got is None
                return
            assert got == pairs[0]
            ticket, server = pairs[0]
            self.waiting.remove(ticket)
            self.idle.remove(server)
            self.held[server.payload] = ticket

    @rule(target=tickets, variant=st.sampled_from(["", "", *VARIANTS]), patience_s=st.integers(1, 5))
    def arrive(self, variant: str, patience_s: int) -> object:
        ticket = Ticket(len(self.taken), self.now_s + patience_s, variant)
        fresh = [t for t in self.waiting if t.attempts == 0]
        free = any(variant in ("", s.variant) for s in self.idle)
        taken = self.dispatcher.offer(ticket)
        assert taken == (free or len(fresh) < BOUND)
        if not taken:
            return multiple()
        self.taken.append(ticket)
        self.waiting.append(ticket)
        self.pump()
        return ticket

    @rule(target=servers, variant=st.sampled_from(VARIANTS), number=st.integers(0, 10**9))
    def join(self, variant: str, number: int) -> Server[int, int]:
        server = Server[int, int](number, variant)
        while any(server.payload == other.payload for other in self.present):
            server.payload += 1
        self.present.append(server)
        self.idle.append(server)
        self.dispatcher.join(server)
        self.pump()
        return server

    @rule(server=servers)
    def finish(self, server: Server[int, int]) -> None:
        if server not in self.present or server.payload not in self.held:
            return
        ticket = self.held.pop(server.payload)
        answered = self.dispatcher.finish(server)
        assert answered is (None if ticket.payload in self.fate else ticket)
        if answered:
            self.settle(ticket, "answered")
        if server.leaving:
            self.present.remove(server)
        else:
            self.idle.append(server)
        self.pump()

    @rule(server=consumes(servers))
    def crash(self, server: Server[int, int]) -> None:
        if server not in self.present:
            return
        self.present.remove(server)
        ticket = self.held.pop(server.payload, None)
        if server in self.idle:
            self.idle.remove(server)
        given_up = self.dispatcher.lose(server)
        if ticket is None or ticket.payload in self.fate:
            assert given_up == []
        elif ticket.attempts == MAX_ATTEMPTS:
            assert given_up == [ticket]
            self.settle(ticket, "given up")
        else:
            assert given_up == []
            self.waiting = sorted([*self.waiting, ticket], key=lambda t: t.payload)
        self.pump()

    @rule(server=servers)
    def retire(self, server: Server[int, int]) -> None:
        if server not in self.present or server.leaving:
            return
        free = self.dispatcher.retire(server)
        assert free == (server.payload not in self.held)
        if free:
            self.present.remove(server)
            self.idle.remove(server)
        self.pump()

    @rule(ticket=tickets)
    def withdraw(self, ticket: Ticket[int]) -> None:
        still_open = ticket.payload not in self.fate
        assert self.dispatcher.withdraw(ticket) == still_open
        if still_open:
            self.settle(ticket, "withdrawn")
        if ticket in self.waiting:
            self.waiting.remove(ticket)
        self.pump()

    @rule(step_s=st.integers(1, 3))
    def time_passes(self, step_s: int) -> None:
        self.now_s += step_s
        expected = [t for t in self.taken if t.payload not in self.fate and t.deadline_s <= self.now_s]
        assert self.dispatcher.expire(self.now_s) == expected
        for ticket in expected:
            self.settle(ticket, "late")
            if ticket in self.waiting:
                self.waiting.remove(ticket)
        self.pump()

    @rule(left=st.sampled_from([None, *VARIANTS]))
    def drop_waiting(self, left: str | None) -> None:
        variants = None if left is None else frozenset({left})
        expected = [t for t in self.waiting if left is None or t.variant not in ("", left)]
        assert self.dispatcher.drop_waiting(variants) == expected
        for ticket in expected:
            self.settle(ticket, "dropped")
            self.waiting.remove(ticket)
        self.pump()

    @invariant()
    def nothing_is_lost(self) -> None:
        unsettled = {t.payload for t in self.taken} - set(self.fate)
        held = {t.payload for t in self.held.values() if t.payload not in self.fate}
        assert unsettled == {t.payload for t in self.waiting} | held
        assert {t.payload for t in self.taken if t.open} == unsettled

    @invariant()
    def the_bound_is_respected(self) -> None:
        assert self.dispatcher.waiting == len(self.waiting)
        assert self.dispatcher.idle == len(self.idle)
        assert sum(t.attempts == 0 for t in self.waiting) <= BOUND

    @invariant()
    def deadlines_are_known(self) -> None:
        open_ = [t.deadline_s for t in self.taken if t.open]
        assert self.dispatcher.next_deadline_s() == min(open_, default=float("inf"))


TestQueue = Queue.TestCase
TestQueue.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
