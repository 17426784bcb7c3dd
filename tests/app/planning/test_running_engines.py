"""``joulery up --plan`` with a plan of language models: what the site's engines say, held against the plan."""

import json

import pytest

from joulery.app.planning.running_engines import check_planned_llms, is_language_plan
from joulery.config import load
from joulery.domain.errors import ConfigError, DataError
from joulery.domain.gpu.language_plan import ServedModel
from joulery.store.plans import read_plan

MODEL = "Qwen/Qwen3-32B"
REPLICAS = {
    "workload": "chat",
    "model": MODEL,
    "precision": "bfloat16",
    "gpus_a_replica": 1,
    "max_num_seqs": 96,
    "replicas": 2,
}
ENGINE = "  - {name: NAME, engine: {kind: openai, dialect: vllm, url: 'http://NAME:8000', model: chatMORE}}\n"


def files(folder, *engines, kind="language"):
    plan = folder / "plan.json"
    plan.write_text(json.dumps({"kind": kind, "gpus": [], "services": [REPLICAS]}))
    site = folder / "site.yaml"
    models = "".join(ENGINE.replace("NAME", name).replace("MORE", more) for name, more in engines)
    site.write_text(f"joulery: 1\nlanguage_models:\n{models}" if models else "joulery: 1\n")
    return load(site), plan


async def checked(folder, monkeypatch, says, *engines):
    """Facts and warnings of a check; ``says``: what each server says."""

    async def answer(upstream):
        return says[upstream.url.split("//")[1].split(":")[0]]

    monkeypatch.setattr("joulery.adapters.engines.remote.served_model.served_model", answer)
    site, plan = files(folder, *engines)
    facts, warnings = [], []
    await check_planned_llms(site, plan, lambda name, text: facts.append(text), warnings.append)
    return facts, warnings


async def test_engines_as_planned_are_facts_with_what_they_do_not_say(tmp_path, monkeypatch):
    says = {"one": ServedModel(("chat", MODEL), 1), "two": ServedModel()}
    facts, warnings = await checked(tmp_path, monkeypatch, says, ("one", ", max_num_seqs: 96"), ("two", ""))
    assert facts[0].startswith("one: as planned") and "precision" in facts[0] and "max-num" not in facts[0]
    assert facts[1] == "two: not compared; it does not say its model"
    assert warnings == [f"the plan has 2 replicas of {MODEL}, the site names 1"]


async def test_what_the_site_states_is_compared_where_the_engine_does_not_say(tmp_path, monkeypatch):
    says = {"one": ServedModel((MODEL,), 1), "two": ServedModel((MODEL,), 1, 96)}
    facts, warnings = await checked(
        tmp_path, monkeypatch, says, ("one", ", max_num_seqs: 8"), ("two", ", max_num_seqs: 8")
    )
    assert warnings[0] == "one: runs 8 requests at once, planned 96" and "--max-num-seqs 96" in warnings[1]
    assert [fact.split(":")[0] for fact in facts] == ["two"], "what the engine says counts"


async def test_a_plan_of_language_models_needs_servers(tmp_path):
    site, plan = files(tmp_path)
    assert is_language_plan(plan) and not is_language_plan(None)
    with pytest.raises(ConfigError, match="names no server"):
        await check_planned_llms(site, plan, lambda *_: None, lambda _: None)
    _, other = files(tmp_path, kind="shares")
    with pytest.raises(DataError, match="expected a plan of language models"):
        read_plan(other).engines()
