"""A plan as files for Triton, and which engine serves which models."""

import json
import subprocess
from pathlib import Path

import pytest

from joulery.adapters.engines.embedded.engine import LocalEngine
from joulery.adapters.engines.remote.open_inference import OpenInferenceEngine
from joulery.app.planning.shares import share_request
from joulery.app.wiring.engine import engine_for
from joulery.app.wiring.triton import write_triton
from joulery.config import load
from joulery.domain.errors import ConfigError
from joulery.domain.serving.engine import ModelRef
from joulery.policies.placement.provisioning.planner import provision
from tests.runtime.plan_files import planned_site, service

EXAMPLE = Path(__file__).parents[3] / "examples" / "igniter-12.yaml"


def written(folder: Path, file: Path = EXAMPLE, preset: str = "igniter"):
    site = load(file)
    request = share_request(site)
    plan = provision(preset, request.workloads, request.types, request.rules)
    return plan, write_triton(site, plan.gpus, folder, {one.id: one.slo for one in request.workloads})


def test_the_papers_plan_as_triton_serves_it(tmp_path):
    plan, files = written(tmp_path)
    assert files.models == 12 and len(list(tmp_path.glob("gpu*/*/config.pbtxt"))) == 12
    w1 = (tmp_path / "gpu4" / "W1" / "config.pbtxt").read_text()
    assert "max_batch_size: 6" in w1 and "count: 200" in w1
    assert "max_queue_delay_microseconds: 4167" in w1, "five requests more at 1200 a second"
    assert "backend" not in w1, "Triton infers it from the model's file: the site does not say"
    script = (tmp_path / "launch-mps.sh").read_text()
    assert "CUDA_VISIBLE_DEVICES=4 CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=20 tritonserver" in script
    assert "CUDA_VISIBLE_DEVICES=4 CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=30 tritonserver" in script, "its standby"
    assert script.count("tritonserver ") == files.processes == 24, "an original and a standby each"
    ports = [word.split("=")[1] for word in script.split() if word.startswith("--http-port=")]
    assert len(set(ports)) == 24
    endpoints = json.loads((tmp_path / "endpoints.json").read_text())
    assert set(endpoints) == {f"W{n}" for n in range(1, 13)} and endpoints["W12"][0]["share_ratio"] == 0.925
    assert sum(len(gpu.instances) for gpu in plan.gpus) == 12


@pytest.mark.parametrize("script", ["launch-mps.sh", "launch-shared.sh"])
def test_the_scripts_are_ones_a_shell_can_read(tmp_path, script):
    written(tmp_path)
    done = subprocess.run(["sh", "-n", str(tmp_path / script)], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / script).stat().st_mode & 0o100


def test_the_backend_is_that_of_the_services_model(tmp_path):
    written(tmp_path / "triton", planned_site(tmp_path, service("steady")), "best")
    assert 'backend: "python"' in (tmp_path / "triton" / "gpu0" / "steady" / "config.pbtxt").read_text()


async def test_the_engine_follows_from_the_models():
    here, there = ModelRef.parse("m:f"), ModelRef.parse("http://127.0.0.1:1/m")
    local, remote = engine_for([here, here]), engine_for([there])
    assert isinstance(local, LocalEngine) and isinstance(remote, OpenInferenceEngine)
    with pytest.raises(ConfigError, match="cannot be served together"):
        engine_for([here, there])
    await local.close()
    await remote.close()
