"""JAX on a GPU: kernels, their annotations, lines that repeat them, and the CUDA graphs that XLA makes."""

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

from joulery.adapters.tracers.files import read_events
from joulery.adapters.tracers.xla.graphs import numbered, spread
from joulery.adapters.tracers.xla.hlo import qualified_op
from joulery.adapters.tracers.xla.xplane import read_xplane
from joulery.domain.trace.events import EventTrace
from tests.adapters.tracers.xla.gpu_profile import Plane, program, write_profile

FORWARD, BACKWARD = "jit(step)/jvp(Net)", "jit(step)/transpose(jvp(Net))"
ENTRY = [
    ("p.0", "parameter", "", []),
    ("loop_tanh_fusion.1", "fusion", "", ["fused_tanh"]),
    ("custom-call.4", "custom-call", f"{FORWARD}/Dense_0/dot_general", []),
    ("gemm_fusion_dot.2", "fusion", f"{FORWARD}/Dense_1/dot_general", []),
    ("custom-call.5", "custom-call", f"{BACKWARD}/Dense_1/dot_general", []),
    ("input_reduce_fusion", "fusion", f"{BACKWARD}/Dense_1/reduce_sum", []),
    ("tuple.9", "tuple", "", []),
]
"""A step in the order of its schedule; the products that are custom calls run kernels of a library."""
PROGRAM = program("jit_step", {"fused_tanh": [("tanh.3", "tanh", f"{FORWARD}/Norm_0/tanh", [])], "main.12": ENTRY})
KERNELS = ("loop_tanh_fusion_1", "nvjet_hsh_64x8", "gemm_fusion_dot_2", "nvjet_hsh_128x8", "input_reduce_fusion")
NAMES = [
    ("Net/Norm_0/tanh", "forward"),
    ("Net/Dense_0/dot_general", "forward"),
    ("Net/Dense_1/dot_general", "forward"),
    ("Net/Dense_1/dot_general", "backward"),
    ("Net/Dense_1/reduce_sum", "backward"),
]
MODULE = {"hlo_module": "jit_step", "program_id": 3, "prefix": "jit(step)"}


def in_order(trace: EventTrace, device: str = "GPU:0") -> list[tuple[str, str]]:
    rows = zip(trace.start_ns.tolist(), trace.op.tolist(), trace.phase.tolist(), trace.device.tolist(), strict=True)
    return [(trace.ops[op], trace.phases[phase]) for _, op, phase, at in sorted(rows) if trace.devices[at] == device]


def kernels(*, graph: bool) -> list[tuple[str, int, int, dict[str, Any]]]:
    """The kernels of a step, each launched by itself, or all with one graph."""
    rows = []
    for n, (kernel, (op, *_)) in enumerate(zip(KERNELS, ENTRY[1:], strict=False)):
        own = {"hlo_op": "command_buffer_1", "cuda_graph_id": 7, "cuda_graph_node_id": (7 << 32) + n}
        own = own if graph else {"hlo_op": op}
        launch = 40 if graph else 40 + n
        context = {"correlation_id": launch, "context_id": "$$1", "kernel_details": "regs:32", "tf_op": "XlaModule:"}
        rows.append((kernel, 10 * n, 8, {**context, **own, **MODULE}))
    return rows


def profile(tmp_path: Path, *, graph: bool) -> Path:
    gpu = Plane("/device:GPU:0 (NVIDIA H100 80GB HBM3)")
    rows = kernels(graph=graph)
    gpu.line(
        "Stream #13(Kernel,MemcpyH2D)", [("MemcpyH2D", 0, 4, {"correlation_id": 2, "memcpy_details": "size:8"}), *rows]
    )
    gpu.line("XLA Ops", [(name, start, length, {"hlo_op": name, **MODULE}) for name, start, length, _ in rows])
    gpu.line("XLA Modules", [("jit_step(3)", 0, 60, MODULE)])
    return write_profile(tmp_path / "t.xplane.pb", gpu, {"jit_step(3)": PROGRAM})


def test_kernels_have_the_operations_of_their_instructions_and_are_counted_once(tmp_path: Path) -> None:
    trace = read_xplane(profile(tmp_path, graph=False))
    assert trace.devices == ("GPU:0",)
    assert sorted(in_order(trace)) == sorted([("<no module>/MemcpyH2D", ""), *NAMES])


def test_kernels_of_a_command_buffer_are_named_by_their_names_and_order(tmp_path: Path) -> None:
    trace = read_xplane(profile(tmp_path, graph=True))
    assert sorted(in_order(trace)) == sorted([("<no module>/MemcpyH2D", ""), *NAMES])
    assert trace.notes[0].startswith("5 of 6 events were launched with a CUDA graph")


def chrome(tmp_path: Path, rows: list[tuple[str, int, int, dict[str, Any]]]) -> Path:
    """The same as JAX's Chrome trace, whose values are texts; without any program beside it."""
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "/device:GPU:0"}},
        {"ph": "M", "pid": 1, "tid": 13, "name": "thread_name", "args": {"name": "Stream #13(Kernel)"}},
        {"ph": "M", "pid": 1, "tid": 99, "name": "thread_name", "args": {"name": "XLA Ops"}},
    ]
    for name, start, length, stats in rows:
        args = {key: str(value) for key, value in stats.items()}
        event = {"ph": "X", "pid": 1, "ts": start, "dur": length, "name": name, "args": args}
        events += [{**event, "tid": 13}, {**event, "tid": 99}]
    path = tmp_path / "t.trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    return path


def test_without_the_program_the_annotation_names_a_kernel(tmp_path: Path) -> None:
    rows = kernels(graph=False)
    stated = ("jvp(Net)/Norm_0/tanh", "jvp(Net)/Dense_0/dot_general", "jvp(Net)/Dense_1/dot_general")
    stated += ("transpose(jvp(Net))/Dense_1/dot_general", "transpose(jvp(Net))/Dense_1/reduce_sum")
    path = chrome(tmp_path, [(*row[:3], {**row[3], "name": name}) for row, name in zip(rows, stated, strict=True)])
    assert in_order(read_events(path)) == NAMES


def test_a_trace_beside_its_program_names_the_kernels_of_graphs_too(tmp_path: Path) -> None:
    profile(tmp_path, graph=True)
    assert in_order(read_events(chrome(tmp_path, kernels(graph=True)))) == NAMES


# ---- a command buffer as a GPU ran it

RECORDED = [
    line.split("\t")
    for line in Path(__file__).with_name("command_buffer.tsv").read_text(encoding="utf-8").splitlines()
    if not line.startswith("#")
]
"""Facts of a profile of one step of a Flax transformer on an H100; the file's first lines say which."""


def recorded(tmp_path: Path, *, numbers: bool = True) -> Path:
    """The profile of that step, written again; without the numbers of the graph's nodes too."""
    instructions = [row[1:] for row in RECORDED if row[0] == "I"]
    main = [(name, opcode, op_name, list[str]()) for name, opcode, op_name, _ in instructions]
    operands = {name: operand for name, _, _, operand in instructions if operand}
    gpu, rows = Plane("/device:GPU:0 (NVIDIA H100 80GB HBM3)"), []
    for _, name, node, start, length in (row for row in RECORDED if row[0] == "K"):
        stats = {"correlation_id": 108, "tf_op": "XlaModule:", "hlo_op": "command_buffer_1", "hlo_module": "jit_step"}
        at_node = {"cuda_graph_id": 123, "cuda_graph_node_id": (123 << 32) + int(node)} if numbers else {}
        rows.append((name, int(start) / 1e3, int(length) / 1e3, {**stats, **at_node}))
    gpu.line("Stream #29(Kernel,Memset)", rows)
    return write_profile(
        tmp_path / "t.xplane.pb", gpu, {"jit_step(150911)": program("jit_step", {"m": main}, operands)}
    )


def test_each_kernel_of_a_recorded_command_buffer_is_of_one_instruction_of_the_program(tmp_path: Path) -> None:
    rows = in_order(read_xplane(recorded(tmp_path)))
    kernels = [row[1] for row in RECORDED if row[0] == "K"]
    ran = [row for row, kernel in zip(rows, kernels, strict=True) if kernel != "Memset 0"]
    stated = [qualified_op(row[3]) for row in RECORDED if row[0] == "I" and row[3]]
    added = sum(row[0] == "I" and not row[3] for row in RECORDED)
    assert len(ran) == len(stated) + added
    counts, expected = Counter(ran), Counter(stated)
    assert not expected - counts  # each instruction ran once
    assert all("fusion" in name for name, _ in counts - expected)  # and so did those that the compiler added
    assert all(name.startswith("Net/") and phase == "backward" for name, phase in counts - expected)


def test_the_products_of_a_recorded_command_buffer_are_in_the_order_of_the_network(tmp_path: Path) -> None:
    rows = in_order(read_xplane(recorded(tmp_path)))
    kernels = [row[1] for row in RECORDED if row[0] == "K"]
    forward = [
        name.removesuffix("/dot_general")
        for (name, phase), kernel in zip(rows, kernels, strict=True)
        if phase == "forward" and name.endswith("dot_general") and kernel != "Memset 0"
    ]
    attention = ("value", "...qhd,...khd->...hqk", "...hqk,...khd->...qhd", "out")  # keys and queries with the values
    block = [*(f"attention/attention/{each}" for each in attention), "up", "out"]
    assert forward == [*(f"Net/block_{n}/{each}" for n in range(4) for each in block), "Net/head"]


def test_the_order_alone_names_a_recorded_command_buffer_as_its_numbers_do(tmp_path: Path) -> None:
    assert in_order(read_xplane(recorded(tmp_path, numbers=False))) == in_order(read_xplane(recorded(tmp_path)))


# ---- names, numbers and order


def number_names(*kernels: tuple[str, int]) -> list[str]:
    sequence = ["a.1", "lib.1", "b.1", "lib.2", "a.2", "b.2", "c", "lib.3"]
    places = {name.replace(".", "_"): (0, at) for at, name in enumerate(sequence)}
    names, nodes = zip(*kernels, strict=True)
    known = numbered(names, nodes, [sequence], places)
    return [sequence[known[at][1]] if at in known else "" for at in range(len(kernels))]


def test_the_number_of_a_node_identifies_the_instruction_of_an_alike_kernel() -> None:
    # The kernels of a.1 and b.1 run for a.2 and b.2 too; the graph begins with the second of them.
    assert number_names(("a_1", 0), ("b_1", 1), ("c", 2)) == ["a.2", "b.2", "c"]
    # Two that ran side by side, the later one first.
    assert number_names(("a_1", 0), ("b_1", 2), ("c", 6), ("b_1", 5)) == ["a.1", "b.1", "c", "b.2"]


def test_a_kernel_of_a_library_has_a_number_of_its_own_or_one_after_all_others() -> None:
    assert number_names(("a_1", 0), ("x", 1), ("b_1", 2), ("c", 6)) == ["a.1", "lib.1", "b.1", "c"]
    assert number_names(("a_1", 0), ("x", 7), ("b_1", 2), ("c", 6)) == ["a.1", "", "b.1", "c"]


def test_numbers_that_do_not_fit_the_names_tell_nothing() -> None:
    assert number_names(("a_1", 0), ("b_1", 3), ("c", 9)) == ["", "", ""]  # other nodes between the kernels
    assert number_names(("a_1", 0), ("b_1", 0), ("c", 0)) == ["", "", ""]  # a profile without numbers


def test_memory_that_is_cleared_belongs_to_the_kernel_after_it() -> None:
    sequence = ["a", "lib.1", "lib.2", "b"]
    found = spread(["a", "x", "Memset 0", "y", "b"], [sequence], {"a": (0, 0), "b": (0, 3)})
    assert found == [("a",), ("lib.1",), ("lib.2",), ("lib.2",), ("b",)]


def spread_names(*names: str) -> list[tuple[str, ...]]:
    sequence = ["a.1", "lib.1", "b.1", "lib.2", "c.2", "lib.3", "d"]
    places = {name.replace(".", "_"): (0, at) for at, name in enumerate(sequence)}
    return [tuple(found) for found in spread(names, [sequence], places)]


def test_kernels_of_a_library_are_from_the_instructions_between() -> None:
    assert spread_names("a_1", "x", "b_1") == [("a.1",), ("lib.1",), ("b.1",)]
    # Two kernels of one instruction, and the instruction after it: which is which is not known.
    assert spread_names("b_1", "x", "y", "z", "d")[1:4] == [("lib.2",), ("c.2",), ("lib.3",)]
    assert spread_names("b_1", "x", "y", "d")[1:3] == [("lib.2", "c.2", "lib.3")] * 2


def test_a_kernel_that_alike_instructions_share_is_read_by_its_order() -> None:
    assert spread_names("b_1", "x", "b_1", "y", "d") == [("b.1",), ("lib.2",), ("c.2",), ("lib.3",), ("d",)]


def test_beyond_the_first_and_last_known_kernel_as_many_instructions_as_kernels_may_be_meant() -> None:
    assert spread_names("x", "b_1", "y", "z") == [("lib.1",), ("b.1",), ("lib.2", "c.2"), ("lib.2", "c.2")]
    assert spread_names("x", "y") == [(), ()]
