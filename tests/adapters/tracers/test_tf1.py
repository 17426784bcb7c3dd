"""TensorFlow 1 timelines: the golden footprint, the tracks of a GPU, phases by scope."""

import csv
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from joulery.accounting.operations.align import align
from joulery.accounting.steps import PowerSteps
from joulery.adapters.tracers.tf1 import read_tf1
from joulery.domain.energy.channel import Channel, ReadingKind
from joulery.domain.errors import DataError
from joulery.domain.quality import Quality
from tests.data_folder import data_folder


def rows(name: str) -> list[dict[str, str]]:
    return list(csv.DictReader((data_folder("smaragdine") / "tf1_timeline" / name).read_text().splitlines()))


@pytest.mark.parametrize("mode", ["event", "set"])
@pytest.mark.parametrize("step", range(3))
def test_the_golden_footprints(step: int, mode: str) -> None:
    trace = read_tf1(data_folder("smaragdine") / "tf1_timeline" / f"timeline-{step}.json.gz")
    total = next(row for row in rows("totals_expected.csv") if (row["step"], row["mode"]) == (str(step), mode))
    window = int(total["window_start_us"]) * 1000, int(total["window_end_us"]) * 1000
    power = rows("power.csv")
    edges = [int(row["ts_us"]) * 1000 for row in power]
    channel = Channel("CPU", "package", ReadingKind.POWER, "golden", Quality.MEASURED)
    meter = PowerSteps(channel, [*edges, edges[-1] + 10**9], [float(row["power_W"]) for row in power])
    got = align(trace, {"CPU": [meter]}, window, multiplicity="events" if mode == "event" else "set")
    (device,) = got.devices
    assert device.total_j == pytest.approx(float(total["total_J"]), rel=1e-9)
    assert device.attributed_j == pytest.approx(float(total["attributed_J"]), rel=1e-9)
    assert device.unattributed_j == pytest.approx(float(total["unattributed_J"]), rel=1e-9)
    energy, count, runtime = got.energy_by_op, defaultdict(int), defaultdict(int)
    for op, n, ns in zip(got.op, got.count.tolist(), got.runtime_ns.tolist(), strict=True):
        count[op] += n
        runtime[op] += ns
    expected = [row for row in rows("tef_expected.csv") if row["step"] == str(step)]
    assert set(energy) == {row["qtn"] for row in expected}
    for row in expected:
        assert energy[row["qtn"]] == pytest.approx(float(row[f"energy_J_{mode}"]), rel=1e-9, abs=1e-12)
        assert count[row["qtn"]] == int(row["n_events"])
        if mode == "event":
            assert runtime[row["qtn"]] == int(row["runtime_us"]) * 1000
    assert sum(count.values()) == 682


def test_the_dataflow_of_the_golden_timeline_and_what_it_leaves_out() -> None:
    trace = read_tf1(data_folder("smaragdine") / "tf1_timeline" / "timeline-0.json.gz")
    key = "bert/encoder/layer_0/attention/self/key/BiasAdd"
    assert ("bert/embeddings/LayerNorm/batchnorm/add_1", key) in trace.feeds
    assert (key, "bert/encoder/layer_0/attention/self/Reshape_1") in trace.feeds
    assert {name for pair in trace.feeds for name in pair} <= set(trace.ops), "constants that never ran feed nothing"


def timeline(folder: Path, tracks: dict[int, str], events: list[dict[str, Any]]) -> Path:
    heads = [{"name": "process_name", "ph": "M", "pid": pid, "args": {"name": name}} for pid, name in tracks.items()]
    path = folder / "timeline.json"
    path.write_text(json.dumps({"traceEvents": [*heads, *events]}))
    return path


def event(pid: int, name: str, ts: int, dur: int, op: str = "MatMul") -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": "Op",
        "name": op,
        "pid": pid,
        "tid": 0,
        "ts": ts,
        "dur": dur,
        "args": {"name": name, "op": op},
    }


JOB = "/job:localhost/replica:0/task:0/device:"


def test_launches_run_on_the_host_and_kernels_on_the_gpu_once(tmp_path: Path) -> None:
    tracks = {
        1: JOB + "CPU:0 Compute",
        2: JOB + "GPU:0 Compute",
        3: "/device:GPU:0/stream:all Compute",
        4: "/device:GPU:0/stream:16 Compute",
        5: "/device:GPU:0/memcpy Compute",
        6: JOB + "GPU:0 Tensors",
    }
    events = [event(pid, f"n{pid}", 10 * pid, 5) for pid in tracks]
    trace = read_tf1(timeline(tmp_path, tracks, events))
    where = {trace.ops[op]: trace.devices[device] for op, device in zip(trace.op, trace.device, strict=True)}
    assert where == {"n1": "CPU", "n2": "CPU", "n4": "GPU:0", "n5": "GPU:0"}


def test_all_streams_together_serve_where_there_are_no_single_ones(tmp_path: Path) -> None:
    trace = read_tf1(timeline(tmp_path, {3: "/device:GPU:0/stream:all Compute"}, [event(3, "a", 0, 5)]))
    assert trace.devices == ("GPU:0",)


def test_launches_without_kernels_leave_the_gpu_unattributed(tmp_path: Path) -> None:
    trace = read_tf1(timeline(tmp_path, {2: JOB + "GPU:0 Compute"}, [event(2, "a", 0, 5)]))
    assert trace.devices == ("CPU",)
    assert trace.notes == ("GPU:0: the timeline shows launches only, no kernels; its energy stays unattributed",)


def phases(folder: Path, nodes: dict[str, str]) -> dict[str, str]:
    events = [event(1, name, 10 * i, 5, op) for i, (name, op) in enumerate(nodes.items())]
    trace = read_tf1(timeline(folder, {1: JOB + "CPU:0 Compute"}, [*events, event(1, "_SOURCE", 0, 1, "NoOp")]))
    return {trace.ops[op]: trace.phases[phase] for op, phase in zip(trace.op, trace.phase, strict=True)}


def test_phases_by_scope(tmp_path: Path) -> None:
    assert phases(
        tmp_path,
        {
            "bert/MatMul": "MatMul",
            "gradients/bert/MatMul_grad/MatMul_1": "MatMul",
            "gradients/AddN": "AddN",
            "ConstantFolding/gradients/bert/x": "Const",
            "Adam/update/ResourceApplyAdam": "ResourceApplyAdam",
            "train/apply": "ResourceApplyGradientDescent",
        },
    ) == {
        "bert/MatMul": "forward",
        "gradients/bert/MatMul_grad/MatMul_1": "backward",
        "gradients/AddN": "backward",
        "ConstantFolding/gradients/bert/x": "backward",
        "Adam/update/ResourceApplyAdam": "optimizer",
        "train/apply": "optimizer",
    }


def test_a_module_called_gradients_is_forward(tmp_path: Path) -> None:
    modules = ("gradients/dense/MatMul", "gradients_of/dense_grad/MatMul", "my_gradients/dense_grad/MatMul")
    made = "gradients_1/gradients/dense/MatMul_grad/MatMul"
    assert phases(tmp_path, dict.fromkeys((*modules, made), "MatMul")) == {
        **dict.fromkeys(modules, "forward"),
        made: "backward",
    }


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda e: e.pop("ts"), "malformed"),
        (lambda e: e.pop("tid"), "malformed"),
        (lambda e: e.update(dur=-4), "at least 0"),
        (lambda e: e.update(dur="x"), "malformed"),
        (lambda e: e.update(args=[1]), "malformed"),
    ],
)
def test_a_malformed_event_is_named(tmp_path: Path, change, says: str) -> None:
    one = event(1, "a", 0, 5)
    change(one)
    with pytest.raises(DataError, match=says):
        read_tf1(timeline(tmp_path, {1: JOB + "CPU:0 Compute"}, [one]))


def test_another_kind_of_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no TensorFlow timeline"):
        read_tf1(timeline(tmp_path, {1: "python"}, [event(1, "a", 0, 5)]))
