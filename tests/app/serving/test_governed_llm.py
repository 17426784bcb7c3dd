"""Clocks of a site that serves language models: whose they are, how they are set, and who may not."""

import asyncio
import os
from contextlib import AsyncExitStack

import pytest

from joulery.app.serving.governed.governed_llm import describe_slos, join_keepers
from joulery.app.serving.llm import open_llm_site
from joulery.app.wiring.governed_clocks import governed_clocks
from joulery.config import load
from joulery.domain.errors import CapabilityError, ConfigError
from joulery.domain.serving.generation import GenerationKind, GenerationRequest
from joulery.runtime.serving.governing import ClockController
from joulery.store.leases import LeaseBook
from tests.adapters.engines.remote.openai_server import FakeServer, running
from tests.adapters.engines.support import until
from tests.fakes.cpufreq import cpu_machine, settings
from tests.fakes.nvml import STATE, NvmlFake, as_administrator, gpu
from tests.runtime.leasing.test_leases import FAKES

SITE = """
joulery: 1
mode: act
meters: {use: [cpu-model], cpu_model: {idle: 10 W, max: 30 W}}
fleet: {clocks: [{CLOCK}]}
language_models:
  - name: here
    engine: {kind: llama.cpp, path: m.gguf}
    slo: {latency: 20 s, quantile: 90 %}
  - name: board
    engine: {kind: openai, url: "URL", model: fake-1, max_num_seqs: 1, device: "gpu:0"}
  - name: far
    engine: {kind: openai, url: "http://far:1", model: m}
"""


class Governed:
    """A site's language models with their governors, and what was logged."""

    def __init__(self, text, drivers):
        self.text, self.drivers, self.logged, self.done, self.messages = text, drivers, [], [], []

    def log(self, kind, **fields):
        self.logged.append((kind, fields))

    async def step(self, now_s):
        for driver in self.drivers.values():
            await driver.step(now_s)


async def governed(folder, stack, clock, url="http://near:1"):
    (folder / "m.gguf").write_text("")
    (folder / "site.yaml").write_text(SITE.replace("CLOCK", clock).replace("URL", url))
    site = load(folder / "site.yaml")
    made = Governed(open_llm_site(site, stack=stack), {})
    clocks, holder = await governed_clocks(site, stack, made.messages.append)
    keepers = [ClockController(clock, lambda now_s: (), site.mode, holder) for clock in clocks]
    made.facts = [text for _, text in join_keepers(keepers, made.text, alone=True)]
    for keeper in keepers:
        made.drivers[keeper.clock] = keeper.driver(made.log, made.done.append)
    return made


@pytest.fixture
def tree(tmp_path, monkeypatch):
    return cpu_machine(tmp_path, monkeypatch)


@pytest.fixture
def nvml(monkeypatch, tmp_path):
    from joulery.adapters.devices import nvidia_clock

    fake = NvmlFake(gpu("NVIDIA A100-SXM4-40GB"), file=tmp_path / "boards.json")
    opened = nvidia_clock.open_board
    monkeypatch.setattr(nvidia_clock, "open_board", lambda board, module: opened(board, fake))
    as_administrator(monkeypatch)
    monkeypatch.setenv("JOULERY_STATE", str(tmp_path / "state"))
    # The watchdog is a process of its own: it sees the same boards.
    monkeypatch.setenv(STATE, str(tmp_path / "boards.json"))
    monkeypatch.setenv("PYTHONPATH", f"{FAKES}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    return fake


async def ask(llm, prompt, **fields):
    request = GenerationRequest(
        llm.name, GenerationKind.CHAT, {"messages": [{"role": "user", "content": prompt}]}, prompt, **fields
    )
    return [event async for event in llm.accept(request).events()]


async def test_a_cpu_falls_to_its_knee_under_work_and_below_it_when_idle_and_comes_back(tmp_path, tree):
    before = settings(tree)
    async with AsyncExitStack() as stack:
        made = await governed(tmp_path, stack, "device: cpu")
        (clock,) = made.drivers
        assert made.text.llms["here"].work_clock.rate == 1.0
        await made.step(1000.0)
        assert [(one.decision.value, one.outcome) for one in made.done] == [(clock.clocks_mhz[0], "applied")]
        llm = made.text.llms["here"]
        assert llm.work_clock.rate == pytest.approx(clock.clocks_mhz[0] / clock.clocks_mhz[-1])
        task = llm.accept(GenerationRequest("here", GenerationKind.CHAT, {}, "Say hello."))
        llm.register(task)
        await made.step(1001.0)
        assert float(made.done[-1].decision.value) == pytest.approx(clock.knee_mhz, rel=0.05)
        assert settings(tree) != before
        kinds = [kind for kind, _ in made.logged]
        assert kinds == ["clock_step", "clock_step"]
    assert settings(tree) == before
    assert LeaseBook(tmp_path / "state/leases").names() == ()


async def test_a_backlog_of_long_answers_that_would_be_late_takes_the_highest_clock(tmp_path, nvml):
    fake = FakeServer()
    fake.gate.clear()
    async with running(fake) as url, AsyncExitStack() as stack:
        made = await governed(tmp_path, stack, "device: nvidia, lease: 60 s", url)
        (clock,) = made.drivers
        assert clock.name == "gpu:0"
        board = made.text.llms["board"]
        tasks = [asyncio.create_task(ask(board, f"Write a long story, number {index}")) for index in range(3)]
        await until(lambda: len(board.tasks()) == 3)
        await made.step(board.tasks()[0].arrival_s)
        low_mhz = nvml.boards[0]["locked"][1]
        assert low_mhz < clock.clocks_mhz[-1]  # five minutes are enough for three answers
        late_s = board.tasks()[0].arrival_s + 299.0
        await made.step(late_s)
        assert nvml.boards[0]["locked"][1] == clock.clocks_mhz[-1]
        assert "late even at the highest clock" in made.done[-1].decision.reason
        fake.gate.set()
        await asyncio.gather(*tasks)
        assert nvml.boards[0]["locked"] is not None
    assert nvml.boards[0]["locked"] is None


async def test_a_board_that_refuses_or_is_lost_costs_no_answer(tmp_path, nvml):
    fake = FakeServer()
    async with running(fake) as url, AsyncExitStack() as stack:
        made = await governed(tmp_path, stack, "device: nvidia, lease: 60 s", url)
        nvml.fail_from, nvml.code = len(nvml.calls), nvml.NVML_ERROR_GPU_IS_LOST
        await made.step(1000.0)
        assert made.done[-1].outcome == "failed"
        assert (await ask(made.text.llms["board"], "still there"))[-1].usage is not None
        nvml.fail_from = None
        await made.step(1002.0)
        assert made.done[-1].outcome == "applied"


async def test_who_is_governed_by_which_clock(tmp_path, tree):
    for clock, names in (
        ("device: cpu", ["here"]),
        ("device: emulated", ["here", "board"]),
        ("device: emulated, services: [far]", ["far"]),
    ):
        async with AsyncExitStack() as stack:
            made = await governed(tmp_path, stack, clock)
            slowed = [name for name, llm in made.text.llms.items() if llm.work_clock.rate != 1.0]
            assert slowed == []
            await made.step(1000.0)
            slowed = [name for name, llm in made.text.llms.items() if llm.work_clock.rate != 1.0]
            assert slowed == names
            llms = [made.text.llms[name] for name in ("here", "board")]
            assert describe_slos(llms) == (
                "here: 90 % within 20 s, board: 99 % within 300 s (its deadline; no slo is stated)"
            )


@pytest.mark.parametrize(
    ("clock", "said"),
    [
        ("device: cpu}, {device: emulated", "here has two clocks, cpu and emulated:0"),
        ("device: cpu, services: [absent]", "there is no absent"),
    ],
)
async def test_clocks_that_make_no_sense_are_refused(tmp_path, tree, clock, said):
    before = settings(tree)
    async with AsyncExitStack() as stack:
        with pytest.raises(ConfigError, match=said):
            await governed(tmp_path, stack, clock)
    assert settings(tree) == before


async def test_a_gpu_that_runs_no_model_of_the_site_is_not_governed_as_idle(tmp_path, nvml):
    async with AsyncExitStack() as stack:
        site = SITE.replace(', device: "gpu:0"', "")
        (tmp_path / "m.gguf").write_text("")
        (tmp_path / "site.yaml").write_text(site.replace("CLOCK", "device: nvidia").replace("URL", "http://near:1"))
        loaded = load(tmp_path / "site.yaml")
        text = open_llm_site(loaded, stack=stack)
        clocks, holder = await governed_clocks(loaded, stack, lambda messages: None)
        keepers = [ClockController(clock, lambda now_s: (), loaded.mode, holder) for clock in clocks]
        with pytest.raises(ConfigError, match=r"no language model .* on gpu:0"):
            list(join_keepers(keepers, text, alone=True))
        assert list(join_keepers(keepers, text, alone=False)) == []
    assert nvml.boards[0]["locked"] is None


async def test_a_clock_that_may_not_be_set_says_what_grants_it_and_advice_needs_no_grant(tmp_path, tree, monkeypatch):
    monkeypatch.setattr("os.access", lambda path, mode: False)
    async with AsyncExitStack() as stack:
        with pytest.raises(CapabilityError, match="may not be set") as caught:
            await governed(tmp_path, stack, "device: cpu")
        assert "sudo chmod" in (caught.value.grant or "")
    monkeypatch.setattr("tests.app.serving.test_governed_llm.SITE", SITE.replace("mode: act", "mode: advise"))
    async with AsyncExitStack() as stack:
        made = await governed(tmp_path, stack, "device: cpu")
        await made.step(1000.0)
        assert [one.outcome for one in made.done] == ["advised"]
        assert made.text.llms["here"].work_clock.rate == 1.0
