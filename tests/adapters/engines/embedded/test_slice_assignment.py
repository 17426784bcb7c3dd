import pytest
from hypothesis import given
from hypothesis import strategies as st

from joulery.adapters.engines.embedded.slice_assignment import assign_cores
from joulery.domain.errors import CapabilityError
from joulery.domain.serving.service import Slice, SliceKind


def cpu(cores: int, share_ratio: float = 1.0) -> Slice:
    return Slice(SliceKind.CPU, cores=cores, share_ratio=share_ratio)


def test_slices_get_cores_of_their_own_while_there_are_any() -> None:
    assert assign_cores([cpu(1), cpu(2), cpu(1)], [0, 1, 2, 3]) == [(2,), (0, 1), (3,)]


def test_then_they_share_the_least_loaded() -> None:
    assert assign_cores([cpu(1), cpu(1), cpu(1)], [4, 7]) == [(4,), (7,), (4,)]
    assert assign_cores([cpu(1)], [0, 1], taken=[((0,), 0.5), ((1,), 0.25)]) == [(1,)]
    assert assign_cores([cpu(1)], [0, 1], taken=[((9,), 1.0)]) == [(0,)]


@given(st.lists(st.integers(1, 4), max_size=8), st.sets(st.integers(0, 63), min_size=4, max_size=9))
def test_every_slice_gets_its_number_and_the_load_stays_level(sizes: list[int], cores: set[int]) -> None:
    given_cores = assign_cores([cpu(n) for n in sizes], sorted(cores))
    assert [len(set(bound)) for bound in given_cores] == sizes
    load = {core: sum(core in bound for bound in given_cores) for core in cores}
    assert sum(load.values()) == sum(sizes)
    assert max(load.values()) - min(load.values()) <= 1


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(CapabilityError, match="3 cores does not fit: 2"):
        assign_cores([cpu(3)], [0, 1])
    with pytest.raises(CapabilityError, match="no whole slice"):
        assign_cores([Slice(SliceKind.WHOLE)], [0, 1])
