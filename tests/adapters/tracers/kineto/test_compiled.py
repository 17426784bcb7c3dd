"""Calls of kernels in compiled code: which module each is from, and what becomes of their events."""

import json
from pathlib import Path
from typing import Any

import pytest

from joulery.adapters.tracers.inject.compiled import CALL
from joulery.adapters.tracers.kineto.compiled import CompiledCall, read_compiled
from joulery.adapters.tracers.kineto.names import name_events
from joulery.adapters.tracers.kineto.reader import read_columns
from joulery.domain.errors import DataError
from joulery.domain.trace.events import EventTrace
from joulery.domain.trace.nesting import exclusive_pieces
from tests.adapters.tracers.kineto.kineto_file import KinetoFile


class Notes:
    """What a recorder notes about compiled code, written by hand."""

    def __init__(self) -> None:
        self.texts: dict[str, int] = {}
        self.graphs: list[dict[str, Any]] = []
        self.codes: list[dict[str, Any]] = []

    def text(self, text: str) -> int:
        return self.texts.setdefault(text, len(self.texts))

    def graph(self, *rows: tuple[str, str, str, str], inputs: tuple[str, ...] = ()) -> None:
        """Operations: name, stack, module, what is called."""
        calls = [[name, *(self.text(text) for text in (stack, module, called))] for name, stack, module, called in rows]
        self.graphs.append({"calls": calls, "inputs": [self.text(module) for module in inputs]})

    def code(self, contexts: list[tuple[int, str]], *calls: list[Any], backward: bool = False) -> None:
        self.codes.append(
            {"backward": backward, "calls": calls, "contexts": [(line, self.text(stack)) for line, stack in contexts]}
        )

    def read(self, folder: Path) -> list[tuple[str, str | None]]:
        file = folder / "torch-1.compiled"
        file.write_text(json.dumps({"texts": list(self.texts), "graphs": self.graphs, "codes": self.codes}))
        return [(call.leaf, call.module) for call in read_compiled(file).values()]


def layered(layers: int) -> Notes:
    """A stack of layers of one class: a norm, two products, an activation; their lines are the same in each layer."""
    notes = Notes()
    rows = []
    for n in range(layers):
        rows += [
            (f"h_{n}", "norm line", f".layers.{n}.norm", "layer_norm"),
            (f"up_{n}", "up line", f".layers.{n}.up", "linear"),
            (f"act_{n}", "act line", f".layers.{n}", "gelu"),
            (f"down_{n}", "down line", f".layers.{n}.down", "linear"),
        ]
    notes.graph(*rows, inputs=tuple(f".layers.{n}.{part}" for n in range(layers) for part in ("up", "down")))
    return notes


def test_source_nodes_name_the_calls_of_a_forward_pass(tmp_path: Path) -> None:
    notes = layered(3)
    contexts = [(10 * n + at, line) for n in range(3) for at, line in enumerate(("norm line", "up line"))]
    calls = []
    for n in range(3):
        calls += [
            [10 * n + 1, f"cpp_fused_native_layer_norm_{n}", True, [], [], []],
            [10 * n + 2, "addmm", False, [f"h_{n}", f"up_{n}"], ["aten.addmm"], []],
        ]
    notes.code(contexts, *calls)
    found = notes.read(tmp_path)
    assert [module for _, module in found] == [f".layers.{n}.{part}" for n in range(3) for part in ("norm", "up")], (
        "the stack of the call that follows a fused kernel stands before both"
    )


def test_order_and_kind_name_the_calls_of_a_backward_pass(tmp_path: Path) -> None:
    notes = layered(4)
    contexts, calls, line = [], [], 0
    for n in (3, 2, 1, 0):
        for stack, leaf, fused in (
            ("down line", "mm", False),
            ("down line", "mm", False),
            ("act line", "cpp_fused_gelu_backward_0", True),
            ("up line", "mm", False),
            ("norm line", "cpp_fused_native_layer_norm_backward_1", True),
        ):
            line += 10
            contexts.append((line, stack))
            inputs = [2 * n + 1] if leaf == "mm" and stack == "down line" else []
            calls.append([line + 1, leaf, fused, [], [], inputs])
    notes.code(contexts, *calls, backward=True)
    wanted = []
    for n in (3, 2, 1, 0):
        wanted += [f".layers.{n}{part}" for part in (".down", ".down", "", ".up", ".norm")]
    assert [module for _, module in notes.read(tmp_path)] == wanted


def test_a_kernel_of_several_loops_belongs_to_their_lowest_common_module(tmp_path: Path) -> None:
    notes = layered(2)
    notes.code([(1, "norm line"), (2, "act line")], [3, "cpp_fused_gelu_native_layer_norm_0", True, [], [], []])
    assert notes.read(tmp_path) == [("cpp_fused_gelu_native_layer_norm_0", ".layers.0")]


def test_lines_that_moved_since_the_code_was_cached_still_name_it(tmp_path: Path) -> None:
    notes = Notes()
    new, old = '  File "/new/net.py", line 9, in forward\n    x = self.fc(x)', '  File "/net.py", line 7, in forward\n'
    notes.graph(("fc", new, ".fc", "linear"))
    notes.code([(1, old + "    x = self.fc(x)")], [2, "addmm", False, [], [], []])
    notes.code([(1, old + "    y = self.other(x)")], [2, "addmm", False, ["gone"], [], []])
    assert notes.read(tmp_path) == [("addmm", ".fc"), ("addmm", None)]


@pytest.mark.parametrize("text", ["{", "[]", '{"texts": [], "graphs": [], "codes": [{}]}'])
def test_damaged_notes_are_an_error_with_their_file(tmp_path: Path, text: str) -> None:
    file = tmp_path / "torch-1.compiled"
    file.write_text(text)
    with pytest.raises(DataError, match="notes about compiled code"):
        read_compiled(file)
    assert read_compiled(tmp_path / "none") == {}


def traced(f: KinetoFile, folder: Path, **compiled: CompiledCall) -> EventTrace:
    known = {CALL + name.replace("c", "").replace("_", ":"): call for name, call in compiled.items()}
    return name_events(read_columns(f.write(folder)), compiled=known)


def rows(trace: EventTrace, device: str = "CPU") -> list[tuple[str, str]]:
    at = trace.devices.index(device)
    order = sorted(range(len(trace)), key=lambda row: (trace.start_ns[row], -trace.dur_ns[row]))
    return [(trace.ops[trace.op[row]], trace.phases[trace.phase[row]]) for row in order if trace.device[row] == at]


def compiled_step() -> KinetoFile:
    f = KinetoFile()
    f.module("Net/body", 0, 100)
    f.op("Torch-Compiled Region: 0/0", 10, 80)
    f.op("CompiledFunction", 20, 65, seq=1)
    f.op(f"{CALL}0:0", 22, 10)
    f.op(f"{CALL}0:1", 35, 20)
    f.op("aten::addmm", 36, 18)
    f.op(f"{CALL}0:2", 60, 10)
    f.launch("cuLaunchKernel", 62, 2, correlation=6)
    f.kernel("triton_poi_fused_relu_0", 80, 30, correlation=6)
    f.node("CompiledFunctionBackward", 200, 100, 2, seq=1)
    f.op(f"{CALL}1:0", 210, 30, 2)
    f.op("aten::mm", 211, 28, 2)
    f.arrow((1, 20), (2, 200.1))
    return f


def test_calls_inside_a_region_have_the_names_of_their_modules(tmp_path: Path) -> None:
    calls = {
        "c0_0": CompiledCall("cpp_fused_norm_0", ".0"),
        "c0_1": CompiledCall("addmm", ".layers.1.fc"),
        "c0_2": CompiledCall("triton_poi_fused_relu_0", "Other/act"),
        "c1_0": CompiledCall("mm", None),
    }
    trace = traced(compiled_step(), tmp_path, **calls)
    region, gradient = "Net/body/Torch-Compiled Region: 0|0", "Net/body/CompiledFunctionBackward"
    assert rows(trace) == [
        ("Net/body/<self>", "forward"),
        (region, "forward"),
        ("Net/body_0/cpp_fused_norm_0", "forward"),
        ("Net/body/layers_1/fc/addmm", "forward"),
        ("Other/act/triton_poi_fused_relu_0", "forward"),
        (gradient, "backward"),
        ("Net/body/mm", "backward"),
    ]
    assert rows(trace, "GPU:0") == [("Other/act/triton_poi_fused_relu_0", "forward")]
    assert trace.composite == {region, gradient}


def test_naming_calls_moves_time_and_makes_none(tmp_path: Path) -> None:
    def total(trace: EventTrace) -> int:
        host = trace.device == trace.devices.index("CPU")
        start = trace.start_ns[host]
        pieces = exclusive_pieces(start, start + trace.dur_ns[host], trace.lane[host])
        return int((pieces.end_ns - pieces.start_ns).sum())

    named = traced(compiled_step(), tmp_path, c0_0=CompiledCall("k", ".a"), c0_1=CompiledCall("addmm", ".b"))
    plain = traced(compiled_step(), tmp_path)
    assert total(named) == total(plain) == 200_000
    region = "Net/body/Torch-Compiled Region: 0|0"
    assert (f"{region}/addmm", "forward") in rows(plain), "without notes operations stand below their region"
    assert rows(plain, "GPU:0") == [(f"{region}/triton_poi_fused_relu_0", "forward")]
    assert not any(CALL in op for op in plain.ops)
