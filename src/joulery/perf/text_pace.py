"""What is learned from answers as they complete: tokens a score stands for, and seconds a token takes.

Both start from what is known beforehand and move with every completion, older ones fading out: the predictor was
trained on other models, other prompts and another machine. Classes are predicted as in μ-Serve (ATC'24, section 3.3);
what they mean here is learned here.
"""

from __future__ import annotations

import numpy as np

from joulery.domain.arrays import FloatArray
from joulery.domain.errors import DataError
from joulery.perf.length import CLASSES, isotonic

PRIOR_WEIGHT = 10.0
"""How many completions the prior mean of a class is worth."""
_KEEP = 0.995
"""What one completion leaves of the weight of those before it in its class: about the last 200 count."""


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
    """Seconds an answer takes: a constant and so much a token, by least squares over fading completions.

    Args:
        constant_s, per_token_s: Before anything is known.
    """

    __slots__ = ("_n", "_x", "_xx", "_xy", "_y", "constant_s", "per_token_s")

    def __init__(self, constant_s: float = 0.1, per_token_s: float = 0.02) -> None:
        self.constant_s, self.per_token_s = constant_s, per_token_s
        # The prior counts as completions on its own line, at 10 and at 300 tokens.
        self._n = self._x = self._xx = self._xy = self._y = 0.0
        for tokens in (10.0, 300.0):
            self._add(tokens, constant_s + per_token_s * tokens)

    def service_s(self, tokens: float) -> float:
        """Seconds that an answer of so many tokens is expected to take."""
        return self.constant_s + self.per_token_s * tokens

    def completed(self, tokens: float, service_s: float) -> None:
        """An answer of so many tokens took so long in the engine.

        Raises:
            DataError: Either is not a finite number of at least 0.
        """
        if not (np.isfinite(tokens) and np.isfinite(service_s) and tokens >= 0 and service_s >= 0):
            raise DataError(f"an answer of {tokens} tokens in {service_s} s")
        for name in ("_n", "_x", "_xx", "_xy", "_y"):
            setattr(self, name, _KEEP * getattr(self, name))
        self._add(tokens, service_s)
        spread = self._n * self._xx - self._x**2
        slope = (self._n * self._xy - self._x * self._y) / spread if spread > 1e-9 else self.per_token_s
        # A slope that noise turned negative would turn the order around.
        self.per_token_s = max(slope, 1e-6)
        self.constant_s = max(0.0, (self._y - self.per_token_s * self._x) / self._n)

    def _add(self, tokens: float, service_s: float) -> None:
        self._n += 1.0
        self._x += tokens
        self._xx += tokens**2
        self._xy += tokens * service_s
        self._y += service_s
