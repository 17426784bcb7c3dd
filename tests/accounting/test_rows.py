"""Folding, rolling up, adding: names change, joules stay."""

import math

import numpy as np
import pytest

from joulery.accounting.operations.align import align
from joulery.accounting.operations.edd import powers_w, tree
from joulery.accounting.operations.rows import Fold, added, fold_from, fold_name, folded, rolled_up
from joulery.domain.energy.tensor_footprint import TensorFootprint
from joulery.domain.errors import ConfigError, DataError
from joulery.domain.trace.events import EventTrace
from tests.accounting.fair_oracle import Event
from tests.accounting.worlds import World, accounted, metered

WATTS = {"CPU:0": [(0, 100.0)]}


def footprint(*rows: tuple[str, int], phases: tuple[str, ...] = ()) -> TensorFootprint:
    """One event after the other, of so many ticks each."""
    at, events = 0, []
    for op, ticks in rows:
        events.append((op, at, ticks))
        at += ticks
    names = sorted({op for op, _, _ in events})
    kinds = list(dict.fromkeys(phases)) or [""]
    trace = EventTrace(
        names,
        ["CPU:0"],
        kinds,
        op=[names.index(op) for op, _, _ in events],
        start_ns=[1000 * start for _, start, _ in events],
        dur_ns=[1000 * ticks for _, _, ticks in events],
        device=[0] * len(events),
        lane=[0] * len(events),
        phase=[kinds.index(phase) for phase in phases] or [0] * len(events),
    )
    return align(trace, {"CPU:0": [metered("CPU:0", [(0, 100.0)], at + 10)]}, (0, 1000 * (at + 10)))


@pytest.mark.parametrize(
    ("name", "folded_name"),
    [
        ("bert/encoder/layer_0/dense/mm", "bert/encoder/transformer/dense/mm"),
        ("bert/encoder/layer_10/dense/mm", "bert/encoder/transformer/dense/mm"),
        ("gpt/h_3/mm", "gpt/transformer/mm"),
        ("llama/layers_31/mm", "llama/transformer/mm"),
        ("vit/blocks.7/mm", "vit/transformer/mm"),
        ("x/block7/mm", "x/transformer/mm"),
        ("my_layer_1/mm", "my_layer_1/mm"),
        ("layer_1x/mm", "layer_1x/mm"),
        ("layer/mm", "layer/mm"),
        ("albert/layer_0@2/mm", "albert/transformer/mm"),
    ],
)
def test_whole_components_fold(name: str, folded_name: str) -> None:
    assert fold_name(name) == folded_name


def test_the_layers_of_the_paper_fold_and_add_up() -> None:
    got = folded(footprint(("e/layer_0/mm", 5), ("e/layer_1/mm", 3), ("e/layer_10/mm", 2), ("pool/mm", 4)))
    assert got.energy_by_op == pytest.approx({"e/transformer/mm": 10e-4, "pool/mm": 4e-4})
    assert dict(zip(got.op, got.count.tolist(), strict=True)) == {"e/transformer/mm": 3, "pool/mm": 1}
    assert got.median_ns[got.op.index("e/transformer/mm")] == 3000


def test_a_user_pattern() -> None:
    folds = (fold_from(r"group_(\d+)=group_k"), fold_from(r"stage(\d)=s\1"))
    assert fold_name("albert/group_3/stage2/mm", folds) == "albert/group_k/s2/mm"
    assert fold_name("group_3x", folds) == "group_3x"


def test_a_fold_without_a_name_leaves_the_component_out() -> None:
    folds = (fold_from("self|dense="), fold_from("ffn=intermediate"))
    assert fold_name("layer/attention/self/query/mm", folds) == "layer/attention/query/mm"
    assert fold_name("layer/ffn/dense/mm", folds) == "layer/intermediate/mm"
    assert fold_name("self/dense", folds) == "self/dense", "nothing would be left"


@pytest.mark.parametrize("text", ["abc", "=x", "=", "a=b/c", "(=x"])
def test_a_pattern_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        fold_from(text)


def test_roll_ups_keep_every_joule() -> None:
    whole = footprint(("n/layer_0/a/mm", 5), ("n/layer_0/b/mm", 3), ("n/layer_1/a/add", 2), ("n/emb", 4), ("loss", 1))
    expected = {
        "op": 5,
        "module": {"n/layer_0/a", "n/layer_0/b", "n/layer_1/a", "n", "loss"},
        "layer": {"n/layer_0", "n/layer_1", "n", "loss"},
        "phase": {"other"},
    }
    for by, names in expected.items():
        got = rolled_up(whole, by)
        assert math.fsum(got.energy_j) == pytest.approx(math.fsum(whole.energy_j), rel=1e-12)
        assert int(got.runtime_ns.sum()) == int(whole.runtime_ns.sum())
        assert (len(got) if isinstance(names, int) else set(got.op)) == names
        assert got.devices == whole.devices
    assert set(rolled_up(whole, "op", depth=1).op) == {"n", "loss"}
    assert set(rolled_up(whole, "module", depth=2).op) == {"n/layer_0", "n/layer_1", "n", "loss"}


def test_phases_stay_apart_until_rolled_up() -> None:
    got = footprint(("a/mm", 5), ("a/mm", 3), phases=("forward", "backward"))
    assert [(op, phase) for op, phase in zip(got.op, got.phase, strict=True)] == [
        ("a/mm", "backward"),
        ("a/mm", "forward"),
    ]
    assert rolled_up(got, "phase").energy_by_op == pytest.approx({"forward": 5e-4, "backward": 3e-4})


@pytest.mark.parametrize(("by", "depth"), [("color", None), ("op", 0)])
def test_a_grouping_that_is_none_is_refused(by: str, depth: int | None) -> None:
    with pytest.raises(ConfigError):
        rolled_up(footprint(("a", 1)), by, depth)


def test_sessions_add_up() -> None:
    one, other = footprint(("a", 5), ("b", 3)), footprint(("b", 2), ("c", 1))
    both = added([one, other])
    assert both.energy_by_op == pytest.approx({"a": 5e-4, "b": 5e-4, "c": 1e-4})
    assert both.devices[0].total_j == pytest.approx(one.devices[0].total_j + other.devices[0].total_j)
    assert both.count.tolist() == [1, 2, 1]
    assert added([one]) is one
    with pytest.raises(DataError, match="no session"):
        added([])


def test_unmetered_sessions_stay_unknown() -> None:
    blind = accounted(World((Event("a", 0, 5, "GPU:0"),), {}, (0, 10)))
    both = added([blind, blind])
    assert math.isnan(both.energy_j[0]) and math.isnan(both.devices[0].total_j)
    assert both.runtime_ns.tolist() == [10_000]


# ---- the tree


def test_the_tree_adds_up_and_keeps_an_own_part() -> None:
    got = footprint(("n/b", 4), ("n/a/mm", 5), ("n/a", 2), ("n/a/add", 3), ("x", 6))
    top = tree(got, root="program")
    assert top.name == "program" and top.energy_j == pytest.approx(20e-4)
    assert [child.name for child in top.children] == ["n", "x"], "in the order they first ran"
    n = top.at("n")
    assert n is not None and [child.name for child in n.children] == ["b", "a"]
    a = top.at("n/a")
    assert a is not None and {c.name: c.energy_j for c in a.children} == pytest.approx(
        {"mm": 5e-4, "<self>": 2e-4, "add": 3e-4}
    )
    assert [c.share_ratio for c in a.children] == pytest.approx([0.5, 0.2, 0.3])
    assert (a.count, a.runtime_s) == (3, pytest.approx(10e-6))
    assert top.at("n/nothing/below") is None
    for _, node in top.walk():
        if node.children:
            assert math.fsum(child.energy_j for child in node.children) == pytest.approx(node.energy_j, rel=1e-12)
            assert math.fsum(child.share_ratio for child in node.children) == pytest.approx(1.0)


def test_a_self_that_is_already_there_is_joined() -> None:
    top = tree(footprint(("n/<self>", 4), ("n", 5), ("n/mm", 1)))
    assert {c.name: c.energy_j for c in top.children[0].children} == pytest.approx({"<self>": 9e-4, "mm": 1e-4})


def test_trees_of_one_phase_and_of_any_depth() -> None:
    got = footprint(("a/mm", 5), ("b/mm", 3), phases=("forward", "backward"))
    assert [child.name for child in tree(got, phase="forward").children] == ["a"]
    assert tree(got, device="GPU:9").children == ()
    deep = tree(footprint(("/".join("d" * 3000), 1)))
    assert sum(1 for _ in deep.walk()) == 3001


def test_two_powers_and_none_for_what_never_ran() -> None:
    got = accounted(World((Event("a", 0, 60), Event("b", 0, 60), Event("c", 70, 70)), WATTS, (0, 100)))
    shared, device = powers_w(got)
    np.testing.assert_allclose(shared[:2], [50, 50])
    np.testing.assert_allclose(device[:2], [100, 100])
    assert math.isnan(shared[2]) and math.isnan(device[2])


def test_a_fold_may_be_given_directly() -> None:
    import re

    got = folded(footprint(("g_1/mm", 1), ("g_2/mm", 2)), (Fold(re.compile(r"g_\d"), "g"),))
    assert got.energy_by_op == pytest.approx({"g/mm": 3e-4})
