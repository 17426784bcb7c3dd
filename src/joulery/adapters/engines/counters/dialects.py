"""Counter names of each engine.

Sources, as the engines print them:

* vLLM, production metrics: ``vllm:prompt_tokens_total``, ``vllm:generation_tokens_total``,
  ``vllm:request_success_total{finished_reason}``, by ``model_name`` (and ``engine``, one a data-parallel rank).
* SGLang with ``--enable-metrics``: ``sglang:prompt_tokens_total``, ``sglang:generation_tokens_total``,
  ``sglang:num_requests_total``, by ``model_name``.
* Triton: ``nv_inference_request_success``, ``nv_inference_compute_infer_duration_us`` and
  ``nv_inference_pending_request_count`` by ``model`` and ``version``; its TensorRT-LLM backend adds
  ``nv_llm_input_token_len_sum`` and ``nv_llm_output_token_len_sum``.
* TensorRT-LLM (``trtllm-serve``, ``/prometheus/metrics``): ``trtllm_request_success_total``,
  ``trtllm_prompt_tokens_total``, ``trtllm_generation_tokens_total``, by ``model_name``; counted when a request ends.
* llama.cpp with ``--metrics``: ``llamacpp:prompt_tokens_total``, ``llamacpp:tokens_predicted_total``; it counts no
  requests.
* Ray Serve LLM and other Ray programs print vLLM's and SGLang's names behind Ray's, on the page of the node's agent:
  ``ray_vllm:generation_tokens_total``, with newer releases ``ray_vllm_generation_tokens_total``. Collectors that allow
  no colon print ``vllm_generation_tokens_total``.

Requests that were aborted or failed are not counted; their tokens are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from joulery.adapters.engines.counters.exposition import ScrapedSample, names_of, samples
from joulery.domain.energy.workload import EngineCounters, ModelCounters
from joulery.domain.errors import DataError

_UNANSWERED = frozenset({"abort", "error", "cancelled"})
_US_PER_S = 1e6


@dataclass(frozen=True, slots=True)
class _Dialect:
    """The counter names of one engine; empty for counters that it does not have."""

    engine: str
    requests: str
    prompt: str
    output: str
    active: tuple[str, ...]
    model: str = "model_name"
    compute_us: str = ""
    behind_ray: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        every = (self.requests, self.prompt, self.output, self.compute_us, *self.active)
        return tuple(name for name in every if name)


_DIALECTS = (
    _Dialect(
        "vllm",
        "vllm:request_success_total",
        "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total",
        ("vllm:num_requests_running", "vllm:num_requests_waiting"),
    ),
    _Dialect(
        "sglang",
        "sglang:num_requests_total",
        "sglang:prompt_tokens_total",
        "sglang:generation_tokens_total",
        ("sglang:num_running_reqs", "sglang:num_queue_reqs"),
    ),
    _Dialect(
        "tensorrt-llm",
        "trtllm_request_success_total",
        "trtllm_prompt_tokens_total",
        "trtllm_generation_tokens_total",
        ("trtllm_num_active_requests", "trtllm_server_queue_length", "trtllm_num_queued_requests"),
    ),
    _Dialect(
        "triton",
        "nv_inference_request_success",
        "nv_llm_input_token_len_sum",
        "nv_llm_output_token_len_sum",
        ("nv_inference_pending_request_count", "nv_trt_llm_request_metrics"),
        "model",
        "nv_inference_compute_infer_duration_us",
    ),
    _Dialect(
        "llama.cpp",
        "",
        "llamacpp:prompt_tokens_total",
        "llamacpp:tokens_predicted_total",
        ("llamacpp:requests_processing", "llamacpp:requests_deferred"),
    ),
)
_RENAMED = tuple(
    replace(
        dialect,
        requests=dialect.requests.replace(colon, prefix),
        prompt=dialect.prompt.replace(colon, prefix),
        output=dialect.output.replace(colon, prefix),
        active=tuple(name.replace(colon, prefix) for name in dialect.active),
        behind_ray=prefix.startswith("ray_"),
    )
    for dialect in _DIALECTS
    if dialect.engine in ("vllm", "sglang")
    for colon in (f"{dialect.engine}:",)
    for prefix in (f"ray_{colon}", f"ray_{dialect.engine}_", f"{dialect.engine}_")
)
"""The same engines under the names that Ray and some collectors give their counters."""
ENGINES = tuple(dialect.engine for dialect in _DIALECTS)


def engine_counters(exposition: str) -> EngineCounters:
    """The counters of an engine so far, from its metrics page.

    Raises:
        DataError: No engine known here prints such a page, or it is malformed.
    """
    printed = names_of(exposition)
    for dialect in (*_DIALECTS, *_RENAMED):
        if printed.intersection(dialect.names):
            return _read(dialect, samples(exposition, dialect.names))
    raise DataError(
        "none of the names on this page belongs to a known engine",
        hint=f"known: {', '.join(ENGINES)}; SGLang prints them with --enable-metrics, llama.cpp with --metrics",
    )


def _read(dialect: _Dialect, found: Iterable[ScrapedSample]) -> EngineCounters:
    sums: dict[str, dict[str, float]] = {}
    active: list[float] = []
    for sample in found:
        if not math.isfinite(sample.value):
            continue
        if sample.name in dialect.active:
            if sample.labels.get("request_type", "active") in ("active", "waiting"):
                active.append(sample.value)
            continue
        of_model = sums.setdefault(sample.labels.get(dialect.model, ""), {})
        answered = sample.labels.get("finished_reason", "") not in _UNANSWERED
        of_model[sample.name] = of_model.get(sample.name, 0.0) + (sample.value if answered else 0.0)
    models = {}
    for model, values in sums.items():
        missing = 0.0 if dialect.output in values or dialect.prompt in values else math.nan
        models[model or dialect.engine] = ModelCounters(
            values.get(dialect.requests, 0.0 if dialect.requests else math.nan),
            values.get(dialect.prompt, missing),
            values.get(dialect.output, missing),
            values[dialect.compute_us] / _US_PER_S if dialect.compute_us in values else math.nan,
        )
    return EngineCounters(dialect.engine, models, math.fsum(active) if active else math.nan, dialect.behind_ray)
