"""Nsight Compute's table, read from what the program prints, and its refusals."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from joulery.adapters.devices.nvidia_kernels import GpuKernel, NsightCompute, nsight_compute, parse
from joulery.adapters.engines.embedded import once
from joulery.domain.errors import CapabilityError, DataError, JouleryError
from joulery.domain.gpu.device import DEVICE
from joulery.domain.serving.engine import ModelRef
from joulery.runtime.profiling.kernels import KernelCount, count_kernels

NCU = Path(__file__).resolve().parents[2] / "fakes/ncu"
MODEL = ModelRef.parse("tests.adapters.engines.toys:echo")


@pytest.fixture
def ncu(monkeypatch: pytest.MonkeyPatch) -> NsightCompute:
    monkeypatch.setenv("PATH", f"{NCU}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("JOULERY_FAKE_NCU", json.dumps({"load": 5, "each": 4}))
    found = nsight_compute()
    assert found is not None
    return found


def command(batch: int, times: int) -> list[str]:
    return [sys.executable, "-c", "print('the program speaks')", str(batch), str(times)]


def test_kernels_in_the_order_of_their_launch(ncu: NsightCompute) -> None:
    assert ncu.kernels(command(16, 1), {}) == (
        *[GpuKernel(1000.0, 4.0)] * 5,
        *[GpuKernel(3000.0, 16.0), GpuKernel(1000.0, 4.0)] * 2,
    )


def test_kernels_of_one_inference_are_what_more_of_them_launch(ncu: NsightCompute) -> None:
    inputs = {"x": np.zeros((1, 4), np.float32)}
    found = count_kernels(ncu, MODEL, inputs, 0, (1, 16))
    assert found == {1: KernelCount(4, pytest.approx(1.75)), 16: KernelCount(4, pytest.approx(13.0))}


def test_models_that_are_counted_run_on_the_gpu() -> None:
    """On an H100 ncu saw no kernels of a PyTorch model: without this variable it runs on the CPU."""
    seen: list[dict[str, str]] = []

    class Profiler:
        def kernels(self, command: Sequence[str], environ: Mapping[str, str]) -> list[tuple[float, float]]:
            seen.append(dict(environ))
            return [(1.0, 1.0)] * int(command[-1])

    count_kernels(Profiler(), MODEL, {"x": np.zeros((1, 4), np.float32)}, "GPU-1", (1,))
    assert seen == [{"CUDA_VISIBLE_DEVICES": "GPU-1", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "100", DEVICE: "cuda"}] * 2


@pytest.mark.parametrize(
    ("fake", "message"),
    [
        ({"load": 5, "each": 4, "odd": True}, "1 inference launched 9 kernels and 3 launched 18"),
        ({}, "1 inference launched 0 kernels and 3 launched 0"),
    ],
)
def test_counts_that_make_no_sense(
    ncu: NsightCompute, monkeypatch: pytest.MonkeyPatch, fake: object, message: str
) -> None:
    monkeypatch.setenv("JOULERY_FAKE_NCU", json.dumps(fake))
    with pytest.raises(DataError, match=message):
        count_kernels(ncu, MODEL, {"x": np.zeros((1, 4), np.float32)}, 0, (1,))


def test_a_driver_that_forbids_counters_says_how_to_allow_them(
    ncu: NsightCompute, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JOULERY_FAKE_NCU", json.dumps({"refuse": True}))
    with pytest.raises(CapabilityError, match="does not have permission") as caught:
        ncu.kernels(command(1, 1), {})
    assert "NVreg_RestrictProfilingToAdminUsers=0" in caught.value.hint


def test_a_command_that_fails_and_a_program_that_is_not_there(ncu: NsightCompute, tmp_path: Path) -> None:
    with pytest.raises(CapabilityError, match="returned an error code"):
        ncu.kernels([sys.executable, "-c", "raise SystemExit(3)", "1", "1"], {})
    with pytest.raises(CapabilityError, match="cannot start"):
        NsightCompute(str(tmp_path / "ncu")).kernels(["true"], {})


def test_no_profiler_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert nsight_compute() is None


HEADER = '"ID","Kernel Name","Metric Name","Metric Value"\n'


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("==PROF== nothing\n", "no table"),
        (HEADER + '"0","k","gpu__time_duration.sum","1"\n', "did not measure"),
        (HEADER + '"0","k","gpu__time_duration.sum","n/a"\n', "not a line of ncu"),
        (HEADER + '"0","k"\n', "not a line of ncu"),
    ],
)
def test_what_is_no_table_is_one_clear_error(said: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        parse(said)


@given(st.text(max_size=60))
def test_any_text_is_kernels_or_one_clear_error(text: str) -> None:
    try:
        assert isinstance(parse(HEADER + text), tuple)
    except JouleryError as error:
        assert str(error)


def test_a_model_asked_so_many_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, ...]] = []

    class Loaded:
        def run(self, inputs: dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float32]]], outputs: tuple[()]) -> None:
            asked.append(inputs["x"].shape)

    np.savez(tmp_path / "one.npz", x=np.zeros((1, 7), np.float32))
    monkeypatch.setattr(once, "load", lambda model, threads: Loaded())
    assert once.main("a:b", str(tmp_path / "one.npz"), "3", "2") == 0
    assert asked == [(3, 7), (3, 7)]
