"""Replicas of lower rank take requests first; a request waits for one for a bounded time only."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from joulery.domain.serving.dispatch import Dispatcher, Server, Ticket

PATIENCE_S = 0.1


def queue(*ranks: int, patience_s: float = PATIENCE_S) -> tuple[Dispatcher, list[Server]]:
    made: Dispatcher = Dispatcher(100)
    servers: list[Server] = []
    for number, rank in enumerate(ranks):
        server: Server = Server(number)
        server.rank = rank
        servers.append(server)
        made.join(server)
    made.prefer(patience_s)
    return made, servers


def offered(made: Dispatcher, name: str, since_s: float = 0.0, variant: str = "") -> Ticket:
    ticket = Ticket(name, math.inf, variant, since_s=since_s)
    assert made.offer(ticket)
    return ticket


def test_a_free_replica_of_the_lowest_rank_answers_and_of_equals_the_one_idle_longest():
    made, (_, clean, other) = queue(1, 0, 0)
    offered(made, "a")
    offered(made, "b")
    assert [made.pull(0.0)[1], made.pull(0.0)[1]] == [clean, other]
    made.finish(other)
    made.finish(clean)
    offered(made, "c")
    assert made.pull(0.0)[1] is other


def test_a_request_waits_for_a_busy_replica_of_lower_rank_until_its_patience_ends():
    made, (dirty, clean) = queue(1, 0)
    offered(made, "a")
    assert made.pull(0.0)[1] is clean
    offered(made, "b", since_s=1.0)
    assert made.pull(1.0) is None and made.ripe_s == 1.0 + PATIENCE_S
    made.finish(clean)
    assert made.pull(1.05)[1] is clean, "it is free in time"
    offered(made, "c", since_s=2.0)
    assert made.pull(2.0) is None
    assert made.pull(2.0 + PATIENCE_S)[1] is dirty


def test_only_as_many_wait_as_there_are_better_replicas_that_work():
    made, (dirty, _) = queue(1, 0)
    offered(made, "a")
    made.pull(0.0)
    offered(made, "b")
    last = offered(made, "c")
    ticket, server = made.pull(0.0)
    assert (ticket, server) == (last, dirty), "the second in the queue is not made to wait"
    assert made.pull(0.0) is None


def test_without_patience_or_a_clock_nothing_waits():
    for patience_s, now_s in ((0.0, 0.0), (PATIENCE_S, math.inf)):
        made, (dirty, _) = queue(1, 0, patience_s=patience_s)
        offered(made, "a")
        made.pull(now_s)
        offered(made, "b")
        assert made.pull(now_s)[1] is dirty


def test_a_better_replica_that_leaves_or_runs_another_variant_is_not_waited_for():
    made, (dirty, clean) = queue(1, 0)
    clean.variant, dirty.variant = "x", "y"
    offered(made, "a")
    made.pull(0.0)
    offered(made, "b", variant="y")
    assert made.pull(0.0)[1] is dirty
    made.finish(dirty)
    made.retire(clean)
    offered(made, "c")
    assert made.pull(0.0)[1] is dirty


@given(
    ranks=st.lists(st.integers(0, 2), min_size=1, max_size=4),
    arrivals=st.lists(st.floats(0.0, 1.0), min_size=1, max_size=12),
    service_s=st.floats(0.01, 0.5),
)
def test_every_request_is_answered_and_none_waits_beyond_its_patience_beside_a_free_replica(ranks, arrivals, service_s):
    made, _ = queue(*ranks)
    ends: list[tuple[float, int, Server]] = []
    left, now_s, answered = sorted(arrivals), 0.0, 0
    while answered < len(arrivals):
        upcoming = [*left[:1], *[end_s for end_s, _, _ in ends], made.ripe_s]
        now_s = max(now_s, min(upcoming))
        while left and left[0] <= now_s:
            offered(made, "r", since_s=left.pop(0))
        for entry in sorted((one for one in ends if one[0] <= now_s), key=lambda one: one[:2]):
            ends.remove(entry)
            made.finish(entry[2])
            answered += 1
        while (pair := made.pull(now_s)) is not None:
            ends.append((now_s + service_s, len(ends), pair[1]))
        if made.idle and made.waiting:
            assert now_s < made.since_s(0) + PATIENCE_S
            assert made.ripe_s <= made.since_s(0) + PATIENCE_S
    assert answered == pytest.approx(len(arrivals))
