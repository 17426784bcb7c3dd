"""Accuracy of the shipped length predictor on unseen models and prompts, compared with the reachable limits.

The answers are AlpacaEval's (CC BY-NC): they are test data, and nothing that is shipped was trained on them. The limits
are computed here too: the same features trained on one half of these answers and tested on the other, and each model's
lengths predicted by another model's true ones.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np

from benchmarks import Result, data_folder
from joulery.app.wiring.length_predictor import kept_predictor, prompt_encoder
from joulery.domain.arrays import BoolArray, FloatArray
from joulery.perf.lengths.classes import LengthClasses, judge
from joulery.perf.lengths.kernel_ridge import AnswerLengths, fit_lengths, normal_scores
from joulery.perf.lengths.prompt_features import FEATURES
from joulery.runtime.llm.predictor_files import DEFAULT, kept_words
from joulery.runtime.llm.predictor_training import Encoder, TrainedPredictor, features_of, read_answers

BAR = 0.70
"""Share of pairs in order that a predictor should reach on unseen prompts and models."""
_DRAWS, _SEED = 4, 0


def _pairs(scores: FloatArray, tokens: FloatArray) -> float:
    """Share of pairs of one model's answers that the scores put in order; float64[n] each, NaN if unanswered."""
    answered = ~(np.isnan(tokens) | np.isnan(scores))
    return judge(scores[answered], tokens[answered], LengthClasses.of(tokens[answered])).pairwise


def _of_models(scores: FloatArray, tokens: FloatArray) -> FloatArray:
    """Share of pairs in order of each model, float64[models]; the scores are the same for all."""
    return np.array([_pairs(scores, column) for column in tokens.T])


def _halves(count: int) -> Iterator[BoolArray]:
    """Random halves and their complements, bool[count]."""
    rng = np.random.default_rng(_SEED)
    for _ in range(_DRAWS):
        half = rng.permutation(count) < count // 2
        yield half
        yield ~half


def _trained_here(prompts: tuple[str, ...], answers: AnswerLengths, encoder: Encoder | None) -> FloatArray:
    """Pairs in order where the features are trained on half of the answers and tested on the rest, by half."""
    rows = np.array([features_of(prompt, encoder) for prompt in prompts])
    blocks = [len(FEATURES)] if encoder is None else [len(FEATURES), rows.shape[1] - len(FEATURES)]
    found = []
    for learned in _halves(len(prompts)):
        model = fit_lengths(rows[learned], blocks, AnswerLengths(answers.models, answers.tokens[learned]))
        scores = np.array([model.raw_scores(row)[-1] for row in rows[~learned]])
        found.append(_of_models(scores, answers.tokens[~learned]).mean())
    return np.array(found)


def _from_one_another(tokens: FloatArray) -> FloatArray:
    """Pairs in order where one model's true lengths are the prediction of another's; all ordered pairs of models."""
    return np.concatenate([_of_models(tokens[:, one], np.delete(tokens, one, 1)) for one in range(tokens.shape[1])])


def _from_all_others(tokens: FloatArray) -> FloatArray:
    """Pairs in order where the mean normal score of all other models is the prediction; one value a model."""
    scores = normal_scores(tokens)
    return np.array(
        [_pairs(np.nanmean(np.delete(scores, one, 1), 1), tokens[:, one]) for one in range(tokens.shape[1])]
    )


def _row(what: str, values: FloatArray) -> list[str]:
    return [what, f"{values.mean():.1%}", f"{values.min():.1%}", f"{values.max():.1%}"]


def run() -> Result:
    """Measure the shipped predictor and the limits."""
    folder = data_folder("muserve")
    log = read_answers([folder / "alpaca_eval_lengths.parquet"], [folder / "instructions.parquet"])
    tokens = log.answers.tokens
    kept = kept_predictor(DEFAULT)
    assert isinstance(kept, TrainedPredictor)
    spent_ms, scores = [], []
    for prompt in log.prompts:
        began_ns = time.thread_time_ns()
        scores.append(kept.scores(prompt)[-1])
        spent_ms.append((time.thread_time_ns() - began_ns) / 1e6)
    shipped = _of_models(np.array(scores), tokens)
    rows = [
        _row("the default predictor, as shipped", shipped),
        _row("limit: surface features, trained on half of them", _trained_here(log.prompts, log.answers, None)),
        _row(
            "limit: with its word vectors, trained on half of them",
            _trained_here(log.prompts, log.answers, kept_words(DEFAULT)),
        ),
    ]
    minilm = prompt_encoder("auto")
    if minilm is not None:
        rows.append(
            _row("limit: with the encoder (not shipped)", _trained_here(log.prompts, log.answers, minilm)),
        )
    one = _from_one_another(tokens)
    rows += [_row("limit: another model's true lengths", one), _row("limit: all 39 others'", _from_all_others(tokens))]
    size = sum(file.stat().st_size for file in DEFAULT.iterdir()) / 1000
    return Result(
        "Length predictor: models and prompts not seen",
        ("prediction", "pairs in order, mean", "lowest", "highest"),
        rows,
        (
            f"{len(log.prompts)} prompts of AlpacaEval and the answers of {len(log.answers.models)} models (CC BY-NC, "
            "used to judge only). Lowest and highest are of models, in the rows of features of "
            f"{2 * _DRAWS} halves. Chance is 50 %.",
            f"The default predictor takes {np.median(spent_ms):.2f} ms of CPU a prompt (p99 "
            f"{np.quantile(spent_ms, 0.99):.2f} ms) and {size:.0f} kB.",
        ),
        [
            (
                f"unseen prompts and models: {BAR:.0%} of pairs in order ({shipped.mean():.1%})",
                bool(shipped.mean() >= BAR),
            )
        ],
        {"pairwise": float(shipped.mean()), "noise_ceiling": float(one.mean())},
    )
