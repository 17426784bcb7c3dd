"""Language models of the site file, wired."""

import json
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from joulery.adapters.engines.remote.llama import LlamaEngine
from joulery.adapters.engines.remote.openai import OpenAiEngine
from joulery.adapters.models import smollm2
from joulery.app.serving.llm import llm_engine, open_llm_site, upstream_boards
from joulery.app.serving.llm_site import llm_facts
from joulery.config import load
from joulery.domain.errors import ConfigError
from joulery.domain.renames import RenamedWarning
from joulery.domain.serving.generation import Dialect, GenerationKind, GenerationRequest
from joulery.policies.ordering import Aging
from joulery.policies.reranking import Reranking
from joulery.store.answer_log import read_answer_log
from joulery.ui.cli import main

SITE = """
joulery: 1
pue: 1.5
carbon: {kind: constant, intensity: 360 g/kWh}
meters: {use: [cpu-model], cpu_model: {idle: 10 W, max: 30 W}}
language_models:
  - name: near
    owner: ada
    engine: {kind: llama.cpp, path: m.gguf, threads: 2, max_num_seqs: 3, context_tokens: 512}
    order: {kind: ssjf, aging: 0.1, grace: 30 s}
    predictor: {cache: 0}
    log: near.jsonl
  - name: far
    engine: {kind: openai, url: "http://far:1/v1/", model: big, dialect: sglang, token_file: token, stall: 7 s,
             device: "gpu:0"}
    order: {kind: fcfs}
    deadline: 2 min
    queue: 5
"""


def site_of(folder, text=SITE):
    (folder / "m.gguf").write_text("")
    (folder / "token").write_text(" s3cret\n")
    (folder / "site.yaml").write_text(text)
    return load(folder / "site.yaml")


async def test_every_key_reaches_what_it_is_for(tmp_path):
    async with AsyncExitStack() as stack:
        text = open_llm_site(site_of(tmp_path), stack=stack)
        near, far = text.llms["near"], text.llms["far"]
        assert (near.owner, near.settings.max_num_seqs, near.settings.retries) == ("ada", 3, 1)
        assert near.settings.aging == Aging(0.1, 30.0)
        assert near.forecaster.predictor is not None and near.forecaster.cache is None
        assert isinstance(near.engine, LlamaEngine)
        settings = near.engine.settings
        assert (settings.path, settings.name, settings.threads) == (tmp_path / "m.gguf", "m", 2)
        assert (settings.max_num_seqs, settings.context_tokens) == (3, 512)
        assert isinstance(far.engine, OpenAiEngine)
        upstream = far.engine.upstream
        assert (upstream.url, upstream.model, upstream.dialect) == ("http://far:1", "big", Dialect.SGLANG)
        assert (upstream.token, upstream.stall_s, upstream.answer_s) == ("s3cret", 7.0, 120.0)
        assert (far.settings.aging, far.settings.queue, far.settings.deadline_s) == (None, 5, 120.0)
        assert (far.settings.retries, far.forecaster.predictor, far.forecaster.cache) == (0, None, None)
        assert any("modelled" in note for note in text.notes)
        await text.grid.refresh()
        assert text.grid.at(text.grid._now_s()) == 360.0
        request = GenerationRequest("near", GenerationKind.CHAT, {}, "hello")
        near.keep(request, 4)
        near.keep(request._replace(max_tokens=4), 4)
        far.keep(request, 5)
    assert list(read_answer_log(tmp_path / "near.jsonl")) == [("near", "hello", 4)] * 2
    assert [json.loads(line).get("cut") for line in (tmp_path / "near.jsonl").read_text().splitlines()] == [None, True]


def test_the_example_is_valid_and_says_what_it_serves(capsys):
    example = Path(__file__).parents[3] / "examples" / "llm.yaml"
    assert main(["config", "check", str(example)]) == 0
    assert capsys.readouterr().out.endswith("llm.yaml: valid; smollm2; mode advise\n")
    assert [type(llm_engine(model)) for model in load(example).language_models if smollm2.installed()] in (
        [LlamaEngine],
        [],
    )


async def test_a_log_that_cannot_be_written_any_more_costs_no_answer(tmp_path, capsys):
    async with AsyncExitStack() as stack:
        site = site_of(tmp_path, SITE.replace("near.jsonl", "full.jsonl"))
        (tmp_path / "full.jsonl").symlink_to("/dev/full")
        near = open_llm_site(site, stack=stack).llms["near"]
        for _ in range(2):
            near.keep(GenerationRequest("near", GenerationKind.CHAT, {}, "hello"), 4)
    assert capsys.readouterr().err.count("logging of answers has stopped") == 1


@pytest.mark.parametrize(
    ("order", "expected"), [("{kind: rerank}", None), ("{kind: rerank, decay: 90 s}", Aging.boost(90.0))]
)
async def test_an_order_that_is_revised_may_state_its_decay(tmp_path, order, expected):
    text = SITE.replace("{kind: ssjf, aging: 0.1, grace: 30 s}", order)
    async with AsyncExitStack() as stack:
        site = open_llm_site(site_of(tmp_path, text), stack=stack)
        assert site.llms["near"].settings.reranking == Reranking(expected)
        assert site.llms["far"].settings.reranking is None
        assert "shortest expected remainder first" in next(text for _, text in llm_facts(site))


async def test_boost_orders_our_queue_and_an_engines_own(tmp_path):
    text = SITE.replace("{kind: ssjf, aging: 0.1, grace: 30 s}", "{kind: boost, decay: 90 s}")
    async with AsyncExitStack() as stack:
        site = open_llm_site(
            site_of(tmp_path, text.replace("{kind: fcfs}", "{kind: boost, decay: 2 min}")), stack=stack
        )
        assert [site.llms[name].settings.aging for name in ("near", "far")] == [Aging.boost(90.0), Aging.boost(120.0)]
        assert dict(llm_facts(site))["model"].endswith("head start by length, the engine's own queue")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("order: {kind: fcfs}", "order: {grace: 3 s}", "one priority number"),
        ("order: {kind: fcfs}", "order: {kind: boost}", "boost needs a decay"),
        ("order: {kind: fcfs}", "order: {decay: 2 min}", "only boost and rerank have a decay"),
        ("order: {kind: fcfs}", "order: {kind: boost, decay: 2 min, aging: 0.1}", "neither aging nor grace"),
        ("{kind: ssjf, aging: 0.1, grace: 30 s}", "{kind: rerank, grace: 30 s}", "neither aging nor grace"),
        ("order: {kind: fcfs}", "order: {kind: rerank}", "cannot be revised in an engine"),
        ("log: near.jsonl", "log: near.parquet", "a name ending in .jsonl"),
        ("name: far", "name: near", "names must differ"),
        ("http://far:1/v1/", "far:1", "url"),
        ("token_file: token", "token_file: nowhere", "no such file"),
    ],
)
def test_what_makes_no_sense_is_refused_where_it_stands(tmp_path, old, new, said):
    assert old in SITE
    with pytest.raises(ConfigError, match=said):
        site_of(tmp_path, SITE.replace(old, new))


def test_a_token_that_is_no_text_is_refused(tmp_path):
    site = site_of(tmp_path)
    (tmp_path / "token").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="token cannot be read"):
        llm_engine(site.language_models[1])


def far(folder, device, name="far"):
    engine = f'{{kind: openai, url: "http://far:1", model: big, device: {device}}}'
    return site_of(folder, f"joulery: 1\nlanguage_models:\n  - {{name: {name}, aliases: [gpt], engine: {engine}}}\n")


@pytest.mark.parametrize(
    ("device", "named"),
    [('"gpuu:7"', "gpuu:7"), ('"gpu:0,gpu:1"', "gpu:0,gpu:1"), ("[]", "device"), ("[gpu:0, gpu:0]", "device")],
)
def test_a_device_that_cannot_be_is_an_error(tmp_path, device, named):
    with pytest.raises(ConfigError) as caught:
        far(tmp_path, device)
    assert named in str(caught.value)


async def test_every_device_of_a_model_is_metered_and_an_unmetered_one_is_noted(tmp_path):
    async with AsyncExitStack() as stack:
        text = open_llm_site(far(tmp_path, "[gpu:6, gpu:7]"), stack=stack)
        assert text.devices == {"far": ("gpu:6", "gpu:7")}
        assert upstream_boards(far(tmp_path, "[gpu:6, gpu:7]")) == ("gpu:6", "gpu:7"), "no process there is joulery's"
        assert text.aliases == {"gpt": "far"}
        for device in ("gpu:6", "gpu:7"):
            assert any(device in note and "far" in note for note in text.notes)


def test_the_old_key_lanes_is_read_with_a_warning(tmp_path):
    with pytest.warns(RenamedWarning, match="max_num_seqs"):
        site = site_of(tmp_path, SITE.replace("max_num_seqs: 3", "lanes: 3"))
    assert site.language_models[0].engine.max_num_seqs == 3
