import pytest

from joulery.domain.errors import ConfigError
from joulery.policies.ordering import Aging
from joulery.policies.reranking import DECAY_ANSWERS, Reranking


def test_less_to_come_ranks_first_and_waiting_counts() -> None:
    policy = Reranking()
    aging = policy.aged(2.0)
    assert aging == Aging.boost(DECAY_ANSWERS * 2.0)
    keys = [policy.key_s(aging, 0.0, remaining_s) for remaining_s in (0.1, 1.0, 10.0, 1000.0)]
    assert keys == sorted(keys) and keys[-1] <= 0.0
    assert policy.key_s(aging, 5.0, 1.0) == pytest.approx(policy.key_s(aging, 0.0, 1.0) + 5.0)


def test_a_running_answer_gives_way_to_less_than_half_of_what_it_still_needs() -> None:
    policy = Reranking()
    aging = policy.aged(1.0)
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
