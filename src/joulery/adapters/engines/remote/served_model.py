"""Model and configuration of a language-model server, as far as vLLM and SGLang report them.

``/v1/models`` names the model, and under ``root`` what it was loaded from. ``/server_info`` of vLLM (only with
``VLLM_SERVER_DEV_MODE=1``) has its configuration as text, ``/get_server_info`` of SGLang its arguments as JSON.
"""

from __future__ import annotations

import logging
import re
from typing import Any

import httpx

from joulery.adapters.engines.remote.openai import Upstream
from joulery.domain.gpu.language_plan import ServedModel

_INFO = ("/server_info", "/get_server_info")
_FLOATS = {"bfloat16", "float16", "float32"}
_log = logging.getLogger(__name__)


async def served_model(upstream: Upstream, transport: httpx.AsyncBaseTransport | None = None) -> ServedModel:
    """Query a server for its model, once; the report is empty where it does not answer.

    Args:
        upstream: The server.
        transport: Replaces the connection in tests.
    """
    headers = {"Authorization": f"Bearer {upstream.token}"} if upstream.token else {}
    async with httpx.AsyncClient(
        base_url=upstream.url, headers=headers, timeout=upstream.connect_s, transport=transport
    ) as client:
        models = _names(await _answer(client, "/v1/models"))
        for path in _INFO:
            if isinstance(info := await _answer(client, path), dict):
                return _stated_in(info)._replace(models=models or _stated_in(info).models)
    return ServedModel(models)


async def _answer(client: httpx.AsyncClient, path: str) -> Any:
    """The JSON at a path; None where there is none."""
    try:
        answer = await client.get(path)
        return answer.json() if answer.status_code == 200 else None
    except (httpx.HTTPError, ValueError) as error:
        _log.debug("%s%s cannot be read: %s", client.base_url, path, error)
        return None


def _names(listed: Any) -> tuple[str, ...]:
    """Every name in a list of models."""
    models = listed.get("data") if isinstance(listed, dict) else None
    entries = [each for each in models if isinstance(each, dict)] if isinstance(models, list) else []
    return tuple(dict.fromkeys(str(each[key]) for each in entries for key in ("id", "root") if each.get(key)))


def _stated_in(info: dict[str, Any]) -> ServedModel:
    """The served model according to a server's configuration."""
    text = info.get("vllm_config")
    if isinstance(text, str):
        # The first of equal keys: others stand within the configurations of parts.
        found = dict(reversed(re.findall(r"\b(\w+)='?([^',\s)]+)", text)))
        return _served(found, "model", "tensor_parallel_size", "max_num_seqs")
    flat = {str(key): value for key, value in info.items()}
    return _served(flat, "model_path", "tp_size", "max_running_requests")


def _served(found: dict[str, Any], model: str, gpus: str, most: str) -> ServedModel:
    named = str(found.get(model) or "")
    quantization, dtype = str(found.get("quantization") or "None"), str(found.get("dtype") or "").removeprefix("torch.")
    precision = quantization if quantization != "None" else dtype if dtype in _FLOATS else ""
    return ServedModel(
        (named,) if named else (), _whole_number(found.get(gpus)), _whole_number(found.get(most)), precision
    )


def _whole_number(value: Any) -> int | None:
    text = str(value)
    return int(text) if text.isdigit() and int(text) > 0 else None
