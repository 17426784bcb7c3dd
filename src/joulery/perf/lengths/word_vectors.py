"""Topic of a prompt: the mean of the small vectors of its known words.

Surface features cover a few hundred words by their spelling; vectors place thousands of words near those of similar
meaning, so that a prompt about a *sonata* is near one about a *song*. The mean ignores the order of words: it separates
topics, not prompts, and is not an embedding with which to compare two prompts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from joulery.domain.arrays import FloatArray
from joulery.domain.errors import DataError
from joulery.perf.lengths.prompt_features import READ_CHARACTERS

_WORD = re.compile(r"[a-z]+")


class WordVectors:
    """Turns a prompt into the mean vector of its words.

    Args:
        name: Origin of the vectors, for the record of a predictor's training.
        words: Lower-case words of the letters a to z.
        vectors: One for each word, int8[words, width], no unit.

    Raises:
        DataError: There is not one int8 vector for each word, or a word is listed twice.
    """

    __slots__ = ("_rows", "name", "vectors", "words")

    def __init__(self, name: str, words: Sequence[str], vectors: npt.NDArray[np.int8]) -> None:
        if vectors.ndim != 2 or vectors.dtype != np.int8 or len(words) != len(vectors) or not len(words):
            raise DataError(f"{len(words)} words and vectors {vectors.dtype}{list(vectors.shape)} do not fit")
        self.name, self.words, self.vectors = name, tuple(words), vectors
        self._rows = {word: row for row, word in enumerate(self.words)}
        if len(self._rows) != len(self.words):
            raise DataError("a word has two vectors")

    def __call__(self, prompt: str) -> FloatArray:
        """The mean vector of a prompt, float64[width], finite; zeros where no word is known; any string is accepted.

        Of a long prompt only the characters that surface features read are used.
        """
        text = prompt
        if len(prompt) > READ_CHARACTERS:
            tail = READ_CHARACTERS // 3
            text = f"{prompt[: READ_CHARACTERS - tail]} {prompt[-tail:]}"
        rows = [row for word in _WORD.findall(text.lower()) if (row := self._rows.get(word)) is not None]
        if not rows:
            return np.zeros(self.vectors.shape[1])
        return np.asarray(self.vectors[rows].mean(0, dtype=np.float64), np.float64)
