import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from joulery.domain.errors import InfeasibleError
from joulery.domain.gpu.layout import Layout
from joulery.policies.serving.search.layout_space import core_partitions, cpu_slices, layouts


def test_two_cores_three_variants_are_nine_layouts():
    partitions = core_partitions(2)
    assert partitions == ((2,), (1, 1))
    found = layouts([cpu_slices(p) for p in partitions], ["a", "b", "c"])
    assert len(found) == 3 + 6
    assert [str(layout) for layout in found[:4]] == [
        "a on cpu:2",
        "b on cpu:2",
        "c on cpu:2",
        "a on cpu:1 | a on cpu:1",
    ]


@given(st.integers(1, 20))
def test_partitions_use_every_core_once(cores):
    found = core_partitions(cores)
    assert all(sum(pieces) == cores for pieces in found)
    assert len(set(found)) == len(found)
    assert all(piece & (piece - 1) == 0 for pieces in found for piece in pieces)
    assert (1,) * cores in found


@given(st.lists(st.integers(1, 3), min_size=1, max_size=5), st.integers(1, 4))
def test_layouts_are_all_multisets_of_variants_over_equal_slices(partition, variants):
    found = layouts([cpu_slices(partition)], "abcd"[:variants])
    sizes = [partition.count(size) for size in set(partition)]
    assert len(found) == math.prod(math.comb(variants + n - 1, n) for n in sizes)
    assert len({layout.instances for layout in found}) == len(found)
    assert all(sorted(p.cores for p in layout.slices) == sorted(partition) for layout in found)


def test_equal_partitions_count_once():
    assert layouts([cpu_slices((2, 1)), cpu_slices((1, 2))], ["a"]) == layouts([cpu_slices((1, 2))], ["a"])
    assert all(isinstance(layout, Layout) for layout in layouts([cpu_slices((1,))], ["a"]))


def test_too_many_to_try_is_said():
    with pytest.raises(InfeasibleError, match="more than 5000 layouts") as caught:
        layouts([cpu_slices(p) for p in core_partitions(32)], "abcdef")
    assert "fewer" in caught.value.hint
