"""The order of nodes by the intensity of their grids."""

import math

from hypothesis import given
from hypothesis import strategies as st

from joulery.policies.serving.node_order import NodeOrder

ORDER = NodeOrder(0.05)
VALUES = st.one_of(st.floats(0.0, 2000.0), st.just(math.nan))
GRIDS = st.dictionaries(st.sampled_from("abcd"), VALUES, min_size=1)


def test_the_cleanest_first_equals_together_and_the_unknown_last():
    assert ORDER.step({"a": 300.0, "b": 50.0, "c": 51.0, "d": math.nan}, {}) == {"b": 0, "c": 0, "a": 1, "d": 2}
    assert ORDER.step({"a": math.nan, "b": math.nan}, {}) == {"a": 0, "b": 0}
    assert ORDER.step({"a": 0.0, "b": 0.0, "c": 1.0}, {}) == {"a": 0, "b": 0, "c": 1}


def test_an_order_stays_until_it_is_wrong_by_more_than_the_margin():
    before = {"a": 0, "b": 1}
    assert ORDER.step({"a": 104.0, "b": 100.0}, before) == before
    assert ORDER.step({"a": 106.0, "b": 100.0}, before) == {"b": 0, "a": 1}
    assert ORDER.step({"a": math.nan, "b": 100.0}, before) == {"b": 0, "a": 1}
    assert ORDER.step({"a": 100.0, "b": 50.0, "c": 10.0}, before) == {"c": 0, "b": 1, "a": 2}, "a node more"


@given(GRIDS, GRIDS)
def test_no_node_comes_before_one_that_is_cleaner_beyond_the_margin(old, new):
    ranks = ORDER.step(new, ORDER.step(old, {}))
    assert ranks.keys() == new.keys() and min(ranks.values()) == 0
    assert sorted(set(ranks.values())) == list(range(len(set(ranks.values()))))
    for one, g_per_kwh in new.items():
        for other, cleaner in new.items():
            if ranks[one] < ranks[other] and cleaner < g_per_kwh:
                assert g_per_kwh <= cleaner * 1.05 * (1 + 1e-9)
            if math.isnan(g_per_kwh) and not math.isnan(cleaner):
                assert ranks[other] < ranks[one]
    assert ORDER.step(new, ranks) == ranks
