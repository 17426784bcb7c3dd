"""Counts of the samples, and of the tokens of language models, that the data loaders of a PyTorch program return.

A batch counts as many samples as its first tensor has rows, as PyTorch's own collation makes it, and as many tokens as
its ``input_ids`` has elements, padding included, as the Trainer of Transformers counts them. Accelerate fetches one
batch ahead of training: there a batch counts when the next one is fetched.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Seen = tuple[int | None, int | None]
"""Samples and tokens; None where a batch did not say."""
_AHEAD = "accelerate.data_loader"
"""Module that takes one batch ahead."""


class LoadedCounts:
    """Samples and tokens that the data loaders of this process have returned so far.

    Attributes:
        now: Up to the last batch.
        before: Up to the batch before it.
    """

    def __init__(self) -> None:
        self.now: Seen = (0, 0)
        self.before: Seen = (0, 0)
        self._batches = 0
        self._counts = False
        self._remove: Callable[[], None] = lambda: None

    def install(self, loading: Any) -> None:
        """Count every batch of every loader.

        Args:
            loading: The module ``torch.utils.data.dataloader``.
        """
        kind = loading._BaseDataLoaderIter
        give = kind.__next__
        ahead: weakref.WeakKeyDictionary[Any, Seen] = weakref.WeakKeyDictionary()

        @functools.wraps(give)
        def giving(iterator: Any) -> Any:
            earlier = ahead.pop(iterator, None)
            try:
                batch = give(iterator)
            finally:
                if earlier is not None and self._counts:
                    self._count(earlier)
            if self._counts:
                found = sizes(batch) if getattr(iterator, "_auto_collation", True) else (None, None)
                if sys._getframe(1).f_globals.get("__name__") == _AHEAD:
                    ahead[iterator] = found
                else:
                    self._count(found)
            return batch

        kind.__next__ = giving
        self._counts = True

        def remove() -> None:
            if kind.__next__ is giving:
                kind.__next__ = give

        self._remove = remove

    def stop(self) -> None:
        """Stop counting and restore the loaders."""
        self._counts = False
        self._remove()

    def _count(self, batch: Seen) -> None:
        self._batches += 1
        self.before = self.now
        self.now = _sum(self.now[0], batch[0]), _sum(self.now[1], batch[1])

    def between(self, start: Seen, end: Seen) -> Seen:
        """Samples and tokens from ``start`` to ``end``; None where they are not known, or where no loader was used."""
        if not self._batches:
            return None, None
        return _difference(end[0], start[0]), _difference(end[1], start[1])


def sizes(batch: Any) -> Seen:
    """The samples and tokens of a batch; None for a number that it does not show. No type of batch raises an error."""
    try:
        tokens = batch.get("input_ids") if isinstance(batch, Mapping) else None
        if tokens is not None and _is_rows(tokens):
            return int(tokens.shape[0]), int(tokens.numel())
        first = _first_rows(batch)
        return (None if first is None else int(first.shape[0])), None
    except Exception:  # noqa: BLE001  # a batch is of the program's own types: whatever they raise, the program goes on
        return None, None


def _first_rows(batch: Any) -> Any:
    if _is_rows(batch):
        return batch
    parts: Sequence[Any] = ()
    if isinstance(batch, Mapping):
        parts = list(batch.values())
    elif isinstance(batch, (list, tuple)):
        parts = batch
    return next((found for part in parts if (found := _first_rows(part)) is not None), None)


def _is_rows(value: Any) -> bool:
    return hasattr(value, "numel") and len(getattr(value, "shape", ())) > 0


def _sum(one: int | None, more: int | None) -> int | None:
    return None if one is None or more is None else one + more


def _difference(one: int | None, less: int | None) -> int | None:
    return None if one is None or less is None else one - less
