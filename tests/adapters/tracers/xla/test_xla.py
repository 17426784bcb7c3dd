"""XLA profiles of JAX and TensorFlow 2, and JAX's Chrome trace, without either framework."""

import gzip
import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from joulery.adapters.tracers.xla.hlo import qualified_op
from joulery.adapters.tracers.xla.origins import Origin
from joulery.adapters.tracers.xla.protobuf import WireError, fields
from joulery.adapters.tracers.xla.tracer import read_jax
from joulery.adapters.tracers.xla.xplane import Event, read_xplane, xla_trace
from joulery.domain.errors import DataError
from joulery.domain.trace.events import EventTrace
from tests.adapters.tracers.xla.hlo_text import origins_in_text
from tests.data_folder import data_folder


def golden(name: str) -> Path:
    return data_folder("smaragdine") / "tf2_jax" / name


def table(trace: EventTrace) -> set[tuple[str, str]]:
    return {(trace.ops[o], trace.phases[p]) for o, p in zip(trace.op.tolist(), trace.phase.tolist(), strict=True)}


def test_jax_profile_names_every_instruction_by_itself() -> None:
    trace = read_xplane(golden("jax0.10.2_cpu_grad.xplane.pb.gz"))
    names = table(trace)
    assert len(trace) == 32 and trace.devices == ("CPU",) and trace.notes == ()
    assert ("bert/encoder/layer_0/output/dense/dot_general", "forward") in names
    assert ("bert/encoder/layer_0/output/dense/dot_general", "backward") in names
    assert ("j.py:13 f/add_any", "backward") in names
    assert len(names) == 16
    assert trace.extent_ns == (1795146723587963429, 1795146723595419350)


def test_jax_trace_and_profile_say_the_same() -> None:
    trace = read_jax(golden("jax0.10.2_cpu_grad.trace.json.gz"))
    profile = read_xplane(golden("jax0.10.2_cpu_grad.xplane.pb.gz"))
    assert table(trace) == table(profile)
    assert sorted(trace.start_ns.tolist()) == sorted(profile.start_ns.tolist())


def test_jax_trace_with_the_program_alone_has_names_but_no_clock(tmp_path: Path) -> None:
    path = tmp_path / "t.trace.json.gz"
    shutil.copy(golden("jax0.10.2_cpu_grad.trace.json.gz"), path)
    trace = read_jax(path, [golden("jax0.10.2_cpu_grad.hlo.txt")])
    same = {(name.replace("<string>", "j.py"), when) for name, when in table(trace)}  # the text is of another run
    assert same == table(read_xplane(golden("jax0.10.2_cpu_grad.xplane.pb.gz")))
    assert trace.notes == ("the trace does not say when it began: its times count from its start",)


def test_instructions_added_by_the_compiler_are_distinguished_from_unknown_programs() -> None:
    def event(module: str, op: str) -> Event:
        return Event(op, "CPU", ("host", 0), 0, 1000, {"hlo_module": module, "hlo_op": op})

    names = {
        ("jit_f", "dot.1"): Origin("jit(f)/net/dot_general"),
        ("jit_f", "copy.2"): Origin("jit(f)/net/dot_general", "", True),
    }
    events = [event("jit_f", "dot.1"), event("jit_f(3)", "copy.1"), event("jit_g", "dot.1"), event("jit_f", "copy.2")]
    trace = xla_trace(events, names, 1)
    assert [trace.ops[op] for op in trace.op.tolist()] == [
        "net/dot_general",
        "<no module>/copy.1",
        "<no module>/dot.1",
        "net/copy",
    ]
    assert trace.notes == (
        "1 of 4 events run instructions that the compiler added: named after the operation that they serve",
        "1 of 4 events run instructions that the compiler added, of no operation",
        "1 of 4 events run instructions without op_name: give the compiled program with --hlo",
    )


def test_jax_trace_without_the_program_says_what_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "t.trace.json.gz"
    shutil.copy(golden("jax0.10.2_cpu_grad.trace.json.gz"), path)
    trace = read_jax(path)
    assert all(name.startswith("<no module>/") for name, _ in table(trace))
    assert "32 of 32 events run instructions without op_name" in trace.notes[0]


def test_tensorflow_2_profile() -> None:
    trace = read_xplane(golden("tf2.21_cpu_train.xplane.pb.gz"))
    names = table(trace)
    assert ("bert/layer_0/output/dense/MatMul", "forward") in names
    assert ("gradients/bert/layer_1/output/dense/MatMul_grad/MatMul_1", "backward") in names
    assert len(trace) == 26 and len(names) == 13


@pytest.mark.parametrize(
    ("op_name", "expected"),
    [
        ("jit(f)/jvp(bert)/encoder/layer_0/dot_general", ("bert/encoder/layer_0/dot_general", "forward")),
        ("jit(f)/transpose(jvp(bert))/encoder/mul", ("bert/encoder/mul", "backward")),
        ("jit(f)/transpose(jvp())/add_any", ("<no module>/add_any", "backward")),
        ("jit(f)/jit(silu)/mlp/logistic", ("mlp/logistic", "forward")),
        ("jit(f)/rematted_computation/bert/tanh", ("bert/tanh", "recompute")),
        ("jit(f)/vmap(layer)/add", ("layer/add", "forward")),
        ("add", ("<no module>/add", "forward")),
        ("jit(f)/transpose(jvp(net/layer_1))/mul", ("net/layer_1/mul", "backward")),
        ("jit(f)/jvp(net/layer_1)/jit(silu)/mul", ("net/layer_1/mul", "forward")),
        ("jit(f)/a(b/c(d))/mul;jit(f)/transpose(jvp(x))/y", ("a(b/c(d))/mul", "forward")),
    ],
)
def test_names_of_operations(op_name: str, expected: tuple[str, str]) -> None:
    assert qualified_op(op_name) == expected


def test_a_fusion_without_a_name_takes_that_of_its_root() -> None:
    program = """HloModule jit_f, is_scheduled=true

%fused (p: f32[2]) -> f32[2] {
  %p = f32[2]{0} parameter(0)
  ROOT %t = f32[2]{0} tanh(%p), metadata={op_name="jit(f)/net/tanh" stack_frame_id=1}
}

ENTRY %main (x: f32[2]) -> f32[2] {
  %x = f32[2]{0} parameter(0)
  ROOT %fusion.1 = f32[2]{0} fusion(%x), kind=kLoop, calls=%fused
}
"""
    assert origins_in_text(program)["jit_f", "fusion.1"] == Origin("jit(f)/net/tanh")


@pytest.mark.parametrize("name", ["jax0.10.2_cpu_grad.xplane.pb.gz", "tf2.21_cpu_train.xplane.pb.gz"])
def test_a_profile_cut_anywhere_is_reported_or_whole_planes_are_missing(tmp_path: Path, name: str) -> None:
    content = gzip.decompress(golden(name).read_bytes())
    whole = len(read_xplane(golden(name)))
    path = tmp_path / "cut.xplane.pb"
    for cut in range(0, len(content), max(1, len(content) // 60)):
        path.write_bytes(content[:cut])
        try:
            assert len(read_xplane(path)) == whole
        except DataError as error:
            assert error.exit_code == 2


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_fields_or_a_wire_error(content: bytes) -> None:
    try:
        values = [value for _, value in fields(memoryview(content))]
        held = sum(len(value) for value in values if isinstance(value, memoryview))
        numbers = sum(isinstance(value, int) for value in values)
        assert len(values) + numbers + held <= len(content), "each takes a byte for its tag; a number takes one more"
    except WireError as error:
        assert str(error)


@pytest.mark.parametrize("content", [b"", b"\x0a", b"\x0a\x03\x12\x01a", b"\xff" * 30])
def test_what_is_no_profile_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.xplane.pb"
    path.write_bytes(content)
    with pytest.raises(DataError):
        read_xplane(path)


@pytest.mark.parametrize(
    "event",
    [
        {"ph": "X", "pid": 1, "tid": 1, "name": "dot", "dur": 1, "args": {"hlo_op": "dot", "hlo_module": "m"}},
        {"ph": "X", "pid": 1, "tid": 1, "name": "dot", "ts": "x", "dur": 1, "args": {"hlo_op": "dot"}},
        {"ph": "X", "pid": 1, "tid": 1, "name": "dot", "ts": 1, "dur": 1},
    ],
)
def test_a_damaged_jax_trace_is_reported(tmp_path: Path, event: dict) -> None:
    path = tmp_path / "t.trace.json"
    path.write_text(json.dumps({"traceEvents": [event]}))
    with pytest.raises(DataError):
        read_jax(path)
