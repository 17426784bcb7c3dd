"""Names of operations outside every module, in traces of other tools: functions that called them, scripted modules."""

from pathlib import Path

import pytest

from joulery.accounting.operations.align import align
from joulery.accounting.steps import PowerSteps
from joulery.adapters.tracers.kineto.names import read_kineto
from joulery.adapters.tracers.source_names import source_component, written_path
from joulery.domain.energy.channel import Channel, ReadingKind
from joulery.domain.quality import Quality
from joulery.domain.trace.events import EventTrace
from tests.adapters.tracers.kineto.kineto_file import KinetoFile


def names_of(trace: EventTrace) -> set[tuple[str, str]]:
    return {(trace.ops[op], trace.phases[phase]) for op, phase in zip(trace.op, trace.phase, strict=True)}


def framed_step() -> KinetoFile:
    """A loss outside every module, in ``step``, which the file calls; its backward pass; data made by the file."""
    f = KinetoFile()
    f.add("python_function", "train.py(60): <module>", 0, 400)
    f.op("aten::randn", 1, 3)
    f.add("python_function", "/home/me/lib/python3.11/contextlib.py(77): inner", 5, 390)
    f.add("python_function", "train.py(12): step", 6, 300)
    f.add("python_function", "nn.Module: Net_0", 10, 40)
    f.op("aten::addmm", 12, 30, seq=6)
    f.add("python_function", "torch/nn/functional.py(3014): cross_entropy", 60, 30)
    f.op("aten::log_softmax", 61, 20, seq=7)
    f.node("LogSoftmaxBackward0", 100, 30, seq=7)
    f.op("aten::_log_softmax_backward_data", 110, 10)
    f.node("AddmmBackward0", 140, 30, tid=2, seq=6)
    f.op("aten::mm", 145, 10, tid=2)
    f.op("aten::ones_like", 95, 2)
    return f


def test_functions_of_the_program_name_what_no_module_does(tmp_path: Path) -> None:
    names = names_of(read_kineto(framed_step().write(tmp_path)))
    assert ("train.py/randn", "") in names
    assert ("train.py:12 step/log_softmax", "forward") in names
    assert ("train.py:12 step/_log_softmax_backward_data", "backward") in names
    assert ("train.py:12 step/ones_like", "") in names
    assert ("Net_0/addmm", "forward") in names
    assert ("Net_0/mm", "backward") in names
    assert not any(op.startswith("<no module>") for op, _ in names)


def test_functions_add_no_event_and_keep_every_joule(tmp_path: Path) -> None:
    named = read_kineto(framed_step().write(tmp_path))
    plain = KinetoFile()
    plain.events = [event for event in framed_step().events if "(" not in event["name"]]
    bare = read_kineto(plain.write(tmp_path, name="plain.json"))
    assert len(named) == len(bare)
    channel = Channel("CPU", "package", ReadingKind.POWER, "test", Quality.MEASURED)
    power = {"CPU": [PowerSteps(channel, list(bare.extent_ns), [10.0])]}
    one, other = (align(trace, power, bare.extent_ns) for trace in (named, bare))
    assert sum(one.energy_by_op.values()) == pytest.approx(sum(other.energy_by_op.values()), rel=1e-12)
    assert one.devices[0].unattributed_j == pytest.approx(other.devices[0].unattributed_j, rel=1e-12)


def test_call_stacks_of_old_traces_name_operations_and_their_gradients(tmp_path: Path) -> None:
    f = KinetoFile()
    stack = "torch/nn/functional.py(1848): linear;model.py(40): forward;train.py(12): step;train.py(60): <module>"
    f.op("aten::linear", 0, 50, seq=3)
    f.events[-1]["args"]["Call stack"] = stack
    f.node("AddmmBackward0", 100, 30, tid=2, seq=3)
    f.op("aten::mm", 110, 10, tid=2)
    names = names_of(read_kineto(f.write(tmp_path)))
    assert ("train.py:12 step/model.py:40 forward/linear", "forward") in names
    assert ("train.py:12 step/model.py:40 forward/mm", "backward") in names


def test_kernels_of_old_traces_have_the_functions_of_the_operation_that_launched_them(tmp_path: Path) -> None:
    f = KinetoFile()
    for cat, name, start, length, args in (
        ("Operator", "aten::addmm", 10, 80, {"Call stack": "net.py(12): forward;train.py(31): step"}),
        ("Operator", "aten::copy_", 30, 10, {}),
        ("Runtime", "cudaLaunchKernel", 50, 5, {"correlation": 77}),
        ("Runtime", "cudaMemcpyAsync", 32, 5, {"correlation": 78}),
        ("Kernel", "volta_sgemm", 60, 30, {"device": 0, "stream": 7, "correlation": 77}),
        ("Memcpy", "Memcpy DtoD", 40, 5, {"device": 0, "stream": 7, "correlation": 78}),
    ):
        f.add(cat, name, start, length, **args)
    trace = read_kineto(f.write(tmp_path))
    place = "train.py:31 step/net.py:12 forward"
    on_gpu = {
        trace.ops[op] for op, device in zip(trace.op, trace.device, strict=True) if trace.devices[device] == "GPU:0"
    }
    assert on_gpu == {f"{place}/addmm", f"{place}/copy_"}


def test_parts_of_a_scripted_module_are_named_below_its_range(tmp_path: Path) -> None:
    f = KinetoFile()
    f.add("python_function", "nn.Module: RecursiveScriptModule_0", 0, 90)
    f.op("aten::linear", 10, 20)
    f.events[-1]["args"]["Module Hierarchy"] = "TOP()::<forward op>.blocks(Sequential)::forward.0(Linear)::forward."
    f.op("aten::relu", 40, 20)
    f.events[-1]["args"]["Module Hierarchy"] = "TOP(Net)::forward."
    f.op("aten::add", 100, 20)
    f.events[-1]["args"]["Module Hierarchy"] = "model.layers.0.mlp"
    names = {op for op, _ in names_of(read_kineto(f.write(tmp_path)))}
    assert names >= {"RecursiveScriptModule_0/blocks_0/linear", "RecursiveScriptModule_0/relu"}
    assert "model/layers_0/mlp/add" in names


def test_frames_cut_off_at_the_ends_of_a_trace_harm_no_operation(tmp_path: Path) -> None:
    """A frame that ends between the ends of an operation does not nest: the operation keeps its place."""
    f = KinetoFile()
    f.add("python_function", "train.py(12): step", 0, 15)
    f.op("aten::mm", 10, 20)
    f.op("aten::add", 12, 5)
    trace = read_kineto(f.write(tmp_path))
    assert {op.rpartition("/")[2] for op in trace.ops} == {"mm", "add"}
    assert not any("overlap" in note for note in trace.notes)


@pytest.mark.parametrize(
    ("file", "function", "expected"),
    [
        ("/usr/lib/python3.11/site-packages/torch/optim/adam.py", "step", ""),
        ("/venv/lib/python3.11/site-packages/transformers/trainer.py", "compute_loss", "trainer.py:7 compute_loss"),
        ("<frozen importlib._bootstrap>", "_load", ""),
        ("/tmp/ipykernel_71/2.py", "f.<locals>.g", "2.py:7 g"),
        ("profile.py", "main", "profile.py:7 main"),
    ],
)
def test_frames_of_frameworks_and_of_the_standard_library_say_nothing(file: str, function: str, expected: str) -> None:
    assert source_component(file, 7, function) == expected


def test_empty_arguments_say_nothing() -> None:
    assert written_path({"Call stack": "", "Module Hierarchy": None}) == ("", False)


def test_a_trace_without_stacks_says_how_to_record_one_with_them(tmp_path: Path) -> None:
    f = KinetoFile()
    f.op("aten::mm", 0, 10, seq=1)
    f.node("MmBackward0", 20, 10, seq=1)
    assert any("with_stack=True" in note for note in read_kineto(f.write(tmp_path)).notes)
    assert not any("with_stack=True" in note for note in read_kineto(framed_step().write(tmp_path)).notes)


def test_what_distributed_training_copies_stands_below_its_range(tmp_path: Path) -> None:
    f = KinetoFile()
    f.op("torch.distributed.ddp.reducer::copy_bucket_to_grad", 0, 20)
    f.op("aten::copy_", 5, 10)
    names = {op for op, _ in names_of(read_kineto(f.write(tmp_path)))}
    assert names == {f"torch.distributed.ddp.reducer::copy_bucket_to_grad/{leaf}" for leaf in ("copy_", "<self>")}
