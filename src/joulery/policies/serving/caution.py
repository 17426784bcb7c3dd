"""Patience before a change that may threaten the SLO: it doubles where a threat soon follows such a change.

On a machine that other programs keep busy, a layout may be late although its profile predicts that it suffices. Without
caution a service would alternate: leave the leanest layout as soon as there is room, be late, and return.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

MOST_CAUTION = 32.0
_LASTS = 10.0
"""Multiples of the patience within which a change counts as the cause of the threat that follows it."""


@dataclass(frozen=True, slots=True)
class Caution:
    """Caution about one kind of change.

    Attributes:
        ratio: Multiple of the patience before the next one.
        doubtful_until_s: Until when a threat counts as caused by the last one; infinite where none is in doubt.
    """

    ratio: float = 1.0
    doubtful_until_s: float = math.inf

    def at(self, now_s: float) -> float:
        """The multiple in force: 1 again once the last change has lasted."""
        return self.ratio if now_s < self.doubtful_until_s else 1.0

    def risked(self, now_s: float, patience_s: float) -> Caution:
        """The caution after a change that was made with patience."""
        ratio = self.at(now_s)
        return Caution(ratio, now_s + _LASTS * patience_s * ratio)

    def struck(self, now_s: float) -> Caution:
        """The caution once the SLO begins to be threatened."""
        doubtful = now_s < self.doubtful_until_s < math.inf
        return Caution(min(MOST_CAUTION, 2.0 * self.ratio) if doubtful else self.at(now_s))


CALM = Caution()
"""The caution while no change so far has led to a threat."""
