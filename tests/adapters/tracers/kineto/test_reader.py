"""Names of PyTorch traces: the golden ones, and each rule by itself."""

import csv
import gzip
import json
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from joulery.accounting.operations.align import align
from joulery.accounting.operations.session import session
from joulery.accounting.steps import PowerSteps
from joulery.adapters.tracers.kineto.names import GRAPH, name_events, read_kineto
from joulery.adapters.tracers.kineto.reader import EventKind, read_columns
from joulery.domain.energy.channel import Channel, ReadingKind
from joulery.domain.errors import DataError
from joulery.domain.quality import Quality
from joulery.domain.trace.events import EventTrace, module_components
from tests.adapters.tracers.kineto.kineto_file import KinetoFile
from tests.data_folder import data_folder


def listed(trace: EventTrace, device: str = "CPU") -> list[tuple[str, str]]:
    """(name, phase) of each event on a device, in file order."""
    return [
        (trace.ops[op], trace.phases[phase])
        for op, phase, where in zip(trace.op.tolist(), trace.phase.tolist(), trace.device.tolist(), strict=True)
        if trace.devices[where] == device
    ]


def phases_of(trace: EventTrace) -> dict[str, str]:
    return dict(listed(trace))


# ---- the golden traces


def test_every_module_of_the_golden_trace_has_its_events_its_products_and_its_time() -> None:
    folder = data_folder("smaragdine") / "torch_cpu"
    trace = read_kineto(folder / "tiny_bert_train_step.json.gz")
    cut = session(trace, trace.extent_ns)
    time_us = np.bincount(cut.row, cut.end_ns - cut.start_ns, len(cut.rows)) / 1e3
    found: dict[tuple[str, str], list[float]] = {}
    for op, phase, count, us in zip(cut.rows.op, cut.rows.phase, cut.rows.count.tolist(), time_us, strict=True):
        path, _, leaf = op.rpartition("/")
        kind = re.sub(r"_\d+$", "", leaf)
        here = found.setdefault((path, phase), [0, 0, 0, 0, 0.0])
        for slot, name in enumerate((None, "mm", "addmm", "bmm")):
            here[slot] += count * (name is None or kind == name)
        here[4] += us
    for row in csv.DictReader((folder / "expected_by_module.csv").read_text().splitlines()):
        if row["module"]:
            here = found.pop(("/".join(module_components(row["module"])), row["phase"]))
            assert here[:4] == [int(row[key]) for key in ("n_events", "n_mm", "n_addmm", "n_bmm")], row
            assert here[4] == pytest.approx(float(row["self_us"]), rel=1e-6, abs=1e-3), row
    assert set(found) == {
        ("<no module>", "backward"),
        ("<no module>", "forward"),
        ("<no module>", ""),
        ("<root>", "forward"),
        ("AdamW.step", "optimizer"),
        ("AdamW.zero_grad", "optimizer"),
    }
    assert trace.notes == ()


def test_every_matrix_product_of_the_golden_trace_has_its_own_name() -> None:
    trace = read_kineto(data_folder("smaragdine") / "torch_cpu" / "tiny_bert_train_step.json.gz")
    names = Counter(name for name, phase in listed(trace) if phase in ("forward", "backward"))
    products = {name: n for name, n in names.items() if re.search(r"/(mm|addmm|bmm)(_\d+)?$", name)}
    assert not any(name.startswith("<") for name in products)
    linear = "bert/encoder/layer_0/attention/self/query"
    assert (products[f"{linear}/addmm"], products[f"{linear}/mm"], products[f"{linear}/mm_1"]) == (1, 1, 1)
    total = Counter(re.sub(r"_\d+$", "", name.rpartition("/")[2]) for name in products for _ in range(products[name]))
    assert total == {"addmm": 14, "mm": 28, "bmm": 12}


def facts() -> list[dict[str, str]]:
    table = data_folder("smaragdine") / "kineto_gpu" / "expected_facts.csv"
    return list(csv.DictReader(table.read_text().splitlines()))


@pytest.mark.parametrize("number", range(3))
def test_every_kernel_of_the_golden_gpu_traces_is_linked_and_busy_time_is_exact(number: int) -> None:
    fact = facts()[number]
    columns = read_columns(data_folder("smaragdine") / "kineto_gpu" / fact["file"])
    kernels = columns.kind == EventKind.KERNEL
    assert int(kernels.sum()) == int(fact["gpu_events"])
    assert int(columns.dur_ns[kernels].sum()) == int(fact["gpu_busy_sum_ns"])
    assert len(np.unique(columns.lane[kernels])) == int(fact["device_streams"])
    assert len(columns.flow_ns) == int(fact["fwdbwd_pairs"])
    trace = name_events(columns)
    assert not [note for note in trace.notes if "launch" in note]
    device = next(name for name in trace.devices if name.startswith("GPU"))
    window = trace.extent_ns
    one_watt = PowerSteps(Channel(device, "board", ReadingKind.POWER, "fake", Quality.MEASURED), list(window), [1.0])
    got = {entry.device: entry for entry in align(trace, {device: [one_watt]}, window).devices}[device]
    assert round(got.active_s * 1e9) == int(fact["union_busy_ns"])
    assert got.attributed_j == pytest.approx(int(fact["union_busy_ns"]) / 1e9, rel=1e-12)
    assert got.attributed_j + got.unattributed_j == pytest.approx(got.total_j, rel=1e-12)


def test_stamps_far_from_their_base_are_exact_to_the_nanosecond(tmp_path: Path) -> None:
    source = data_folder("smaragdine") / "kineto_gpu" / "a100_nccl_data.json.gz"
    text = gzip.decompress(source.read_bytes()).decode()
    written = [int(a + b) for a, b in re.findall(r'"ph": "X", "cat": "kernel".*?"ts": (\d+)\.(\d{3})', text, re.DOTALL)]
    columns = read_columns(source)
    names = np.array([columns.names[name] for name in columns.name])
    kernels = (columns.kind == EventKind.KERNEL) & ~np.char.startswith(names, "Mem")
    assert sorted((columns.start_ns[kernels] - columns.base_ns).tolist()) == sorted(written)
    assert len(written) == 2700


# ---- rule by rule


def test_forward_operations_take_the_name_of_their_module(tmp_path: Path) -> None:
    f = KinetoFile()
    f.module("net.layer.0", 0, 100)
    f.op("aten::linear", 10, 50, seq=1)
    f.op("aten::addmm", 20, 30, seq=1)
    f.op("aten::mse_loss", 200, 10, seq=2)
    f.op("aten::randn", 300, 10)
    trace = read_kineto(f.write(tmp_path))
    assert listed(trace) == [
        ("net/layer_0/<self>", "forward"),
        ("net/layer_0/linear", "forward"),
        ("net/layer_0/addmm", "forward"),
        ("<no module>/mse_loss", "forward"),
        ("<no module>/randn", ""),
    ]
    assert trace.start_ns[0] == 1_000_000_000 and trace.dur_ns.tolist() == [100_000, 50_000, 30_000, 10_000, 10_000]


def backward(f: KinetoFile, *, arrows: bool) -> None:
    """Two linears forward on thread 1, their gradients on thread 2."""
    for k, path in enumerate(("a", "b")):
        f.module(path, 100 * k, 50)
        f.op("aten::view", 100 * k + 2, 5, seq=k + 1)
        f.op("aten::addmm", 100 * k + 10, 30, seq=k + 1)
    for k, start in ((1, 1000), (0, 1200)):
        f.node("AddmmBackward0", start, 100, 2, seq=k + 1, fwd=1)
        f.op("aten::mm", start + 10, 20, 2)
        f.op("aten::mm", start + 40, 20, 2)
        f.node("torch::autograd::AccumulateGrad", start + 120, 20, 2)
        if arrows:
            f.arrow((1, 100 * k + 10), (2, start + 0.1))


@pytest.mark.parametrize("arrows", [True, False])
def test_backward_operations_take_the_module_of_what_they_differentiate(tmp_path: Path, arrows: bool) -> None:
    f = KinetoFile()
    backward(f, arrows=arrows)
    names = [name for name, phase in listed(read_kineto(f.write(tmp_path))) if phase == "backward"]
    expected = ["AddmmBackward0", "AddmmBackward0", "mm", "mm_1", "AccumulateGrad", "AccumulateGrad"]
    assert names == [f"{module}/{leaf}" for module in ("b", "a") for leaf in expected]


def test_the_last_forward_operation_with_a_number_is_the_one(tmp_path: Path) -> None:
    f = KinetoFile()
    f.module("early", 0, 10)
    f.op("aten::detach", 1, 2, seq=5)
    f.module("late", 20, 20)
    f.op("aten::mul", 21, 5, seq=5)
    f.node("MulBackward0", 100, 20, seq=5, fwd=1)
    assert phases_of(read_kineto(f.write(tmp_path)))["late/MulBackward0"] == "backward"


def test_a_node_differentiates_nothing_that_comes_after_it(tmp_path: Path) -> None:
    f = KinetoFile()
    f.node("MulBackward0", 10, 20, seq=5, fwd=1)
    f.module("next step", 100, 20)
    f.op("aten::mul", 101, 5, seq=5)
    names = phases_of(read_kineto(f.write(tmp_path)))
    assert names["<no module>/MulBackward0"] == "backward"


def two_forward_threads(f: KinetoFile) -> None:
    """Two threads, each with its own sequence numbers from 1: they collide."""
    for tid, path in ((1, "one"), (3, "three")):
        f.module(path, 10 * tid, 8, tid)
        f.op("aten::mul", 10 * tid + 1, 5, tid, seq=1)
    f.node("MulBackward0", 100, 20, 9, seq=1, fwd=1)
    f.node("MulBackward0", 200, 20, 9, seq=1, fwd=2)


def test_colliding_sequence_numbers_are_distinguished_by_arrows(tmp_path: Path) -> None:
    f = KinetoFile()
    two_forward_threads(f)
    f.arrow((1, 11), (9, 100.1))
    f.arrow((3, 31), (9, 200.1))
    nodes = [name for name, phase in listed(read_kineto(f.write(tmp_path))) if phase == "backward"]
    assert nodes == ["one/MulBackward0"] * 2 + ["three/MulBackward0"] * 2


def test_arrows_of_some_nodes_tell_the_threads_of_the_others(tmp_path: Path) -> None:
    f = KinetoFile()
    two_forward_threads(f)
    for tid in (1, 3):
        f.module(f"later{tid}", 60 + 10 * tid, 8, tid)
        f.op("aten::add", 61 + 10 * tid, 5, tid, seq=2)
    f.node("AddBackward0", 300, 20, 9, seq=2, fwd=2)
    f.arrow((1, 11), (9, 100.1))
    f.arrow((3, 31), (9, 200.1))
    assert phases_of(read_kineto(f.write(tmp_path)))["later3/AddBackward0"] == "backward"


def test_a_thread_that_arrows_tell_is_the_only_one_asked(tmp_path: Path) -> None:
    f = KinetoFile()
    two_forward_threads(f)
    f.module("later1", 70, 8, 1)
    f.op("aten::add", 71, 5, 1, seq=2)
    f.node("AddBackward0", 300, 20, 9, seq=2, fwd=2)
    f.arrow((1, 11), (9, 100.1))
    f.arrow((3, 31), (9, 200.1))
    assert phases_of(read_kineto(f.write(tmp_path)))["<no module>/AddBackward0"] == "backward"


def test_a_thousand_forward_threads_without_arrows(tmp_path: Path) -> None:
    f = KinetoFile()
    for at in range(1000):
        f.module(f"of{at}", 10 * at, 8, 100 + at)
        f.op("aten::mul", 10 * at + 1, 5, 100 + at, seq=at)
        f.node("MulBackward0", 20_000 + 10 * at, 8, 9, seq=at, fwd=at + 1)
    names = phases_of(read_kineto(f.write(tmp_path)))
    assert all(names[f"of{at}/MulBackward0"] == "backward" for at in range(1000))


def test_colliding_sequence_numbers_without_arrows_have_no_module(tmp_path: Path) -> None:
    f = KinetoFile()
    two_forward_threads(f)
    trace = read_kineto(f.write(tmp_path))
    assert [name for name, phase in listed(trace) if phase == "backward"] == ["<no module>/MulBackward0"] * 4
    assert any("2 backward nodes carry a sequence number that several threads used" in note for note in trace.notes)


def test_a_gradient_is_not_accumulated_for_a_node_of_another_thread(tmp_path: Path) -> None:
    f = KinetoFile()
    f.module("m", 0, 20)
    f.op("aten::mul", 1, 5, seq=1)
    f.node("MulBackward0", 100, 20, 8, seq=1)
    f.node("torch::autograd::AccumulateGrad", 130, 20, 9)
    names = listed(read_kineto(f.write(tmp_path)))
    assert ("m/MulBackward0", "backward") in names and ("<no module>/AccumulateGrad", "backward") in names


def test_recomputation_keeps_its_modules_and_says_so(tmp_path: Path) -> None:
    f = KinetoFile()
    f.module("block", 0, 50)
    f.op("aten::addmm", 10, 30, seq=1)
    f.node("CheckpointFunctionBackward", 100, 300, 2, seq=1)
    f.module("block", 110, 50, 2)
    f.op("aten::addmm", 120, 30, 2, seq=7)
    f.node("AddmmBackward0", 200, 100, 2, seq=7, fwd=2)
    f.op("aten::mm", 210, 20, 2)
    f.arrow((1, 10), (2, 100.1))
    f.arrow((2, 120), (2, 200.1))
    names = listed(read_kineto(f.write(tmp_path)))
    assert ("block/addmm", "recompute") in names and ("block/<self>", "recompute") in names
    assert ("block/mm", "backward") in names and ("block/CheckpointFunctionBackward", "backward") in names


def test_a_second_derivative_is_followed_to_its_module(tmp_path: Path) -> None:
    f = KinetoFile()
    f.module("m", 0, 20)
    f.op("aten::mul", 1, 5, seq=1)
    f.node("MulBackward0", 100, 40, seq=1)
    f.op("aten::mul", 110, 5, seq=2)
    f.node("MulBackward0", 200, 40, seq=2)
    names = [name for name, phase in listed(read_kineto(f.write(tmp_path))) if phase == "backward"]
    assert names == ["m/MulBackward0"] * 2 + ["m/mul"] + ["m/MulBackward0"] * 2


def test_optimizers_loaders_and_ranges_of_the_user(tmp_path: Path) -> None:
    f = KinetoFile()
    f.add("user_annotation", "ProfilerStep#3", 0, 1000)
    f.add("user_annotation", "Optimizer.step#AdamW.step", 10, 50)
    f.op("aten::_foreach_add_", 20, 10)
    f.add("user_annotation", "my loss", 100, 50)
    f.op("aten::mul", 110, 10, seq=4)
    trace = read_kineto(f.write(tmp_path))
    assert listed(trace) == [
        ("AdamW.step/<self>", "optimizer"),
        ("AdamW.step/_foreach_add_", "optimizer"),
        ("my loss/<self>", ""),
        ("my loss/mul", "forward"),
    ]


def test_a_closure_inside_an_optimizers_step_is_a_forward_pass(tmp_path: Path) -> None:
    f = KinetoFile()
    f.add("user_annotation", "Optimizer.step#AdamW.step", 0, 500)
    f.module("Net", 10, 50)
    f.op("aten::addmm", 20, 10, seq=1)
    f.op("aten::mse_loss", 100, 10, seq=2)
    f.node("MseLossBackward0", 200, 50, seq=2)
    f.op("aten::_foreach_add_", 300, 10)
    assert phases_of(read_kineto(f.write(tmp_path))) == {
        "AdamW.step/<self>": "optimizer",
        "Net/<self>": "forward",
        "Net/addmm": "forward",
        "<no module>/mse_loss": "forward",
        "<no module>/MseLossBackward0": "backward",
        "AdamW.step/_foreach_add_": "optimizer",
    }


def test_waiting_for_a_batch_is_a_phase_of_its_own(tmp_path: Path) -> None:
    f = KinetoFile()
    f.add("user_annotation", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 0, 500)
    f.op("aten::stack", 20, 10, seq=1)
    assert listed(read_kineto(f.write(tmp_path))) == [("DataLoader/<self>", "data"), ("DataLoader/stack", "data")]


def test_odd_module_names(tmp_path: Path) -> None:
    f = KinetoFile()
    for k, path in enumerate(("gradients.fc", "<lambda>", "Sequential/0.1", "layer_1", "layer_10", "")):
        f.module(path, 100 * k, 50)
        f.op("aten::mul", 100 * k + 1, 5, seq=k)
    names = listed(read_kineto(f.write(tmp_path)))
    assert [n for n, _ in names if n.endswith("mul")] == [
        "gradients/fc/mul",
        "<lambda>/mul",
        "Sequential/0/1/mul",
        "layer_1/mul",
        "layer_10/mul",
        "<root>/mul",
    ]
    assert {phase for _, phase in names} == {"forward"}


def test_repeated_calls_are_numbered_when_asked(tmp_path: Path) -> None:
    f = KinetoFile()
    f.module("albert", 0, 100)
    for k in range(2):
        f.module("albert.layer", 10 + 40 * k, 30)
        f.module("albert.layer.ffn", 15 + 40 * k, 20)
        f.op("aten::mm", 20 + 40 * k, 5, seq=k + 1)
    f.node("MmBackward0", 200, 20, seq=2)
    path = f.write(tmp_path)
    plain = [n for n, _ in listed(read_kineto(path)) if n.endswith("/mm")]
    assert plain == ["albert/layer/ffn/mm"] * 2
    names = [n for n, _ in listed(name_events(read_columns(path), calls=True))]
    assert [n for n in names if n.endswith("/mm")] == ["albert/layer/ffn/mm", "albert/layer@2/ffn/mm"]
    assert "albert/layer@2/ffn/MmBackward0" in names


# ---- kernels


def test_kernels_take_the_name_of_the_operation_that_launched_them(tmp_path: Path) -> None:
    f = KinetoFile()
    f.module("fc", 0, 100)
    f.op("aten::addmm", 10, 50, seq=1, ext=5)
    f.launch("cudaLaunchKernel", 20, 10, correlation=77)
    f.kernel("ampere_sgemm_128x64_nn", 90, 40, correlation=77, **{"External id": 6})
    f.op("aten::to", 200, 50, ext=6)
    f.kernel("Memcpy HtoD", 210, 5, correlation=0, cat="gpu_memcpy", **{"External id": 6})
    f.launch("cudaLaunchKernel", 300, 10, correlation=78)
    f.kernel("mine<float>/x", 310, 5, correlation=78)
    f.kernel("lost", 400, 5, correlation=999)
    f.kernel("again", 90, 40, correlation=77, stream=8)
    f.add("gpu_user_annotation", "QTN:fc", 90, 40, 7)
    trace = read_kineto(f.write(tmp_path))
    assert listed(trace, "GPU:0") == [
        ("fc/addmm", "forward"),
        ("<no module>/to", ""),
        ("<no module>/mine<float>|x", ""),
        ("<no module>/lost", ""),
        ("fc/addmm", "forward"),
    ]
    assert listed(trace) == [
        ("fc/<self>", "forward"),
        ("fc/addmm", "forward"),
        ("<no module>/to", ""),
        ("<no module>/cudaLaunchKernel", ""),
    ]
    assert trace.notes == ("1 of 5 kernels, copies and fills have no launch in the trace",)


def test_waiting_for_the_gpu_is_seen_and_launching_belongs_to_the_operation(tmp_path: Path) -> None:
    f = KinetoFile()
    f.module("fc", 0, 100)
    f.op("aten::item", 10, 80)
    f.launch("cudaMemcpyAsync", 20, 10, correlation=3)
    f.launch("cudaStreamSynchronize", 40, 40, correlation=4)
    trace = read_kineto(f.write(tmp_path))
    assert listed(trace) == [("fc/<self>", "forward"), ("fc/item", "forward"), ("fc/<wait>", "forward")]
    cut = session(trace, trace.extent_ns)
    time = dict(zip(cut.rows.op, np.bincount(cut.row, cut.end_ns - cut.start_ns).tolist(), strict=True))
    assert time == {"fc/<self>": 20_000, "fc/item": 40_000, "fc/<wait>": 40_000}


def test_the_kernels_of_a_cuda_graph_have_their_own_names_below_it(tmp_path: Path) -> None:
    f = KinetoFile()
    f.module("net", 0, 100)
    f.launch("cudaGraphLaunch", 20, 10, correlation=5)
    for k in range(3):
        f.kernel(f"k{k}", 40 + 10 * k, 10, correlation=5)
    trace = read_kineto(f.write(tmp_path))
    assert listed(trace, "GPU:0") == [(f"net/{GRAPH}/k{k}", "forward") for k in range(3)]


def test_a_compiled_region_names_its_operations_and_keeps_the_rest_as_a_composite_leaf(tmp_path: Path) -> None:
    f = KinetoFile()
    f.module("net", 0, 100)
    f.add("user_annotation", "Torch-Compiled Region: 0/0", 10, 80)
    f.op("CompiledFunction", 20, 60, seq=1)
    f.add("user_annotation", "## Call CompiledFxGraph fabc ##", 25, 50)
    f.op("extern_kernels.addmm", 30, 20)
    f.launch("cudaLaunchKernel", 35, 5, correlation=6)
    f.kernel("ampere_sgemm", 60, 10, correlation=6)
    f.launch("cuLaunchKernel", 55, 5, correlation=7)
    f.kernel("triton_poi_fused_0", 80, 10, correlation=7)
    f.node("CompiledFunctionBackward", 200, 100, 2, seq=1)
    f.op("extern_kernels.mm", 220, 20, 2)
    f.arrow((1, 20), (2, 200.1))
    trace = read_kineto(f.write(tmp_path))
    region, gradient = "net/Torch-Compiled Region: 0|0", "net/CompiledFunctionBackward"
    assert listed(trace) == [
        ("net/<self>", "forward"),
        (region, "forward"),
        (f"{region}/extern_kernels.addmm", "forward"),
        (gradient, "backward"),
        (f"{gradient}/extern_kernels.mm", "backward"),
    ]
    assert listed(trace, "GPU:0") == [
        (f"{region}/extern_kernels.addmm", "forward"),
        (f"{region}/triton_poi_fused_0", "forward"),
    ]
    assert trace.composite == {region, gradient}


# ---- damage


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda e: e.pop("ts"), "malformed"),
        (lambda e: e.pop("dur"), "malformed"),
        (lambda e: e.pop("tid"), "malformed"),
        (lambda e: e.update(dur=-1), "at least 0"),
        (lambda e: e.update(dur="x"), "not a number"),
        (lambda e: e.update(ts=1e300), "beyond any clock"),
        (lambda e: e.update(args=[1]), "malformed"),
    ],
)
def test_a_malformed_event_is_named(tmp_path: Path, change, says: str) -> None:
    f = KinetoFile()
    f.op("aten::mul", 0, 5)
    change(f.events[0])
    with pytest.raises(DataError, match=says):
        read_kineto(f.write(tmp_path))


def test_an_event_that_is_no_object_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text('{"schemaVersion": 1, "traceEvents": [1, {}]}')
    with pytest.raises(DataError, match="malformed"):
        read_kineto(path)


def test_a_base_that_is_no_number_is_reported(tmp_path: Path) -> None:
    f = KinetoFile()
    f.op("aten::mul", 0, 5)
    with pytest.raises(DataError, match="baseTimeNanoseconds"):
        read_kineto(f.write(tmp_path, base="soon"))  # type: ignore[arg-type]


def test_identifiers_that_are_no_numbers_count_as_absent(tmp_path: Path) -> None:
    f = KinetoFile()
    f.op("aten::mul", 0, 5)
    f.events[0]["args"] = {"Sequence number": "x", "Fwd thread id": None, "External id": 1.5, "correlation": True}
    columns = read_columns(f.write(tmp_path, base=None))
    assert (columns.seq[0], columns.fwd[0], columns.external[0], columns.correlation[0]) == (-1, -1, -1, -1)
    assert columns.base_ns == 0


def test_absolute_and_relative_stamps_are_the_same_trace(tmp_path: Path) -> None:
    base = 1_700_000_000_000_000_000
    one, other = KinetoFile(), KinetoFile()
    one.op("aten::mul", 5.125, 2.5)
    other.op("aten::mul", 0, 2.5)
    other.events[0]["ts"] = "STAMP"
    absolute = other.write(tmp_path, base=None, name="absolute.json")
    absolute.write_text(absolute.read_text().replace('"STAMP"', f"{base // 1000 + 5}.125"))
    a, b = read_kineto(one.write(tmp_path, base=base)), read_kineto(absolute)
    assert a.start_ns.tolist() == b.start_ns.tolist() == [base + 5125]


def test_a_trace_without_events_is_empty(tmp_path: Path) -> None:
    trace = read_kineto(KinetoFile().write(tmp_path))
    assert len(trace) == 0 and trace.extent_ns is None
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"] == []


def test_traces_of_old_pytorch_are_read(tmp_path: Path) -> None:
    """Categories of PyTorch 1.8 to 1.12, device and correlation as they wrote them."""
    file = tmp_path / "old.json"
    events = [
        {"ph": "X", "cat": "Operator", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 0, "dur": 10, "args": {}},
        {
            "ph": "X", "cat": "Runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": 1, "ts": 2, "dur": 3,
            "args": {"correlation": 7},
        },
        {
            "ph": "X", "cat": "Kernel", "name": "sgemm", "pid": 0, "tid": 7, "ts": 4, "dur": 5,
            "args": {"device": 0, "stream": 7, "correlation": 7},
        },
    ]  # fmt: skip
    file.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
    trace = read_kineto(file)
    assert [name.rpartition("/")[2] for name, _ in listed(trace, "GPU:0")] == ["mm"]


def test_a_trace_of_unknown_categories_is_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "strange.json"
    event = {"ph": "X", "cat": "npu_op", "name": "x", "pid": 1, "tid": 1, "ts": 0, "dur": 1}
    file.write_text(json.dumps({"schemaVersion": 1, "traceEvents": [event]}))
    with pytest.raises(DataError, match="npu_op"):
        read_kineto(file)


def test_frames_of_modules_in_a_foreign_trace_name_both_passes(tmp_path: Path) -> None:
    """What ``with_stack=True`` leaves of modules: frames that say which module called which."""
    f = KinetoFile()
    f.add("python_function", "train.py(12): step", 0, 200)
    f.add("python_function", "nn.Module: Net_0", 5, 60)
    f.add("python_function", "nn.Module: Linear_1", 10, 40)
    f.op("aten::addmm", 12, 30, seq=7)
    f.node("AddmmBackward0", 100, 30, tid=2, seq=7)
    f.op("aten::mm", 110, 10, tid=2)
    trace = read_kineto(f.write(tmp_path))
    names = {(trace.ops[op], trace.phases[phase]) for op, phase in zip(trace.op, trace.phase, strict=True)}
    assert ("Net_0/Linear_1/addmm", "forward") in names
    assert ("Net_0/Linear_1/mm", "backward") in names
    assert not any(op.startswith("<no module>") for op, _ in names)
