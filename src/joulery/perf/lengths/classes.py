"""Ordinal classes of answer length, their calibration, and the quality of a predictor's ranking.

The classes of μ-Serve (ATC'24, section 3.3) are the quartiles and the 99th percentile of a model's own answers:
``[0, p25) [p25, p50) [p50, p75) [p75, p99) [p99, inf)``. A predictor gives a raw ordinal score; requests are ranked by
it, and the class is for reporting. Calibration turns a score into tokens: a mean to rank by, an upper quantile where
being too optimistic costs a deadline.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from joulery.domain.arrays import FloatArray, IntArray, readonly
from joulery.domain.errors import DataError
from joulery.perf.isotonic import isotonic

CLASSES = 5
QUANTILES = (0.25, 0.50, 0.75, 0.99)
"""Quantiles of a model's answers at which its length classes meet."""


@dataclass(frozen=True, slots=True, eq=False)
class LengthClasses:
    """The class boundaries of one model, from its training answers.

    Attributes:
        cuts: The 25th, 50th, 75th and 99th percentile of the answers' lengths in tokens, float64[4].
    """

    cuts: FloatArray

    def __post_init__(self) -> None:
        cuts = readonly(self.cuts, np.float64)
        if len(cuts) != CLASSES - 1 or bool(np.any(np.diff(cuts) < 0)):
            raise DataError(f"length classes need four ascending cuts, got {cuts.tolist()}")
        object.__setattr__(self, "cuts", cuts)

    @classmethod
    def of(cls, lengths: npt.ArrayLike) -> LengthClasses:
        """Boundaries from the answers of one model, tokens.

        Raises:
            DataError: There are no answers.
        """
        values = np.asarray(lengths, np.float64)
        if not len(values):
            raise DataError("length classes need at least one answer")
        return cls(np.quantile(values, QUANTILES))

    def classify(self, lengths: npt.ArrayLike) -> IntArray:
        """Class 0 to 4 of each length; a length equal to a cut belongs above it."""
        return np.asarray(np.searchsorted(self.cuts, np.asarray(lengths, np.float64), "right"), np.int64)


def rounded_class(score: npt.ArrayLike) -> IntArray:
    """The reported class of a raw ordinal score: rounded half up, clipped to 0 … 4."""
    return np.clip(np.floor(np.asarray(score, np.float64) + 0.5), 0, CLASSES - 1).astype(np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class LengthCalibration:
    """Mapping from scores to tokens, isotonic in the score.

    Attributes:
        scores: Knots, ascending, float64[k].
        mean_tokens: Mean length at each knot, non-decreasing.
        upper_tokens: Upper quantile of the length at each knot, non-decreasing.
    """

    scores: FloatArray
    mean_tokens: FloatArray
    upper_tokens: FloatArray

    def mean(self, score: npt.ArrayLike) -> FloatArray:
        """Expected tokens of each score, for ranking."""
        return np.asarray(np.interp(np.asarray(score, np.float64), self.scores, self.mean_tokens), np.float64)

    def upper(self, score: npt.ArrayLike) -> FloatArray:
        """Tokens that are seldom exceeded at each score, for planning a clock."""
        return np.asarray(np.interp(np.asarray(score, np.float64), self.scores, self.upper_tokens), np.float64)


def fit_classes(
    scores: npt.ArrayLike, tokens: npt.ArrayLike, *, upper_quantile: float = 0.9, bins: int = 10
) -> LengthCalibration:
    """Fit the calibration on completed requests: quantile bins of the score, pooled until monotone.

    Args:
        scores: Predicted scores, float64[n].
        tokens: True lengths, float64[n].
        upper_quantile: Which quantile ``upper`` gives.
        bins: Bins at most; equal scores share one.

    Raises:
        DataError: Columns are empty or differ in length.
    """
    s, t = np.asarray(scores, np.float64), np.asarray(tokens, np.float64)
    if len(s) != len(t) or not len(s):
        raise DataError(f"a calibration needs as many lengths as scores, got {len(t)} and {len(s)}")
    edges = np.unique(np.quantile(s, np.linspace(0, 1, bins + 1)[1:-1]))
    group = np.searchsorted(edges, s, "right")
    rows = [(s[group == g], t[group == g]) for g in np.unique(group)]
    knots = np.array([float(np.mean(row[0])) for row in rows])
    weight = np.array([len(row[0]) for row in rows], np.float64)
    mean = isotonic(np.array([float(np.mean(row[1])) for row in rows]), weight)
    upper = isotonic(np.array([float(np.quantile(row[1], upper_quantile)) for row in rows]), weight)
    return LengthCalibration(knots, mean, np.maximum(upper, mean))


@dataclass(frozen=True, slots=True)
class OrdinalQuality:
    """Quality of predictions (μ-Serve, Table 2).

    Attributes:
        accuracy: Share of classes hit.
        macro_f1: Mean F1 over the classes that occur.
        l1, mse: Mean absolute and squared class error.
        kendall_tau: Tau-b between score and true length.
        pairwise: Share of pairs of different length ranked right, a tie counting half.
    """

    accuracy: float
    macro_f1: float
    l1: float
    mse: float
    kendall_tau: float
    pairwise: float


def judge(scores: npt.ArrayLike, tokens: npt.ArrayLike, classes: LengthClasses) -> OrdinalQuality:
    """Judge predicted scores against true lengths of one model.

    Raises:
        DataError: Columns are empty or differ in length.
    """
    s, t = np.asarray(scores, np.float64), np.asarray(tokens, np.float64)
    if len(s) != len(t) or not len(s):
        raise DataError(f"an evaluation needs as many lengths as scores, got {len(t)} and {len(s)}")
    predicted, true = rounded_class(s), classes.classify(t)
    concordant, discordant, ties_s, ties_t = _pairs(s, t)
    untied = concordant + discordant
    scale = np.sqrt(float(untied + ties_s) * float(untied + ties_t))
    different = untied + ties_s
    return OrdinalQuality(
        accuracy=float(np.mean(predicted == true)),
        macro_f1=_macro_f1(predicted, true),
        l1=float(np.mean(np.abs(predicted - true))),
        mse=float(np.mean((predicted - true) ** 2)),
        kendall_tau=float((concordant - discordant) / scale) if scale > 0 else 0.0,
        pairwise=float((concordant + 0.5 * ties_s) / different) if different else 0.5,
    )


def _macro_f1(predicted: IntArray, true: IntArray) -> float:
    scores = []
    for label in np.unique(true):
        hit = float(np.sum((predicted == label) & (true == label)))
        scores.append(2 * hit / float(np.sum(predicted == label) + np.sum(true == label)))
    return float(np.mean(scores))


def _pairs(s: FloatArray, t: FloatArray) -> tuple[int, int, int, int]:
    """Concordant and discordant pairs; pairs tied in the score alone, in the length alone."""
    n = len(s)
    concordant = discordant = ties_s = ties_t = 0
    for low in range(0, n, 1024):
        ds = np.sign(s[low : low + 1024, None] - s[None, :])
        dt = np.sign(t[low : low + 1024, None] - t[None, :])
        product = ds * dt
        concordant += int(np.sum(product > 0))
        discordant += int(np.sum(product < 0))
        ties_s += int(np.sum((ds == 0) & (dt != 0)))
        ties_t += int(np.sum((ds != 0) & (dt == 0)))
    return concordant // 2, discordant // 2, ties_s // 2, ties_t // 2
