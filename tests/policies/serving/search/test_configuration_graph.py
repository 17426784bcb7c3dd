"""The configuration graph: sizes of the spaces, neighbours, additivity, proposals."""

from collections import Counter
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from joulery.domain.errors import ConfigError, InfeasibleError
from joulery.domain.gpu.mig import A100_40GB, GIB, MigMenu, MigProfile
from joulery.policies.serving.search.configuration_graph import one_gpu, published_odds, published_partitions

THREE, FOUR = one_gpu(A100_40GB, ("l", "x", "6")), one_gpu(A100_40GB, ("0", "1", "2", "3"))
SMALL_MENU = MigMenu(
    "toy",
    3,
    3,
    (MigProfile("3g", 3, 3, 3 * GIB), MigProfile("2g", 2, 2, 2 * GIB), MigProfile("1g", 1, 1, GIB)),
    (("3g",), ("2g", "1g"), ("1g", "2g"), ("1g", "1g", "1g")),
    "made up",
)


@pytest.mark.parametrize(("space", "graphs", "neighbours"), [(THREE, 438, 89), (FOUR, 1282, 197)])
def test_sizes_of_the_published_spaces(space, graphs, neighbours):
    assert len(space) == graphs
    base = space.index(space.vector([(space.variants[-1], "7g.40gb")]))
    assert len(space.neighbours(base)) == neighbours


@pytest.mark.parametrize(("space", "least", "median", "most"), [(THREE, 11, 85, 137), (FOUR, 17, 162, 264)])
def test_neighbourhood_sizes(space, least, median, most):
    sizes = sorted(len(space.neighbours(row)) for row in range(len(space)))
    assert (sizes[0], np.median(sizes), sizes[-1]) == (least, median, most)


def test_edges_that_do_not_fit_are_never_part_of_a_configuration():
    space = one_gpu(A100_40GB, ("l", "x", "6"), {("6", "1g.5gb")})
    assert len(space) == 208
    assert not any(("6", "1g.5gb") in space.instances(row) for row in space.graphs)
    assert {tuple(row) for row in space.graphs.tolist()} < {tuple(row) for row in THREE.graphs.tolist()}


def test_two_gpus_are_the_sums_of_one():
    assert len(THREE.plus(THREE)) == 18_688
    assert len(FOUR.plus(FOUR)) == 107_825


def test_sums_equal_brute_force_and_keep_their_gpus_placeable():
    left = one_gpu(SMALL_MENU, ("a", "b"), {("b", "1g")})
    right = one_gpu(SMALL_MENU, ("a", "b"))
    both = left.plus(right)
    expected = {tuple(a + b) for a, b in product(left.graphs, right.graphs)}
    assert [tuple(row) for row in both.graphs] == sorted(expected)
    assert [tuple(row) for row in right.plus(left).graphs] == sorted(expected)
    three = both.plus(right)
    assert {tuple(row) for row in three.graphs} == {
        tuple(a + b + c) for a, b, c in product(left.graphs, right.graphs, right.graphs)
    }


def test_every_configuration_is_placeable_and_every_placement_a_configuration():
    rows = {
        THREE.vector(list(zip(models, partition, strict=True)))
        for partition in A100_40GB.partitions
        for models in product(THREE.variants, repeat=len(partition))
    }
    assert rows == {tuple(row) for row in THREE.graphs.tolist()}


@given(st.integers(0, len(FOUR) - 1))
def test_a_row_is_its_instances_and_back(row):
    instances = FOUR.instances(FOUR.graphs[row])
    assert FOUR.index(FOUR.vector(instances)) == row
    assert tuple(sorted(Counter(p for _, p in instances).items())) in {
        tuple(sorted(Counter(partition).items())) for partition in A100_40GB.partitions
    }
    assert FOUR.describe(FOUR.graphs[row]).count(" on ") == len(instances)


@given(st.integers(0, len(THREE) - 1), st.integers(0, 8))
def test_neighbours_are_all_and_only_the_near(row, distance):
    near = set(THREE.neighbours(row, distance).tolist())
    for other, graph in enumerate(THREE.graphs):
        apart = int(np.abs(graph - THREE.graphs[row]).sum())
        assert (other in near) == (0 < apart <= distance)


def test_a_distance_by_hand():
    """One instance on the whole GPU gives way to seven: eight edge units."""
    left = FOUR.vector([("3", "7g.40gb")])
    right = FOUR.vector([("0", "1g.5gb")] * 7)
    assert sum(abs(a - b) for a, b in zip(left, right, strict=True)) == 8


def test_published_odds_are_those_of_drawing_a_partition_then_letters():
    """Half a million draws of the published kind."""
    odds, rng = published_odds(THREE, A100_40GB), np.random.default_rng(0)
    partitions = published_partitions(A100_40GB)
    assert len(partitions) == 15
    assert len({tuple(sorted(partition)) for partition in partitions}) == 14
    draws = Counter()
    for number, count in enumerate(np.bincount(rng.integers(15, size=500_000))):
        letters = rng.integers(3, size=(count, len(partitions[number])))
        for slot, profile in enumerate(partitions[number]):
            column = A100_40GB.profiles.index(A100_40GB[profile])
            letters[:, slot] = letters[:, slot] * 5 + column
        vectors = np.zeros((count, 15), int)
        np.add.at(vectors, (np.arange(count)[:, None], letters), 1)
        draws.update(map(tuple, vectors.tolist()))
    seen = np.array([draws[tuple(row)] for row in THREE.graphs.tolist()])
    assert seen.sum() == 500_000
    expected = 500_000 * odds
    assert float(np.sum((seen - expected) ** 2 / expected)) < 437 + 5 * np.sqrt(2 * 437)


def test_odds_leave_out_what_cannot_run_and_other_menus_count_each_partition_once():
    space = one_gpu(A100_40GB, ("l", "x", "6"), {("6", "1g.5gb")})
    odds = published_odds(space, A100_40GB)
    assert odds.sum() == pytest.approx(1.0)
    assert odds.min() > 0
    assert published_partitions(SMALL_MENU) == (("3g",), ("2g", "1g"), ("1g", "1g", "1g"))
    toy = one_gpu(SMALL_MENU, ("a", "b"))
    whole = toy.index(toy.vector([("a", "3g")]))
    assert published_odds(toy, SMALL_MENU)[whole] == pytest.approx(1 / 3 / 2)


def test_configurations_no_partition_carries_are_refused():
    with pytest.raises(InfeasibleError, match="no partition carries"):
        THREE.index(THREE.vector([("l", "4g.20gb"), ("l", "4g.20gb")]))
    with pytest.raises(ConfigError, match="no edge"):
        THREE.vector([("7", "7g.40gb")])
    with pytest.raises(ConfigError, match="no edge"):
        THREE.vector([("l", "5g")])
    with pytest.raises(ConfigError, match="same variants"):
        THREE.plus(FOUR)
    every = {("l", profile.name) for profile in A100_40GB.profiles}
    with pytest.raises(InfeasibleError, match="no variant fits"):
        one_gpu(A100_40GB, ("l",), every)


def test_a_space_too_large_to_enumerate_says_so():
    many = one_gpu(SMALL_MENU, tuple("abcdefghij"))
    total = many
    with pytest.raises(InfeasibleError, match="too many edges"):
        for _ in range(4):
            total = total.plus(many)
