"""Who pays for the real vLLM's joules, behind ``joulery serve``: equal requests alike, other clients for themselves.

The processors run vLLM alone as far as the site says (``device: "cpu:0"``), with modelled power. So what is checked
are shares of the joules, which other programs of a busy machine only make more.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from contextlib import contextmanager

import httpx
import pytest

from tests.vllm.conftest import BATCH

pytestmark = [pytest.mark.vllm, pytest.mark.xdist_group("vllm"), pytest.mark.timeout(900)]
SITE = """
joulery: 1
meters: {{use: [cpu-model], cpu_model: {{idle: 5 W, max: 50 W}}}}
language_models:
  - name: small
    engine: {{kind: openai, url: "{url}", model: small, dialect: vllm, max_num_seqs: {batch}, device: "cpu:0"}}
    order: {{kind: {order}}}
    predictor: {{cache: 0}}
serving: {{listen: "127.0.0.1:0"}}
"""
TOKENS = 48


@pytest.fixture
def gateway(wide_url, tmp_path):
    with serving(wide_url, tmp_path, "ssjf") as address:
        yield address


@contextmanager
def serving(url, folder, order):
    site = folder / "site.yaml"
    site.write_text(SITE.format(url=url, batch=BATCH, order=order))
    line = [sys.executable, "-m", "joulery", "serve", str(site), "--json"]
    with subprocess.Popen(line, stdout=subprocess.PIPE) as process:
        try:
            yield json.loads(process.stdout.readline())["url"]
        finally:
            process.terminate()


@pytest.mark.parametrize("streamed", [True, False])
async def test_equal_requests_of_a_batch_cost_the_same(gateway, streamed) -> None:
    async with clients(gateway) as client:
        before = await joules(client)  # nothing was asked before: the gateway's first requests are no dearer
        found = await asyncio.gather(*(one(client, number, TOKENS, streamed) for number in range(BATCH)))
        after = await joules(client)
    assert {usage["completion_tokens"] for usage in found} == {TOKENS}
    paid = [usage["joulery"]["energy_j"] for usage in found]
    mean = sum(paid) / BATCH
    took = {part: after[part] - before[part] for part in after}
    print(
        json.dumps({"streamed": streamed, "least": min(paid) / mean, "most": max(paid) / mean, "mean_j": mean, **took})
    )
    assert paid == pytest.approx([mean] * BATCH, rel=0.05)
    assert sum(paid) == pytest.approx(took["requests"], rel=0.02)


@pytest.mark.parametrize("order", ["ssjf", "fcfs"])
async def test_requests_in_vllms_own_queue_are_no_other_clients(wide_url, tmp_path, order) -> None:
    """24 requests of all lengths, eight of which wait: nothing of it is another client's."""
    with serving(wide_url, tmp_path, order) as gateway:
        async with clients(gateway) as client:
            before = await joules(client)
            await asyncio.gather(*(one(client, number, 16 + 8 * (number % 12), True) for number in range(24)))
            after = await joules(client)
    took = {part: after[part] - before[part] for part in after}
    print(json.dumps({"order": order, **took}))
    assert took["unattributed"] <= 0.05 * (took["requests"] + took["unattributed"])


async def test_unattributed_joules_are_what_another_client_of_vllm_took(gateway, wide_url) -> None:
    """Another client has six streams all the time, and the gateway 24 requests of which many wait."""
    async with clients(gateway) as client, clients(wide_url) as other:
        theirs, begun, ends = [0], asyncio.Event(), asyncio.Event()

        async def busy(number):
            while not ends.is_set():
                async for tokens in pieces(other, body(1000 + number, 64, True)):
                    theirs[0] += tokens
                    begun.set()

        others = [asyncio.create_task(busy(number)) for number in range(6)]
        await begun.wait()
        await one(client, 99, 8, True)
        before, tokens_before = await joules(client), theirs[0]
        found = await asyncio.gather(*(one(client, number, 40 + 8 * (number % 12), True) for number in range(24)))
        after, tokens_after = await joules(client), theirs[0]
        ends.set()
        await asyncio.gather(*others)
    own, other = sum(usage["completion_tokens"] for usage in found), tokens_after - tokens_before
    took = {part: after[part] - before[part] for part in after}
    said = took["unattributed"] / (took["unattributed"] + took["requests"])
    print(json.dumps({"own": own, "other": other, "true": other / (own + other), "said": said, **took}))
    assert said == pytest.approx(other / (own + other), abs=0.1)


def clients(address):
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=address, timeout=None, limits=limits, trust_env=False)


def body(number, tokens, streamed):
    asked = {"model": "small", "messages": [{"role": "user", "content": f"Tell me story number {number:04d}."}]}
    asked |= {"max_tokens": tokens, "ignore_eos": True, "temperature": 0, "stream": streamed}
    return asked | ({"stream_options": {"include_usage": True}} if streamed else {})


async def one(client, number, tokens, streamed):
    """The usage of one answer, with its joules."""
    asked = body(number, tokens, streamed)
    if not streamed:
        answer = await client.post("/v1/chat/completions", json=asked)
        return answer.raise_for_status().json()["usage"]
    usage = None
    async with client.stream("POST", "/v1/chat/completions", json=asked) as stream:
        stream.raise_for_status()
        async for line in stream.aiter_lines():
            if line.startswith("data: {"):
                usage = json.loads(line.removeprefix("data: ")).get("usage") or usage
    return usage


async def pieces(client, asked):
    """Tokens of a stream as they arrive."""
    async with client.stream("POST", "/v1/chat/completions", json=asked) as stream:
        async for line in stream.aiter_lines():
            if line.startswith("data: {") and json.loads(line.removeprefix("data: "))["choices"]:
                yield 1


async def joules(client):
    """Joules of the machine so far, by part."""
    text = (await client.get("/metrics")).text
    rows = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    parts = ("requests", "idle", "unattributed")
    return {part: float(rows[f'joulery_llm_machine_joules_total{{part="{part}"}}']) for part in parts}
