import pytest
from hypothesis import given
from hypothesis import strategies as st

from joulery.domain.errors import ConfigError
from joulery.policies.ordering import Aging
from joulery.policies.reranking import DECAY_RATIO, LEAST_ANSWERS, BacklogHistory, Reranking


def test_less_to_come_ranks_first_and_waiting_counts() -> None:
    policy = Reranking()
    aging = policy.aged(2.0, 100.0, 50.0)
    assert aging == Aging.boost(DECAY_RATIO * 100.0)
    keys = [policy.key_s(aging, 0.0, remaining_s) for remaining_s in (0.1, 1.0, 10.0, 1000.0)]
    assert keys == sorted(keys) and keys[-1] <= 0.0
    assert policy.key_s(aging, 5.0, 1.0) == pytest.approx(policy.key_s(aging, 0.0, 1.0) + 5.0)


def test_a_running_answer_gives_way_to_less_than_half_of_what_it_still_needs() -> None:
    policy = Reranking()
    aging = policy.aged(1.0, 60.0, 30.0)
    assert policy.interrupts(aging, (0.0, 0.9), (0.0, 2.0))
    assert not policy.interrupts(aging, (0.0, 1.1), (0.0, 2.0))
    assert not policy.interrupts(aging, (1000.0, 0.1), (0.0, 2.0)), "one that came much later does not overtake"
    assert Reranking(switch_ratio=1.0).interrupts(aging, (0.0, 1.9), (0.0, 2.0))


def test_a_stated_order_is_used_and_nonsense_is_refused() -> None:
    assert Reranking(Aging(0.5)).aged(9.0) == Aging(0.5)
    with pytest.raises(ConfigError, match="at least 1"):
        Reranking(switch_ratio=0.5)
    with pytest.raises(ConfigError, match="grace"):
        Reranking(Aging(0.1, 5.0))


def test_head_starts_grow_with_the_backlog_and_are_small_without_one() -> None:
    policy = Reranking()
    assert policy.aged(2.0) == policy.aged(2.0, 1.0, 1.0) == Aging.boost(LEAST_ANSWERS * 2.0)
    assert policy.aged(2.0, 300.0, 150.0).decay_s == pytest.approx(10 * policy.aged(2.0, 30.0, 15.0).decay_s)
    low, high, none = (policy.aged(2.0, 300.0, now_s).decay_s for now_s in (30.0, 300.0, 0.0))
    assert high == pytest.approx(DECAY_RATIO * 300.0 / 2**0.5) and high < low < none == 4 * DECAY_RATIO * 300.0
    assert Reranking(Aging.boost(9.0)).aged(2.0, 300.0) == Aging.boost(9.0), "a stated decay stays"


@given(st.lists(st.floats(0, 1e4), min_size=1, max_size=300))
def test_a_high_backlog_is_one_of_the_highest_of_those_seen(seen) -> None:
    backlog = BacklogHistory()
    assert backlog.high_s == 0.0
    for each_s in seen:
        backlog.add(each_s)
    assert backlog.high_s in seen
    assert sum(each_s > backlog.high_s for each_s in seen) <= 0.01 * len(seen)


def test_a_backlog_of_long_ago_is_forgotten() -> None:
    backlog = BacklogHistory()
    for each_s in (*[500.0] * 2000, *[1.0] * 1999):
        backlog.add(each_s)
    assert backlog.high_s == 1.0
    backlog.add(1.0)
    assert backlog.high_s == 1.0
