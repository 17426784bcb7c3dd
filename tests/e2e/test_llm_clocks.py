"""``joulery serve`` with language models on a device whose clock is governed: logged, leased, reverted."""

import asyncio
import json
import os
import re
import signal
import sys
from contextlib import asynccontextmanager

import httpx
import pytest

from joulery.store.leases import LeaseBook
from joulery.store.run.directory import open_run
from joulery.ui.cli import main
from tests.adapters.engines.remote.openai_server import FakeServer, running
from tests.adapters.engines.support import until
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.e2e
SITE = """
joulery: 1
mode: act
meters: {use: [cpu-model], cpu_model: {idle: 10 W, max: 30 W}}
fleet: {clocks: [{device: emulated, period: 100 ms}]}
language_models:
  - name: small
    engine: {kind: openai, url: "URL", model: fake-1, device: "gpu:0"}
    slo: {latency: 30 s, quantile: 95 %}
serving: {listen: "127.0.0.1:0"}
"""


@asynccontextmanager
async def serving(tmp_path, monkeypatch, *options):
    monkeypatch.setenv("JOULERY_STATE", str(tmp_path / "state"))
    async with running(FakeServer()) as url:
        (tmp_path / "site.yaml").write_text(SITE.replace("URL", url))
        line = (sys.executable, "-m", "joulery", "serve", str(tmp_path / "site.yaml"), "--out", str(tmp_path / "run"))
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*line, *options, stdout=pipe, stderr=pipe)
        try:
            yield process
        finally:
            if process.returncode is None:
                process.kill()
            await process.communicate()


def ceiling(tmp_path):
    file = tmp_path / "state/emulated-0.json"
    return json.loads(file.read_text())["ceiling_mhz"] if file.exists() else None


def settings_made(metrics):
    found = re.findall(r'joulery_decisions_total\{[^}]*kind="set_clock"[^}]*\} ([\d.]+)', metrics)
    return sum(map(float, found))


async def test_the_clock_falls_while_it_serves_and_comes_back(tmp_path, monkeypatch, capsys):
    async with serving(tmp_path, monkeypatch) as process:
        said = []
        while not said or said[-1][:1] != ["serving"]:
            said.append((await process.stdout.readline()).decode().split())
        address = said[-1][2].removesuffix("/v1")
        heard = " ".join(word for line in said for word in line)
        assert "clock emulated:0 (emulated V100): predictive, 200 to 1380 MHz, knee 1004 MHz" in heard
        assert "kept by emulated:0: small: 95 % within 30 s" in heard
        await until(lambda: ceiling(tmp_path) == 200.0)
        async with httpx.AsyncClient(base_url=address, timeout=PATIENCE_S, trust_env=False) as client:
            body = {"model": "small", "messages": [{"role": "user", "content": "Say hello."}]}
            assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
            shown = ""
            while settings_made(shown) < 3:  # down, up, down: each look is a request of its own
                shown = (await client.get("/metrics")).text
        process.send_signal(signal.SIGTERM)
        out, error = await process.communicate()
        assert (process.returncode, error) == (0, b""), (out, error)
    assert ceiling(tmp_path) is None
    run = open_run(tmp_path / "run")
    decided = [(entry["decision"]["value"], entry["outcome"]) for entry in run.log("decision")]
    assert decided[:3] == [(200.0, "applied"), (980.0, "applied"), (200.0, "applied")], "least energy while it answers"
    assert any(entry["waiting"] == 0 for entry in run.log("clock_step"))
    assert (run.manifest["kind"], run.manifest["state"]) == ("up", "closed")
    assert main(["report", str(tmp_path / "run")]) == 0
    assert "where" not in capsys.readouterr().err


async def test_a_gateway_that_is_killed_gives_the_clock_back(tmp_path, monkeypatch):
    async with serving(tmp_path, monkeypatch, "--json") as process:
        assert json.loads(await process.stdout.readline())["models"][0]["model"] == "small"
        await until(lambda: ceiling(tmp_path) == 200.0)
        os.kill(process.pid, signal.SIGKILL)
        await process.wait()
        await until(lambda: ceiling(tmp_path) is None)
        await until(lambda: LeaseBook(tmp_path / "state/leases").names() == ())
