"""The load of vLLM and SGLang by their own metrics."""

import math

import pytest

from joulery.adapters.engines.remote.engine_metrics import engine_load
from joulery.adapters.engines.remote.openai import OpenAiEngine, Upstream
from joulery.domain.serving.generation import Dialect, EngineLoad
from tests.adapters.engines.remote.openai_server import FakeServer, running

VLLM = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 2.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 4.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 4.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.75
# TYPE vllm:prompt_tokens counter
vllm:prompt_tokens_total{engine="0",model_name="m"} 70.0
vllm:prompt_tokens_created{engine="0",model_name="m"} 1.79e+09
# TYPE vllm:generation_tokens counter
vllm:generation_tokens_total{engine="0",model_name="m"} 200.0
"""
SGLANG = """# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{model_name="m"} 7.0
# TYPE sglang:num_queue_reqs gauge
sglang:num_queue_reqs{model_name="m"} 1.0
# TYPE sglang:token_usage gauge
sglang:token_usage{model_name="m"} 0.5
# TYPE sglang:generation_tokens_total counter
sglang:generation_tokens_total{model_name="m"} 40.0
"""


def test_the_names_of_both_engines_are_read() -> None:
    assert engine_load(VLLM) == EngineLoad(5.0, 4.0, 0.75, 70.0, 200.0)
    found = engine_load(SGLANG)
    assert found is not None and found[:3] == (7.0, 1.0, 0.5)
    assert found.generated_tokens == 40.0 and math.isnan(found.prompt_tokens)
    old = engine_load(VLLM.replace("kv_cache_usage_perc", "gpu_cache_usage_perc"))
    assert old is not None and old.kv_usage_ratio == 0.75


@pytest.mark.parametrize("text", ["", "# TYPE up gauge\nup 1\n", "vllm:num_requests_running 1\n"])
def test_other_expositions_are_no_load(text: str) -> None:
    assert engine_load(text) is None


@pytest.mark.parametrize(
    ("dialect", "metrics", "running_requests"),
    [(Dialect.VLLM, VLLM, 5.0), (Dialect.SGLANG, "", None), (Dialect.PLAIN, VLLM, None), (Dialect.VLLM, "}{", None)],
)
async def test_an_engine_is_asked_where_it_keeps_the_queue(dialect, metrics, running_requests) -> None:
    fake = FakeServer(order=dialect.value)
    fake.metrics = metrics
    async with running(fake) as url:
        engine = OpenAiEngine(Upstream(url, "fake-1", dialect=dialect))
        load = await engine.load()
        await engine.close()
    assert (None if load is None else load.running) == running_requests


async def test_a_server_that_is_away_reports_nothing() -> None:
    engine = OpenAiEngine(Upstream("http://127.0.0.1:1", "m", dialect=Dialect.VLLM))
    assert await engine.load() is None
    await engine.close()
