"""What no plan costs less than: below the least of any plans whose costs are lines, equal to it where it is known."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from joulery.domain.gpu.envelope_floors import Floors

_FIGURE = st.floats(0.1, 100.0)
_PLANS = st.lists(st.tuples(_FIGURE, _FIGURE, st.floats(0.3, 2.0)), min_size=1, max_size=8)
_POINTS = st.lists(st.tuples(st.sampled_from([0.3, 0.5, 0.8, 1.1]), st.floats(0.01, 50.0)), min_size=1, max_size=9)
LEAST_W = 5.0


def least(plans, price, load):
    """The least cost of plans of a rent, standing watts and a greatest load, each request at the fewest watts."""
    costs = [rent + price * (watts + LEAST_W * load) for rent, watts, most in plans if load <= most]
    return min(costs, default=np.inf)


@settings(max_examples=150, deadline=None)
@given(plans=_PLANS, points=_POINTS, prices=st.lists(st.floats(0.0, 80.0), min_size=1, max_size=4))
def test_it_is_never_above_the_least_of_plans(plans, points, prices):
    plans = [*plans, (200.0, 300.0, 2.0)]  # something serves every load
    known = {}
    for load, price in points:
        known.setdefault(load, {})[price] = least(plans, price, load)
    floors = Floors({load: sorted(each.items()) for load, each in known.items()})
    loads = np.array([0.1, 0.3, 0.4, 0.8, 0.95, 1.3])
    found = floors.at(np.array(prices), LEAST_W * np.array(prices), loads)
    for at, load in enumerate(loads.tolist()):
        for index, price in enumerate(prices):
            assert found[at, index] <= least(plans, price, load) * (1 + 1e-9)


def test_it_is_what_is_known_at_a_point_and_rises_from_there():
    floors = Floors({0.5: [(1.0, 10.0), (3.0, 20.0)], 1.0: [(2.0, 40.0)]})
    prices = np.array([0.5, 1.0, 2.0, 3.0, 9.0])
    found = floors.at(prices, 4.0 * prices, np.array([0.25, 0.5, 0.75, 1.0]))
    assert found[0] == pytest.approx(4.0 * prices * 0.25), "below the first load, the requests alone"
    assert found[1] == pytest.approx([5.0, 10.0, 15.0, 20.0, 20.0])
    assert found[2] == pytest.approx(found[1] + prices), "what the requests between them take"
    assert found[3] == pytest.approx([10.0, 20.0, 40.0, 40.0, 40.0])
