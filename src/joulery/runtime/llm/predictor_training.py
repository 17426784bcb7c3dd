"""Trains a predictor of answer lengths from a service's own log and judges it on other prompts."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from joulery.domain.arrays import FloatArray
from joulery.domain.errors import DataError
from joulery.perf.lengths.classes import LengthClasses, OrdinalQuality, judge
from joulery.perf.lengths.kernel_ridge import (
    AnswerLengths,
    LengthModel,
    LengthRecipe,
    fit_lengths,
    left_out_scores,
    mean_quality,
)
from joulery.perf.lengths.prompt_features import FEATURES, prompt_features
from joulery.perf.lengths.word_vectors import WordVectors
from joulery.store.answer_log import SUFFIX, read_answer_log
from joulery.store.columns import float_column, read_parquet


class Encoder(Protocol):
    """Adds learned numbers to the features of a prompt."""

    @property
    def name(self) -> str:
        """Its name."""
        ...

    def __call__(self, prompt: str) -> FloatArray:
        """The prompt's numbers, float64[width]."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class TrainingAnswers:
    """Prompts, and how long the answers to them were.

    Attributes:
        prompts: Text of each prompt.
        ids: Its number in the log.
        answers: Lengths of the answers.
    """

    prompts: tuple[str, ...]
    ids: tuple[int, ...]
    answers: AnswerLengths


@dataclass(frozen=True, slots=True, eq=False)
class TrainedPredictor:
    """A length model with the encoder it was trained with.

    Attributes:
        model: The fitted model.
        encoder: What it was fitted with besides surface features; None for those alone.
    """

    model: LengthModel
    encoder: Encoder | None

    def scores(self, prompt: str) -> FloatArray:
        """Ordinal score of each head, float64[models + 1]; the shared head last."""
        return self.model.scores(features_of(prompt, self.encoder))

    def look(self, prompt: str) -> tuple[FloatArray, FloatArray | None]:
        """The scores, and the prompt's embedding: the encoder's numbers less their mean.

        The embedding is None without an encoder and from word vectors: their mean is nearly equal for prompts of
        opposite meaning.
        """
        features = features_of(prompt, self.encoder)
        embedding = None
        if self.encoder is not None and not isinstance(self.encoder, WordVectors):
            embedding = (features - self.model.arrays["shift"])[len(FEATURES) :]
        return self.model.scores(features), embedding

    @property
    def class_tokens(self) -> FloatArray:
        """Class boundaries of each trained model, tokens, float64[models, 4]."""
        return self.model.arrays["class_tokens"]

    def head(self, model: str) -> int:
        """Index of the head of a model; the shared one for a model never seen."""
        return self.model.head(model)

    def of(self, model: str) -> ModelPredictor:
        """The predictor of one served model: its own head, or the shared one for a model never seen."""
        return ModelPredictor(self, self.model.head(model))


@dataclass(frozen=True, slots=True, eq=False)
class ModelPredictor:
    """One head as a :class:`~joulery.perf.lengths.classes.LengthPredictor`."""

    trained: TrainedPredictor
    head: int

    def score(self, prompt: str) -> float:
        """Raw ordinal score, about 0 (short) to 4 (long)."""
        return float(self.trained.scores(prompt)[self.head])


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Evaluation of a predictor on prompts.

    Attributes:
        quality: Mean over the models.
        p50_ms, p99_ms: CPU time of this thread a prompt, everything included.
        models, prompts, answers: What it was judged on.
        unseen_models: Models it was not trained on, judged by the shared head and their own evaluated percentiles.
        seen_prompts: Evaluated prompts whose text it was trained on: not a fair test of those.
    """

    quality: OrdinalQuality
    p50_ms: float
    p99_ms: float
    models: int
    prompts: int
    answers: int
    unseen_models: int
    seen_prompts: int


def features_of(prompt: str, encoder: Encoder | None) -> FloatArray:
    """Surface features, then the encoder's numbers."""
    surface = prompt_features(prompt)
    return surface if encoder is None else np.concatenate([surface, encoder(prompt)])


def read_answers(files: Sequence[Path], instructions: Sequence[Path]) -> TrainingAnswers:
    """Join logs of answers (``model``, ``instruction_id``, ``out_tokens``) with their texts.

    Of a prompt that a model answered twice, the mean length counts.

    Args:
        files: Parquet files of answers; or the gateway's own logs (``.jsonl``), which hold the texts themselves.
        instructions: Parquet files with ``instruction_id`` and ``instruction``.

    Raises:
        DataError: A column is missing or contains an invalid value, or an answer's prompt is in no file.
    """
    texts: dict[int, str] = {}
    for file in instructions:
        texts |= _read_texts(file)
    sums: dict[tuple[int, str], tuple[float, int]] = {}
    numbered = {text: number for number, text in texts.items()}
    for file in files:
        if file.suffix == SUFFIX:
            for name, text, length in read_answer_log(file):
                # Numbers of their own, below those that files give.
                number = numbered.setdefault(text, -1 - len(numbered))
                texts[number] = text
                total, count = sums.get((number, name), (0.0, 0))
                sums[number, name] = (total + length, count + 1)
            continue
        columns = read_parquet(file, ("model", "instruction_id", "out_tokens"))
        numbers = _whole_numbers(columns["instruction_id"], "instruction_id", file)
        tokens = _whole_numbers(columns["out_tokens"], "out_tokens", file)
        for row, (number, name, length) in enumerate(zip(numbers, columns["model"].tolist(), tokens, strict=True), 1):
            if number not in texts:
                names = ", ".join(str(each) for each in instructions) or "any file of --instructions"
                raise DataError(f"instruction_id {number} is not in {names}", file=str(file), row=row)
            if not isinstance(name, str) or not name:
                raise DataError(f"model is {name!r}, expected a name", file=str(file), row=row)
            if length < 0:
                raise DataError(f"out_tokens is {length}, expected 0 or more", file=str(file), row=row)
            total, count = sums.get((number, name), (0.0, 0))
            sums[number, name] = (total + length, count + 1)
    if not sums:
        raise DataError("no answers", file=", ".join(map(str, files)))
    return _table(sums, texts)


def _table(sums: Mapping[tuple[int, str], tuple[float, int]], texts: Mapping[int, str]) -> TrainingAnswers:
    ids = tuple(sorted({number for number, _ in sums}))
    models = tuple(sorted({name for _, name in sums}))
    row, column = {n: i for i, n in enumerate(ids)}, {name: j for j, name in enumerate(models)}
    lengths = np.full((len(ids), len(models)), np.nan)
    for (number, name), (total, count) in sums.items():
        lengths[row[number], column[name]] = total / count
    return TrainingAnswers(tuple(texts[number] for number in ids), ids, AnswerLengths(models, lengths))


def _read_texts(file: Path) -> dict[int, str]:
    columns = read_parquet(file, ("instruction_id", "instruction"))
    numbers = _whole_numbers(columns["instruction_id"], "instruction_id", file)
    texts: dict[int, str] = {}
    for row, (number, text) in enumerate(zip(numbers, columns["instruction"].tolist(), strict=True), 1):
        if not isinstance(text, str):
            raise DataError(f"instruction is {text!r}, expected text", file=str(file), row=row)
        if texts.setdefault(number, text) != text:
            raise DataError(f"instruction_id {number} stands for two different texts", file=str(file), row=row)
    return texts


def _whole_numbers(values: npt.NDArray[Any], name: str, file: Path) -> list[int]:
    numbers = float_column(values, name, file)
    bad = ~np.isfinite(numbers) | (numbers != np.floor(numbers))
    if bool(bad.any()):
        row = int(np.argmax(bad))
        raise DataError(f"{name} is {values[row]}, expected a whole number", file=str(file), row=row + 1)
    return [int(number) for number in numbers.tolist()]


def train(log: TrainingAnswers, encoder: Encoder | None, recipe: LengthRecipe | None = None) -> TrainedPredictor:
    """Fit a predictor to a log.

    Raises:
        DataError: The log is too small to learn from.
    """
    rows, blocks = _rows(log, encoder)
    return TrainedPredictor(fit_lengths(rows, blocks, log.answers, recipe), encoder)


def scores_unseen(log: TrainingAnswers, encoder: Encoder | None) -> FloatArray:
    """Score of each head for each prompt of a log when fitted without it, float64[prompts, models + 1].

    Raises:
        DataError: The log is too small to learn from.
    """
    rows, blocks = _rows(log, encoder)
    return left_out_scores(rows, blocks, log.answers)


def _rows(log: TrainingAnswers, encoder: Encoder | None) -> tuple[FloatArray, tuple[int, ...]]:
    """Features of a log's prompts and the width of each block of them."""
    rows, width = np.array([features_of(prompt, encoder) for prompt in log.prompts], np.float64), len(FEATURES)
    return rows, (width,) if encoder is None else (width, rows.shape[1] - width)


def evaluate(
    predictor: TrainedPredictor,
    log: TrainingAnswers,
    trained_on: Sequence[str],
    look: Callable[[str], tuple[FloatArray, FloatArray | None]] | None = None,
) -> Evaluation:
    """Judge a predictor, and time it, on a log.

    Args:
        predictor: What is judged.
        log: The answers to score it on.
        trained_on: The prompts it was trained on, to count those that are not new to it.
        look: Scores a prompt, as :meth:`TrainedPredictor.look`; that method when not given.
    """
    look = look or predictor.look
    spent_ms, scores = np.empty(len(log.prompts)), []
    for row, prompt in enumerate(log.prompts):
        begun_ns = time.thread_time_ns()
        scores.append(look(prompt)[0])
        spent_ms[row] = (time.thread_time_ns() - begun_ns) / 1e6
    table, model, known = np.array(scores), predictor.model, set(predictor.model.models)
    rows = []
    for name, tokens in zip(log.answers.models, log.answers.tokens.T, strict=True):
        answered = ~np.isnan(tokens)
        classes = model.classes(name) if name in known else LengthClasses.of(tokens[answered])
        rows.append(judge(table[answered, model.head(name)], tokens[answered], classes))
    return Evaluation(
        quality=mean_quality(rows),
        p50_ms=float(np.quantile(spent_ms, 0.50)),
        p99_ms=float(np.quantile(spent_ms, 0.99)),
        models=len(rows),
        prompts=len(log.prompts),
        answers=int(np.sum(~np.isnan(log.answers.tokens))),
        unseen_models=len(set(log.answers.models) - known),
        seen_prompts=len(set(log.prompts) & set(trained_on)),
    )
