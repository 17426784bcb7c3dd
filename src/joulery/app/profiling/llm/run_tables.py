"""Readers of CSV files of measured runs: those of The ML.ENERGY Benchmark, and others with the same columns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from joulery.app.profiling.llm.tables import MeasuredRow, read_table
from joulery.domain.errors import ConfigError
from joulery.perf.llm.models import LanguageModelFacts, estimated_facts, model_facts
from joulery.perf.llm.runs import LlmPoint, LlmRun, llm_point

REQUIRED = (
    "model_id",
    "gpu_model",
    "num_gpus",
    "weight_precision",
    ("avg_batch_size", "max_num_seqs"),
    "output_throughput_tokens_per_sec",
)
"""Required columns of a file of runs; of a tuple, one of its columns."""
ASKED = ("model_id", "gpu_model", "num_gpus", "weight_precision", ("avg_batch_size", "max_num_seqs"))
"""Required columns of a file of rows to predict."""


ECHOED = ("model_id", "gpu_model", "num_gpus", "weight_precision", "task", "avg_batch_size", "max_num_seqs")
"""Columns that predictions repeat unchanged."""


@dataclass(frozen=True, slots=True)
class Question:
    """A row to predict.

    Attributes:
        point: The point to predict.
        asked: Cells of the row by column, as written.
    """

    point: LlmPoint
    asked: Mapping[str, str]


def read_run_table(path: Path) -> list[LlmRun]:
    """Read the runs of a CSV file. It may add to :data:`REQUIRED`: ``task``, ``max_num_seqs``, ``avg_power_watts`` or
    ``energy_per_token_joules``, ``median_itl_ms``, ``p99_itl_ms``, ``mean_ttft_ms``, ``mean_tpot_ms``,
    ``avg_input_len``, ``avg_output_len``, ``total_params_billions`` and ``activated_params_billions``.

    Raises:
        DataError: The file or a row of it is wrong.
    """
    return [_run(row) for row in read_table(path, REQUIRED)]


def read_questions(path: Path, runs: list[LlmRun]) -> list[Question]:
    """Read the rows to predict. A model whose id does not state its size has the size of the run with the same id.

    Raises:
        DataError: The file or a row of it is wrong.
    """
    known = {run.point.model_id: run.point.facts for run in runs}
    return [Question(_point(row, known), {name: row.text(name) for name in ECHOED}) for row in read_table(path, ASKED)]


def _run(row: MeasuredRow) -> LlmRun:
    throughput = row.required("output_throughput_tokens_per_sec")
    power_w, joules = row.number("avg_power_watts"), row.number("energy_per_token_joules")
    if power_w is None and joules is not None:
        power_w = joules * throughput
    return LlmRun(
        _point(row, {}),
        throughput,
        power_w,
        _seconds(row.number("median_itl_ms")),
        _seconds(row.number("p99_itl_ms")),
        _seconds(row.number("mean_ttft_ms")),
        _seconds(row.number("mean_tpot_ms")),
    )


def _point(row: MeasuredRow, known: Mapping[str, LanguageModelFacts]) -> LlmPoint:
    model_id = row.text("model_id")
    if not model_id:
        raise row.wrong("model_id is empty")
    batch, limit = row.number("avg_batch_size"), row.number("max_num_seqs")
    if batch is None:
        batch = row.required("max_num_seqs")
    try:
        return llm_point(
            model_id,
            row.text("gpu_model"),
            row.whole("num_gpus"),
            row.text("weight_precision") or "bfloat16",
            batch,
            task=row.text("task"),
            max_num_seqs=limit,
            input_tokens=row.number("avg_input_len"),
            output_tokens=row.number("avg_output_len"),
            facts=_facts(model_id, row, known),
        )
    except ConfigError as error:
        raise row.named(error) from None


def _facts(model_id: str, row: MeasuredRow, known: Mapping[str, LanguageModelFacts]) -> LanguageModelFacts:
    if model_id in known:
        return known[model_id]
    try:
        return model_facts(model_id)
    except ConfigError:
        total, active = row.number("total_params_billions"), row.number("activated_params_billions")
        if total is None:
            raise
        return estimated_facts(model_id.lower(), total * 1e9, (active or total) * 1e9)


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3
