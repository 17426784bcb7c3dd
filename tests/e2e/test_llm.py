"""``joulery serve`` with language models, from the command line to its last process."""

import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from joulery.adapters.models import smollm2
from tests.runtime.site_files import toy_site
from tests.waiting import PATIENCE_S, wait_until

SITE = """
joulery: 1
carbon: {kind: constant, intensity: 360 g/kWh}
meters: {use: [cpu-model], cpu_model: {idle: 10 W, max: 30 W}}
language_models:
  - name: small
    owner: ada
    engine: {kind: llama.cpp, context_tokens: 512}
serving: {listen: "127.0.0.1:0"}
"""


@contextmanager
def serving(tmp_path, site=SITE):
    file = tmp_path / "site.yaml"
    file.write_text(site)
    line = [sys.executable, "-m", "joulery", "serve", str(file), "--json"]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


def children(pid):
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def gone(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.fixture
def installed():
    pytest.importorskip("xllamacpp", reason="joulery[llm] is not installed")
    if not smollm2.installed():
        pytest.skip(f"the small language model is not installed: {smollm2.HOW}")


@pytest.mark.e2e
def test_a_model_is_served_charged_and_gone(tmp_path, installed):
    with serving(tmp_path) as process:
        said = json.loads(process.stdout.readline())
        assert said["models"] == [
            {"model": "small", "engine": f"llama.cpp {smollm2.weights().name}", "variant": smollm2.NAME}
        ]
        workers = children(process.pid)
        with httpx.Client(base_url=said["url"], timeout=PATIENCE_S, trust_env=False) as client:
            body = {"model": "small", "messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 12}
            answer = client.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200
            cost = answer.json()["usage"]["joulery"]
            assert cost["energy_j"] > 0 and cost["quality"] == "modelled" and cost["predicted_by"] == "predictor"
            assert cost["carbon_g"] == pytest.approx(cost["energy_j"] * 1e-4, rel=1e-4)
            text = client.get("/metrics").text
            rows = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
            requests_j = float(rows['joulery_llm_machine_joules_total{part="requests"}'])
            assert requests_j == pytest.approx(cost["energy_j"], rel=1e-4)
            with client.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as stream:
                process.send_signal(signal.SIGTERM)  # what runs is finished first
                assert list(stream.iter_lines())[-2] == "data: [DONE]"
        assert process.wait(30) == 0
        assert process.stderr.read() == b""
    assert workers and all(gone(pid) for pid in workers)


@pytest.mark.e2e
def test_nothing_outlives_a_gateway_that_is_killed(tmp_path, installed):
    with serving(tmp_path) as process:
        json.loads(process.stdout.readline())
        workers = children(process.pid)
        os.kill(process.pid, signal.SIGKILL)
        process.wait(30)
        assert workers
        wait_until(lambda: all(gone(pid) for pid in workers))


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("{kind: llama.cpp, context_tokens: 512}", "{kind: llama.cpp, path: site.yaml}", "did not start"),
        ("engine:", "predictor: {path: .}\n    engine:", "there is no length predictor"),
    ],
)
def test_what_cannot_be_served_is_said_and_nothing_is_left_running(tmp_path, installed, old, new, said):
    with serving(tmp_path, SITE.replace(old, new)) as process:
        out, err = process.communicate()
        assert process.returncode == 2
        assert said in (out + err).decode()
        assert b"Traceback" not in err


@pytest.mark.e2e
def test_language_models_are_served_and_governed_beside_other_services(tmp_path, installed, monkeypatch):
    monkeypatch.setenv("JOULERY_STATE", str(tmp_path / "state"))
    models = SITE[SITE.index("language_models:") : SITE.index("serving:")]
    clocks = "cpu: {slices: [1]}, clocks: [{device: emulated, period: 100 ms, services: [small]}]"
    path = toy_site(tmp_path, changed={"serving:": models + "serving:", "cpu: {cores: 2}": clocks})
    line = [sys.executable, "-m", "joulery", "serve", str(path), "--json", "--out", str(tmp_path / "run")]
    with subprocess.Popen(
        line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=Path(__file__).parents[2]
    ) as process:
        try:
            url = json.loads(process.stdout.readline())["url"]
            workers = children(process.pid)
            with httpx.Client(base_url=url, timeout=PATIENCE_S, trust_env=False) as client:
                tensor = {"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [2, 3]}
                assert client.post("/v2/models/sums/infer", json={"inputs": [tensor]}).status_code == 200
                body = {"model": "small", "prompt": "Once", "max_tokens": 3}
                assert client.post("/v1/completions", json=body).json()["usage"]["completion_tokens"] == 3
                text = client.get("/metrics").text
                assert 'joulery_requests_total{outcome="ok",workload="small"} 1.0' in text
                assert 'joulery_requests_total{outcome="ok",workload="sums"} 1.0' in text
            log = tmp_path / "run/log.jsonl"
            wait_until(lambda: any(row["slack_ratio"] is not None for row in clock_steps(log)))
            process.terminate()
            process.communicate()
            assert process.returncode == 0
        finally:
            process.kill()
    assert all(gone(pid) for pid in workers)
    # The clock keeps only the language model's SLO, and its 300 s are far off.
    assert min(row["slack_ratio"] for row in clock_steps(log) if row["slack_ratio"] is not None) > 0.5
    assert json.loads((tmp_path / "state/emulated-0.json").read_text())["ceiling_mhz"] is None


def clock_steps(log):
    rows = [json.loads(line) for line in log.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [row for row in rows if row["kind"] == "clock_step"]
