"""Models by their id."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from joulery.domain.errors import ConfigError
from joulery.perf.llm.models import estimated_facts, model_facts, precision_bytes, precision_name


@pytest.mark.parametrize(
    ("model", "parameters", "active", "known"),
    [
        ("Qwen/Qwen3-235B-A22B-Thinking-2507-FP8", 235e9, 22e9, True),
        ("openai/gpt-oss-120b", 116.8e9, 5.1e9, True),
        ("deepseek-ai/DeepSeek-V3.1", 671e9, 37e9, True),
        ("meta-llama/Llama-4-Maverick-17B-128E-Instruct-FP8", 400e9, 17e9, True),
        ("someone/Foo-60B-A7B-Chat", 60e9, 7e9, False),
        ("someone/foo-350m", 0.35e9, 0.35e9, False),
        ("someone/Foo-1.5B", 1.5e9, 1.5e9, False),
        ("mistralai/Bar-8x7B", 46.48e9, 12.88e9, False),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", 7e9, 7e9, False),
    ],
)
def test_an_id_says_how_many_parameters_there_are_and_work(model, parameters, active, known):
    facts = model_facts(model)
    assert facts.parameters == pytest.approx(parameters)
    assert facts.active_parameters == pytest.approx(active)
    assert facts.known is known


def test_an_id_that_says_nothing_is_refused_with_what_is_near():
    with pytest.raises(ConfigError) as raised:
        model_facts("gpt-oss")
    assert "gpt-oss-20b" in raised.value.hint


@pytest.mark.parametrize("model", ["Qwen/Qwen3-33B", "Qwen/Qwen3-132B", "xLlama-3.1-8B", "mistral-7b2-1B"])
def test_a_name_that_only_contains_a_known_one_is_not_it(model):
    assert not model_facts(model).known


def test_an_unknown_precision_is_refused_with_what_is_near():
    with pytest.raises(ConfigError) as raised:
        precision_bytes("bfloat61")
    assert "bfloat16" in raised.value.hint
    assert precision_name("BF16") == precision_name("bfloat16")


@given(st.floats(1, 1000), st.floats(0.01, 1), st.floats(1, 4096))
def test_more_requests_touch_more_experts_and_never_more_than_all(billions, share, batch):
    facts = estimated_facts("x", billions * 1e9, share * billions * 1e9)
    once, now, more = (facts.touched_ratio(b) for b in (1, batch, 2 * batch))
    assert share - 1e-9 <= once <= now + 1e-12
    assert now <= more + 1e-12 <= 1 + 2e-12
