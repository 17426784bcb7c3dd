"""The energy dependency diagram: dataflow among siblings."""

import numpy as np

from joulery.accounting.operations.align import align
from joulery.accounting.operations.edd import Node, tree
from joulery.accounting.operations.rows import added, folded
from joulery.domain.energy.tensor_footprint import TensorFootprint
from joulery.domain.trace.events import EventTrace, joined, shifted, with_devices

OPS = (
    "net/embed/lookup",
    "net/layer_0/attention/mm",
    "net/layer_0/ffn/mm",
    "net/layer_1/attention/mm",
    "net/layer_1/ffn/mm",
    "net/layer_1",
)
FEEDS = frozenset(
    {
        (OPS[0], OPS[1]),
        (OPS[1], OPS[2]),
        (OPS[2], OPS[3]),
        (OPS[0], OPS[3]),
        (OPS[3], OPS[4]),
        (OPS[4], OPS[5]),
        ("net/gone/mm", OPS[4]),
        (OPS[4], "elsewhere"),
    }
)


def trace() -> EventTrace:
    count = len(OPS)
    return EventTrace(
        OPS,
        ["CPU:0"],
        ["forward"],
        op=range(count),
        start_ns=np.arange(count) * 10,
        dur_ns=[10] * count,
        device=[0] * count,
        lane=[0] * count,
        phase=[0] * count,
        feeds=FEEDS,
    )


def footprint(of: EventTrace) -> TensorFootprint:
    return align(of, {}, (0, 1000))


def feeds(node: Node, path: str) -> tuple[tuple[str, str], ...]:
    found = node.at(path)
    assert found is not None
    return found.feeds


def test_an_arrow_joins_the_siblings_under_which_two_operations_part() -> None:
    top = tree(footprint(trace()))
    assert feeds(top, "net") == (("embed", "layer_0"), ("embed", "layer_1"), ("layer_0", "layer_1"))
    assert feeds(top, "net/layer_0") == (("attention", "ffn"),)
    assert feeds(top, "net/layer_1") == (("attention", "ffn"), ("ffn", "<self>"))
    assert feeds(top, "") == (), "what is not in the footprint has no arrow"


def test_layers_folded_into_one_do_not_feed_themselves() -> None:
    top = tree(folded(footprint(trace())))
    assert feeds(top, "net") == (("embed", "transformer"),)
    assert feeds(top, "net/transformer")[0] == ("attention", "ffn")
    assert ("ffn", "attention") not in feeds(top, "net/transformer"), "that leads from one layer into the next"


def test_the_dataflow_survives_what_is_done_to_traces_and_sessions() -> None:
    moved = with_devices(shifted(trace(), 5), ["cpu:0"])
    assert moved.feeds == FEEDS and joined([moved, trace()]).feeds == FEEDS
    assert added([footprint(moved), footprint(trace())]).feeds == FEEDS


def test_producers_come_before_those_they_feed_whenever_they_ran() -> None:
    early = trace()
    late = EventTrace(
        OPS[:3],
        ["CPU:0"],
        ["forward"],
        op=[2, 1, 0],
        start_ns=[0, 10, 20],
        dur_ns=[10] * 3,
        device=[0] * 3,
        lane=[0] * 3,
        phase=[0] * 3,
        feeds=early.feeds,
    )
    net = tree(footprint(late)).at("net")
    assert net is not None and [child.name for child in net.children] == ["embed", "layer_0"]
    assert [child.name for child in net.children[1].children] == ["attention", "ffn"]


def test_without_a_dataflow_there_is_none() -> None:
    plain = EventTrace(
        ["a/b", "a/c"],
        ["CPU"],
        [""],
        **{key: [0, 1] for key in ("op", "start_ns", "dur_ns")},
        device=[0, 0],
        lane=[0, 0],
        phase=[0, 0],
    )
    assert all(node.feeds == () for _, node in tree(footprint(plain)).walk())


def test_the_node_above_others_adds_them_up_and_shares_its_energy_among_them() -> None:
    leaf = Node("x", 0.0, 1.0, 0.5, 2, 0.25)
    top = Node.over("all", [Node("a", 3.0, 1.0, 1.0, 4, 0.0, (leaf,), (("x", "x"),)), Node("b", 1.0, 1.0, 2.0, 1, 0.5)])
    assert (top.name, top.energy_j, top.share_ratio) == ("all", 4.0, 1.0)
    assert (top.runtime_s, top.count, top.uncovered_s, top.feeds) == (3.0, 5, 0.5, ())
    assert [(child.name, child.share_ratio) for child in top.children] == [("a", 0.75), ("b", 0.25)]
    assert (top.children[0].children, top.children[0].feeds) == ((leaf,), (("x", "x"),))
    assert [child.share_ratio for child in Node.over("none", [leaf, leaf]).children] == [0.0, 0.0]
