"""Results of load generators: vLLM ``bench serve``, AIPerf (and GenAI-Perf), Triton Model Analyzer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from joulery.app.profiling.llm.tables import Given, MeasuredRow, hardware, positive, read_table
from joulery.domain.errors import ConfigError, DataError
from joulery.perf.llm.runs import LlmPoint, LlmRun, llm_point


def read_vllm_bench(document: Mapping[str, Any], path: Path, given: Given) -> LlmRun:
    """Read a result of ``vllm bench serve --save-result`` (or of SGLang's benchmark, which has the same keys).

    Requests in flight follow from Little's law: completed requests a second times their mean time. ``--metadata
    gpu_model=H100 num_gpus=2 weight_precision=fp8 avg_power_watts=520`` adds what the tool does not record.

    Raises:
        DataError: A key is missing or wrong, or the GPU type is unknown.
    """
    model = given.model or document.get("model_id")
    throughput = positive(document, "output_throughput", path)
    requests_s = positive(document, "request_throughput", path)
    if not model or throughput is None or requests_s is None:
        missing = "model_id" if not model else "output_throughput" if throughput is None else "request_throughput"
        raise DataError(f"no {missing}", file=str(path), hint="expected a result of vllm bench serve --save-result")
    completed = positive(document, "completed", path)
    answers, prompts = positive(document, "total_output_tokens", path), positive(document, "total_input_tokens", path)
    output = answers / completed if answers and completed else throughput / requests_s
    ttft_ms, tpot_ms = positive(document, "mean_ttft_ms", path), positive(document, "mean_tpot_ms", path)
    limit = positive(document, "max_concurrency", path)
    e2e_ms = positive(document, "mean_e2el_ms", path)
    if e2e_ms is None and ttft_ms is not None and tpot_ms is not None:
        e2e_ms = ttft_ms + (output - 1) * tpot_ms
    batch = limit if e2e_ms is None else requests_s * e2e_ms / 1e3
    if batch is None:
        raise DataError("neither max_concurrency nor mean latencies state how many requests ran", file=str(path))
    power_w = positive(document, "avg_power_watts", path)
    point = _point(
        str(model),
        hardware(given, document.get("gpu_model"), document.get("num_gpus"), document.get("weight_precision"), path),
        batch,
        path,
        (limit, prompts / completed if prompts and completed else None, output, str(document.get("task") or "")),
    )
    itl = [positive(document, f"{which}_itl_ms", path) for which in ("median", "p99")]
    return LlmRun(point, throughput, power_w, *(_seconds(ms) for ms in (*itl, ttft_ms, tpot_ms)))


def read_aiperf(document: Mapping[str, Any], path: Path, given: Given) -> LlmRun:
    """Read ``profile_export_aiperf.json`` (AIPerf) or ``profile_export_genai_perf.json`` (GenAI-Perf).

    Raises:
        DataError: A metric is missing or wrong, or the GPU type is unknown.
    """
    metrics = document.get("records") if isinstance(document.get("records"), dict) else document
    assert isinstance(metrics, Mapping)
    config = document.get("input_config")
    config = config if isinstance(config, Mapping) else {}
    model = given.model or _model_of(config)
    throughput = _metric(metrics, path, "output_token_throughput")
    if model is None or throughput is None:
        what = "model name in input_config" if model is None else "output_token_throughput"
        raise DataError(
            f"no {what}", file=str(path), hint="expected AIPerf's profile_export_aiperf.json; or --model ID"
        )
    requests_s, latency_ms = _metric(metrics, path, "request_throughput"), _metric(metrics, path, "request_latency")
    limit = _concurrency(config, path)
    batch = requests_s * latency_ms / 1e3 if requests_s and latency_ms else limit
    if batch is None:
        raise DataError("neither concurrency nor request_latency states how many requests ran", file=str(path))
    power_w, gpus, gpu = _telemetry(document, path)
    point = _point(
        model,
        hardware(given, gpu, gpus, None, path),
        batch,
        path,
        (
            limit,
            _metric(metrics, path, "input_sequence_length"),
            _metric(metrics, path, "output_sequence_length"),
            "",
        ),
    )
    return LlmRun(
        point,
        throughput,
        power_w,
        _seconds(_metric(metrics, path, "inter_token_latency", "p50")),
        _seconds(_metric(metrics, path, "inter_token_latency", "p99")),
        _seconds(_metric(metrics, path, "time_to_first_token")),
        _seconds(_metric(metrics, path, "inter_token_latency")),
    )


_ANALYZER = {
    "model": ("model",),
    "concurrency": ("concurrency",),
    "throughput": ("outputtokenthroughputtokenssec", "outputtokenthroughput"),
    "power": ("gpupowerusagew", "averagegpupowerusagew"),
    "itl": ("p99intertokenlatencyms", "intertokenlatencyp99ms"),
    "ttft": ("avgtimetofirsttokenms", "timetofirsttokenavgms"),
}
"""Columns of Model Analyzer without case and punctuation."""


def read_model_analyzer(path: Path, given: Given) -> list[LlmRun]:
    """Read ``metrics-model-inference.csv`` of Triton Model Analyzer for language models (``model_type: LLM``).

    Raises:
        DataError: The file has requests but no tokens, a row is wrong, or the GPU type is not given.
    """
    rows = read_table(path, ["Model", "Concurrency"])
    columns = _analyzer_columns(path)
    if "throughput" not in columns:
        raise DataError(
            "holds requests a second and no output tokens a second",
            file=str(path),
            row=1,
            hint="profile with model_type: LLM, and add output_token_throughput to inference_output_fields",
        )
    return [_analyzed(row, columns, path, given) for row in rows]


def _analyzer_columns(path: Path) -> dict[str, str]:
    from joulery.tabular import csv_header

    plain = {re.sub(r"[^a-z0-9]", "", name.lower()): name for name in csv_header(path)}
    return {key: plain[name] for key, names in _ANALYZER.items() for name in names if name in plain}


def _analyzed(row: MeasuredRow, columns: Mapping[str, str], path: Path, given: Given) -> LlmRun:
    def number(key: str) -> float | None:
        return row.number(columns[key]) if key in columns else None

    concurrency = row.required(columns["concurrency"])
    point = _point(
        given.model or row.text(columns["model"]),
        hardware(given, None, None, None, path),
        concurrency,
        path,
        (concurrency, None, None, ""),
    )
    return LlmRun(
        point,
        row.required(columns["throughput"]),
        number("power"),
        itl_p99_s=_seconds(number("itl")),
        ttft_s=_seconds(number("ttft")),
    )


def _point(
    model: str,
    on: tuple[str, int, str],
    batch: float,
    path: Path,
    rest: tuple[float | None, float | None, float | None, str],
) -> LlmPoint:
    gpu, num_gpus, precision = on
    limit, prompt, answer, task = rest
    try:
        return llm_point(
            model,
            gpu,
            num_gpus,
            precision,
            max(batch, 1.0),
            task=task,
            max_num_seqs=limit,
            input_tokens=prompt,
            output_tokens=answer,
        )
    except ConfigError as error:
        raise DataError(f"{error.message} (got {error.got})", file=str(path), hint=error.hint) from None


def _metric(metrics: Mapping[str, Any], path: Path, tag: str, statistic: str = "avg") -> float | None:
    found = metrics.get(tag)
    return positive(found, statistic, path) if isinstance(found, Mapping) else None


def _model_of(config: Mapping[str, Any]) -> str | None:
    """The first model name in a result of AIPerf or GenAI-Perf."""
    endpoint = config.get("endpoint")
    for place in (endpoint if isinstance(endpoint, Mapping) else {}, config):
        for key in ("model_names", "model", "formatted_model_name"):
            found = place.get(key)
            if isinstance(found, list) and found:
                found = found[0]
            if isinstance(found, str) and found:
                return found
    return None


def _concurrency(config: Mapping[str, Any], path: Path) -> float | None:
    for place in (config.get("loadgen"), config.get("perf_analyzer"), config):
        if isinstance(place, Mapping) and isinstance(place.get("concurrency"), int | float):
            return positive(place, "concurrency", path)
    return None


def _telemetry(document: Mapping[str, Any], path: Path) -> tuple[float | None, int | None, str | None]:
    """Watts of all GPUs together, their number and type, from AIPerf's GPU telemetry; None where there is none."""
    telemetry = document.get("telemetry_data")
    endpoints = telemetry.get("endpoints") if isinstance(telemetry, Mapping) else None
    if not isinstance(endpoints, Mapping):
        return None, None, None
    watts, names = [], []
    for endpoint in endpoints.values():
        gpus = endpoint.get("gpus") if isinstance(endpoint, Mapping) else None
        for gpu in gpus.values() if isinstance(gpus, Mapping) else ():
            power = _metric(gpu.get("metrics", {}), path, "gpu_power_usage")
            if power is not None:
                watts.append(power)
                names.append(str(gpu.get("gpu_name", "")))
    return (sum(watts), len(watts), names[0] or None) if watts else (None, None, None)


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3
