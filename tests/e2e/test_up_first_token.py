"""An SLO of the first token of a family of language models, played: what no model begins in time is refused at once."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from joulery.app.runs.replay import decide_again
from joulery.store.run.directory import open_run
from tests.adapters.engines.remote.openai_server import FakeServer, running
from tests.e2e.test_up import Up
from tests.waiting import PATIENCE_S, eventually

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.xdist_group("up")]
SITE = """\
joulery: 1
name: text
mode: act
carbon: {{kind: constant, intensity: 400 g/kWh}}
meters: {{period: 50 ms, use: [cpu-model], cpu_model: {{idle: 20 W, max: 60 W}}}}
language_models:
  - name: large
    engine: {{kind: openai, url: "{large}", model: fake-1, max_num_seqs: 1}}
    order: {{kind: fcfs}}
  - name: small
    engine: {{kind: openai, url: "{small}", model: fake-1, max_num_seqs: 1}}
    order: {{kind: fcfs}}
language_families:
  - name: chat
    slo: {{latency: 60 s}}
    ttft: {{latency: 1 ms, quantile: 90 %}}
    base_intensity: 200 g/kWh
    variants:
      - {{model: large, accuracy: 80 %, accuracy_source: made up}}
      - {{model: small, accuracy: 70 %, accuracy_source: made up}}
serving: {{listen: '127.0.0.1:0', drain: 2 s}}
"""
ASKED = 6


def test_requests_that_would_begin_too_late_are_refused(tmp_path: Path) -> None:
    fakes = FakeServer(), FakeServer()

    async def scenario() -> list[httpx.Response]:
        async with running(fakes[0]) as large, running(fakes[1]) as small:
            (tmp_path / "site.yaml").write_text(SITE.format(large=large, small=small))
            with Up(tmp_path / "site.yaml", tmp_path, "--json", verb="serve") as up:
                url = json.loads((await asyncio.to_thread(up.until, "\n")).splitlines()[0])["url"]
                for fake in fakes:
                    fake.gate.clear()
                sent = [asyncio.create_task(post(url)) for _ in range(ASKED)]
                # One runs at each model; what waits behind those has a whole answer before it.
                await eventually(lambda: sum(task.done() for task in sent) >= ASKED - 4, "all but a few are refused")
                early = [task.result() for task in sent if task.done()]
                for fake in fakes:
                    fake.gate.set()
                late = await asyncio.gather(*sent)
                os.kill(up.process.pid, signal.SIGINT)
                code, _, complaint = await asyncio.to_thread(up.end)
                assert code == 0, complaint
                assert await asyncio.to_thread(up.survivors) == []
        assert {answer.status_code for answer in early} == {429}, "while the models still work"
        return list(late)

    answers = asyncio.run(scenario())
    refused = [answer for answer in answers if answer.status_code == 429]
    assert {answer.status_code for answer in answers} == {200, 429} and len(refused) >= ASKED - 4
    assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
    assert len(fakes[0].asked) + len(fakes[1].asked) == ASKED - len(refused), "no engine got what was refused"
    report = json.loads((tmp_path / "run/report.json").read_text())
    (family,) = report["language_families"]
    assert family["refused"] == len(refused) and family["answered"] == ASKED - len(refused)
    assert (family["ttft_slo_s"], family["ttft_quantile"], family["ttft_slo_met"]) == (0.001, 0.9, False)
    replayed = decide_again(open_run(tmp_path / "run").log())
    assert replayed.decisions >= 1 and replayed.differences == ()


async def post(url: str) -> httpx.Response:
    body: dict[str, Any] = {"model": "chat", "messages": [{"role": "user", "content": "hi"}]}
    async with httpx.AsyncClient(timeout=PATIENCE_S) as http:
        return await http.post(f"{url}/v1/chat/completions", json=body)
