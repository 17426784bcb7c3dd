from joulery.domain.serving.dispatch import Dispatcher, QueueLimit, QueueLimits, Server, Ticket


def queue_with(*variants: str, bound: int = 8) -> tuple[Dispatcher[str, str], list[Server[str, str]]]:
    dispatcher: Dispatcher[str, str] = Dispatcher(bound)
    servers = [Server[str, str](f"r{i}", variant) for i, variant in enumerate(variants)]
    for server in servers:
        dispatcher.join(server)
    return dispatcher, servers


def offer(dispatcher: Dispatcher[str, str], *names: str, deadline_s: float = 100.0) -> list[Ticket[str]]:
    tickets = [Ticket(name, deadline_s) for name in names]
    for ticket in tickets:
        assert dispatcher.offer(ticket)
    return tickets


def pull_all(dispatcher: Dispatcher[str, str]) -> list[tuple[str, str]]:
    pairs = []
    while pair := dispatcher.pull():
        pairs.append((pair[0].payload, pair[1].payload))
    return pairs


def test_the_oldest_request_meets_the_longest_idle_replica() -> None:
    dispatcher, (first, second) = queue_with("", "")
    offer(dispatcher, "a", "b", "c", "d")
    assert pull_all(dispatcher) == [("a", "r0"), ("b", "r1")]
    assert dispatcher.finish(second).payload == "b"
    assert dispatcher.finish(first).payload == "a"
    assert pull_all(dispatcher) == [("c", "r1"), ("d", "r0")]


def test_below_saturation_every_replica_serves_equally_many_whatever_its_speed() -> None:
    """Clover, section 2: the mixture's accuracy is then the plain mean over the instances."""
    dispatcher, servers = queue_with("slow", "fast", "fast")
    counts = {server.payload: 0 for server in servers}
    for n in range(30):
        offer(dispatcher, str(n))
        pair = dispatcher.pull()
        assert pair is not None
        counts[pair[1].payload] += 1
        dispatcher.finish(pair[1])
    assert set(counts.values()) == {10}


def test_a_full_queue_takes_nothing_more() -> None:
    dispatcher, (server,) = queue_with("", bound=2)
    offer(dispatcher, "a")
    pull_all(dispatcher)
    offer(dispatcher, "b", "c")
    assert not dispatcher.offer(Ticket("d", 100.0))
    dispatcher.finish(server)
    assert pull_all(dispatcher) == [("b", "r0")]
    assert dispatcher.offer(Ticket("d", 100.0))


def test_without_room_to_wait_a_free_replica_still_serves() -> None:
    dispatcher, _ = queue_with("", bound=0)
    offer(dispatcher, "a")
    assert pull_all(dispatcher) == [("a", "r0")]
    assert not dispatcher.offer(Ticket("b", 100.0))


def test_the_request_of_a_dead_replica_comes_first_and_only_once_more() -> None:
    dispatcher, (first, second) = queue_with("", "", bound=1)
    offer(dispatcher, "a", "b")
    pull_all(dispatcher)
    offer(dispatcher, "c")
    assert dispatcher.lose(second) == []
    assert dispatcher.lose(first) == []
    assert dispatcher.waiting == 3
    dispatcher.join(third := Server("r2"))
    assert pull_all(dispatcher) == [("a", "r2")]
    (given_up,) = dispatcher.lose(third)
    assert (given_up.payload, given_up.attempts, given_up.open) == ("a", 2, False)
    dispatcher.join(Server("r3"))
    dispatcher.join(Server("r4"))
    assert pull_all(dispatcher) == [("b", "r3"), ("c", "r4")]


def test_a_returned_request_does_not_take_the_place_of_a_new_one() -> None:
    dispatcher, (server,) = queue_with("", bound=1)
    offer(dispatcher, "a")
    pull_all(dispatcher)
    dispatcher.lose(server)
    offer(dispatcher, "b")
    assert not dispatcher.offer(Ticket("c", 100.0))
    dispatcher.join(server := Server("r1"))
    pull_all(dispatcher)
    assert not dispatcher.offer(Ticket("c", 100.0))
    dispatcher.finish(server)
    pull_all(dispatcher)
    offer(dispatcher, "c")


def test_a_returned_request_that_is_withdrawn_makes_no_room() -> None:
    dispatcher, (server,) = queue_with("", bound=1)
    (a,) = offer(dispatcher, "a")
    pull_all(dispatcher)
    dispatcher.lose(server)
    offer(dispatcher, "b")
    dispatcher.withdraw(a)
    assert not dispatcher.offer(Ticket("c", 100.0))
    dispatcher.drop_waiting()
    offer(dispatcher, "d")
    assert not dispatcher.offer(Ticket("e", 100.0))


def test_the_replicas_present_are_those_that_joined_and_are_not_gone() -> None:
    dispatcher, (idle, busy, dying) = queue_with("", "", "")
    offer(dispatcher, "a", "b")
    pull_all(dispatcher)
    assert dispatcher.servers == [idle, busy, dying]
    dispatcher.lose(dying)
    dispatcher.lose(busy)
    assert dispatcher.servers == [idle]
    assert dispatcher.idle == 0
    dispatcher.retire(idle)
    assert dispatcher.servers == [idle]
    dispatcher.finish(idle)
    assert dispatcher.servers == []


def test_a_request_for_one_variant_waits_without_holding_up_the_others() -> None:
    dispatcher, (small, large) = queue_with("small", "large")
    assert dispatcher.offer(Ticket("a", 100.0))
    assert dispatcher.offer(Ticket("b", 100.0, "small"))
    assert dispatcher.offer(Ticket("c", 100.0))
    assert pull_all(dispatcher) == [("a", "r0"), ("c", "r1")]
    dispatcher.finish(large)
    assert pull_all(dispatcher) == []
    dispatcher.finish(small)
    assert pull_all(dispatcher) == [("b", "r0")]


def test_requests_for_a_variant_that_is_gone_are_handed_back() -> None:
    dispatcher, _ = queue_with()
    tickets = [Ticket("a", 100.0), Ticket("b", 100.0, "small"), Ticket("c", 100.0, "large")]
    for ticket in tickets:
        assert dispatcher.offer(ticket)
    assert [t.payload for t in dispatcher.drop_waiting(frozenset({"large"}))] == ["b"]
    assert [t.payload for t in dispatcher.drop_waiting()] == ["a", "c"]
    assert dispatcher.waiting == 0


def test_a_retired_replica_finishes_what_it_holds() -> None:
    dispatcher, (first, second) = queue_with("", "")
    offer(dispatcher, "a")
    pull_all(dispatcher)
    assert not dispatcher.retire(first)
    assert dispatcher.retire(second)
    offer(dispatcher, "b")
    assert pull_all(dispatcher) == []
    assert dispatcher.servers == [first]
    assert dispatcher.finish(first).payload == "a"
    assert dispatcher.servers == []
    assert pull_all(dispatcher) == []


def test_a_retired_replica_that_dies_hands_its_request_back() -> None:
    dispatcher, (first, _) = queue_with("", "")
    offer(dispatcher, "a")
    pull_all(dispatcher)
    dispatcher.retire(first)
    assert dispatcher.lose(first) == []
    assert pull_all(dispatcher) == [("a", "r1")]


def test_a_withdrawn_request_is_never_answered() -> None:
    dispatcher, (server,) = queue_with("")
    a, b = offer(dispatcher, "a", "b")
    pull_all(dispatcher)
    assert dispatcher.withdraw(b)
    assert not dispatcher.withdraw(b)
    assert dispatcher.withdraw(a)
    assert server.ticket is a, "the replica still works on it"
    assert dispatcher.finish(server) is None
    assert dispatcher.waiting == 0
    offer(dispatcher, "c")
    assert pull_all(dispatcher) == [("c", "r0")]


def test_a_withdrawn_request_is_not_tried_again() -> None:
    dispatcher, (server,) = queue_with("")
    (ticket,) = offer(dispatcher, "a")
    pull_all(dispatcher)
    dispatcher.withdraw(ticket)
    assert dispatcher.lose(server) == []
    assert dispatcher.waiting == 0


def test_deadlines_reach_waiting_running_and_draining_requests() -> None:
    dispatcher, (first, second) = queue_with("", "")
    tickets = [Ticket(name, deadline_s) for name, deadline_s in [("a", 5.0), ("b", 3.0), ("c", 4.0), ("d", 9.0)]]
    for ticket in tickets:
        dispatcher.offer(ticket)
    pull_all(dispatcher)
    dispatcher.retire(first)
    assert dispatcher.next_deadline_s() == 3.0
    assert dispatcher.expire(2.9) == []
    assert [t.payload for t in dispatcher.expire(5.0)] == ["a", "b", "c"]
    assert dispatcher.next_deadline_s() == 9.0
    assert dispatcher.finish(second) is None
    assert pull_all(dispatcher) == [("d", "r1")]
    dispatcher.finish(second)
    assert dispatcher.next_deadline_s() == float("inf")


def batching(batch: int, max_delay_s: float = 0.0) -> tuple[Dispatcher[str, str], Server[str, str]]:
    dispatcher: Dispatcher[str, str] = Dispatcher(100)
    server: Server[str, str] = Server("r", batch=batch, max_delay_s=max_delay_s)
    dispatcher.join(server)
    return dispatcher, server


def offered(dispatcher: Dispatcher[str, str], *names: str, kind: str | None = "k", at_s: float = 0.0) -> None:
    for name in names:
        assert dispatcher.offer(Ticket(name, 99.0, kind=kind, since_s=at_s))


def held(server: Server[str, str]) -> list[str]:
    return [ticket.payload for ticket in server.held]


def test_a_batch_is_those_of_a_kind_in_order_up_to_the_servers_size():
    dispatcher, server = batching(3)
    offered(dispatcher, "a")
    offered(dispatcher, "x", kind="other")
    offered(dispatcher, "b", "c", "d")
    assert dispatcher.pull() is not None and held(server) == ["a", "b", "c"]
    assert [ticket and ticket.payload for ticket in dispatcher.finish_all(server)] == ["a", "b", "c"]
    assert dispatcher.pull() is not None and held(server) == ["x"], "it waited longest"


def test_a_batch_that_is_not_full_waits_for_its_delay():
    dispatcher, server = batching(3, max_delay_s=2.0)
    offered(dispatcher, "a", at_s=10.0)
    assert dispatcher.pull(11.9) is None and dispatcher.ripe_s == 12.0
    offered(dispatcher, "b", at_s=11.0)
    assert dispatcher.pull(11.9) is None and dispatcher.ripe_s == 12.0, "the first of them decides"
    assert dispatcher.pull(12.0) is not None and held(server) == ["a", "b"] and dispatcher.ripe_s == float("inf")


def test_a_full_batch_waits_for_nothing_and_neither_does_a_request_without_a_kind():
    dispatcher, server = batching(2, max_delay_s=5.0)
    offered(dispatcher, "a", "b", at_s=10.0)
    assert dispatcher.pull(10.0) is not None and held(server) == ["a", "b"]
    dispatcher.finish_all(server)
    offered(dispatcher, "x", kind=None, at_s=11.0)
    assert dispatcher.pull(11.0) is not None and held(server) == ["x"]


def test_a_split_batch_goes_back_to_its_place_and_is_served_one_by_one():
    dispatcher, server = batching(3)
    offered(dispatcher, "a", "b", "c", "d")
    dispatcher.pull()
    assert dispatcher.withdraw(server.held[1])
    dispatcher.split(server)
    order = []
    while dispatcher.pull() is not None:
        order.append(held(server))
        dispatcher.finish_all(server)
    assert order == [["a"], ["c"], ["d"]]


def test_a_batch_whose_replica_died_is_tried_again_one_by_one_and_given_up_the_second_time():
    dispatcher, server = batching(2)
    offered(dispatcher, "a", "b")
    dispatcher.pull()
    assert dispatcher.lose(server) == []
    dispatcher.join(second := Server("s", batch=2))
    dispatcher.pull()
    assert held(second) == ["a"]
    assert [ticket.payload for ticket in dispatcher.lose(second)] == ["a"]
    dispatcher.join(third := Server("t", batch=2))
    dispatcher.pull()
    assert held(third) == ["b"]


def test_withdrawn_members_of_a_batch_get_no_answer():
    dispatcher, server = batching(2)
    offered(dispatcher, "a", "b")
    dispatcher.pull()
    assert dispatcher.withdraw(server.held[0])
    assert [ticket and ticket.payload for ticket in dispatcher.finish_all(server)] == [None, "b"]


def test_a_queue_has_the_engines_limit_or_a_lower_one() -> None:
    limits, queue = QueueLimits(8), Dispatcher[str, str](8)
    limits.change("a", QueueLimit(3, 0.5), queue)
    limits.change("later", QueueLimit(20, 0.1), None)
    assert queue.limit == limits.of("a") == QueueLimit(3, 0.5)
    assert (limits.of("later"), limits.of("other")) == (QueueLimit(8, 0.1), QueueLimit(8))
    limits.change("a", None, queue)
    assert queue.limit == limits.of("a") == QueueLimit(8)


def test_requests_that_waited_longer_than_the_limit_are_withdrawn_the_oldest_first() -> None:
    dispatcher = Dispatcher[str, str](8)
    for at_s, name in enumerate("abcd"):
        dispatcher.offer(Ticket(name, 100.0, since_s=float(at_s)))
    assert dispatcher.overdue(1e9) == [], "no limit"
    dispatcher.limit = QueueLimit(8, 2.0)
    assert [ticket.payload for ticket in dispatcher.overdue(3.5)] == ["a", "b"]
    assert dispatcher.overdue(3.5) == [] and dispatcher.waiting == 2
    dispatcher.join(Server("x"))
    pair = dispatcher.pull()
    assert pair is not None and pair[0].payload == "c"


def test_a_batch_of_a_replica_with_warm_variants_is_of_one_variant():
    dispatcher, server = batching(4)
    server.warm = frozenset({"warm"})
    server.variant = "own"
    dispatcher.retire(server)
    for number, name in enumerate(["warm", "", "warm", "own", ""]):
        dispatcher.offer(Ticket(f"{number}{name}", 9.0, name, kind="k"))
    server.leaving = False
    dispatcher.join(server)
    found = []
    while (pair := dispatcher.pull()) is not None:
        found.append([ticket.payload for ticket in pair[1].held])
        dispatcher.finish_all(server)
    assert found == [["0warm", "2warm"], ["1", "4"], ["3own"]]
