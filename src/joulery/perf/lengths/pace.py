"""Online estimates from completed answers: the tokens of a score, and the seconds of a token.

Both start from prior values and change with every completion, while older completions lose weight, because the
predictor was trained on other models, other prompts and another machine. Classes are predicted as in μ-Serve (ATC'24,
section 3.3); their lengths are learned online.

The model assumes that the lengths of answers of one score are exponential about their mean. It estimates from that the
full length of an answer cut at the client's limit (:func:`unlimited_tokens`) and the expected length under a limit
(:func:`limited_tokens`): a prompt of longer answers still ranks behind one of shorter answers where both expect more
than the limit.
"""

from __future__ import annotations

import math

import numpy as np

from joulery.domain.arrays import FloatArray
from joulery.domain.errors import DataError
from joulery.perf.isotonic import isotonic
from joulery.perf.lengths.classes import CLASSES

PRIOR_WEIGHT = 10.0
"""Number of completions that the prior mean of a class is worth."""
_KEEP = 0.995
"""Factor of one completion on the weight of those before it in its class: about the last 200 count."""
_HOLD = 1.0
"""Squared tokens by which a slope is held at its value: prompts of equal length do not determine the time of prompts of
another length."""


def limited_tokens(mean_tokens: float, max_tokens: float) -> float:
    """Mean length of answers that end at ``max_tokens`` at the latest and would have ``mean_tokens`` without a limit.

    E[min(L, c)] = m (1 - exp(-c/m)) for exponential lengths: increasing in both, below both.
    """
    if mean_tokens <= 0:
        return 0.0
    return -mean_tokens * math.expm1(-max_tokens / mean_tokens)


def unlimited_tokens(mean_tokens: float, at_tokens: float) -> float:
    """Expected full length of an answer cut at ``at_tokens``, of which ``mean_tokens`` were expected.

    E[L | L > c] = c + m for exponential lengths. The unseen part counts for at most the seen part, so that a model
    whose answers are always cut does not raise its expectation without bound.
    """
    return at_tokens + min(mean_tokens, at_tokens)


class OnlineLengths:
    """Expected tokens by ordinal score, corrected by every completion.

    Args:
        prior_tokens: Mean tokens of the five classes as trained; ascending, float64[5].

    Raises:
        DataError: The means are not five positive ascending numbers.
    """

    __slots__ = ("_knots", "_sums", "_weights")

    def __init__(self, prior_tokens: FloatArray) -> None:
        prior = np.asarray(prior_tokens, np.float64)
        if (
            prior.shape != (CLASSES,)
            or not bool(np.all(np.isfinite(prior) & (prior > 0)))
            or np.any(np.diff(prior) < 0)
        ):
            raise DataError(f"expected five positive ascending mean lengths, got {prior.tolist()}")
        self._weights = np.full(CLASSES, PRIOR_WEIGHT)
        self._sums = PRIOR_WEIGHT * prior
        self._knots = prior.copy()

    def expected(self, score: float) -> float:
        """Expected tokens of a score, non-decreasing in the score."""
        place = min(max(score, 0.0), CLASSES - 1.0)
        low = min(int(place), CLASSES - 2)
        return float(self._knots[low] + (place - low) * (self._knots[low + 1] - self._knots[low]))

    def expected_of(self, scores: FloatArray) -> FloatArray:
        """Expected tokens of many scores, float64[n]."""
        return np.asarray(np.interp(scores, np.arange(CLASSES), self._knots), np.float64)

    def completed(self, score: float, tokens: float) -> None:
        """Correct the expected tokens by a completed answer, from its score and its tokens.

        Raises:
            DataError: Either is not a finite number, or the tokens are negative.
        """
        if not (np.isfinite(score) and np.isfinite(tokens) and tokens >= 0):
            raise DataError(f"a completion of score {score} and {tokens} tokens")
        row = int(np.clip(np.floor(score + 0.5), 0, CLASSES - 1))
        self._weights[row] = _KEEP * self._weights[row] + 1.0
        self._sums[row] = _KEEP * self._sums[row] + tokens
        self._knots = isotonic(self._sums / self._weights, self._weights)


class OnlinePace:
    """Linear model of an answer's seconds: a constant, a time per prompt token and a time per answer token.

    The fit is least squares over completions of fading weight. Reading a long prompt may take longer than writing a
    short answer. The prior sets the proportions of the three, not the engine's speed: it is scaled to the speed of the
    completions, or a slow engine's short answers would make a token seem to take no time.

    Args:
        constant_s, per_read_s, per_token_s: Prior values.
    """

    __slots__ = ("_assumed", "_prior", "_seen", "constant_s", "per_read_s", "per_token_s")

    def __init__(self, constant_s: float = 0.1, per_token_s: float = 0.02, per_read_s: float = 0.002) -> None:
        self.constant_s, self.per_token_s, self.per_read_s = constant_s, per_token_s, per_read_s
        self._prior = (constant_s, per_read_s, per_token_s)
        # The prior counts as completions on its own plane: short and long answers, one of them to a long prompt.
        self._assumed: tuple[float, ...] = (0.0,) * 9
        self._seen: tuple[float, ...] = (0.0,) * 9
        for read, written in ((20.0, 10.0), (20.0, 300.0), (1000.0, 100.0)):
            self._assumed = _faded_sum(self._assumed, 1.0, _moments(read, written, self.service_s(written, read)))

    def service_s(self, tokens: float, read: float = 0.0) -> float:
        """Expected seconds for an answer of ``tokens`` tokens to a prompt of ``read`` tokens."""
        return self.constant_s + self.per_read_s * read + self.per_token_s * tokens

    def completed(self, tokens: float, service_s: float, read: float = 0.0) -> None:
        """Update the model with the seconds that a completed answer to a prompt of ``read`` tokens took in the engine.

        Raises:
            DataError: A value is not a finite number of at least 0.
        """
        if not all(np.isfinite(each) and each >= 0 for each in (tokens, service_s, read)):
            raise DataError(f"an answer of {tokens} tokens to {read} in {service_s} s")
        self._seen = _faded_sum(self._seen, _KEEP, _moments(read, tokens, service_s))
        self._assumed = tuple(_KEEP * each for each in self._assumed)
        scale = self._slower_ratio()
        assumed = (*self._assumed[:6], *(scale * each for each in self._assumed[6:]))
        n, *sums = _faded_sum(self._seen, 1.0, assumed)
        mean_r, mean_w, mean_rr, mean_rw, mean_ww, mean_y, mean_ry, mean_wy = (each / n for each in sums)
        # Covariances; each slope is held a little where it is, so there is always one solution.
        rr, ww, rw = mean_rr - mean_r**2 + _HOLD, mean_ww - mean_w**2 + _HOLD, mean_rw - mean_r * mean_w
        ry = mean_ry - mean_r * mean_y + _HOLD * self.per_read_s
        wy = mean_wy - mean_w * mean_y + _HOLD * self.per_token_s
        spread = rr * ww - rw**2
        read_s, token_s = (ww * ry - rw * wy) / spread, (rr * wy - rw * ry) / spread
        if read_s < 0:
            read_s, token_s = 0.0, wy / ww
        # A slope that noise turned negative would turn the order around.
        self.per_read_s, self.per_token_s = read_s, max(token_s, 1e-6)
        self.constant_s = max(0.0, mean_y - self.per_read_s * mean_r - self.per_token_s * mean_w)

    def _slower_ratio(self) -> float:
        """Time of the completions over the time that the prior predicts for them."""
        constant_s, per_read_s, per_token_s = self._prior
        n, read, written, *_ = self._seen
        expected_s, took_s = constant_s * n + per_read_s * read + per_token_s * written, self._seen[6]
        return took_s / expected_s if expected_s > 0 and took_s > 0 else 1.0


def _moments(read: float, written: float, took_s: float) -> tuple[float, ...]:
    """Sums of a completion for least squares: first without its time, then with it."""
    return (1.0, read, written, read**2, read * written, written**2, took_s, read * took_s, written * took_s)


def _faded_sum(old: tuple[float, ...], keep: float, new: tuple[float, ...]) -> tuple[float, ...]:
    """``keep * old + new``."""
    return tuple(keep * before + after for before, after in zip(old, new, strict=True))
