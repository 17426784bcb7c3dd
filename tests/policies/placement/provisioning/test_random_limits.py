"""Limits of batches of random requests: the same wherever the search begins, and just short enough."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from joulery.perf.queues.batch_queue import late_ratio
from joulery.policies.placement.provisioning import random_limits
from joulery.policies.placement.provisioning.random_limits import KnownLimits, random_limit_ms

LATE = 0.01


def shape(batch):
    return [(1 + size) / (1 + batch) for size in range(1, batch + 1)]


@settings(max_examples=40, deadline=None)
@given(
    rates=st.lists(st.floats(5.0, 400.0), min_size=2, max_size=3),
    batch=st.sampled_from([1, 2, 8]),
    scv=st.sampled_from([0.5, 1.0, 2.0]),
    deadline_ms=st.floats(10.0, 60.0),
)
def test_a_search_that_begins_at_another_rate_ends_at_the_same(rates, batch, scv, deadline_ms):
    known = KnownLimits()
    for rate in rates:
        one = random_limit_ms(rate, scv, shape(batch), 0.1, deadline_ms, LATE, known, "one")
        assert one == pytest.approx(random_limit_ms(rate, scv, shape(batch), 0.1, deadline_ms, LATE), rel=1e-12)


def test_it_is_just_short_enough():
    def late(full_ms):
        times_s = [(0.1 * (size + 1) + full_ms * part) / 1e3 for size, part in enumerate(shape(4))]
        return late_ratio(200.0, 1.0, times_s, 0.03)

    limit = random_limit_ms(200.0, 1.0, shape(4), 0.1, 30.0, LATE)
    assert late(limit) <= LATE < late(limit + 20.0 / 1024 * 1.01)


def test_a_deadline_below_the_transfer_leaves_nothing_wherever_it_begins():
    known = KnownLimits()
    assert random_limit_ms(10.0, 1.0, [1.0], 5.0, 4.0, LATE) == 0.0
    assert random_limit_ms(10.0, 1.0, [1.0], 0.1, 40.0, LATE, known, "one") > 0
    assert random_limit_ms(10.0, 1.0, [1.0], 50.0, 40.0, LATE, known, "other") == 0.0
    assert random_limit_ms(11.0, 1.0, [1.0], 50.0, 40.0, LATE, known, "other") == 0.0
    assert random_limit_ms(10.0, 1.0, [1.0], 0.1, 40.0, LATE, known, "one") > 0


def test_a_limit_is_sought_in_few_tries_and_the_same_one_never_twice(monkeypatch):
    tries = []
    seen = random_limits.late_ratio
    monkeypatch.setattr(random_limits, "late_ratio", lambda *args: tries.append(args) or seen(*args))
    known = KnownLimits()
    for count, rate in enumerate((200.0, 202.0, 204.0)):
        tries.clear()
        limit = random_limit_ms(rate, 1.0, shape(4), 0.1, 30.0, LATE, known, "one")
        assert len(tries) <= (3 if count else 9)
        tries.clear()
        assert random_limit_ms(rate, 1.0, shape(4), 0.1, 30.0, LATE, known, "one") == limit
        assert not tries


def test_without_known_limits_too_the_same_one_is_sought_once_and_others_by_themselves(monkeypatch):
    tries = []
    seen = random_limits.late_ratio
    monkeypatch.setattr(random_limits, "late_ratio", lambda *args: tries.append(args) or seen(*args))
    asked = (211.0, 1.0, shape(4), 0.1, 30.0, LATE)
    limit = random_limit_ms(*asked)
    tries.clear()
    assert random_limit_ms(*asked) == limit
    assert not tries
    for at, other in enumerate((212.0, 2.0, shape(8), 0.2, 31.0, 0.02)):
        tries.clear()
        random_limit_ms(*asked[:at], other, *asked[at + 1 :])
        assert tries, at


def test_limits_kept_are_those_asked_for_last():
    known = KnownLimits()
    for rate in range(1, 200):
        known.keep("one", float(rate), rate)
    assert known.exactly("one", 199.0) == 199 and known.exactly("one", 1.0) is None
    assert known.expected("one", 200.0) == 200 and known.expected("other", 1.0) == 0
