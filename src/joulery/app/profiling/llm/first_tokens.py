"""Fit and predict the time to first token at load points with prompt and answer lengths.

Columns are those of NVIDIA AIConfigurator's silicon samples: ``model_path``, ``system``, ``backend``,
``backend_version``, ``precision``, ``isl``, ``osl``, ``batch_size`` (requests in flight), ``tp_size``, and
``silicon_ttft_ms`` where measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from joulery.app.profiling.llm.tables import MeasuredRow, read_table
from joulery.domain.errors import ConfigError, DataError
from joulery.perf.llm.first_token import FirstToken, FirstTokenPredictor, LoadPoint
from joulery.perf.llm.runs import llm_point
from joulery.tabular import csv_header

COLUMNS = ("model_path", "system", "isl", "osl", "batch_size", "tp_size")
MEASURED = "silicon_ttft_ms"
_ECHOED = (*COLUMNS, "backend", "backend_version", "precision", "attention_dp_size", "moe_ep_size", "id")


def holds_load_points(path: Path) -> bool:
    """Whether a CSV file has the columns of load points: prompt and answer lengths."""
    return path.suffix.lower() == ".csv" and {"isl", "osl"} <= set(csv_header(path))


@dataclass(frozen=True, slots=True)
class FirstTokenProfile:
    """Predictions for the requested load points, from measured load points.

    Attributes:
        measured: Number of measured load points.
        asked: The cells of each requested row.
        answers: A prediction for each requested row.
        cross_validation: Number of points, median and 90th percentile of the error, by the way points were left out.
    """

    measured: int
    asked: tuple[Mapping[str, str], ...]
    answers: tuple[FirstToken, ...]
    cross_validation: Mapping[str, tuple[int, float, float]]

    def document(self) -> dict[str, Any]:
        """The predictions as one JSON object."""
        return {
            "schema": "joulery.llm-first-token/1",
            "runs": self.measured,
            "rows": [
                {
                    **cells,
                    "ttft_s": answer.ttft_s,
                    "basis": answer.basis,
                    "distance": answer.distance.value,
                    "error_ratio": answer.band.typical_ratio,
                    "error_p90_ratio": answer.band.p90_ratio,
                }
                for cells, answer in zip(self.asked, self.answers, strict=True)
            ],
            "cross_validation": [
                {"figure": "ttft", "left_out": how, "rows": rows, "median_ratio": median, "p90_ratio": p90}
                for how, (rows, median, p90) in self.cross_validation.items()
            ],
        }


def first_token_profile(files: Sequence[Path], rows: Path | None) -> FirstTokenProfile:
    """Fit the load points of ``files`` and predict those of ``rows``.

    Raises:
        DataError: A file cannot be read, a row is wrong, or there are too few or too many points.
    """
    points = [_point(row, measured=True) for file in files for row in read_table(file, (*COLUMNS, MEASURED))]
    asked = [] if rows is None else read_table(rows, COLUMNS)
    questions = [_point(row, measured=False) for row in asked]
    try:
        predictor = FirstTokenPredictor(points)
    except DataError as error:
        raise DataError(error.message, file=", ".join(map(str, files)), hint=error.hint) from None
    errors = {how.value: np.abs(each) for how, each in predictor.left_out().items()}
    return FirstTokenProfile(
        len(points),
        tuple({name: text for name in _ECHOED if (text := row.text(name))} for row in asked),
        tuple(predictor.predict(questions)),
        {how: (len(e), float(np.median(e)), float(np.quantile(e, 0.9))) for how, e in errors.items()},
    )


def _point(row: MeasuredRow, *, measured: bool) -> LoadPoint:
    try:
        point = llm_point(
            row.text("model_path"),
            row.text("system"),
            row.whole("tp_size"),
            row.text("precision") or "fp8",
            row.required("batch_size"),
            input_tokens=row.required("isl"),
            output_tokens=row.required("osl"),
        )
    except ConfigError as error:
        raise row.named(error) from None
    parallelism = "|".join(row.text(name) for name in ("attention_dp_size", "moe_ep_size"))
    ttft_ms = row.required(MEASURED) if measured else None
    return LoadPoint(
        point,
        row.text("backend"),
        row.text("backend_version"),
        parallelism,
        None if ttft_ms is None else ttft_ms / 1e3,
    )
