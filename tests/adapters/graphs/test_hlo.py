"""Programs as XLA prints them."""

import re
from pathlib import Path

import pytest

from joulery.adapters.graphs import hlo, onnx, torch_export
from joulery.adapters.graphs.hlo import read_hlo
from joulery.domain.errors import DataError
from joulery.domain.trace.operators import OperatorKind
from joulery.perf.power.operator_costs import operator_costs
from tests.data_folder import data_folder

LOOP = """HloModule jit_generate, is_scheduled=true, entry_computation_layout={(f32[4,8]{1,0})->f32[4,8]{1,0}}

%fused (p0: f32[4,8], p1: f32[8,8]) -> f32[4,8] {
  %p0 = f32[4,8]{1,0} parameter(0)
  %p1 = f32[8,8]{1,0} parameter(1)
  %dot.9 = f32[4,8]{1,0} dot(%p0, %p1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %tanh.9 = f32[4,8]{1,0} tanh(%dot.9), metadata={op_name="jit(f)/tanh"}
}

%body (t: (s32[], f32[4,8], f32[8,8])) -> (s32[], f32[4,8], f32[8,8]) {
  %t = (s32[], f32[4,8]{1,0}, f32[8,8]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %x = f32[4,8]{1,0} get-tuple-element(%t), index=1
  %w = f32[8,8]{1,0} get-tuple-element(%t), index=2
  %y = f32[4,8]{1,0} fusion(%x, %w), kind=kLoop, calls=%fused
  ROOT %r = (s32[], f32[4,8]{1,0}, f32[8,8]{1,0}) tuple(%i, %y, %w)
}

%cond (t.1: (s32[], f32[4,8], f32[8,8])) -> pred[] {
  %t.1 = (s32[], f32[4,8]{1,0}, f32[8,8]{1,0}) parameter(0)
  ROOT %always = pred[] constant(true)
}

ENTRY %main (a: f32[4,8], w.1: f32[8,8]) -> f32[4,8] {
  %a = f32[4,8]{1,0} parameter(0)
  %w.1 = f32[8,8]{1,0} parameter(1)
  %start = s32[] constant(0)
  %gemm = (f32[4,8]{1,0}, s8[64]{0}) custom-call(%a, %w.1), custom_call_target="__cublas$gemm", backend_config={"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}
  %first = f32[4,8]{1,0} get-tuple-element(%gemm), index=0
  %init = (s32[], f32[4,8]{1,0}, f32[8,8]{1,0}) tuple(%start, %first, %w.1)
  %loop = (s32[], f32[4,8]{1,0}, f32[8,8]{1,0}) while(%init), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"64"}}
  %out = f32[4,8]{1,0} get-tuple-element(%loop), index=1
  ROOT %t2 = f32[8,4]{1,0} transpose(%out), dimensions={1,0}
}
"""  # noqa: E501
CONVOLUTION = """HloModule net

ENTRY %main.1 (x: bf16[2,16,16,4], k: bf16[3,3,2,6]) -> bf16[2,8,8,6] {
  %x = bf16[2,16,16,4]{3,2,1,0} parameter(0)
  %k = bf16[3,3,2,6]{3,2,1,0} parameter(1)
  %c = bf16[2,8,8,6]{3,2,1,0} convolution(%x, %k), window={size=3x3 stride=2x2 pad=0_1x0_1}, dim_labels=b01f_01io->b01f, feature_group_count=2
  ROOT %odd = bf16[2,8,8,6]{3,2,1,0} made-up-op(%c)
}
"""  # noqa: E501


def written(folder: Path, text: str) -> Path:
    file = folder / "program.hlo"
    file.write_text(text)
    return file


def test_fusions_loops_and_library_calls(tmp_path: Path) -> None:
    first, looped, last = operator_costs(read_hlo(written(tmp_path, LOOP)))
    assert (first.type, first.flops, first.count) == ("__cublas$gemm", 2 * 32 * 8, 1)
    assert first.traffic_bytes == 4 * (32 + 64 + 32)  # the scratch space is not what it computes
    assert first.parameter_bytes == 4 * 64
    assert (looped.type, looped.count) == ("fusion of dot, tanh", 64)
    assert looped.flops == 2 * 32 * 8 + 10 * 32
    assert looped.traffic_bytes == 4 * (32 + 64 + 32)  # what is inside the fusion does not touch memory
    assert (last.type, last.flops, last.traffic_bytes) == ("transpose", 0, 2 * 4 * 32)


def test_a_loop_of_unknown_length_counts_once(tmp_path: Path) -> None:
    text = LOOP.replace(', backend_config={"known_trip_count":{"n":"64"}}', "")
    assert operator_costs(read_hlo(written(tmp_path, text)))[1].count == 1


def test_a_grouped_convolution_in_bfloat16(tmp_path: Path) -> None:
    convolution, odd = operator_costs(read_hlo(written(tmp_path, CONVOLUTION)))
    assert convolution.flops == 2 * (2 * 8 * 8 * 6) * (3 * 3 * 2)
    assert convolution.traffic_bytes == 2 * (2 * 16 * 16 * 4 + 3 * 3 * 2 * 6 + 2 * 8 * 8 * 6)
    assert (odd.type, odd.flops, odd.traffic_bytes) == ("made-up-op", 0, 2 * 2 * (2 * 8 * 8 * 6))


def test_operators_with_hyphens_in_their_names_have_rules(tmp_path: Path) -> None:
    program = """HloModule shifts

ENTRY %main (x: s32[8], n: s32[8], seed: u64[2]) -> s32[8] {
  %x = s32[8]{0} parameter(0)
  %n = s32[8]{0} parameter(1)
  %seed = u64[2]{0} parameter(2)
  %bits = (u64[2]{0}, u32[8]{0}) rng-bit-generator(%seed), algorithm=rng_default
  %held = s32[8]{0} optimization-barrier(%x)
  ROOT %shifted = s32[8]{0} shift-right-arithmetic(%held, %n)
}
"""
    operators = read_hlo(written(tmp_path, program))
    kinds = {operator.type: operator.kind for operator in operators}
    assert kinds == {"rng-bit-generator": OperatorKind.MOVE, "shift-right-arithmetic": OperatorKind.ELEMENTWISE}


def test_every_rule_is_of_a_whole_name() -> None:
    for table in (hlo._RULES, onnx._RULES, torch_export._RULES):
        assert all(re.fullmatch(r"\w([\w.:-]*\w)?", name) for name in table)


def test_several_programs_are_phases(tmp_path: Path) -> None:
    graph = read_hlo(written(tmp_path, LOOP + CONVOLUTION))
    assert [operator.phase for operator in graph] == ["jit_generate"] * 3 + ["net"] * 2
    assert {operator.phase for operator in read_hlo(written(tmp_path, LOOP))} == {"forward"}


def test_what_jax_printed() -> None:
    costs = operator_costs(read_hlo(data_folder("smaragdine") / "tf2_jax" / "jax0.10.2_cpu_grad.hlo.txt"))
    dots = [cost for cost in costs if "dot" in cost.type]
    assert len(costs) == 16
    assert len(dots) == 11  # four layers forward, three backward to inputs, four to weights
    assert {cost.flops for cost in dots} == {2 * 128 * 256 * 256}


@pytest.mark.parametrize("text", ["", "some text", "HloModule empty\n\nENTRY %e () -> f32[] {\n}\n"])
def test_what_is_no_program(tmp_path: Path, text: str) -> None:
    with pytest.raises(DataError, match="no HLO program"):
        read_hlo(written(tmp_path, text))


def test_a_program_cut_short(tmp_path: Path) -> None:
    whole = LOOP.replace("%body (t:", "%other (t:")
    with pytest.raises(DataError, match=r"computation body .*not in the file"):
        read_hlo(written(tmp_path, whole))
    (tmp_path / "binary.hlo").write_bytes(b"HloModule \xff\xfe")
    with pytest.raises(DataError, match="cannot read"):
        read_hlo(tmp_path / "binary.hlo")


@pytest.mark.parametrize(
    "changed",
    [
        LOOP.replace("%", ""),
        LOOP.replace("dot(%p0, %p1)", "dot(f32[4,8]{1,0} %p0, f32[8,8]{1,0} %p1)").replace(
            "fusion(%x, %w)", "fusion(f32[4,8]{1,0:T(8,128)} %x, f32[8,8]{1,0} %w)"
        ),
        LOOP.replace("f32[4,8]{1,0}", "f32[4,8]{1,0:T(8,128)(2,1)}"),
    ],
    ids=["without percent signs", "operands with their types", "tiled layouts"],
)
def test_other_ways_to_print_the_same_program(tmp_path: Path, changed: str) -> None:
    assert changed != LOOP
    expected = operator_costs(read_hlo(written(tmp_path, LOOP)))
    assert operator_costs(read_hlo(written(tmp_path, changed))) == expected
