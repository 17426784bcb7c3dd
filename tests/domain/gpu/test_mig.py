"""The MIG catalog against what the paper and the driver say."""

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from joulery.domain.errors import ConfigError
from joulery.domain.gpu.mig import A30_24GB, A100_40GB, MENUS, MigPlace, find_places, menu_for
from tests.data_folder import data_folder


def test_nineteen_partitions_of_which_fourteen_differ():
    assert len(A100_40GB.partitions) == 19
    assert len(A100_40GB.multisets) == 14
    assert len(set(A100_40GB.multisets)) == 14


def test_every_partition_fits_the_chip_and_is_one_nothing_can_be_added_to_or_a_published_one():
    for partition in A100_40GB.partitions:
        pieces = [A100_40GB[name] for name in partition]
        assert sum(piece.compute_slices for piece in pieces) in (6, 7)
        assert sum(piece.memory_slices for piece in pieces) in (7, 8)


def test_partitions_are_the_published_ones_in_their_order():
    lines = (data_folder("clover") / "mig_a100_partitions.csv").read_text().splitlines()[1:]
    published = [line.split(",") for line in lines]
    assert [row[2].split() for row in published] == [
        [A100_40GB[name].size for name in partition] for partition in A100_40GB.partitions
    ]
    assert sum(row[5] == "1" for row in published) == len(A100_40GB.multisets)


def test_multisets_are_largest_first_and_counts_count():
    assert A100_40GB.multisets[1] == ("4g.20gb", "3g.20gb")
    assert A100_40GB.counts(("1g.5gb", "2g.10gb", "1g.5gb")) == (0, 0, 0, 1, 2)
    assert A100_40GB["3g.20gb"].size == "3g"


def test_unknown_profiles_and_impossible_partitions_are_refused():
    with pytest.raises(ConfigError, match="5g"):
        A100_40GB["5g.20gb"]
    for partition in (("4g.20gb", "4g.20gb"), ("3g.20gb",) * 3, ("7g.40gb", "1g.5gb")):
        with pytest.raises(ConfigError, match="cannot be partitioned"):
            replace(A100_40GB, partitions=(partition,))
    with pytest.raises(ConfigError, match="no MIG profile"):
        replace(A100_40GB, partitions=(("9g",),))


@pytest.mark.parametrize("menu", MENUS, ids=lambda menu: menu.gpu)
def test_every_partition_of_every_menu_has_places(menu):
    for partition in menu.partitions:
        places = find_places(partition, menu.profiles, menu.compute_slices)
        assert sorted(place.profile for place in places) == sorted(partition)
        covered = [slice_ for place in places for slice_ in range(place.start, place.start + place.size)]
        assert len(covered) == len(set(covered)) and max(covered) < menu.memory_slices
        assert all(place.start in menu[place.profile].starts for place in places)


def ways(wanted, menu):
    """Every way to place instances, by trying all."""
    for starts in product(*(menu[name].starts for name in wanted)):
        places = [MigPlace(name, start, menu[name].memory_slices) for name, start in zip(wanted, starts, strict=True)]
        covered = [slice_ for place in places for slice_ in range(place.start, place.start + place.size)]
        if len(covered) == len(set(covered)):
            yield frozenset(places)


@given(
    old=st.lists(st.sampled_from(["2g.12gb", "1g.6gb"]), max_size=4),
    new=st.lists(st.sampled_from(["4g.24gb", "2g.12gb", "1g.6gb"]), min_size=1, max_size=4),
    data=st.data(),
)
def test_as_much_as_possible_stays_what_is_in_use_first(old, new, data):
    present = data.draw(st.sampled_from(list(ways(old, A30_24GB)) or [frozenset()]))
    used = frozenset(data.draw(st.lists(st.sampled_from(sorted(present)), unique=True)) if present else [])
    found = find_places(new, A30_24GB.profiles, 4, sorted(present), sorted(used))
    possible = list(ways(new, A30_24GB))
    if sum(A30_24GB[name].compute_slices for name in new) > 4 or not possible:
        assert found is None
        return
    best = max((len(used & way), len(present & way)) for way in possible)
    assert (len(used & set(found)), len(present & set(found))) == best


@pytest.mark.parametrize(
    ("name", "gpu"),
    [
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA A100 80GB PCIe", "A100-80GB"),
        ("NVIDIA H100 PCIe", "H100-80GB"),
        ("NVIDIA H200", "H200-141GB"),
        ("NVIDIA A30", "A30-24GB"),
        ("Tesla V100-SXM2-16GB", None),
        ("NVIDIA A10", None),
    ],
)
def test_the_drivers_names_find_their_menus(name, gpu):
    found = menu_for(name)
    assert (found.gpu if found else None) == gpu
