"""The ledger of several gateways: nothing is lost, nothing counts twice, whatever comes in whatever order."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from joulery.domain.serving.engine import Outcome, RequestRecord
from joulery.domain.serving.ledger import RequestLedger

NAN = float("nan")


def record(outcome: Outcome = Outcome.OK, service: str = "s") -> RequestRecord:
    return RequestRecord(service, "v", "r", 0.0, NAN, 1.0, outcome, 0.1, 0.1, 1, None)


STEP = st.one_of(
    st.tuples(st.just("open"), st.integers(0, 2), st.integers(1, 6)),
    st.tuples(st.just("close"), st.integers(0, 2), st.integers(0, 6)),
    st.tuples(st.just("lose"), st.integers(0, 2), st.just(0)),
    st.tuples(st.just("take"), st.just(0), st.integers(1, 4)),
)


@given(st.lists(STEP, max_size=80))
def test_what_came_in_is_open_or_has_ended_once(steps: list[tuple[str, int, int]]) -> None:
    ledger, taken, is_open = RequestLedger(), [], set()
    received: Counter[str] = Counter()
    for kind, connection, number in steps:
        gateway = f"g{connection}"
        if kind == "open" and (connection, number) not in is_open:
            ledger.open(gateway, connection, number, "s", 0.0)
            is_open.add((connection, number))
            received[gateway] += 1
        elif kind == "close":
            closed = ledger.close(gateway, connection, number, record())
            assert closed == (number == 0 or (connection, number) in is_open)
            received[gateway] += number == 0
            is_open.discard((connection, number))
        elif kind == "lose":
            mine = {key for key in is_open if key[0] == connection}
            assert ledger.lose(connection, 1.0) == len(mine)
            is_open -= mine
        elif kind == "take":
            batch = ledger.take(len(taken), number)
            assert batch.first == len(taken)
            taken += batch.entries
            ledger.drop(len(taken))
        assert ledger.received == received
        for name in received:
            assert ledger.open_of(name) == sum(f"g{one}" == name for one, _ in is_open)
        assert sum(ledger.received.values()) == sum(ledger.ended.values()) + len(is_open)
    taken += ledger.take(len(taken), 1000).entries
    assert Counter(entry.gateway for entry in taken) == +ledger.ended


def test_a_lost_gateway_leaves_cancelled_requests_with_their_costs() -> None:
    ledger = RequestLedger()
    ledger.open("g", 1, 1, "s", 5.0)
    ledger.open("g", 1, 2, "s", 5.0)
    ledger.answered(1, 2, "v", "r0", 0.25, 0.5)
    assert ledger.lose(1, 7.0) == 2
    waiting, answered = (entry.record for entry in ledger.take(0).entries)
    assert (waiting.outcome, waiting.variant, waiting.cpu_s, waiting.end_s) == (Outcome.CANCELLED, "", 0.0, 7.0)
    assert (answered.outcome, answered.variant, answered.cpu_s) == (Outcome.CANCELLED, "v", 0.5)
    assert not ledger.close("g", 1, 2, record()), "its record comes too late"
    assert ledger.ended["g"] == 2


def test_a_full_ledger_keeps_counts_of_the_oldest() -> None:
    ledger = RequestLedger(most=3)
    for outcome in (Outcome.OK, Outcome.FAILED, Outcome.OK, Outcome.OK, Outcome.OK):
        ledger.close("g", 1, 0, record(outcome))
    batch = ledger.take(0)
    assert batch.first == 2 and len(batch.entries) == 3
    assert batch.folded == (("s", Outcome.FAILED, 1), ("s", Outcome.OK, 1))
    assert ledger.ended["g"] == len(batch.entries) + sum(count for *_, count in batch.folded)


def test_requests_for_no_service_are_counted_without_an_entry() -> None:
    ledger = RequestLedger()
    ledger.close("g", 1, 0, record(Outcome.UNKNOWN, service=""))
    assert ledger.take(0).unknown == 1 and ledger.next == 0
    assert ledger.received["g"] == ledger.ended["g"] == 1


def test_what_was_stored_is_dropped_and_numbers_go_on() -> None:
    ledger = RequestLedger()
    for _ in range(5):
        ledger.close("g", 1, 0, record())
    ledger.drop(3)
    assert ledger.first == 3 and ledger.next == 5
    assert ledger.take(0).first == 3 and len(ledger.take(4).entries) == 1 and ledger.take(9) == ledger.take(5)
