"""Fit measured runs of language models and predict rows that were not measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from joulery.app.profiling.llm.run_tables import Question, read_questions
from joulery.app.profiling.llm.sources import read_runs
from joulery.app.profiling.llm.tables import Given
from joulery.domain.errors import DataError
from joulery.perf.llm.predictor import ENERGY, ITL_P50, ITL_P99, POWER, TOKEN_TIME, LlmPrediction, LlmPredictor
from joulery.perf.llm.runs import LlmRun

SCHEMA = "joulery.llm-profile/1"


class LeftOutErrors(NamedTuple):
    """Errors on rows left out of the fit in one way.

    Attributes:
        figure: Name of the predicted figure.
        left_out: The way rows were left out, which stands for the distance of a row from the measured runs.
        rows: Number of rows.
        median_ratio, p90_ratio: Median and 90th percentile of the relative error, without sign.
    """

    figure: str
    left_out: str
    rows: int
    median_ratio: float
    p90_ratio: float


@dataclass(frozen=True, slots=True)
class LlmProfile:
    """Predictions for the requested rows, from measured runs.

    Attributes:
        runs: The runs.
        questions: The requested rows, in their order.
        answers: A prediction for each requested row.
        cross_validation: Errors on rows left out, by figure and distance.
    """

    runs: tuple[LlmRun, ...]
    questions: tuple[Question, ...]
    answers: tuple[LlmPrediction, ...]
    cross_validation: tuple[LeftOutErrors, ...]

    def document(self) -> dict[str, Any]:
        """The predictions as one JSON object."""
        return {
            "schema": SCHEMA,
            "runs": len(self.runs),
            "rows": [_row(question, answer) for question, answer in zip(self.questions, self.answers, strict=True)],
            "cross_validation": [each._asdict() for each in self.cross_validation],
        }


def llm_profile(files: Sequence[Path], rows: Path | None, given: Given | None = None) -> LlmProfile:
    """Fit the runs of ``files`` and predict the rows of ``rows``.

    Raises:
        DataError: A file cannot be read, a row is wrong, or there are too few runs to fit.
    """
    runs = read_runs(files, given)
    questions = [] if rows is None else read_questions(rows, runs)
    try:
        predictor = LlmPredictor(runs)
    except DataError as error:
        raise DataError(error.message, file=", ".join(map(str, files)), hint=error.hint) from None
    answers = predictor.predict([question.point for question in questions])
    return LlmProfile(tuple(runs), tuple(questions), tuple(answers), cross_validation(predictor))


def cross_validation(predictor: LlmPredictor) -> tuple[LeftOutErrors, ...]:
    """Errors of every figure, for every way to leave out rows."""
    return tuple(
        LeftOutErrors(
            figure,
            how.value,
            len(errors),
            float(np.median(np.abs(errors))),
            float(np.quantile(np.abs(errors), 0.9)),
        )
        for figure in (ENERGY, TOKEN_TIME, POWER, ITL_P50, ITL_P99)
        for how, errors in predictor.left_out(figure).items()
    )


def _row(question: Question, answer: LlmPrediction) -> dict[str, Any]:
    numbers = {name: _number(question.asked[name]) for name in ("num_gpus", "avg_batch_size", "max_num_seqs")}
    leading = answer.bands.get(ENERGY) or answer.bands[TOKEN_TIME]
    return {
        **question.asked,
        **numbers,
        "energy_per_token_j": answer.energy_per_token_j,
        "throughput_tps": answer.throughput_tps,
        "power_w": answer.power_w,
        "itl_p50_s": answer.itl_p50_s,
        "itl_p99_s": answer.itl_p99_s,
        "basis": answer.basis,
        "distance": answer.distance.value,
        "error_ratio": leading.typical_ratio,
        "error_p90_ratio": leading.p90_ratio,
        "errors": {name: band._asdict() for name, band in answer.bands.items()},
        "fits_memory": answer.fits_memory,
    }


def _number(text: str) -> float | int | None:
    if not text:
        return None
    value = float(text)
    return int(value) if value == int(value) else value
