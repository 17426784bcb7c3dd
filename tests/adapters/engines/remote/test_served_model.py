"""What servers of language models say of what they run: vLLM and SGLang, and servers that say less."""

import httpx
import pytest

from joulery.adapters.engines.remote.openai import Upstream
from joulery.adapters.engines.remote.served_model import served_model
from joulery.domain.gpu.language_plan import ServedModel

# As in vllm-project/vllm pull request 31899.
VLLM = (
    "model='Qwen/Qwen3-32B', speculative_config=None, tokenizer='Qwen/Qwen3-32B', dtype=torch.bfloat16, "
    "max_seq_len=40960, load_format=auto, tensor_parallel_size=2, pipeline_parallel_size=1, quantization=None, "
    "structured_outputs_config=StructuredOutputsConfig(backend='auto'), seed=0, served_model_name=chat, model='x'"
)
SGLANG = {
    "model_path": "Qwen/Qwen3-32B",
    "tp_size": 4,
    "max_running_requests": 96,
    "dtype": "auto",
    "quantization": "fp8",
}
LISTED = {"data": [{"id": "chat", "root": "Qwen/Qwen3-32B"}]}


async def asked(**answers):
    """What is read of a server that has JSON at these paths; a string answers as text."""

    def answer(request: httpx.Request) -> httpx.Response:
        found = answers.get(request.url.path.strip("/").replace("/", "_"))
        if found is None:
            return httpx.Response(404)
        return httpx.Response(200, text=found) if isinstance(found, str) else httpx.Response(200, json=found)

    return await served_model(Upstream("http://there:8000", "chat", token="secret"), httpx.MockTransport(answer))


async def test_vllm_says_its_model_and_in_development_its_parallelism_and_precision():
    said = await asked(v1_models=LISTED, server_info={"vllm_config": VLLM})
    assert said == ServedModel(("chat", "Qwen/Qwen3-32B"), 2, None, "bfloat16")
    assert (await asked(server_info={"vllm_config": VLLM})).models == ("Qwen/Qwen3-32B",)


async def test_sglang_says_how_many_requests_it_runs_too():
    assert await asked(get_server_info=SGLANG) == ServedModel(("Qwen/Qwen3-32B",), 4, 96, "fp8")


@pytest.mark.parametrize(
    "answers",
    [
        {},
        {"v1_models": "no JSON"},
        {"v1_models": []},
        {"v1_models": {"data": ["x", {"id": None}]}},
        {"server_info": [1]},
        {"server_info": {"tp_size": "many", "max_running_requests": 0}},
    ],
)
async def test_what_says_nothing_is_not_made_up(answers):
    assert await asked(**answers) == ServedModel()


async def test_a_server_that_is_not_there_says_nothing():
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    assert await served_model(Upstream("http://there:8000", "chat"), httpx.MockTransport(refuse)) == ServedModel()
