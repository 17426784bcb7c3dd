import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from joulery.domain.errors import ConfigError, InfeasibleError
from joulery.policies.placement.pipelines.partition import split_stages


def exhaustive(times, stages, transfers):
    """The least slowest stage over every cut."""
    n, best = len(times), float("inf")
    for inner in itertools.combinations(range(1, n), stages - 1):
        bounds = (0, *inner, n)
        slowest = max(sum(times[a:b]) + (transfers[a - 1] if a else 0.0) for a, b in itertools.pairwise(bounds))
        best = min(best, slowest)
    return best


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_equals_exhaustive_search(data) -> None:
    n = data.draw(st.integers(1, 14))
    stages = data.draw(st.integers(1, min(n, 5)))
    times = data.draw(st.lists(st.floats(0, 10), min_size=n, max_size=n))
    transfers = data.draw(st.lists(st.floats(0, 2), min_size=n - 1, max_size=n - 1))
    cut = split_stages(times, stages, transfers)
    assert cut.bounds[0] == 0
    assert cut.bounds[-1] == n
    assert all(a < b for a, b in itertools.pairwise(cut.bounds))
    assert len(cut.latency_s) == stages
    assert max(cut.latency_s) == pytest.approx(exhaustive(times, stages, transfers), abs=1e-9)
    for (a, b), latency in zip(itertools.pairwise(cut.bounds), cut.latency_s, strict=True):
        assert latency == pytest.approx(sum(times[a:b]) + (transfers[a - 1] if a else 0.0), abs=1e-9)


def test_a_dear_transfer_moves_the_cut() -> None:
    assert split_stages([1, 1, 1, 1], 2).bounds == (0, 2, 4)
    assert split_stages([1, 1, 1, 1], 2, [0, 5, 0]).bounds in {(0, 1, 4), (0, 3, 4)}


def test_bad_input() -> None:
    with pytest.raises(InfeasibleError, match="2 units cannot fill 3 stages") as caught:
        split_stages([1.0, 1.0], 3)
    assert caught.value.binding == "units"
    for times, stages, transfers in (([], 1, []), ([1.0], 0, []), ([1.0, 1.0], 1, [1.0, 1.0]), ([-1.0], 1, [])):
        with pytest.raises(ConfigError, match="cannot be cut into stages"):
            split_stages(times, stages, transfers)
