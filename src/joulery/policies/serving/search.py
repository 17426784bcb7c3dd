"""Ask/tell searches over a set of candidates, and the loop that joins a search with whoever judges."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, TypeVar

from joulery.domain.ports import Evaluator, Search

P = TypeVar("P")
M = TypeVar("M")


class ExhaustiveSearch(Generic[P, M]):
    """Asks for every candidate once, in the order given. For spaces small enough to try whole."""

    def __init__(self, candidates: Iterable[P]) -> None:
        self._rest = iter(tuple(candidates))

    def ask(self) -> P | None:
        """The next candidate; None when all were asked for."""
        return next(self._rest, None)

    def tell(self, candidate: P, metrics: M, /) -> None:
        """Nothing to learn: every candidate is asked for anyway."""


def trials(search: Search[P, M], evaluator: Evaluator[P, M]) -> list[tuple[P, M]]:
    """Every candidate the search asked for, with what the evaluator said of it, in order."""
    found: list[tuple[P, M]] = []
    while (candidate := search.ask()) is not None:
        metrics = evaluator.evaluate(candidate)
        search.tell(candidate, metrics)
        found.append((candidate, metrics))
    return found
