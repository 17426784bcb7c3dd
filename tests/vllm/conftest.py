"""The real vLLM on this machine's CPU; see :mod:`tests.vllm.test_vllm`."""

from __future__ import annotations

import os
import subprocess
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from joulery.adapters.models import smollm2
from joulery.domain.errors import CapabilityError
from tests.ports import free_port
from tests.waiting import wait_until

PYTHON = os.environ.get("JOULERY_VLLM", "")
LANES, BATCH = 2, 16
"""Sequences in a batch of the servers of ``url`` and ``wide_url``."""
SERVER = (
    *("-m", "vllm.entrypoints.openai.api_server", "--served-model-name", "small", "--scheduling-policy", "priority"),
    *("--max-model-len", "1024", "--enforce-eager", "--dtype", "bfloat16"),
)
OFFLINE = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


@pytest.fixture(scope="session")
def model():
    if not PYTHON:
        pytest.skip("vLLM is not installed: make test-vllm")
    try:
        weights = smollm2.weights()
    except CapabilityError as error:
        pytest.skip(f"the small language model is not installed: {error}")
    folder = Path(PYTHON).parent.parent / "model"
    if not (folder / "tokenizer.json").exists():
        script = Path(__file__).with_name("converted.py")
        subprocess.run([PYTHON, str(script), str(weights), str(folder)], check=True)
    return folder


@pytest.fixture(scope="module")
def url(model, tmp_path_factory):
    """The address of a running server."""
    with server(model, tmp_path_factory.mktemp("vllm"), LANES) as address:
        yield address


@pytest.fixture(scope="module")
def wide_url(model, tmp_path_factory):
    """The address of a running server with a batch of 16."""
    with server(model, tmp_path_factory.mktemp("vllm"), BATCH) as address:
        yield address


@contextmanager
def server(model, folder, lanes):
    """A running server; its log is in the folder."""
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    line = [PYTHON, *SERVER, "--max-num-seqs", str(lanes), "--model", str(model), "--port", str(port)]
    with (
        (folder / "log").open("w+") as log,
        subprocess.Popen(line, stdout=log, stderr=log, env=os.environ | OFFLINE) as process,
    ):
        try:
            wait_until(lambda: process.poll() is not None or healthy(address), "vLLM", patience_s=600.0)
            log.seek(0)
            assert process.poll() is None, log.read()[-3000:]
            yield address
        finally:
            process.terminate()


def healthy(address):
    try:
        return httpx.get(f"{address}/health", timeout=2.0, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False
