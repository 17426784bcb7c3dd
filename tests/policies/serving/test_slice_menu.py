"""Cuts of cores and GPUs in the form of a MIG menu."""

from joulery.domain.gpu.mig import GIB
from joulery.domain.serving.service import Slice
from joulery.policies.serving.search.layout_space import size_of, slice_menu, unfit_edges


def test_sizes_are_cores_slices_percent_or_one() -> None:
    assert [size_of(Slice.parse(text)) for text in ("cpu:2", "3g.20gb", "mps:0.375", "whole")] == [2, 3, 38, 1]


def test_mig_slices_keep_their_memory_and_what_does_not_fit_is_left_out() -> None:
    cuts = [[Slice.parse("7g.40gb")], [Slice.parse("4g.20gb"), Slice.parse("3g.20gb")]]
    menu = slice_menu(cuts)
    assert menu.partitions == (("7g.40gb",), ("4g.20gb", "3g.20gb"))
    assert [(one.name, one.compute_slices, one.memory_bytes // GIB) for one in menu.profiles] == [
        ("7g.40gb", 7, 40),
        ("4g.20gb", 4, 20),
        ("3g.20gb", 3, 20),
    ]
    assert unfit_edges(menu, {"huge": 30 * GIB, "unknown": 0}) == (("huge", "4g.20gb"), ("huge", "3g.20gb"))


def test_shares_of_a_gpu() -> None:
    menu = slice_menu([[Slice.parse("mps:1")], [Slice.parse("mps:0.6"), Slice.parse("mps:0.4")]])
    assert [(one.name, one.compute_slices, one.memory_bytes) for one in menu.profiles] == [
        ("mps:1", 100, 0),
        ("mps:0.6", 60, 0),
        ("mps:0.4", 40, 0),
    ]
