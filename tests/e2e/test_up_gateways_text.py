"""A language model behind two gateways: whole answers, streams, clients that leave, a controller that is lost."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.adapters.engines.remote.openai_server import FakeServer, running
from tests.e2e.test_up import Up
from tests.fakes.mps import gpu_machine
from tests.fakes.nvml import gpu
from tests.ports import free_port
from tests.waiting import PATIENCE_S, eventually

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.xdist_group("up")]
SITE = """\
joulery: 1
name: text
mode: act
carbon: {{kind: constant, intensity: 400 g/kWh}}
meters: {{period: 50 ms, use: [cpu-model, nvml], cpu_model: {{idle: 20 W, max: 60 W}}}}
language_models:
  - name: chat
    owner: ada
    engine: {{kind: openai, url: "{url}", model: fake-1, device: "gpu:0", max_num_seqs: 2}}
    order: {{kind: fcfs}}
serving: {{listen: "127.0.0.1:0", drain: 2 s, gateways: {{count: 2, state: state, outlive: 30 s}}}}
"""
TOKENS = 3


def asked(prompt: str, **more: Any) -> dict[str, Any]:
    return {"model": "chat", "messages": [{"role": "user", "content": prompt}], **more}


def test_gateways_share_one_queue_and_one_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeServer(max_num_seqs=8)

    async def scenario() -> None:
        async with running(fake) as server:
            (tmp_path / "site.yaml").write_text(SITE.format(url=server))
            with Up(tmp_path / "site.yaml", tmp_path, "--json", verb="serve") as up:
                facts = json.loads((await asyncio.to_thread(up.until, "\n")).splitlines()[0])
                url = facts["url"]
                count = await answers(url, fake)
                os.kill(up.process.pid, signal.SIGINT)
                code, _, complaint = await asyncio.to_thread(up.end)
                assert code == 0, complaint
                check_report(json.loads((tmp_path / "run/report.json").read_text()), count)
                assert await asyncio.to_thread(up.survivors) == []
            await lost(tmp_path, fake)

    with gpu_machine(tmp_path, monkeypatch, gpu("NVIDIA A100-SXM4-40GB", idle_w=50.0)):
        asyncio.run(scenario())


async def answers(url: str, fake: FakeServer) -> int:
    """Whole answers and streams over connections of their own, which come to both gateways; how many there were."""
    assert (await get(f"{url}/v1/models")).json()["data"][0]["id"] == "chat"
    assert (await get(f"{url}/v2/health/ready")).json()["ready"] is True
    for number in range(6):
        answer = await post(url, asked(f"whole {number}"))
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["message"]["content"] == "w0 w1 w2 "
        assert answer.headers["x-joulery-variant"] == "fake-1"
    await check_stream(url)
    refused = await post(url, {**asked("x"), "model": "other"})
    assert refused.status_code == 404 and refused.json()["error"]["code"] == "model_not_found"
    await leave(url, fake)
    return 7


STREAMED = asked("stream", stream=True, stream_options={"include_usage": True})


async def check_stream(url: str) -> None:
    """A stream comes piece by piece, with its usage and joules at the end."""
    async with (
        httpx.AsyncClient(timeout=PATIENCE_S) as http,
        http.stream(
            "POST",
            f"{url}/v1/chat/completions",
            json=STREAMED,
        ) as answer,
    ):
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
        text = (await answer.aread()).decode()
    events = [json.loads(line) for line in re.findall(r"^data: (\{.*)$", text, re.MULTILINE)]
    words = [event["choices"][0]["delta"].get("content", "") for event in events if event["choices"]]
    assert "".join(words) == "w0 w1 w2 "
    assert events[-1]["usage"]["completion_tokens"] == TOKENS and "joulery energy_j=" in text
    assert text.endswith("data: [DONE]\n\n")


async def leave(url: str, fake: FakeServer) -> None:
    """A client that leaves ends its request at the server; with two running the third one waits in the queue."""
    fake.gate.clear()
    begun = len(fake.begun)
    async with httpx.AsyncClient(timeout=PATIENCE_S) as http:
        sent = [asyncio.create_task(http.post(f"{url}/v1/chat/completions", json=asked(f"held {n}"))) for n in range(3)]
        await eventually(lambda: len(fake.begun) == begun + 2, "two of three requests run")
        for task in sent:
            task.cancel()
        await asyncio.gather(*sent, return_exceptions=True)
    # The third one begins where the end of another is known before its own.
    await eventually(lambda: 2 <= fake.cancelled == len(fake.begun) - begun, "all that began ended at the server")
    fake.gate.set()


def check_report(report: dict[str, Any], count: int) -> None:
    (model,) = report["language_models"]
    assert (model["model"], model["owner"], model["answered"], model["quality"]) == ("chat", "ada", count, "measured")
    assert model["completion_tokens"] == TOKENS * count, "each token once"
    assert model["energy_j"] > 0 and model["charged_requests"] >= count
    assert {one["gateway"] for one in report["gateways"]} == {"gateway-1", "gateway-2"}


async def lost(folder: Path, fake: FakeServer) -> None:
    """Without its controller a gateway answers 503 with Retry-After; the next controller takes over."""
    site = folder / "site.yaml"
    site.write_text(site.read_text().replace("127.0.0.1:0", f"127.0.0.1:{free_port()}"))
    first, second = folder / "first", folder / "second"
    with Up(site, first, "--json", verb="serve") as up:
        url = json.loads((await asyncio.to_thread(up.until, "\n")).splitlines()[0])["url"]
        fake.gate.clear()
        begun = len(fake.begun)
        held = asyncio.create_task(post(url, asked("held")))
        await eventually(lambda: len(fake.begun) == begun + 1, "one request runs")
        os.kill(up.process.pid, signal.SIGKILL)
        answer = await held
        assert answer.status_code == 503 and int(answer.headers["retry-after"]) >= 1
        assert "controller" in answer.json()["error"]["message"]
        assert (await post(url, asked("later"))).status_code == 503
        assert (await get(f"{url}/v2/health/ready")).status_code == 503
        fake.gate.set()
        with Up(site, second, "--json", verb="serve") as next_one:
            assert json.loads((await asyncio.to_thread(next_one.until, "\n")).splitlines()[0])["url"] == url
            assert (await post(url, asked("again"))).status_code == 200
            os.kill(next_one.process.pid, signal.SIGINT)
            assert (await asyncio.to_thread(next_one.end))[0] == 0
        assert await asyncio.to_thread(up.survivors) == []


async def post(url: str, body: dict[str, Any]) -> httpx.Response:
    async with httpx.AsyncClient(timeout=PATIENCE_S) as http:
        return await http.post(f"{url}/v1/chat/completions", json=body)


async def get(url: str) -> httpx.Response:
    async with httpx.AsyncClient(timeout=PATIENCE_S) as http:
        return await http.get(url)
