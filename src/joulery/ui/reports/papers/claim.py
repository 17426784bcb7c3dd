"""A claim of a paper beside what the same comparison comes to here."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Claim:
    """One line.

    Attributes:
        figure: Where the paper says it.
        what: What is claimed or compared.
        paper, ours: Both figures, as text.
        verdict: ``holds``, ``sign only``, ``partly``, ``does not hold``; empty where the paper gives no number.
    """

    figure: str
    what: str
    paper: str
    ours: str
    verdict: str

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)
