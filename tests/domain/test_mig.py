"""The MIG catalog against what the paper and the driver say."""

from dataclasses import replace

import pytest

from joulery.domain.errors import ConfigError
from joulery.domain.mig import A100_40GB
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
        with pytest.raises(ConfigError, match="cannot be cut"):
            replace(A100_40GB, partitions=(partition,))
    with pytest.raises(ConfigError, match="no MIG profile"):
        replace(A100_40GB, partitions=(("9g",),))
