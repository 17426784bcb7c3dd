"""What is learned from answers as they complete: tokens a score stands for, and seconds a token takes.

Both start from what is known beforehand and move with every completion, older ones fading out: the predictor was
trained on other models, other prompts and another machine. Classes are predicted as in μ-Serve (ATC'24, section 3.3);
what they mean here is learned here.

The model assumes that the lengths of answers of one score are exponential about their mean. It estimates from that the
full length of an answer cut at the client's limit (:func:`uncut_tokens`) and the expected length under a limit
(:func:`cut_tokens`): a prompt of longer answers still ranks behind one of shorter answers where both expect more than
the limit.
"""

from __future__ import annotations

import math

import numpy as np

from joulery.domain.arrays import FloatArray
from joulery.domain.errors import DataError
from joulery.perf.lengths.classes import CLASSES, isotonic

PRIOR_WEIGHT = 10.0
"""How many completions the prior mean of a class is worth."""
_KEEP = 0.995
"""What one completion leaves of the weight of those before it in its class: about the last 200 count."""
_HOLD = 1.0
"""Squared tokens by which a slope is held where it is: prompts that are all alike do not tell what one of another
length would take."""


def cut_tokens(mean_tokens: float, max_tokens: float) -> float:
    """Mean length of answers that end at ``max_tokens`` at the latest and would have ``mean_tokens`` without that.

    E[min(L, c)] = m (1 - exp(-c/m)) for exponential lengths: increasing in both, below both.
    """
    if mean_tokens <= 0:
        return 0.0
    return -mean_tokens * math.expm1(-max_tokens / mean_tokens)


def uncut_tokens(mean_tokens: float, at_tokens: float) -> float:
    """What an answer cut at ``at_tokens`` would have come to, of which ``mean_tokens`` were expected.

    E[L | L > c] = c + m for exponential lengths. The unseen part counts for at most the seen part, so that a model
    whose answers are always cut does not raise its expectation without bound.
    """
    return at_tokens + min(mean_tokens, at_tokens)


class OnlineLengths:
    """Expected tokens by ordinal score, corrected by every completion.

    Args:
        prior_tokens: Mean tokens of the five classes as trained; ascending, float64[5].

    Raises:
        DataError: They are not five positive ascending numbers.
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
        """Tokens that a score stands for, non-decreasing in the score."""
        place = min(max(score, 0.0), CLASSES - 1.0)
        low = min(int(place), CLASSES - 2)
        return float(self._knots[low] + (place - low) * (self._knots[low + 1] - self._knots[low]))

    def expected_of(self, scores: FloatArray) -> FloatArray:
        """The same for many scores, float64[n]."""
        return np.asarray(np.interp(scores, np.arange(CLASSES), self._knots), np.float64)

    def completed(self, score: float, tokens: float) -> None:
        """An answer of that score came to so many tokens.

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
    """Seconds an answer takes: a constant, so much a token of the prompt and so much a token of the answer.

    Least squares over fading completions. Reading a long prompt may take longer than writing a short answer.

    Args:
        constant_s, per_read_s, per_token_s: Before anything is known.
    """

    __slots__ = (
        "_n",
        "_rr",
        "_rw",
        "_ry",
        "_sr",
        "_sw",
        "_sy",
        "_ww",
        "_wy",
        "constant_s",
        "per_read_s",
        "per_token_s",
    )

    def __init__(self, constant_s: float = 0.1, per_token_s: float = 0.02, per_read_s: float = 0.002) -> None:
        self.constant_s, self.per_token_s, self.per_read_s = constant_s, per_token_s, per_read_s
        self._n = self._sr = self._sw = self._sy = 0.0
        self._rr = self._rw = self._ww = self._ry = self._wy = 0.0
        # The prior counts as completions on its own plane: short and long answers, one of them to a long prompt.
        for read, written in ((20.0, 10.0), (20.0, 300.0), (1000.0, 100.0)):
            self._add(read, written, self.service_s(written, read))

    def service_s(self, tokens: float, read: float = 0.0) -> float:
        """Seconds that an answer of so many tokens to a prompt of ``read`` tokens is expected to take."""
        return self.constant_s + self.per_read_s * read + self.per_token_s * tokens

    def completed(self, tokens: float, service_s: float, read: float = 0.0) -> None:
        """An answer of so many tokens to a prompt of ``read`` tokens took so long in the engine.

        Raises:
            DataError: One of them is not a finite number of at least 0.
        """
        if not all(np.isfinite(each) and each >= 0 for each in (tokens, service_s, read)):
            raise DataError(f"an answer of {tokens} tokens to {read} in {service_s} s")
        for name in ("_n", "_sr", "_sw", "_sy", "_rr", "_rw", "_ww", "_ry", "_wy"):
            setattr(self, name, _KEEP * getattr(self, name))
        self._add(read, tokens, service_s)
        n, mean_r, mean_w, mean_y = self._n, self._sr / self._n, self._sw / self._n, self._sy / self._n
        # Covariances; each slope is held a little where it is, so there is always one solution.
        rr, ww, rw = self._rr / n - mean_r**2 + _HOLD, self._ww / n - mean_w**2 + _HOLD, self._rw / n - mean_r * mean_w
        ry = self._ry / n - mean_r * mean_y + _HOLD * self.per_read_s
        wy = self._wy / n - mean_w * mean_y + _HOLD * self.per_token_s
        spread = rr * ww - rw**2
        read_s, token_s = (ww * ry - rw * wy) / spread, (rr * wy - rw * ry) / spread
        if read_s < 0:
            read_s, token_s = 0.0, wy / ww
        # A slope that noise turned negative would turn the order around.
        self.per_read_s, self.per_token_s = read_s, max(token_s, 1e-6)
        self.constant_s = max(0.0, mean_y - self.per_read_s * mean_r - self.per_token_s * mean_w)

    def _add(self, read: float, written: float, took_s: float) -> None:
        self._n += 1.0
        self._sr += read
        self._sw += written
        self._sy += took_s
        self._rr += read**2
        self._rw += read * written
        self._ww += written**2
        self._ry += read * took_s
        self._wy += written * took_s
