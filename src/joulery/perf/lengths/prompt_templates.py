"""Correction of predicted answer lengths by a service's own completions of prompts with the same template.

Most prompts of a service come from few templates, whose words stay while their content changes. A form is the words and
pairs of words of a prompt, hashed; two prompts of one template have nearly the same form. The ratio of the answers'
lengths to their expected lengths, averaged over completed prompts by the similarity of their forms, corrects the
expected length for a new prompt (Nadaraya-Watson with a prior of no correction). Only counts of hashes are kept.
"""

from __future__ import annotations

import math
import re
import zlib
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from joulery.domain.errors import DataError
from joulery.perf.lengths.pace import OnlineLengths

Form = npt.NDArray[np.float32]

WIDTH = 256
"""Number of counts in a form."""
CAPACITY = 512
"""Number of completions that are kept; the oldest are dropped."""
_READ_CHARACTERS = 400
"""Characters that are read at a prompt's beginning and at its end."""
_NEAR = 0.35
"""Cosine below which two prompts share only the words that all prompts share."""
_PRIOR_WEIGHT = 0.5
"""Weight of the prior of no correction, in completions of exactly the same form."""
_MOST = math.log(16.0)
"""Logarithm of the largest factor by which a correction changes an expected length."""
_WORD = re.compile(r"[^\W\d_]+|\d+|[?!:]")


def prompt_template(prompt: str) -> Form:
    """Hashed words and pairs of words of a prompt, float32[WIDTH] of unit length; zeros for one without words.

    Of a number only the count of its digits is used, because its value is content and not part of the template.
    """
    text = (
        prompt if len(prompt) <= 2 * _READ_CHARACTERS else prompt[:_READ_CHARACTERS] + " " + prompt[-_READ_CHARACTERS:]
    )
    found = _WORD.findall(text.lower())
    words = [b"0" * len(word) if word.isdecimal() else word.encode("utf-8", "replace") for word in found]
    form = np.zeros(WIDTH, np.float32)
    for piece in (*words, *(a + b" " + b for a, b in pairwise(words))):
        form[zlib.crc32(piece) % WIDTH] += 1.0
    form = np.sqrt(form)
    length = float(np.sqrt(form @ form))
    return form / np.float32(length) if length > 0 else form


class TemplateLengths:
    """Ratios of answer lengths to those that scores predict, by the form of their prompts."""

    __slots__ = ("_count", "_forms", "_logs", "_scores")

    def __init__(self) -> None:
        self._forms = np.zeros((CAPACITY, WIDTH), np.float32)
        self._scores, self._logs = np.zeros(CAPACITY), np.zeros(CAPACITY)
        self._count = 0

    def ratio(self, form: Form, lengths: OnlineLengths) -> float:
        """Factor on the expected length: 1 where no prompt of a similar form was completed.

        Args:
            form: The prompt's form.
            lengths: Present expected lengths by score.
        """
        known = min(self._count, CAPACITY)
        # einsum stays on this thread: a prediction costs no more CPU than its caller is charged for.
        near = np.einsum("ij,j->i", self._forms[:known], form)
        weight = np.where(near > _NEAR, near, 0.0).astype(np.float64) ** 4
        longer = self._logs[:known] - np.log1p(lengths.expected_of(self._scores[:known]))
        total = float(np.einsum("i,i->", weight, np.clip(longer, -_MOST, _MOST)))
        return math.exp(total / (float(weight.sum()) + _PRIOR_WEIGHT))

    def completed(self, form: Form, score: float, tokens: float) -> None:
        """Add a completed answer, with the form and the score of its prompt and its tokens.

        Raises:
            DataError: Either is not a finite number, or the tokens are negative.
        """
        if not (math.isfinite(score) and math.isfinite(tokens) and tokens >= 0):
            raise DataError(f"a completion of score {score} and {tokens} tokens")
        row = self._count % CAPACITY
        self._forms[row], self._scores[row], self._logs[row] = form, score, math.log1p(tokens)
        self._count += 1
