"""Kernels of replayed CUDA graphs: the operations of the capture, or the calls of generated code, they are from."""

from pathlib import Path

import pytest

from joulery.adapters.tracers.inject.compiled import CALL
from joulery.adapters.tracers.kineto.compiled import CompiledCall
from joulery.adapters.tracers.kineto.graphs import aligned
from joulery.adapters.tracers.kineto.names import GRAPH, kernel_time_ns, name_events, read_kineto
from joulery.adapters.tracers.kineto.reader import read_columns
from joulery.domain.trace.events import EventTrace
from tests.adapters.tracers.kineto.kineto_file import KinetoFile

LAYERS = ("up", "act", "down")


def on_gpu(trace: EventTrace) -> list[tuple[str, str]]:
    """(operation, phase) of what ran on the GPU, in order of time."""
    rows = sorted(
        (start, trace.ops[op], trace.phases[phase])
        for start, op, phase, device in zip(
            trace.start_ns.tolist(), trace.op.tolist(), trace.phase.tolist(), trace.device.tolist(), strict=True
        )
        if trace.devices[device] == "GPU:0"
    )
    return [(op, phase) for _, op, phase in rows]


def capture(f: KinetoFile, ts: float, name: str, layers: tuple[str, ...] = LAYERS) -> None:
    """A capture of one operation a layer, each with a call that launches nothing, and a copy at the end."""
    f.module(name, ts, 100)
    f.launch("cudaStreamBeginCapture", ts + 1, 1, correlation=int(ts) + 1)
    for n, layer in enumerate(layers):
        f.module(f"{name}.{layer}", ts + 10 + 20 * n, 18)
        f.op("aten::addmm", ts + 12 + 20 * n, 14)
        f.launch("cudaStreamIsCapturing", ts + 13 + 20 * n, 1, correlation=int(ts) + 40 + n)
        f.launch("cudaLaunchKernelExC", ts + 14 + 20 * n, 2, correlation=int(ts) + 10 + n)
    f.op("aten::copy_", ts + 75, 10)
    f.launch("cudaMemcpyAsync", ts + 76, 2, correlation=int(ts) + 30)
    f.launch("cudaStreamEndCapture", ts + 90, 1, correlation=int(ts) + 2)


def replay(f: KinetoFile, ts: float, correlation: int, graph: int = 0, order: tuple[int, ...] = (0, 1, 2, 3)) -> None:
    """A launch of a graph of three kernels and a copy; ``order`` is that of their times."""
    f.launch("cudaGraphLaunch", ts, 2, correlation=correlation)
    for place, node in enumerate(order):
        args = {"graph id": graph, "graph node id": (graph << 32) + node} if graph else {}
        cat, name = ("gpu_memcpy", "Memcpy DtoD (Device -> Device)") if node == 3 else ("kernel", f"gemm_{node}")
        f.kernel(name, ts + 10 + 5 * place, 4, correlation, cat, **args)


def test_kernels_of_a_replay_have_the_operations_of_the_capture(tmp_path: Path) -> None:
    f = KinetoFile()
    capture(f, 0, "net")
    replay(f, 500, 900)
    replay(f, 600, 901)
    trace = read_kineto(f.write(tmp_path))
    layers = [(f"net/{layer}/addmm", "forward") for layer in LAYERS]
    assert on_gpu(trace) == [*layers, ("net/copy_", "forward")] * 2
    assert not any("CUDA graph" in note for note in trace.notes)
    busy, linked = kernel_time_ns(read_columns(tmp_path / "trace.json"))
    assert busy == linked == 8 * 4_000


def test_numbers_of_nodes_decide_where_branches_ran_in_another_order(tmp_path: Path) -> None:
    f = KinetoFile()
    capture(f, 0, "net")
    replay(f, 500, 900, graph=7, order=(1, 0, 3, 2))
    up, act, down = ((f"net/{layer}/addmm", "forward") for layer in LAYERS)
    assert on_gpu(read_kineto(f.write(tmp_path))) == [act, up, ("net/copy_", "forward"), down]


def test_graphs_alike_are_matched_by_their_numbers_in_the_order_of_the_captures(tmp_path: Path) -> None:
    f = KinetoFile()
    capture(f, 0, "prefill")
    capture(f, 200, "decode")
    replay(f, 500, 900, graph=12)
    replay(f, 600, 901, graph=9)
    replay(f, 700, 902, graph=12)
    found = [op.partition("/")[0] for op, _ in on_gpu(read_kineto(f.write(tmp_path)))]
    assert found == ["decode"] * 4 + ["prefill"] * 4 + ["decode"] * 4


def test_a_graph_that_two_captures_fit_stays_without_operations(tmp_path: Path) -> None:
    f = KinetoFile()
    capture(f, 0, "prefill")
    capture(f, 200, "decode")
    replay(f, 500, 900)
    trace = read_kineto(f.write(tmp_path))
    assert {op.split("/")[1] for op, _ in on_gpu(trace)} == {GRAPH}
    assert any(
        note.startswith("4 of 4 kernels, copies and fills were launched with a CUDA graph") for note in trace.notes
    )


def test_a_capture_of_other_work_names_nothing(tmp_path: Path) -> None:
    f = KinetoFile()
    capture(f, 0, "net", ("up", "act"))
    replay(f, 500, 900)
    assert {op.split("/")[1] for op, _ in on_gpu(read_kineto(f.write(tmp_path)))} == {GRAPH}


def test_calls_that_ran_while_a_stream_was_captured_are_no_nodes(tmp_path: Path) -> None:
    f = KinetoFile()
    capture(f, 0, "net")
    f.op("aten::mul", 20, 5, tid=2)
    f.launch("cudaLaunchKernel", 21, 2, correlation=77, tid=2)
    f.kernel("mul", 30, 4, 77, stream=20)
    replay(f, 500, 900)
    found = on_gpu(read_kineto(f.write(tmp_path)))
    assert found[0] == ("<no module>/mul", "")
    assert found[1:4] == [(f"net/{layer}/addmm", "forward") for layer in LAYERS]


def test_a_backward_pass_in_the_capture_keeps_its_phase(tmp_path: Path) -> None:
    f = KinetoFile()
    f.launch("cudaStreamBeginCapture", 0, 1, correlation=1)
    f.module("fc", 10, 20)
    f.op("aten::addmm", 12, 10, seq=3)
    f.launch("cudaLaunchKernel", 14, 2, correlation=2)
    f.node("AddmmBackward0", 40, 20, 2, seq=3)
    f.op("aten::mm", 45, 10, 2)
    f.launch("cudaLaunchKernel", 47, 2, correlation=3, tid=2)
    f.arrow((1, 12), (2, 40.1))
    f.launch("cudaStreamEndCapture", 80, 1, correlation=4)
    f.launch("cudaGraphLaunch", 100, 2, correlation=5)
    f.kernel("gemm_a", 110, 4, 5)
    f.kernel("gemm_b", 120, 4, 5)
    assert on_gpu(read_kineto(f.write(tmp_path))) == [("fc/addmm", "forward"), ("fc/mm", "backward")]


# ---- generated code

CODE = [
    CompiledCall("convolution", ".stem"),
    CompiledCall("triton_poi_fused_relu_0", ".stem_act"),
    CompiledCall("mm", ".blocks.0.up"),
    CompiledCall("mm", ".blocks.0.down"),
    CompiledCall("triton_per_fused_native_layer_norm_1", ".blocks.0.norm"),
    CompiledCall("mm", ".blocks.1.up"),
    CompiledCall("triton_per_fused_native_layer_norm_1", ".blocks.1.norm"),
]


def places(kernels: list[str]) -> list[str | None]:
    found = aligned(kernels, CODE)
    assert found is not None
    return [None if call is None else call.module for call in found]


def test_kernels_between_two_fused_ones_are_from_the_calls_between_them() -> None:
    relu, norm = CODE[1].leaf, CODE[4].leaf
    whole = ["Memset (Device)", "nchwToNhwc", "sm90_fprop", relu, "gemm_a", "gemm_b", norm, "gemm_c", "splitK", norm]
    first, second = ([f".blocks.{n}.{part}" for part in ("up", "down", "norm")] for n in range(2))
    up, _, last = second
    assert places(whole) == [".stem", ".stem", ".stem", ".stem_act", *first, up, up, last]
    three = [relu, "gemm_a", "splitK", "gemm_b", norm, "gemm_c", norm]
    assert places(three)[1:4] == [".blocks.0"] * 3, "of kernels that are more than the calls, the module in common"


def test_what_is_cleared_is_of_the_kernel_of_a_library_after_it_alone() -> None:
    relu, norm = CODE[1].leaf, CODE[4].leaf
    kernels = ["Memset (Device)", relu, "gemm_a", "Memset (Device)", "gemm_b", "Memset (Device)", norm, "gemm_c", norm]
    first, second = ([f".blocks.{n}.{part}" for part in ("up", "down", "norm")] for n in range(2))
    up, down, last = first
    assert places(kernels) == [None, ".stem_act", up, down, down, None, last, second[0], second[2]]


@pytest.mark.parametrize(
    "kernels",
    [
        ["gemm_a", "gemm_b"],
        [CODE[4].leaf],
        [CODE[4].leaf, CODE[1].leaf],
        ["triton_poi_fused_other_9"],
    ],
)
def test_kernels_of_other_code_or_of_several_places_of_it_have_no_call(kernels: list[str]) -> None:
    assert aligned(kernels, CODE) is None


def test_a_graph_of_generated_code_has_the_modules_of_its_calls(tmp_path: Path) -> None:
    f = KinetoFile()
    f.module("Net", 0, 100)
    f.add("user_annotation", "Torch-Compiled Region: 0/0", 10, 80)
    f.add("user_annotation", "## Call CompiledFxGraph fabc ##", 15, 60)
    f.launch("cudaGraphLaunch", 20, 10, correlation=5)
    for n, name in enumerate(["sm90_fprop", CODE[1].leaf, "gemm_a", "gemm_b", CODE[4].leaf, "gemm_c", CODE[4].leaf]):
        f.kernel(name, 40 + 10 * n, 10, correlation=5)
    compiled = {f"{CALL}3:{at}": call for at, call in enumerate(CODE)}
    other = {f"{CALL}4:0": CompiledCall("triton_poi_fused_other_9", ".other")}
    trace = name_events(read_columns(f.write(tmp_path)), compiled={**compiled, **other})
    assert on_gpu(trace) == [
        ("Net/stem/convolution", "forward"),
        ("Net/stem_act/triton_poi_fused_relu_0", "forward"),
        ("Net/blocks_0/up/mm", "forward"),
        ("Net/blocks_0/down/mm", "forward"),
        ("Net/blocks_0/norm/triton_per_fused_native_layer_norm_1", "forward"),
        ("Net/blocks_1/up/mm", "forward"),
        ("Net/blocks_1/norm/triton_per_fused_native_layer_norm_1", "forward"),
    ]
