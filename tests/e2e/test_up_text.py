"""``joulery up`` with a language model beside a service: prompts are sent, answered, counted and charged."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections import Counter
from itertools import cycle, islice
from pathlib import Path

import pytest

from joulery.app.runs.replay import decide_again
from joulery.runtime.load.load_plan import PROMPTS
from joulery.store.run.directory import open_run
from tests.adapters.engines.remote.openai_server import FakeServer, running
from tests.e2e.test_up import Up
from tests.fakes.mps import gpu_machine
from tests.fakes.nvml import gpu
from tests.runtime.site_files import toy_site

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("up")]
MODEL = """language_models:
  - name: sums
    owner: ada
    engine: {{kind: openai, url: "{url}", model: fake-1, device: "gpu:0", max_num_seqs: 4}}
    order: {{kind: fcfs}}
    load: {{kind: poisson, rate: 15 /s, duration: 2 s, max_tokens: 5, seed: 2}}
serving:"""


def test_prompts_are_sent_and_what_they_took_is_in_the_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of the same name as the service, whose server has a GPU to itself."""
    fake = FakeServer(max_num_seqs=4)

    def served(url: str) -> tuple[int, str, str]:
        changed = {
            "serving:": MODEL.format(url=url),
            "cpu: {cores: 2}": "cpu: {slices: [1]}",
            "use: [cpu-model]": "use: [cpu-model, nvml]",
        }
        path = toy_site(tmp_path, duration="4 s", replay="4 s", changed=changed)
        with Up(path, tmp_path, "--duration", "2") as up:
            ended = up.end()
            assert up.survivors() == []
        return ended

    async def scenario() -> tuple[int, str, str]:
        async with running(fake) as url:
            return await asyncio.to_thread(served, url)

    with gpu_machine(tmp_path, monkeypatch, gpu("NVIDIA A100-SXM4-40GB", idle_w=50.0)):
        code, said, complaint = asyncio.run(scenario())
    assert code == 0, complaint
    report = json.loads((tmp_path / "run/report.json").read_text())
    (model,) = report["language_models"]
    assert (model["model"], model["owner"], model["failed"], model["quality"]) == ("sums", "ada", 0, "measured")
    asked = Counter(data["messages"][0]["content"] for data in fake.asked)
    assert asked.total() == model["requests"] > 3, "15 a second for one second"
    assert asked == Counter(islice(cycle(PROMPTS), asked.total()))
    assert {data["max_tokens"] for data in fake.asked} == {5}
    assert model["completion_tokens"] == 3 * model["requests"] and model["prompt_tokens"] == 7 * model["requests"]
    assert model["charged_requests"] == model["requests"] and model["energy_j"] > 0
    assert model["energy_per_request_j"] == pytest.approx(model["energy_j"] / model["requests"])
    assert model["energy_per_token_j"] == pytest.approx(model["energy_per_request_j"] / 3)
    assert model["p95_s"] >= model["p50_s"] > 0
    (service,) = report["services"]
    assert service["requests"] > 20 and service["failed"] == service["refused"], "and the service has its own load"
    line, sent = " ".join(said.split()), model["requests"]
    assert re.search(rf"{sent}, none failed; load: (all )?{sent} planned", line) and "a token, measured" in line
    assert (tmp_path / "run/client-text-sums.parquet").exists() and (tmp_path / "run/client.parquet").exists()


FAMILY = """language_models:
  - name: large
    engine: {{kind: openai, url: "{large}", model: fake-1, device: "gpu:0", max_num_seqs: 4}}
    order: {{kind: fcfs}}
  - name: small
    engine: {{kind: openai, url: "{small}", model: fake-1, device: "gpu:1", max_num_seqs: 4}}
    order: {{kind: fcfs}}
language_families:
  - name: chat
    slo: {{latency: 20 s}}
    lambda: 100 %
    base_intensity: 200 g/kWh
    variants:
      - {{model: large, accuracy: 80 %, accuracy_source: made up}}
      - {{model: small, accuracy: 70 %, accuracy_source: made up}}
    load: {{kind: poisson, rate: 20 /s, duration: 60 s, max_tokens: 5, seed: 2}}
serving:"""


def test_a_family_finds_out_which_model_takes_fewer_joules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two servers, each with a GPU to itself: one at 300 W, one at 80 W."""
    fakes = FakeServer(max_num_seqs=4), FakeServer(max_num_seqs=4)

    def served(large: str, small: str) -> tuple[int, str, str]:
        path = tmp_path / "site.yaml"
        head = "joulery: 1\nname: text\nmode: act\ncarbon: {kind: constant, intensity: 400 g/kWh}\n"
        meters = "meters: {period: 50 ms, use: [cpu-model, nvml], cpu_model: {idle: 20 W, max: 60 W}}\n"
        body = FAMILY.format(large=large, small=small) + " {listen: '127.0.0.1:0', drain: 2 s}\n"
        path.write_text(head + meters + body)
        with Up(path, tmp_path) as up:
            up.until("joules of all models known: small 100 %")
            up.until("/60 s ", times=1 + up.heard.count("/60 s "))
            os.killpg(up.process.pid, signal.SIGINT)
            ended = up.end()
            assert up.survivors() == []
        return ended

    async def scenario() -> tuple[int, str, str]:
        async with running(fakes[0]) as large, running(fakes[1]) as small:
            return await asyncio.to_thread(served, large, small)

    boards = [gpu(index=0, idle_w=300.0), gpu(index=1, idle_w=80.0)]
    with gpu_machine(tmp_path, monkeypatch, *boards):
        code, said, complaint = asyncio.run(scenario())
    assert code == 0, complaint
    report = json.loads((tmp_path / "run/report.json").read_text())
    (family,) = report["language_families"]
    assert family["answered"] == sum(model["answered"] for model in report["language_models"]) > 0
    assert 0 < family["variants"]["large"] < 1 and 0.7 < family["accuracy_ratio"] < 0.8
    assert "chat" in said and "accuracy" in said
    replayed = decide_again(open_run(tmp_path / "run").log())
    assert replayed.decisions >= 1 and replayed.differences == ()
