"""``joulery profile --mps``: real processes with real shares, on a GPU that is not there."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from joulery.perf.interference.document import from_document
from joulery.ui.cli import main
from tests.fakes.mps import PATH, daemon, gpu_machine
from tests.fakes.nvml import NvmlFake, gpu

MODEL = "mine=tests.adapters.engines.toys:shared"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NvmlFake]:
    """A V100 that draws 200 W at 1500 MHz, whatever it does."""
    board = gpu("Tesla V100-SXM2-16GB", running_mhz=1500, power_mw=200_000, limit_mw=300_000)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with gpu_machine(tmp_path, monkeypatch, board) as nvml:
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        yield nvml


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    file = tmp_path / "one.npz"
    np.savez(file, x=np.zeros((1, 100), np.float32))
    return file


def test_a_model_is_profiled_and_the_gpu_given_back(
    machine: NvmlFake, inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "mine.json"
    arguments = ["profile", MODEL, "--mps", "0", "--inputs", str(inputs), "--seconds", "0.15", "--warmup", "1"]
    assert main([*arguments, "-o", str(out), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    profile = from_document(json.loads(out.read_text()))
    assert profile.gpu.name == "Tesla V100-SXM2-16GB"
    assert (profile.gpu.power_cap_w, profile.gpu.clock_max_mhz, profile.gpu.idle_w) == (300.0, 1500.0, 200.0)
    assert profile.gpu.pcie_bytes_per_ms == pytest.approx(1e7, rel=0.01)
    assert (profile["mine"].load_bytes, profile["mine"].feedback_bytes) == (400.0, 8.0)
    assert {fit["data"]: fit["points"] for fit in document["fits"]} == {"solo": 9, "held-out pairs": 2}
    assert document["totals"]["solo"]["points"] == 9
    assert any("no kernel profiler" in note for note in document["notes"])
    assert any("never ran faster than 1500 MHz here" in note for note in document["notes"])
    assert daemon(tmp_path) is None
    assert not list((tmp_path / "state/leases").glob("*.json"))


def test_a_kernel_profiler_counts_where_there_is_one(
    machine: NvmlFake,
    inputs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PATH", f"{PATH.parent / 'ncu'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("JOULERY_FAKE_NCU", json.dumps({"load": 5, "each": 42}))
    arguments = ["profile", MODEL, "--mps", "0", "--inputs", str(inputs), "--seconds", "0.1", "--warmup", "1", "--json"]
    assert main(arguments) == 0
    document = json.loads(capsys.readouterr().out)
    profile = from_document(document)
    assert profile["mine"].kernels == 42
    assert not any("estimated from throughput" in note or "not counted" in note for note in document["notes"])
    assert profile["mine"].cache_slope > 0, "the fake's use of the cache grows with the batch"
    monkeypatch.setenv("JOULERY_FAKE_NCU", json.dumps({"refuse": True}))
    assert main(arguments) == 0
    said = capsys.readouterr()
    assert "kernels are not counted" in said.err and "NVreg_RestrictProfilingToAdminUsers" in said.err
    assert any("estimated from throughput" in note for note in json.loads(said.out)["notes"])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["mine", "--mps", "0"], "name the model to profile"),
        ([MODEL, "--mps", "0"], "name the inputs of one request"),
        ([MODEL, "--mps", "7", "--inputs", "INPUTS"], "no such GPU"),
        ([MODEL, "--mps", "0", "--inputs", "INPUTS", "--launch", "3 W"], "is a power, not a time"),
        ([MODEL, "--mps", "0", "--inputs", "no.npz"], "not an .npz file"),
        ([MODEL, "--mps", "0", "--inputs", "INPUTS", "--base", "v1000"], "no GPU type"),
    ],
)
def test_one_clear_error_each(
    machine: NvmlFake, inputs: Path, arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", *(str(inputs) if word == "INPUTS" else word for word in arguments)]) == 2
    assert says in capsys.readouterr().err


def test_a_request_is_one_request(machine: NvmlFake, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.savez(tmp_path / "two.npz", x=np.zeros((2, 100), np.float32))
    assert main(["profile", MODEL, "--mps", "0", "--inputs", str(tmp_path / "two.npz")]) == 2
    assert "the first axis is the batch" in capsys.readouterr().err
