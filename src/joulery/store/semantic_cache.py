"""Cache of answer lengths of earlier prompts, found by meaning (μ-Serve, ATC'24, section 3.3; GPTCache's rule).

A look-up finds the nearest entry of the same model and hits when the similarity ``(2 - |a - b|) / 2`` of the unit-norm
embeddings reaches the threshold. At the default 0.8 that is a distance of at most 0.4: a cosine of at least 0.92, not
of 0.8. Text that is equal but for its case hits too.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from joulery.domain.arrays import IntArray
from joulery.domain.errors import ConfigError, DataError

_Vectors = npt.NDArray[np.float32]
_HEAD = 48
"""Dimensions that are compared first."""


@dataclass(slots=True)
class _Shelf:
    """The entries of one model: rows of a growing matrix, with the clock of their last use.

    ``heads`` repeats the first few dimensions of every row, and ``head_squares`` is their squared length.
    """

    vectors: _Vectors
    heads: _Vectors
    head_squares: _Vectors
    tokens: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    used: list[int] = field(default_factory=list)
    row_of: dict[str, int] = field(default_factory=dict)


def _empty_vectors(dimensions: int) -> _Shelf:
    few = min(dimensions, _HEAD)
    rows = np.zeros((0, dimensions), np.float32)
    return _Shelf(rows, rows[:, :few].copy(), np.zeros(0, np.float32))


class SemanticCache:
    """Least-recently-used cache of answer lengths by prompt meaning, apart for each model.

    Args:
        capacity: Entries a model at most.
        threshold: Similarity from which a look-up hits, 0 to 1.

    Raises:
        ConfigError: The capacity is not positive or the threshold not within [0, 1].
    """

    def __init__(self, capacity: int = 10_000, threshold: float = 0.8) -> None:
        if capacity < 1:
            raise ConfigError("a cache needs room for at least one entry", got=str(capacity))
        if not 0 <= threshold <= 1:
            raise ConfigError("the similarity threshold lies between 0 and 1", got=str(threshold))
        self.capacity, self.threshold = capacity, threshold
        self._distance_squared = (2.0 - 2.0 * threshold) ** 2
        self._shelves: dict[str, _Shelf] = {}
        self._clock = 0

    def __len__(self) -> int:
        return sum(len(shelf.tokens) for shelf in self._shelves.values())

    def look_up(self, model: str, prompt: str, embedding: npt.ArrayLike) -> float | None:
        """Answer length of the nearest entry of the model, tokens; None on a miss.

        Args:
            model: Entries of other models are never seen.
            prompt: Compared with the entries' text, case aside.
            embedding: Any length; a zero vector misses unless the text is equal.
        """
        shelf = self._shelves.get(model)
        if shelf is None:
            return None
        row = shelf.row_of.get(prompt.casefold())
        if row is None:
            row = self._nearest(shelf, _unit(embedding))
        if row is None:
            return None
        self._touch(shelf, row)
        return shelf.tokens[row]

    def insert(self, model: str, prompt: str, embedding: npt.ArrayLike, tokens: float) -> None:
        """Store the length of a completed answer; replaces an equal prompt, or evicts the least used when full.

        Raises:
            DataError: The length is negative or not finite, or the embedding's size differs from the entries before it.
        """
        if not (tokens >= 0 and np.isfinite(tokens)):
            raise DataError(f"an answer has {tokens} tokens, expected 0 or more")
        vector = _unit(embedding)
        shelf = self._shelves.setdefault(model, _empty_vectors(len(vector)))
        if shelf.vectors.shape[1] != len(vector):
            raise DataError(f"embeddings of {model} have {shelf.vectors.shape[1]} dimensions, got {len(vector)}")
        key = prompt.casefold()
        row = shelf.row_of.get(key)
        if row is None:
            row = self._new_row(shelf)
            shelf.row_of[key] = row
            shelf.texts[row] = key
        shelf.vectors[row] = vector
        head = shelf.heads[row] = vector[: shelf.heads.shape[1]]
        shelf.head_squares[row] = float(head @ head)
        shelf.tokens[row] = tokens
        self._touch(shelf, row)

    def _nearest(self, shelf: _Shelf, vector: _Vectors) -> int | None:
        if not vector.any():
            return None
        near = self._near(shelf, vector)
        if not len(near):
            return None
        row = int(near[np.argmax(_products(shelf.vectors[near], vector))])
        # Near the threshold float32 products are not exact enough to decide: measure the distance itself.
        difference = shelf.vectors[row].astype(np.float64) - vector
        return row if float(difference @ difference) <= self._distance_squared + 1e-9 else None

    def _near(self, shelf: _Shelf, vector: _Vectors) -> IntArray:
        """Rows that may be near enough: the first few dimensions alone exclude almost all others."""
        count, few = len(shelf.tokens), shelf.heads.shape[1]
        head = vector[:few]
        distance = _products(shelf.heads[:count], -2.0 * head)
        distance += shelf.head_squares[:count]
        distance += float(head @ head)
        return np.flatnonzero(distance <= self._distance_squared + 1e-4)

    def _new_row(self, shelf: _Shelf) -> int:
        if len(shelf.tokens) >= self.capacity:
            row = int(np.argmin(shelf.used))
            del shelf.row_of[shelf.texts[row]]
            return row
        row = len(shelf.tokens)
        if row == len(shelf.vectors):
            rows = min(max(16, 2 * row), self.capacity)
            shelf.vectors = _grown(shelf.vectors, rows)
            shelf.heads = _grown(shelf.heads, rows)
            shelf.head_squares = _grown(shelf.head_squares, rows)
        shelf.tokens.append(0.0)
        shelf.texts.append("")
        shelf.used.append(0)
        return row

    def _touch(self, shelf: _Shelf, row: int) -> None:
        self._clock += 1
        shelf.used[row] = self._clock


def _products(rows: _Vectors, vector: _Vectors) -> _Vectors:
    """Row by vector, in this thread: on a busy machine a BLAS waits milliseconds for its other threads."""
    return np.asarray(np.einsum("ij,j->i", rows, vector), np.float32)


def _grown(array: _Vectors, rows: int) -> _Vectors:
    """Extend an array with rows of zeros."""
    grown = np.zeros((rows, *array.shape[1:]), np.float32)
    grown[: len(array)] = array
    return grown


def _unit(embedding: npt.ArrayLike) -> _Vectors:
    vector = np.asarray(embedding, np.float64)
    norm = float(np.linalg.norm(vector))
    if vector.ndim != 1 or not np.isfinite(norm):
        raise DataError("an embedding must be one finite vector")
    return (vector / norm if norm > 0 else vector).astype(np.float32)
