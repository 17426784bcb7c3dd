"""Counters of engines, from pages as the engines print them."""

import math
from urllib.parse import urlsplit

import pytest

from joulery.adapters.engines.counters.dialects import ENGINES, engine_counters
from joulery.adapters.engines.counters.scrape import MAX_BYTES, metrics_address, scrape
from joulery.domain.energy.workload import ModelCounters
from joulery.domain.errors import CapabilityError, ConfigError, DataError
from tests.fakes import engine_pages as pages

NAN = math.nan
LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
PAGES = {
    "vllm": (pages.vllm(running=2.0), {"Qwen/Qwen3-0.6B": ModelCounters(7, 1200, 340)}, 2.0),
    "sglang": (pages.SGLANG, {LLAMA: ModelCounters(11008, 8128902, 7557572)}, 2988.0),
    "triton": (
        pages.TRITON,
        {"resnet50": ModelCounters(120, NAN, NAN, 3.0), "bert": ModelCounters(30, NAN, NAN, 1.0)},
        0.0,
    ),
    "tensorrt-llm": (pages.TENSORRT_LLM, {"Qwen/Qwen3-0.6B": ModelCounters(155, 90000, 31000)}, NAN),
    "llama.cpp": (pages.LLAMA_CPP, {"llama.cpp": ModelCounters(NAN, 800, 39080)}, 2.0),
}


def same(a, b):
    return all(x == y or (math.isnan(x) and math.isnan(y)) for x, y in zip(a, b, strict=True))


def fields(model):
    return (model.requests, model.prompt_tokens, model.output_tokens, model.compute_s)


def test_each_engine_has_a_page_here():
    assert set(PAGES) == set(ENGINES)


@pytest.mark.parametrize("engine", sorted(PAGES))
def test_the_counters_of_an_engine(engine):
    page, models, active = PAGES[engine]
    found = engine_counters(page)
    assert found.engine == engine
    assert found.models.keys() == models.keys()
    for name, model in models.items():
        assert same(fields(found.models[name]), fields(model))
    assert same([found.active], [active])


@pytest.mark.parametrize(
    ("engine", "written", "by_agent"),
    [
        ("vllm", "ray_vllm:", True),
        ("vllm", "ray_vllm_", True),
        ("vllm", "vllm_", False),
        ("sglang", "ray_sglang_", True),
        ("sglang", "sglang_", False),
    ],
)
def test_the_same_counters_under_the_names_of_ray_and_of_collectors(engine, written, by_agent):
    page, models, active = PAGES[engine]
    found = engine_counters(page.replace(f"{engine}:", written))
    assert (found.engine, found.by_agent) == (engine, by_agent)
    assert {name: fields(model)[:3] for name, model in found.models.items()} == {
        name: fields(model)[:3] for name, model in models.items()
    }
    assert found.active == active
    assert not engine_counters(page).by_agent


def test_replicas_of_ray_are_added_up_and_no_name_is_counted_twice():
    ray = pages.vllm().replace("vllm:", "ray_vllm_")
    replicas = ray + ray.replace('engine="0"', 'engine="0",ReplicaId="b"')
    assert fields(engine_counters(replicas).models["Qwen/Qwen3-0.6B"])[:3] == (14.0, 2400.0, 680.0)
    both = ray + pages.vllm().replace("vllm:", "ray_vllm:")
    assert fields(engine_counters(both).models["Qwen/Qwen3-0.6B"])[:3] == (7.0, 1200.0, 340.0)


def test_triton_with_a_language_model_counts_its_tokens():
    found = engine_counters(pages.TRITON_LLM)
    assert fields(found.models["tensorrt_llm"])[:3] == (40.0, 20480.0, 5120.0)
    assert found.active == 3.0


def test_ranks_of_one_model_are_added_up():
    page = pages.vllm() + "".join(
        line.replace('engine="0"', 'engine="1"') + "\n" for line in pages.vllm().splitlines() if line[0] != "#"
    )
    assert fields(engine_counters(page).models["Qwen/Qwen3-0.6B"])[:3] == (14.0, 2400.0, 680.0)


def test_values_that_are_no_numbers_are_left_out():
    page = pages.vllm().replace("} 340.0", "} NaN")
    assert engine_counters(page).models["Qwen/Qwen3-0.6B"].output_tokens == 0.0


@pytest.mark.parametrize("page", ["", "<html>", "go_goroutines 12\n", '{"tokens": 3}'])
def test_a_page_of_something_else_is_refused(page):
    with pytest.raises(DataError, match="known engine"):
        engine_counters(page)


def test_a_malformed_line_is_refused():
    with pytest.raises(DataError, match="exposition"):
        engine_counters('vllm:prompt_tokens_total{model_name="a} twelve\n')


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("localhost:8000", "http://localhost:8000/metrics"),
        ("http://h:1/", "http://h:1/metrics"),
        ("https://h/x/metrics?a=1", "https://h/x/metrics?a=1"),
        ("http://[::1]:8000", "http://[::1]:8000/metrics"),
    ],
)
def test_an_address(text, url):
    assert metrics_address(text, "--engine").geturl() == url


@pytest.mark.parametrize(
    "text", ["", "ftp://h", "http://", "http://h:x", "http://h:99999", "http://u:p@h", "file:///etc"]
)
def test_no_address(text):
    with pytest.raises(ConfigError, match="--engine"):
        metrics_address(text, "--engine")


def test_a_page_is_fetched_and_what_fails_is_said():
    with pages.shown(pages.Page(pages.SGLANG)) as page:
        assert scrape(metrics_address(page.url, "")) == pages.SGLANG
        with pytest.raises(CapabilityError, match="503"):
            scrape(metrics_address(f"{page.url}/other", ""))
        page.text = "x" * (MAX_BYTES + 1)
        with pytest.raises(CapabilityError, match="16 MiB"):
            scrape(metrics_address(page.url, ""))
        gone = urlsplit(f"{page.url}/metrics")
    with pytest.raises(CapabilityError, match="does not answer"):
        scrape(gone)
