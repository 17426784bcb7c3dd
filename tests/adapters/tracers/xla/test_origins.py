"""Names of JAX programs without scopes: functions of the program, and instructions that the compiler added."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from joulery.adapters.tracers.xla.hlo import qualified_op
from joulery.adapters.tracers.xla.origins import Origin
from joulery.adapters.tracers.xla.xplane import read_xplane
from tests.adapters.tracers.xla.hlo_text import origins_in_text

HEAD = """HloModule jit_step, is_scheduled=true

FileNames
1 "/home/me/train.py"
2 "/venv/lib/python3.12/site-packages/jax/_src/nn/functions.py"

FunctionNames
1 "<module>"
2 "step"
3 "step.<locals>.layer"
4 "gelu"

FileLocations
1 {file_name_id=1 function_name_id=1 line=60 end_line=60 column=0 end_column=4}
2 {file_name_id=1 function_name_id=2 line=12 end_line=12 column=8 end_column=39}
3 {file_name_id=1 function_name_id=3 line=7 end_line=7 column=45 end_column=87}
4 {file_name_id=2 function_name_id=4 line=99 end_line=99 column=4 end_column=9}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}
3 {file_location_id=3 parent_frame_id=3}
4 {file_location_id=4 parent_frame_id=4}

"""
BODY = """%body (p.1: (f32[2], f32[2])) -> (f32[2], f32[2]) {
  %p.1 = (f32[2]{0}, f32[2]{0}) parameter(0), metadata={op_name="carry"}
  %gte.1 = f32[2]{0} get-tuple-element(%p.1), index=0
  %copy.3 = f32[2]{0} copy(%gte.1)
  ROOT %tuple.1 = (f32[2]{0}, f32[2]{0}) tuple(%copy.3, %gte.1)
}

ENTRY %main (x: f32[2]) -> f32[2] {
  %x = f32[2]{0} parameter(0), metadata={op_name="x"}
  %copy.1 = f32[2]{0} copy(%x)
  %mul.1 = f32[2]{0} multiply(%copy.1, %copy.1), metadata={op_name="jit(step)/jvp()/mul" stack_frame_id=3}
  %copy.2 = f32[2]{0} copy(%mul.1)
  %tanh.1 = f32[2]{0} tanh(%copy.2), metadata={op_name="jit(step)/transpose(jvp())/tanh" stack_frame_id=4}
  ROOT %while.1 = f32[2]{0} while(%tanh.1), body=%body, metadata={op_name="jit(step)/while" stack_frame_id=2}
}
"""
LAYER = "train.py:12 step/train.py:7 layer"


def test_functions_of_the_program_are_the_place_of_an_operation() -> None:
    found = origins_in_text(HEAD + BODY)
    assert found["jit_step", "mul.1"] == Origin("jit(step)/jvp()/mul", LAYER)
    # The innermost frame is of JAX itself.
    assert found["jit_step", "tanh.1"] == Origin("jit(step)/transpose(jvp())/tanh", LAYER)
    assert found["jit_step", "while.1"].place == "train.py:12 step"


def test_an_added_instruction_serves_what_made_its_operand_else_its_reader_else_its_caller() -> None:
    found = origins_in_text(HEAD + BODY)
    assert found["jit_step", "copy.2"] == found["jit_step", "mul.1"]._replace(added=True)
    assert found["jit_step", "copy.1"] == found["jit_step", "mul.1"]._replace(added=True)
    assert found["jit_step", "copy.3"] == found["jit_step", "while.1"]._replace(added=True)


def test_an_instruction_with_the_name_of_an_argument_serves_the_operation_that_reads_it() -> None:
    body = """ENTRY %main (w: f32[2]) -> f32[2] {
  %w = f32[2]{0} parameter(0), metadata={op_name="params[\\'head\\'][\\'kernel\\']"}
  %copy.1 = f32[2]{0} copy(%w), metadata={op_name="params[\\'head\\'][\\'kernel\\']"}
  %copy.2 = f32[2]{0} copy(%w), metadata={op_name="params[\\'head\\'][\\'kernel\\']"}
  ROOT %dot.1 = f32[2]{0} dot(%copy.1), metadata={op_name="jit(step)/transpose(jvp(Net))/head/dot_general"}
}
"""
    found = origins_in_text("HloModule jit_step\n\n" + body)
    assert found["jit_step", "copy.1"] == found["jit_step", "dot.1"]._replace(added=True)
    # Nothing that has a name reads the other: it keeps the argument's.
    assert found["jit_step", "copy.2"].op_name.startswith("params[")


def test_a_file_and_a_line_are_a_place_too() -> None:
    program = """HloModule jit_f

ENTRY %main (x: f32[2]) -> f32[2] {
  %x = f32[2]{0} parameter(0)
  %a = f32[2]{0} tanh(%x), metadata={op_name="jit(f)/tanh" source_file="/me/net.py" source_line=4}
  ROOT %b = f32[2]{0} add(%a), metadata={op_name="jit(f)/add" source_file="/me/net.py" source_line=5}
}
"""
    assert origins_in_text(program)["jit_f", "b"] == Origin("jit(f)/add", "net.py:5")


def test_a_primitive_compiled_by_itself_has_no_place_since_other_lines_use_it_too() -> None:
    program = (
        HEAD.replace("jit_step", "jit_multiply")
        + """
ENTRY %main (x: f32[2]) -> f32[2] {
  %x = f32[2]{0} parameter(0)
  ROOT %mul.1 = f32[2]{0} multiply(%x, %x), metadata={op_name="jit(multiply)/mul" stack_frame_id=3}
}
"""
    )
    assert origins_in_text(program)["jit_multiply", "mul.1"] == Origin("jit(multiply)/mul", "")
    own = program.replace("jit_multiply", "jit_layer")
    assert origins_in_text(own)["jit_layer", "mul.1"].place == LAYER


@pytest.mark.parametrize(
    ("op_name", "expected"),
    [
        ("jit(f)/jvp()/mul", "n.py:4 f/mul"),
        ("jit(f)/while/body/closed_call/mul", "n.py:4 f/while/body/closed_call/mul"),
        ("jit(f)/jvp(bert)/mul", "bert/mul"),
        ("jit(f)/while/body/layer_0/mul", "while/body/layer_0/mul"),
    ],
)
def test_scopes_go_before_places(op_name: str, expected: str) -> None:
    assert qualified_op(op_name, "n.py:4 f")[0] == expected


@pytest.mark.parametrize("damage", ["parent_frame_id=9", "parent_frame_id=0", ""])
def test_tables_that_do_not_fit_leave_operations_without_a_place(damage: str) -> None:
    head = HEAD.replace("parent_frame_id=3", damage).replace("function_name_id=3", "function_name_id=77")
    found = origins_in_text(head + BODY)
    assert found["jit_step", "mul.1"].op_name == "jit(step)/jvp()/mul"


PROGRAM = """
import sys, jax, jax.numpy as jnp

def layer(x, w):
    return jnp.tanh(x @ w)

def loss(w, x):
    hidden, _ = jax.lax.scan(lambda x, _: (layer(x, w), None), x, None, length=3)
    return (hidden**2).mean()

def main():
    step = jax.jit(jax.value_and_grad(loss))
    w, x = jnp.ones((64, 64)), jnp.ones((64, 64))
    jax.block_until_ready(step(w, x))
    with jax.profiler.trace(sys.argv[1]):
        jax.block_until_ready(step(w, x))

main()
"""


@pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="JAX is not installed")
def test_a_profile_of_a_program_without_scopes_names_every_operation(tmp_path: Path) -> None:
    """In a process of its own: JAX starts threads, and refuses forks of the process from then on."""
    (tmp_path / "program.py").write_text(PROGRAM)
    subprocess.run([sys.executable, "program.py", str(tmp_path)], cwd=tmp_path, check=True)
    trace = read_xplane(next(tmp_path.rglob("*.xplane.pb")))
    names = [trace.ops[op] for op in trace.op.tolist()]
    assert not [name for name in names if name.startswith("<no module>")]
    assert any("program.py:" in name and " layer/" in name for name in names if "loss" in name)
