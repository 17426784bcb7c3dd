"""Which function launched a run of a primitive that JAX compiled by itself."""

from typing import Any

import pytest

from joulery.adapters.tracers.xla.launches import launch_places
from joulery.adapters.tracers.xla.origins import Origin
from joulery.adapters.tracers.xla.xplane import Event, xla_trace

PLACES = "train.py:60 main/train.py:12 step"
PRIMITIVE = {("jit_mul", ""): Origin("", PLACES), ("jit_mul", "mul.1"): Origin("jit(mul)/mul")}


def event(name: str, start: int, end: int, lane: int = 0, **stats: Any) -> Event:
    return Event(name, "CPU", ("host", lane), start, end - start, stats)


def call(start: int) -> list[Event]:
    """A launch as JAX records it: frames of its own, the function, the executable twice."""
    return [
        event("$core.py:1970 bind", start, start + 9),
        event("PjitFunction(mul)", start + 1, start + 8),
        event("CommonPjRtLoadedExecutable::ExecuteHelperOnSingleDevice", start + 2, start + 7),
        event("CommonPjRtLoadedExecutable::ExecuteHelper", start + 3, start + 6),
    ]


def run(start: int, run_id: int) -> Event:
    return event("mul.1", start, start + 5, lane=1, hlo_module="jit_mul", hlo_op="mul.1", run_id=run_id)


def program() -> list[Event]:
    """``step`` multiplies, calls ``layer``, which multiplies, and multiplies again; the runs lag behind."""
    frames = [event("$train.py:12 step", 0, 100), event("$train.py:3 layer", 30, 60), event("$builtins len", 1, 99)]
    runs = [run(15, 7), run(58, -3), run(90, 9)]
    return [*runs, *call(10), *call(40), *call(70), *frames]


def test_runs_are_paired_with_launches_in_order() -> None:
    found = launch_places(program(), PRIMITIVE)
    assert found == {
        ("jit_mul", 7): "train.py:12 step",
        ("jit_mul", -3): "train.py:12 step/train.py:3 layer",
        ("jit_mul", 9): "train.py:12 step",
    }
    trace = xla_trace([each for each in program() if "hlo_op" in each.stats], PRIMITIVE, 1, found)
    assert [trace.ops[op] for op in trace.op.tolist()] == [
        "train.py:12 step/mul",
        "train.py:12 step/train.py:3 layer/mul",
        "train.py:12 step/mul",
    ]
    assert not trace.phase.any(), "a primitive does not say which pass launched it"


@pytest.mark.parametrize("missing", ["launch", "run"])
def test_nothing_is_inferred_if_there_are_more_of_one_than_of_the_other(missing: str) -> None:
    events = program()
    gone = next(each for each in events if (missing == "run") == ("hlo_op" in each.stats) and "$" not in each.name)
    kept = [each for each in events if each is not gone]
    if missing == "launch":
        kept = [each for each in kept if each.start_ps not in range(10, 20) or "hlo_op" in each.stats]
    assert launch_places(kept, PRIMITIVE) == {}


def test_a_compiled_function_keeps_its_own_lines() -> None:
    own = {("jit_mul", ""): Origin("", PLACES), ("jit_mul", "mul.1"): Origin("jit(mul)/mul", PLACES)}
    assert launch_places(program(), own) == {}
    assert launch_places([], {}) == {}
