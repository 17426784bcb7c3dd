"""Event columns: checked, renamed, moved, put together."""

import pytest

from joulery.domain.errors import DataError
from joulery.domain.trace.events import EventTrace, joined, module_components, qualified, shifted, with_devices


def trace(**changes) -> EventTrace:
    columns = {
        "op": [0, 1],
        "start_ns": [5, 7],
        "dur_ns": [3, 0],
        "device": [0, 1],
        "lane": [0, -1],
        "phase": [0, 0],
        **changes,
    }
    return EventTrace(["a", "b"], ["CPU", "GPU:0"], [""], **columns, composite=frozenset({"b"}), notes=["n"])


def test_columns_are_read_only_and_the_hull_spans_them() -> None:
    one = trace()
    assert one.extent_ns == (5, 8) and one.end_ns.tolist() == [8, 7] and len(one) == 2
    with pytest.raises(ValueError, match="read-only"):
        one.op[0] = 1
    empty = EventTrace([], [], [], op=[], start_ns=[], dur_ns=[], device=[], lane=[], phase=[])
    assert empty.extent_ns is None


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"op": [0]}, "differ in length"),
        ({"op": [0, 2]}, "op 2 is outside its table of 2"),
        ({"device": [0, -1]}, "device -1 is outside"),
        ({"phase": [0, 1]}, "phase 1 is outside"),
        ({"dur_ns": [3, -4]}, "event 1 ends 4 ns before it starts"),
        ({"start_ns": [5, 2**62 + 1]}, "beyond any clock"),
    ],
)
def test_bad_columns_are_refused(changes: dict, says: str) -> None:
    with pytest.raises(DataError, match=says):
        trace(**changes)


def test_devices_get_new_names_and_equal_ones_become_one() -> None:
    one = with_devices(trace(), ["x", "x"], ["m"])
    assert one.devices == ("x",) and one.device.tolist() == [0, 0] and one.notes == ("m",)
    assert with_devices(trace(), ["x", "y"]).notes == ("n",)


def test_a_trace_can_be_moved() -> None:
    assert shifted(trace(), -5).start_ns.tolist() == [0, 2]


def test_traces_are_joined_and_lanes_stay_apart() -> None:
    other = EventTrace(
        ["b", "c"],
        ["GPU:0"],
        ["f"],
        op=[0, 1],
        start_ns=[1, 2],
        dur_ns=[1, 1],
        device=[0, 0],
        lane=[0, 0],
        phase=[0, 0],
    )
    both = joined([trace(), other])
    assert both.ops == ("a", "b", "c") and both.devices == ("CPU", "GPU:0") and both.phases == ("", "f")
    assert both.op.tolist() == [0, 1, 1, 2] and both.device.tolist() == [0, 1, 1, 1]
    assert both.lane.tolist() == [0, -1, 1, 1] and both.composite == {"b"} and both.notes == ("n",)
    assert joined([other]) is other


def test_names() -> None:
    assert qualified("a/b", "", "c") == "a|b/c"
    assert module_components("encoder.layer.0.attention") == ("encoder", "layer_0", "attention")
    assert module_components("net.0.1") == ("net_0", "1")
    assert module_components("0.1") == ("0", "1")
    assert module_components("") == ()
