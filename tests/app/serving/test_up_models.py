"""``joulery up`` and ``joulery serve`` of a site that has language models only, in this process."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager

import httpx
import pytest

from joulery.app.serving.up import Options, the_services, up
from joulery.config import load
from joulery.domain.errors import ConfigError
from joulery.store.run.directory import open_run
from joulery.store.run.timeline import read_site, read_ticks
from joulery.ui.dashboard.routes import dashboard_routes
from joulery.ui.reports.up_facts import serving_facts
from joulery.ui.reports.up_screen import Silent, summary_lines
from tests.adapters.engines.remote.openai_server import FakeServer, running
from tests.adapters.engines.support import until
from tests.waiting import PATIENCE_S

SITE = """
joulery: 1
name: words
mode: act
carbon: {kind: constant, intensity: 360 g/kWh}
meters: {use: [cpu-model], cpu_model: {idle: 10 W, max: 30 W}}
fleet: {clocks: [{device: emulated, period: 100 ms}]}
language_models:
  - name: small
    owner: ada
    engine: {kind: openai, url: "URL", model: fake-1, device: "cpu:0"}
    slo: {latency: 30 s, quantile: 95 %}
  - name: other
    owner: bob
    engine: {kind: openai, url: "URL", model: fake-1}
serving: {listen: "127.0.0.1:0", body: 2 KiB}
"""


class Screen(Silent):
    """Remembers what a run reported."""

    def __init__(self) -> None:
        self.url, self.facts, self.served, self.session = "", [], (), None

    def fact(self, name, text):
        self.facts.append((name, text))

    def serving(self, session, url, grpc=""):
        self.facts += serving_facts(session, url)
        self.url, self.served, self.session = url, session.models.engines, session

    def tokens(self):
        """Tokens of all ticks so far."""
        snapshot = self.session.snapshot()
        return 0 if snapshot is None else sum(one.tokens for tick in snapshot.ticks for one in tick.services)


@asynccontextmanager
async def up_with(tmp_path, monkeypatch, text=SITE, **options):
    """A running site: its screen, a client, and what ends it and gives its report."""
    monkeypatch.setenv("JOULERY_STATE", str(tmp_path / "state"))
    async with running(FakeServer(max_num_seqs=8)) as url:
        (tmp_path / "site.yaml").write_text(text.replace("URL", url))
        screen, stop = Screen(), asyncio.Event()
        chosen = Options(load(tmp_path / "site.yaml"), out=tmp_path / "run", **options)
        running_site = asyncio.create_task(up(chosen, screen, stop, dashboard_routes))
        await until(lambda: screen.url or running_site.done())
        if running_site.done():
            await running_site

        async def end(*, now=True):
            if now:
                stop.set()
            return await running_site

        try:
            async with httpx.AsyncClient(base_url=screen.url, timeout=PATIENCE_S, trust_env=False) as client:
                yield screen, client, end
        finally:
            stop.set()
            await asyncio.gather(running_site, return_exceptions=True)


async def test_a_site_of_language_models_is_served_shown_governed_and_charged(tmp_path, monkeypatch):
    async with up_with(tmp_path, monkeypatch, stay=True, send=False) as (screen, client, end):
        facts = [text for _, text in screen.facts]
        assert any("kept by emulated:0: small: 95 % within 30 s" in text for text in facts)
        assert ("serving", f"at {screen.url}/v1") in screen.facts
        assert {one["model"]: one["variant"] for one in screen.served} == {"small": "fake-1", "other": "fake-1"}
        body = {"model": "small", "messages": [{"role": "user", "content": "hello"}]}
        for model in ("small", "small", "other"):
            answer = await client.post("/v1/chat/completions", json={**body, "model": model})
            assert answer.status_code == 200
        too_long = {**body, "messages": [{"role": "user", "content": "x" * 3000}]}
        assert (await client.post("/v1/chat/completions", json=too_long)).status_code == 413
        await until(lambda: screen.tokens() == 9)
        (now,) = (await client.get("/api/now")).json()["site"]["services"][:1]
        assert (now["name"], now["language_model"], now["variants"]) == ("small", True, [["fake-1", None]])
        page = (await client.get("/api/screen")).text
        assert "Time to first token" in page and "Energy a token" in page and "Accuracy" not in page
        metrics = (await client.get("/metrics")).text
        assert 'joulery_power_watts{component="server",device="cpu:0"' in metrics
        assert 'joulery_decisions_total{kind="set_clock"' in metrics
        report = await end()
    check_report(report)
    run = open_run(tmp_path / "run")
    site = read_site(run)
    assert [(one.name, one.language_model) for one in site.services] == [("small", True), ("other", True)]
    assert sum(one.tokens for tick in read_ticks(run) for one in tick.services) == 9
    assert json.loads((tmp_path / "state/emulated-0.json").read_text())["ceiling_mhz"] is None


def check_report(report):
    assert report["services"] == [] and (report["requests"], report["answered"], report["failed"]) == (3, 3, 0)
    small, other = report["language_models"]
    assert (small["requests"], small["slo_met"], small["attainment_ratio"]) == (2, True, 1.0)
    assert (other["completion_tokens"], other["slo_s"]) == (3, 300.0)
    parts = ("requests_j", "serving_j", "load_generator_j", "idle_j", "unattributed_j")
    assert sum(report[name] for name in parts) == pytest.approx(report["energy_j"])
    charged = {one["workload"]: one for one in report["charges"]}
    assert {name: one["owner"] for name, one in charged.items()} == {"small": "ada", "other": "bob"}
    lines = dict(summary_lines(report))
    assert "3 in" in lines["requests"] and "tokens written" in lines["small"] and "joules not known" in lines["other"]


async def test_the_load_of_a_language_model_alone_is_sent(tmp_path, monkeypatch):
    load_of = "    load: {kind: poisson, rate: 20 /s, duration: 1 s, max_tokens: 5, seed: 2}\n"
    text = SITE.replace("    owner: ada\n", "    owner: ada\n" + load_of).replace(", body: 2 KiB", "")
    async with up_with(tmp_path, monkeypatch, text) as (_, _, end):
        report = await end(now=False)
    small = report["language_models"][0]
    assert small["sent"] == small["requests"] == report["sent"] > 5
    assert report["client"]["answered"] == report["answered"]


async def test_a_clock_that_governs_none_of_the_models_is_refused(tmp_path, monkeypatch):
    text = SITE.replace(', device: "cpu:0"', "")
    with pytest.raises(ConfigError, match="no language model"):
        async with up_with(tmp_path, monkeypatch, text, stay=True, send=False):
            pass


def test_a_site_without_services_and_models_is_refused(tmp_path):
    (tmp_path / "site.yaml").write_text("joulery: 1\nmode: act\n")
    with pytest.raises(ConfigError, match="no service to run"):
        the_services(load(tmp_path / "site.yaml"))
