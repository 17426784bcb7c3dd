"""Read measured runs from files of any known format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from joulery.app.profiling.llm.bench_results import read_aiperf, read_model_analyzer, read_vllm_bench
from joulery.app.profiling.llm.run_tables import REQUIRED, read_run_table
from joulery.app.profiling.llm.tables import Given, read_document
from joulery.domain.errors import DataError
from joulery.perf.llm.models import nearest_names
from joulery.perf.llm.runs import LlmRun
from joulery.tabular import csv_header

FORMS = "vLLM bench serve JSON, AIPerf JSON, Triton Model Analyzer CSV, or a CSV with the columns of the handbook"


def read_runs(paths: Sequence[Path], given: Given | None = None) -> list[LlmRun]:
    """Read the runs of these files, in their order; the format of a file is recognised by its content.

    Raises:
        DataError: A file cannot be read, has an unknown format, or has a wrong row.
    """
    runs: list[LlmRun] = []
    for path in paths:
        runs += _read(path, given or Given())
    return runs


def _read(path: Path, given: Given) -> list[LlmRun]:
    if path.suffix.lower() in (".json", ".jsonl"):
        document = read_document(path)
        documents = document if isinstance(document, list) else [document]
        if not documents:
            raise DataError("no results", file=str(path))
        return [_read_result(each, path, given) for each in documents]
    header = csv_header(path)
    if {"Model", "Concurrency"} <= set(header):
        return read_model_analyzer(path, given)
    if not header:
        raise DataError("the file is empty", file=str(path), hint=f"expected {FORMS}")
    known = [name for each in REQUIRED for name in ((each,) if isinstance(each, str) else each)]
    if not set(known) & set(header) and not any(nearest_names(name, header) for name in known):
        raise DataError("no known form of measurements", file=str(path), row=1, hint=f"expected {FORMS}")
    return read_run_table(path)


def _read_result(document: object, path: Path, given: Given) -> LlmRun:
    if isinstance(document, Mapping):
        if "output_throughput" in document or ("request_throughput" in document and "duration" in document):
            return read_vllm_bench(document, path, given)
        if "input_config" in document or "records" in document or "output_token_throughput" in document:
            return read_aiperf(document, path, given)
    raise DataError("no known form of measurements", file=str(path), hint=f"expected {FORMS}")
