"""A model of answer lengths: kernel ridge from prompt features to the length of every trained model's answer.

Lengths become normal scores within each served model: the rank of an answer among that model's answers, as a quantile
of the normal distribution. Ranks determine the serving order and the classes, and a single very long answer does not
distort the fit. One head learns the mean over the models (less noise), one head per model learns its own lengths, and a
model's score is half of each. μ-Serve (ATC'24, section 3.3) uses a language model here instead of a closed form. The
kernel is Gaussian over standardised blocks of features, each block with equal weight.
Cuts that turn a score into a class lie half-way between those of highest accuracy and those that predict each class as
often as it occurs, both on scores of prompts left out of the fit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from joulery.domain.arrays import FloatArray, IntArray
from joulery.domain.errors import ConfigError, DataError
from joulery.perf.lengths.classes import CLASSES, QUANTILES, LengthClasses, OrdinalQuality, judge

LEAST_PROMPTS = 50
_FARTHEST_DEVIATIONS = 4.0


@dataclass(frozen=True, slots=True)
class LengthRecipe:
    """Settings for fitting a length model.

    Attributes:
        width: Factor of the squared distance in the kernel's exponent.
        mean_ridge, head_ridge: Regularisation of the shared head and of a model's own.
        shared_ratio: Weight of the shared head, 0 to 1.
        folds: Number of folds in which prompts are left out to choose the cuts.
        seed: Seed of the division into folds.
    """

    width: float = 0.6
    mean_ridge: float = 0.3
    head_ridge: float = 0.9
    shared_ratio: float = 0.5
    folds: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        if not (self.width > 0 and self.mean_ridge > 0 and self.head_ridge > 0):
            raise ConfigError("a length recipe needs a positive width and positive ridges")
        if not (0 <= self.shared_ratio <= 1 and self.folds >= 2):
            raise ConfigError("a length recipe needs a shared ratio of 0 to 1 and at least two folds")


@dataclass(frozen=True, slots=True, eq=False)
class AnswerLengths:
    """Answers to the same prompts, by several models.

    Attributes:
        models: The models that answered.
        tokens: Length of each answer, float64[prompts, models]; NaN where a model did not answer.
    """

    models: tuple[str, ...]
    tokens: FloatArray

    def __post_init__(self) -> None:
        tokens = _frozen(self.tokens)
        if tokens.ndim != 2 or tokens.shape[1] != len(self.models) or not self.models:
            raise DataError(f"{len(self.models)} models and lengths of shape {tokens.shape} do not fit")
        if bool(np.any(tokens < 0)) or bool(np.any(np.isinf(tokens))):
            raise DataError("an answer's length is negative or infinite")
        object.__setattr__(self, "tokens", tokens)

    def of(self, model: str) -> FloatArray:
        """Answers of one model, tokens."""
        column = self.tokens[:, self.models.index(model)]
        return np.asarray(column[~np.isnan(column)], np.float64)


@dataclass(frozen=True, slots=True, eq=False)
class _Scale:
    """Standardises blocks of features so that each contributes about one to the squared norm."""

    shift: FloatArray
    factor: FloatArray
    limit: FloatArray

    @classmethod
    def of(cls, features: FloatArray, blocks: Sequence[int]) -> _Scale:
        deviation = features.std(0)
        root = np.repeat(np.sqrt(np.array(blocks, np.float64)), blocks)
        factor = np.where(deviation > 1e-9, 1.0 / (np.maximum(deviation, 1e-9) * root), 0.0)
        return cls(features.mean(0), factor, _FARTHEST_DEVIATIONS / root)

    def __call__(self, features: FloatArray) -> FloatArray:
        return np.clip((features - self.shift) * self.factor, -self.limit, self.limit)


@dataclass(frozen=True, slots=True, eq=False)
class LengthModel:
    """A fitted length model.

    Attributes:
        models: The models whose answers it was trained on, in the order of the heads.
        recipe: Settings of the fit.
        blocks: Width of each block of features.
        arrays: ``shift``, ``factor``, ``limit`` float64[features]; ``points`` float64[prompts, features], scaled, and
            their squared ``norms`` float64[prompts]; ``weights`` float64[prompts, models + 1] and ``offset``
            float64[models + 1] (the shared head last); ``cuts`` float64[models + 1, 4], of the score; ``class_tokens``
            float64[models, 4], class boundaries.
        left_out: Quality on the prompts left out of each fold, mean over the models; the cuts were chosen on them.
    """

    models: tuple[str, ...]
    recipe: LengthRecipe
    blocks: tuple[int, ...]
    arrays: Mapping[str, FloatArray] = field(repr=False)
    left_out: OrdinalQuality

    def classes(self, model: str) -> LengthClasses:
        """The class boundaries of a trained model, tokens."""
        return LengthClasses(self.arrays["class_tokens"][self.models.index(model)])

    def raw_scores(self, features: npt.ArrayLike) -> FloatArray:
        """Normal score of the length that each head predicts, float64[models + 1]; the shared head last.

        Raises:
            DataError: The number of features differs from that of the fit.
        """
        row, arrays = np.asarray(features, np.float64), self.arrays
        if row.shape != arrays["shift"].shape:
            raise DataError(f"expected {len(arrays['shift'])} features, got an array of shape {row.shape}")
        point = _Scale(arrays["shift"], arrays["factor"], arrays["limit"])(row)
        points = arrays["points"]
        # einsum stays on this thread: a prediction costs no more CPU than its caller is charged for.
        near = np.einsum("ij,j->i", points, point)
        kernel = np.exp(self.recipe.width * (2.0 * near - arrays["norms"] - float(point @ point)))
        return np.asarray(np.einsum("i,ij->j", kernel, arrays["weights"]) + arrays["offset"], np.float64)

    def scores(self, features: npt.ArrayLike) -> FloatArray:
        """Ordinal score of each head, about 0 to 4, float64[models + 1]; the shared head last."""
        return ordinal(self.raw_scores(features), self.arrays["cuts"])

    def head(self, model: str) -> int:
        """Index of the head of a model; the shared head for a model that was not trained on."""
        return self.models.index(model) if model in self.models else len(self.models)


def fit_lengths(
    features: FloatArray, blocks: Sequence[int], answers: AnswerLengths, recipe: LengthRecipe | None = None
) -> LengthModel:
    """Fit a length model.

    Args:
        features: Features of each prompt, float64[prompts, features], finite.
        blocks: Width of each block of features; they sum to the number of features.
        answers: Lengths of the answers to those prompts.
        recipe: Settings; the default was chosen by cross-validation on 644 prompts and 40 models.

    Raises:
        DataError: Shapes do not fit, a prompt has no answer, or prompts or answers of a model are too few.
    """
    recipe = recipe or LengthRecipe()
    x = np.asarray(features, np.float64)
    _check(x, blocks, answers)
    target = _Targets.of(answers.tokens)
    class_tokens = np.array([LengthClasses.of(answers.of(model)).cuts for model in answers.models])
    scores = _left_out_scores(x, blocks, target, recipe)
    cuts = _cuts(scores, answers, class_tokens)
    quality = mean_quality(
        [
            judge(ordinal(scores[answered, h], cuts[h]), answers.tokens[answered, h], LengthClasses(class_tokens[h]))
            for h, answered in enumerate((~np.isnan(answers.tokens)).T)
        ]
    )
    scale, points, weights, offset = _solve(x, blocks, target, recipe)
    arrays = {
        "shift": scale.shift,
        "factor": scale.factor,
        "limit": scale.limit,
        "points": points,
        "norms": np.sum(points * points, 1),
        "weights": weights,
        "offset": offset,
        "cuts": cuts,
        "class_tokens": class_tokens,
    }
    kept = {name: _frozen(array) for name, array in arrays.items()}
    return LengthModel(answers.models, recipe, tuple(blocks), kept, quality)


def normal_scores(tokens: FloatArray) -> FloatArray:
    """Each length's rank within its column as a quantile of the normal distribution; equal lengths share one.

    Args:
        tokens: Lengths, float64[prompts, models]; NaN where a model did not answer, and in the result.
    """
    from scipy.special import ndtri

    scores = np.full(tokens.shape, np.nan)
    for column, lengths in enumerate(tokens.T):
        answered = ~np.isnan(lengths)
        _, which, counts = np.unique(lengths[answered], return_inverse=True, return_counts=True)
        middle = np.cumsum(counts) - counts / 2.0
        scores[answered, column] = ndtri(middle[which] / max(1, len(which)))
    return scores


def left_out_scores(
    features: FloatArray, blocks: Sequence[int], answers: AnswerLengths, recipe: LengthRecipe | None = None
) -> FloatArray:
    """Raw scores of each prompt from a fit without it, float64[prompts, models + 1]; the shared head last.

    Raises:
        DataError: As :func:`fit_lengths`.
    """
    x = np.asarray(features, np.float64)
    _check(x, blocks, answers)
    return _left_out_scores(x, blocks, _Targets.of(answers.tokens), recipe or LengthRecipe())


def ordinal(raw: npt.ArrayLike, cuts: FloatArray) -> FloatArray:
    """Stretch raw scores so that the cuts lie at 0.5, 1.5, 2.5 and 3.5: the order is kept, rounding gives the class.

    Args:
        raw: float64[n].
        cuts: Ascending, float64[4], or float64[n, 4] where each score has its own.
    """
    values = np.asarray(raw, np.float64)
    rows = np.broadcast_to(cuts, (*values.shape, CLASSES - 1))
    place = np.sum(values[..., None] >= rows, -1)
    low = np.take_along_axis(rows, np.maximum(place - 1, 0)[..., None], -1)[..., 0]
    high = np.take_along_axis(rows, np.minimum(place, CLASSES - 2)[..., None], -1)[..., 0]
    below = np.minimum(np.exp(np.minimum(values - rows[..., 0], 0.0)), 1.0 - 1e-12) - 0.5
    above = CLASSES - 0.5 - np.exp(np.minimum(rows[..., -1] - values, 0.0))
    width = np.where(high > low, high - low, 1.0)
    inside = place - 0.5 + np.minimum((values - low) / width, 1.0 - 1e-12)
    return np.asarray(np.where(place == 0, below, np.where(place == CLASSES - 1, above, inside)), np.float64)


def best_cuts(scores: FloatArray, classes: IntArray) -> FloatArray:
    """The four cuts under which most scores fall into their class, by dynamic programming, O(n); float64[4].

    Args:
        scores: Raw scores, float64[n].
        classes: True class of each, 0 to 4, int64[n].
    """
    order = np.argsort(scores, kind="stable")
    ranked, labels = scores[order], classes[order]
    n = len(ranked)
    hits = np.array([np.concatenate(([0], np.cumsum(labels == c))) for c in range(CLASSES)])
    # A boundary may lie before i only where the scores differ; at both ends always.
    allowed = np.concatenate(([True], np.diff(ranked) > 0, [True]))
    best, came = hits[0].astype(np.float64), []
    for label in range(1, CLASSES):
        gain = np.where(allowed, best - hits[label], -np.inf)
        run = np.maximum.accumulate(gain)
        came.append(np.maximum.accumulate(np.where(gain == run, np.arange(n + 1), 0)))
        best = run + hits[label]
    bounds, end = [], n
    for arrivals in reversed(came):
        end = int(arrivals[end])
        bounds.append(end)
    edges = np.concatenate(([ranked[0] - 1.0], (ranked[1:] + ranked[:-1]) / 2, [ranked[-1] + 1.0]))
    return np.asarray(edges[bounds[::-1]], np.float64)


def mean_quality(rows: Sequence[OrdinalQuality]) -> OrdinalQuality:
    """The mean over models of each measure.

    Raises:
        DataError: There is no row.
    """
    if not rows:
        raise DataError("no model was evaluated")
    names = OrdinalQuality.__dataclass_fields__
    return OrdinalQuality(**{name: float(np.mean([getattr(row, name) for row in rows])) for name in names})


@dataclass(frozen=True, slots=True, eq=False)
class _Targets:
    """Normal scores of each model's lengths, and their mean over the models; NaN where unanswered."""

    own: FloatArray
    mean: FloatArray

    @classmethod
    def of(cls, tokens: FloatArray) -> _Targets:
        own = normal_scores(tokens)
        return cls(own, np.nanmean(own, 1))

    def rows(self, chosen: IntArray) -> _Targets:
        return _Targets(self.own[chosen], self.mean[chosen])


def _frozen(array: FloatArray) -> FloatArray:
    """A read-only copy, of any number of dimensions."""
    copy = np.array(array, np.float64)
    copy.setflags(write=False)
    return copy


def _check(x: FloatArray, blocks: Sequence[int], answers: AnswerLengths) -> None:
    if x.ndim != 2 or len(x) != len(answers.tokens) or sum(blocks) != x.shape[1]:
        raise DataError(
            f"features of shape {x.shape} in blocks of {list(blocks)} do not fit {len(answers.tokens)} prompts"
        )
    if not bool(np.all(np.isfinite(x))):
        raise DataError("a feature of a prompt is not finite")
    if len(x) < LEAST_PROMPTS:
        raise DataError(f"{len(x)} prompts are too few to learn from", hint=f"log at least {LEAST_PROMPTS} prompts")
    answered = ~np.isnan(answers.tokens)
    if not bool(np.all(answered.any(1))):
        raise DataError("a prompt has no answer of any model")
    for model, count in zip(answers.models, answered.sum(0).tolist(), strict=True):
        if count < LEAST_PROMPTS:
            raise DataError(
                f"{count} answers of model {model} are too few to learn from",
                hint=f"log at least {LEAST_PROMPTS} answers of each model, or leave the model out",
            )


def _solve(
    x: FloatArray, blocks: Sequence[int], target: _Targets, recipe: LengthRecipe
) -> tuple[_Scale, FloatArray, FloatArray, FloatArray]:
    """Scaling, scaled points, kernel weights float64[n, models + 1] and offsets of the blended heads."""
    scale = _Scale.of(x, blocks)
    points = scale(x)
    norms = np.sum(points * points, 1)
    kernel = np.exp(-recipe.width * np.maximum(norms[:, None] + norms - 2.0 * points @ points.T, 0.0))
    eye, centre = np.eye(len(x)), float(target.mean.mean())
    own = np.where(np.isnan(target.own), target.mean[:, None], target.own)
    shared = np.linalg.solve(kernel + recipe.mean_ridge * eye, target.mean - centre)
    heads = np.linalg.solve(kernel + recipe.head_ridge * eye, own)
    blended = recipe.shared_ratio * shared[:, None] + (1.0 - recipe.shared_ratio) * heads
    offset = np.full(own.shape[1] + 1, recipe.shared_ratio * centre)
    offset[-1] = centre
    return scale, points, np.column_stack([blended, shared]), offset


def _left_out_scores(x: FloatArray, blocks: Sequence[int], target: _Targets, recipe: LengthRecipe) -> FloatArray:
    """Scores of each prompt from the fit without its fold, float64[prompts, models + 1]."""
    scores = np.empty((len(x), target.own.shape[1] + 1))
    shuffled = np.random.default_rng(recipe.seed).permutation(len(x))
    for fold in np.array_split(shuffled, recipe.folds):
        rest = np.setdiff1d(shuffled, fold)
        scale, points, weights, offset = _solve(x[rest], blocks, target.rows(rest), recipe)
        away = scale(x[fold])
        distance = np.sum(away * away, 1)[:, None] + np.sum(points * points, 1) - 2.0 * away @ points.T
        scores[fold] = np.exp(-recipe.width * np.maximum(distance, 0.0)) @ weights + offset
    return scores


def _cuts(scores: FloatArray, answers: AnswerLengths, class_tokens: FloatArray) -> FloatArray:
    """Cuts of each head on the scores left out, float64[models + 1, 4].

    The cuts of highest accuracy are chosen on all models together, with each head's scores standardised, because one
    model alone has too few prompts. The cuts of equal frequency are quantiles of the head's own scores.
    """
    centre, spread = scores.mean(0), np.maximum(scores.std(0), 1e-9)
    standard = (scores - centre) / spread
    answered = ~np.isnan(answers.tokens)
    labels = [
        LengthClasses(c).classify(t[k]) for c, t, k in zip(class_tokens, answers.tokens.T, answered.T, strict=True)
    ]
    chosen = np.concatenate([standard[k, h] for h, k in enumerate(answered.T)])
    accurate = best_cuts(chosen, np.concatenate(labels)) * spread[:, None] + centre[:, None]
    return np.asarray((accurate + np.quantile(scores, QUANTILES, axis=0).T) / 2.0, np.float64)
