"""Joules of batching engines: conservation above all."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from joulery.accounting.token_energy import PROMPT_WEIGHT, TokenBook
from joulery.domain.errors import DataError


def test_a_batch_shares_by_tokens_moved_between_two_readings() -> None:
    book = TokenBook()
    book.began("llm", 1)
    book.began("llm", 2)
    book.moved("llm", 1, read=40)  # weighs ten tokens
    book.moved("llm", 2, written=30)
    book.settle(100.0, 20.0, {"llm": 60.0}, g_per_j=0.5)
    assert book.ended("llm", 1) == (pytest.approx(15.0), pytest.approx(7.5))
    assert book.ended("llm", 2) == (pytest.approx(45.0), pytest.approx(22.5))
    totals = book.totals
    assert (totals.total_j, totals.idle_j, totals.requests_j, totals.requests_g) == (100.0, 20.0, 60.0, 30.0)
    assert totals.unattributed_j == pytest.approx(20.0)
    assert PROMPT_WEIGHT == 0.25


def test_joules_wait_for_the_request_that_moves_next() -> None:
    book = TokenBook()
    book.began("llm", 1)
    book.settle(10.0, 0.0, {"llm": 10.0})
    assert book.totals.requests_j == 0.0
    book.moved("llm", 1, written=1)
    book.settle(5.0, 0.0, {"llm": 5.0})
    assert book.ended("llm", 1) == (15.0, None)


def test_a_request_alone_pays_for_what_it_did_though_it_wrote_nothing() -> None:
    book = TokenBook()
    book.began("llm", 1)
    book.settle(10.0, 4.0, {"llm": 6.0})
    assert book.ended("llm", 1) == (6.0, None)


def test_what_an_engine_uses_between_requests_has_no_owner() -> None:
    book = TokenBook()
    book.settle(10.0, 4.0, {"llm": 6.0})
    book.began("llm", 1)
    book.moved("llm", 1, written=3)
    book.settle(1.0, 0.0, {"llm": 1.0})
    assert book.ended("llm", 1) == (1.0, None)
    assert book.totals.unattributed_j == 6.0


def test_what_a_request_did_since_the_last_reading_is_charged_ahead_and_a_reading_pays_for_it() -> None:
    book = TokenBook()
    for number in (1, 2):
        book.began("llm", number)
    assert not book.can_charge_ahead("llm", 1), "nothing says what a token takes"
    for number in (1, 2):
        book.moved("llm", number, written=10)
    book.settle(40.0, 0.0, {"llm": 40.0}, 0.5)
    assert book.can_charge_ahead("llm", 1)
    book.moved("llm", 1, written=5)
    assert book.ended("llm", 1) == (pytest.approx(20.0 + 5 * 2.0), pytest.approx(15.0))
    assert book.totals.requests_j == pytest.approx(40.0), "only what was read"
    book.moved("llm", 2, written=5)
    book.settle(24.0, 0.0, {"llm": 24.0}, 0.5)
    assert book.ended("llm", 2) == (pytest.approx(20.0 + 12.0), pytest.approx(16.0)), "half of the tokens were its own"
    assert book.totals.requests_j == pytest.approx(62.0) and book.totals.requests_g == pytest.approx(31.0)
    assert book.totals.unattributed_j == pytest.approx(2.0), "the first was charged 10 J of 12"


def test_what_was_charged_ahead_is_paid_by_later_readings_too_and_never_twice() -> None:
    book = TokenBook()
    book.began("llm", 1)
    book.moved("llm", 1, written=10)
    book.settle(10.0, 0.0, {"llm": 10.0})
    book.moved("llm", 1, written=10)
    assert book.ended("llm", 1) == (pytest.approx(20.0), None)
    for total_j, requests_j in ((4.0, 14.0), (4.0, 18.0), (4.0, 20.0), (4.0, 20.0)):
        book.settle(total_j, 0.0, {"llm": total_j})
        assert book.totals.requests_j == pytest.approx(requests_j)
    assert book.totals.unattributed_j == pytest.approx(26.0 - 20.0)


def test_unknown_energy_is_unknown_and_not_zero() -> None:
    book = TokenBook()
    book.began("llm", 1)
    book.moved("llm", 1, written=3)
    book.settle(1.0, 0.0, {"llm": math.nan})
    assert book.ended("llm", 1) == (None, None)
    assert book.totals.unattributed_j == 1.0


def test_the_engines_do_not_pay_for_one_another() -> None:
    book = TokenBook()
    book.began("a", 1)
    book.began("b", 1)
    book.moved("a", 1, written=1)
    book.moved("b", 1, written=9)
    book.settle(10.0, 0.0, {"a": 7.0, "b": 3.0})
    assert (book.ended("a", 1)[0], book.ended("b", 1)[0]) == (7.0, 3.0)


def test_parts_that_exceed_the_total_and_requests_that_begin_twice_are_refused() -> None:
    book = TokenBook()
    with pytest.raises(DataError, match="do not fit"):
        book.settle(1.0, 0.8, {"llm": 0.3})
    with pytest.raises(DataError, match="do not fit"):
        book.settle(1.0, -0.1, {})
    book.began("llm", 1)
    with pytest.raises(DataError, match="twice"):
        book.began("llm", 1)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["begin", "read", "write", "settle", "end"]),
        st.integers(0, 3),
        st.floats(0, 50),
        st.floats(0, 1),
    ),
    max_size=60,
)


@given(STEPS)
def test_requests_idle_and_unattributed_are_the_total_whatever_happens(steps) -> None:
    book, here, paid = TokenBook(), set(), []
    for what, number, amount, ratio in steps:
        if what == "begin" and number not in here:
            here.add(number)
            book.began("llm", number)
        elif what in ("read", "write") and number in here:
            book.moved("llm", number, **{"read" if what == "read" else "written": int(amount)})
        elif what == "settle":
            lasts_s = {"llm": amount / 20} if number else None
            book.settle(amount, amount * ratio / 2, {"llm": amount * ratio / 2}, 0.1, lasts_s)
        elif what == "end" and number in here:
            here.remove(number)
            paid.append(book.ended("llm", number))
        assert book.totals.unattributed_j >= -1e-9, "what is charged ahead is not counted before it is read"
    for number in sorted(here):
        paid.append(book.ended("llm", number))
    book.settle(1e6, 0.0, {"llm": 1e6}, 0.1)  # more than was charged ahead
    totals = book.totals
    assert totals.requests_j == pytest.approx(sum(energy_j for energy_j, _ in paid), abs=1e-9)
    assert totals.requests_g == pytest.approx(0.1 * totals.requests_j, abs=1e-9)
    assert totals.unattributed_j >= -1e-9
    whole_j = totals.requests_j + totals.idle_j + totals.unattributed_j
    assert whole_j == pytest.approx(totals.total_j, abs=1e-9)


def played(begins, *, step_s=0.15, tokens=48, delay_s=0.8, watts=50.0):
    """Joules of equal requests in an engine whose meter is read with every token; each gets one a step.

    ``begins``: the step in which each enters the batch; nothing moves in the first ``delay_s``.
    """
    book, left, paid = TokenBook(), dict.fromkeys(range(len(begins)), tokens), {}

    def passes(seconds):
        book.settle(seconds * watts, 0.0, {"llm": seconds * watts}, lasts_s={"llm": seconds})

    for number in left:
        book.began("llm", number)
    passes(delay_s)
    step = 0
    while left:
        passes(step_s)
        for number in [each for each in left if begins[each] <= step]:
            book.moved("llm", number, read=40 if left[number] == tokens else 0, written=1)
            left[number] -= 1
            passes(0.0)
        for number in [each for each, tokens_left in left.items() if not tokens_left]:
            paid[number] = book.ended("llm", number)[0]
            del left[number]
        step += 1
    assert math.fsum(paid.values()) == pytest.approx(book.totals.total_j)
    return [paid[number] for number in range(len(begins))]


def test_of_equal_requests_the_first_in_the_batch_does_not_pay_for_the_step_before_the_others() -> None:
    """Seen in front of vLLM on a CPU: 16 requests at once, the first paid 2.4 times what the others did."""
    paid = played([0] + [1] * 15)
    assert paid == pytest.approx([sum(paid) / 16] * 16, rel=0.05)


def test_a_request_has_no_part_in_what_was_used_long_before_it_began() -> None:
    book = TokenBook()
    book.began("llm", 1)
    for _ in range(15):
        book.settle(10.0, 0.0, {"llm": 10.0}, lasts_s={"llm": 0.1})
    book.began("llm", 2)
    for number in (1, 2):
        book.moved("llm", number, written=4)
    book.settle(20.0, 0.0, {"llm": 20.0}, lasts_s={"llm": 0.2})
    assert book.totals.requests_j == pytest.approx(170.0)
    assert book.ended("llm", 2)[0] == pytest.approx(10.0)
    assert book.ended("llm", 1)[0] == pytest.approx(160.0)


def test_a_stretch_ends_after_some_seconds_and_tokens() -> None:
    """The lone answer is not charged for the batch that comes later, nor the batch for it."""
    book = TokenBook()
    book.began("llm", 1)
    for _ in range(30):
        book.moved("llm", 1, written=1)
        book.settle(10.0, 0.0, {"llm": 10.0}, lasts_s={"llm": 0.1})
    for number in range(2, 6):
        book.began("llm", number)
    for _ in range(30):
        for number in range(1, 6):
            book.moved("llm", number, written=1)
        book.settle(10.0, 0.0, {"llm": 10.0}, lasts_s={"llm": 0.1})
    assert [book.ended("llm", number)[0] for number in range(2, 6)] == pytest.approx([60.0] * 4, rel=0.01)
    assert book.ended("llm", 1)[0] == pytest.approx(300.0 + 60.0, rel=0.01)
