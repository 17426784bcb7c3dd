"""Expected remaining length of an answer, given its length so far.

An answer that exceeds its prediction is not about to end: among earlier answers of the same prediction, those that
reached this length continued beyond it. The expected remainder is their conditional mean, ``E[L - made | L > made]``.
Earlier answers are kept as ratios of true to predicted length, so that one calibration serves every prediction; an
answer that was cut is a censored observation: its ratio was larger (Kaplan and Meier, "Nonparametric estimation from
incomplete observations", JASA 1958). Without earlier answers lengths are assumed to be exponential, as in
:mod:`joulery.perf.lengths.pace`: then the remaining length does not depend on the length so far.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

from joulery.domain.errors import DataError
from joulery.perf.lengths.pace import limited_tokens

KEPT = 200
"""Answers of each kind that a calibration keeps."""
FEW = 20
"""Least number of answers from which the ratios of a kind are estimated."""
_MOST_POINTS = 256
"""Points that a distribution is reduced to."""


class LengthDistribution:
    """Possible lengths of an answer and how likely they are; any unit.

    Args:
        lengths: Ascending, > 0, float64[n]; empty for exponential lengths about ``mean``.
        weights: Weight of each length, > 0; equal where left out.
        mean: Mean of exponential lengths; ignored where there are ``lengths``.

    Raises:
        DataError: Lengths are not positive and ascending, or there is neither a length nor a mean.
    """

    __slots__ = ("_mass", "_mean", "_moment", "_points")

    def __init__(
        self, lengths: Sequence[float] = (), weights: Sequence[float] | None = None, *, mean: float = 0.0
    ) -> None:
        points = [float(each) for each in lengths]
        if points and (points[0] <= 0 or any(b < a for a, b in pairwise(points))):
            raise DataError(f"possible lengths must be positive and ascend, got {points[:4]} …")
        if not points and not mean > 0:
            raise DataError(f"exponential lengths need a mean above 0, got {mean}")
        mass = [1.0] * len(points) if weights is None else [float(each) for each in weights]
        moment = [w * x for w, x in zip(mass, points, strict=True)]
        self._points, self._mean = points, float(mean)
        self._mass = list(accumulate(reversed(mass)))[::-1]
        self._moment = list(accumulate(reversed(moment)))[::-1]

    @classmethod
    def of(cls, lengths: npt.ArrayLike) -> LengthDistribution:
        """The distribution of observed lengths, reduced to at most 256 points, the longest among them.

        Raises:
            DataError: There are no lengths, or one is not above 0.
        """
        values = np.sort(np.asarray(lengths, np.float64))
        if not len(values):
            raise DataError("a distribution of lengths needs at least one")
        if len(values) <= _MOST_POINTS:
            return cls(values.tolist())
        parts = [*np.array_split(values[:-1], _MOST_POINTS - 1), values[-1:]]
        means = np.maximum.accumulate([float(part.mean()) for part in parts])  # of equal lengths rounding may step back
        return cls(means.tolist(), [float(len(part)) for part in parts])

    def remaining(self, made: float = 0.0, limit: float | None = None) -> float:
        """Expected remaining length of an answer of ``made`` so far, which ends at ``limit`` at the latest.

        An answer longer than every known one is expected to continue for its present length again.
        """
        room = None if limit is None else max(limit - made, 0.0)
        if not self._points:
            return self._mean if room is None else limited_tokens(self._mean, room)
        at = bisect_right(self._points, made)
        if at == len(self._points):
            return made if room is None else min(made, room)
        if room is None:
            return self._moment[at] / self._mass[at] - made
        beyond = bisect_right(self._points, made + room)
        above = self._mass[beyond] if beyond < len(self._points) else 0.0
        within = self._moment[at] - (self._moment[beyond] if beyond < len(self._points) else 0.0)
        return max((within - made * (self._mass[at] - above) + room * above) / self._mass[at], 0.0)


EXPONENTIAL = LengthDistribution(mean=1.0)
"""Ratios of true to predicted length before any answer has ended."""


class RatioCalibration:
    """True over predicted lengths of answers that have ended, by kind of prediction; the latest 200 of each.

    A kind with fewer than 20 answers uses the answers of all kinds, or exponential lengths if those are fewer than 20.
    """

    __slots__ = ("_all", "_by_kind", "_found")

    def __init__(self) -> None:
        self._all: deque[tuple[float, bool]] = deque(maxlen=KEPT)
        self._by_kind: dict[Hashable, deque[tuple[float, bool]]] = {}
        self._found: dict[Hashable, LengthDistribution] = {}

    def completed(self, kind: Hashable, predicted: float, length: float, *, cut: bool = False) -> None:
        """Add an answer that ended; ``cut`` when a limit ended it. Predictions and lengths not above 0 are ignored."""
        if not (np.isfinite(predicted) and np.isfinite(length) and predicted > 0 and length > 0):
            return
        row = (length / predicted, cut)
        self._all.append(row)
        self._by_kind.setdefault(kind, deque(maxlen=KEPT)).append(row)
        self._found.clear()

    def ratios(self, kind: Hashable) -> LengthDistribution:
        """The distribution of ratios of a kind of prediction."""
        if kind not in self._found:
            own = self._by_kind.get(kind, ())
            rows = own if len(own) >= FEW else self._all
            self._found[kind] = _kaplan_meier(rows) if len(rows) >= FEW else EXPONENTIAL
        return self._found[kind]


def _kaplan_meier(rows: Iterable[tuple[float, bool]]) -> LengthDistribution:
    """Estimate the distribution of ratios of which some were cut; those beyond the longest count as twice that."""
    points, weights, surviving = list[float](), list[float](), 1.0
    ordered = sorted(rows)
    for place, (ratio, cut) in enumerate(ordered):
        if cut:
            continue
        share = surviving / (len(ordered) - place)
        surviving -= share
        points.append(ratio)
        weights.append(share)
    if surviving > 1e-9:
        points.append(2.0 * ordered[-1][0])
        weights.append(surviving)
    return LengthDistribution(points, weights)
