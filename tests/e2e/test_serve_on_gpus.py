"""``joulery serve --on``: real processes on a GPU that is not there, and what becomes of its cut when they die."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.fakes.mps import PATH, daemon, no_daemon_left, on_path
from tests.fakes.nvml import STATE, NvmlFake, gpu
from tests.waiting import PATIENCE_S, wait_until

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def environ(tmp_path: Path) -> Iterator[dict[str, str]]:
    path = os.pathsep.join(filter(None, (str(PATH), str(ROOT), os.environ.get("PYTHONPATH"))))
    state = tmp_path / "boards.json"
    NvmlFake(gpu("NVIDIA A100-SXM4-40GB"), file=state)
    with no_daemon_left(tmp_path):
        yield {
            **os.environ,
            "PYTHONPATH": path,
            "PATH": on_path(),
            "TMPDIR": str(tmp_path),
            "JOULERY_STATE": str(tmp_path / "state"),
            STATE: str(state),
        }


@pytest.fixture
def serve(environ: dict[str, str]) -> Iterator[Callable[..., tuple[subprocess.Popen[bytes], str]]]:
    started: list[subprocess.Popen[bytes]] = []

    def start(*arguments: str) -> tuple[subprocess.Popen[bytes], str]:
        command = [sys.executable, "-m", "joulery", "serve", "--listen", ":0", "--json", *arguments]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, env=environ))
        assert started[-1].stdout is not None
        return started[-1], json.loads(started[-1].stdout.readline())["url"]

    yield start
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def seen(url: str, name: str) -> str:
    body = {"inputs": [{"name": "seconds", "shape": [1], "datatype": "FP32", "data": [0.0]}]}
    answer = httpx.post(f"{url}/v2/models/toy/infer", json=body, timeout=PATIENCE_S).json()
    data = next(output["data"] for output in answer["outputs"] if output["name"] == name)
    return bytes(data).decode()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_cut_made_for_replicas_goes_with_them(
    serve: Callable[..., tuple[subprocess.Popen[bytes], str]], environ: dict[str, str], tmp_path: Path, number: int
) -> None:
    process, url = serve("--model", "toy=tests.adapters.engines.toys:gpu", "--replicas", "2", "--on", "3g.20gb")
    nvml = NvmlFake(file=Path(environ[STATE]))
    assert [name for name, _, _ in nvml.layout()[1]] == ["3g.20gb", "3g.20gb"]
    assert seen(url, "CUDA_VISIBLE_DEVICES").startswith("MIG-")
    leases = tmp_path / "state/leases"
    (lease,) = leases.glob("GPU-*.mig.json")  # named after the board: indices differ between containers
    process.send_signal(number)
    process.wait()
    wait_until(lambda: not lease.exists())
    assert nvml.layout() == (False, ())


def test_a_daemon_started_for_replicas_goes_with_them(
    serve: Callable[..., tuple[subprocess.Popen[bytes], str]], tmp_path: Path
) -> None:
    process, url = serve("--model", "toy=tests.adapters.engines.toys:gpu", "--on", "mps:0.4")
    assert daemon(tmp_path) is not None
    assert seen(url, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE") == "40"
    process.kill()
    process.wait()
    wait_until(lambda: daemon(tmp_path) is None)


@pytest.mark.parametrize(
    ("on", "mode", "says"),
    [
        ("whole", 3, "gpu:0 (NVIDIA A100-SXM4-40GB) is in exclusive-process mode and process 4242 has it"),
        ("mps:0.5", 2, "gpu:0 (NVIDIA A100-SXM4-40GB) is in prohibited compute mode: nothing can compute on it"),
    ],
)
def test_a_gpu_that_takes_no_process_is_refused_before_anything_starts(
    environ: dict[str, str], on: str, mode: int, says: str
) -> None:
    NvmlFake(
        gpu("NVIDIA A100-SXM4-40GB", compute_mode=mode, processes=[{"pid": 4242, "gi": None}]),
        file=Path(environ[STATE]),
    )
    command = [sys.executable, "-m", "joulery", "serve", "--model", "toy=tests.adapters.engines.toys:gpu", "--on", on]
    done = subprocess.run([*command, "--listen", ":0"], capture_output=True, text=True, env=environ, check=False)
    assert done.returncode == 2
    assert says in done.stderr
    assert "sudo nvidia-smi -i 0 -c DEFAULT" in done.stderr
