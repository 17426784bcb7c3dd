"""Programs of ``torch.export``, read from a graph that PyTorch 2.13 wrote (``exported.json``, without its weights)."""

import json
import zipfile
from pathlib import Path

import pytest

from joulery.adapters.graphs.torch_export import read_torch_export
from joulery.domain.errors import DataError
from joulery.domain.trace.operators import OperatorKind
from joulery.perf.power.operator_costs import operator_costs

EXPORTED = json.loads((Path(__file__).parent / "exported.json").read_text())


def archive(folder: Path, program: object, name: str = "tiny/models/model.json") -> Path:
    file = folder / "model.pt2"
    with zipfile.ZipFile(file, "w") as made:
        made.writestr("tiny/archive_version", "0")
        made.writestr(name, program if isinstance(program, str) else json.dumps(program))
    return file


def test_the_work_of_every_operator(tmp_path: Path) -> None:
    costs = {cost.name: cost for cost in operator_costs(read_torch_export(archive(tmp_path, EXPORTED), {}))}
    # 3 x 3 convolution from 3 to 8 channels, 2 x 8 x 16 x 16 outputs
    assert costs["conv2d"].flops == 2 * (2 * 8 * 16 * 16) * 27
    assert costs["conv2d"].traffic_bytes == 4 * (2 * 3 * 32 * 32 + 8 * 27 + 8 + 2 * 8 * 16 * 16)
    assert costs["conv2d"].parameter_bytes == 4 * (8 * 27 + 8)
    assert costs["linear"].flops == 2 * (2 * 10) * 8
    assert costs["linear_1"].flops == 2 * (7 * 2 * 30) * 10
    assert costs["bmm"].flops == 2 * (4 * 7 * 7) * 5
    assert costs["mean"].flops == 2 * 8 * 16 * 16
    assert costs["softmax_1"].flops == 11 * 4 * 7 * 7
    assert costs["relu"].flops == 2 * 8 * 16 * 16
    assert costs["gelu"].flops == 10 * 2 * 7 * 10
    assert costs["embedding"].flops == 0
    assert costs["embedding"].traffic_bytes == 2 * 4 * 2 * 7 * 10
    assert costs["embedding"].parameter_bytes == 4 * 20 * 10
    # queries 2 x 1 x 7 x 10 against 7 keys: two products and a softmax over 2 x 7 x 7
    assert costs["scaled_dot_product_attention"].flops == 4 * 140 * 7 + 98 * 13
    assert not any(name.startswith(("view", "transpose", "select", "unsqueeze")) for name in costs)


def test_a_symbolic_size_is_that_of_the_example_or_the_one_given(tmp_path: Path) -> None:
    program = json.loads(json.dumps(EXPORTED))
    size = {"as_expr": {"expr_str": "Symbol('s31', positive=True, integer=True)", "hint": {"as_int": 2}}}
    for tensor in ("x", "conv2d"):
        program["graph_module"]["graph"]["tensor_values"][tensor]["sizes"][0] = size
    file = archive(tmp_path, program)
    assert operator_costs(read_torch_export(file, {}))[0].flops == 2 * (2 * 8 * 256) * 27
    assert operator_costs(read_torch_export(file, {"s31": 6}))[0].flops == 2 * (6 * 8 * 256) * 27
    size["as_expr"].pop("hint")
    with pytest.raises(DataError, match="size of x is not known") as caught:
        read_torch_export(archive(tmp_path, program), {})
    assert "--dim" in caught.value.hint


def test_a_call_without_a_rule_is_listed_apart(tmp_path: Path) -> None:
    program = json.loads(json.dumps(EXPORTED))
    program["graph_module"]["graph"]["nodes"][0]["target"] = "torch.ops.mine.fancy.default"
    first = read_torch_export(archive(tmp_path, program), {})[0]
    assert (first.kind, first.type) == (OperatorKind.OTHER, "mine.fancy")


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("{", "not a program of torch.export"),
        ("{}", "a schema of torch.export this joulery does not know"),
        (
            {"graph_module": {"graph": {"nodes": [], "tensor_values": {}}, "signature": {"input_specs": []}}},
            "no operators",
        ),
    ],
)
def test_what_is_no_program(tmp_path: Path, program: object, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_torch_export(archive(tmp_path, program), {})


def test_archives_that_hold_something_else(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no graph of torch\.export"):
        read_torch_export(archive(tmp_path, "{}", name="tiny/data.pkl"), {})
    (tmp_path / "cut.pt2").write_bytes(b"PK\x03\x04 cut short")
    with pytest.raises(DataError, match=r"not a program of torch\.export"):
        read_torch_export(tmp_path / "cut.pt2", {})
