"""The load of vLLM and SGLang, read from their Prometheus metrics.

Sources: vLLM, production metrics (``vllm:``; ``gpu_cache_usage_perc`` until 0.10); SGLang, production metrics
(``sglang:``, with ``--enable-metrics``). Engines of one server (data parallel) are added up; the fullest cache counts.
"""

from __future__ import annotations

import math

from prometheus_client.parser import text_string_to_metric_families

from joulery.domain.serving.generation import EngineLoad

_RUNNING = ("vllm:num_requests_running", "sglang:num_running_reqs")
_WAITING = ("vllm:num_requests_waiting", "sglang:num_queue_reqs")
_KV_USAGE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage")
_PROMPT = ("vllm:prompt_tokens_total", "sglang:prompt_tokens_total")
_GENERATED = ("vllm:generation_tokens_total", "sglang:generation_tokens_total")


def engine_load(exposition: str) -> EngineLoad | None:
    """The load in a Prometheus exposition; None where it has neither engine's metrics.

    Raises:
        ValueError: The text is not an exposition.
    """
    values: dict[str, list[float]] = {}
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            values.setdefault(sample.name, []).append(sample.value)

    def read(names: tuple[str, ...]) -> list[float]:
        return next((values[name] for name in names if name in values), [])

    def total(names: tuple[str, ...]) -> float:
        found = read(names)
        return math.fsum(found) if found else math.nan

    running, waiting = total(_RUNNING), total(_WAITING)
    if math.isnan(running) or math.isnan(waiting):
        return None
    return EngineLoad(running, waiting, max(read(_KV_USAGE), default=math.nan), total(_PROMPT), total(_GENERATED))
