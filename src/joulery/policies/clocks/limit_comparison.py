"""Effect of a power limit on requests: windows under it against windows at full power.

A window holds the work that was answered in it, by kind. A kind is requests of one model variant; where they differ in
size, such as in the tokens they generate, time counts for each unit of size. Two windows are compared on the kinds that
occur in both, weighted by the work of the limited one (direct standardisation), so that another mix of kinds does not
count as a slowdown. Joules are compared for the same work, where the two windows did about the same amount.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

_FADE = 0.5
"""Weight of earlier windows at full power against the newest."""
_MATCHED = 1.5
"""Windows whose work differs by more than this factor are not compared by joules for the same work."""
_COVERED = 0.8
"""Share of the limited window's service time whose kinds must occur in the window at full power."""
_WITHIN = {4: 4.541, 6: 3.365, 9: 2.896, 14: 2.650, 21: 2.528, 32: 2.453, 48: 2.408}
"""Comparisons after which a limit may be found within the bound, and Student's t for each, one-sided 99 %.

Checks after every comparison from 3 to 12, each at 95 %, accept a limit at the bound in 16 % of its trials; these seven
accept it in fewer than 5 % (a test simulates this)."""
_T95 = (math.inf, 6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812, 1.796, 1.782, 1.771, 1.761)
_T95_MORE = 1.76
"""Student's t, one-sided 95 %, by degrees of freedom, and for more: rounded up."""
_HOPELESS = 14
"""Number of comparisons after which a limit whose mean lies beyond the bound is given up."""
_LATEST = (6, 9, 14)
"""Numbers of newest comparisons by which a limit that is kept may be found beyond the bound, at 99 %."""


@dataclass(frozen=True, slots=True)
class WorkTotals:
    """Requests of one kind that were answered.

    Attributes:
        kind: The kind.
        count: Number of requests.
        size: Sum of their sizes; ``count`` where a kind has one size.
        service_s: Sum of their service times, s.
        fresh_count, fresh_size, fresh_s: The same for requests that began after the limit in force was set and had
            settled.
    """

    kind: str
    count: int = 0
    size: float = 0.0
    service_s: float = 0.0
    fresh_count: int = 0
    fresh_size: float = 0.0
    fresh_s: float = 0.0

    @property
    def seconds_a_size(self) -> float:
        """Service time of a unit of size at the limit in force, s; 0 where nothing is known."""
        return self.fresh_s / self.fresh_size if self.fresh_size > 0 else 0.0


def add_totals(first: tuple[WorkTotals, ...], second: tuple[WorkTotals, ...]) -> tuple[WorkTotals, ...]:
    """The sum of the fresh work of both, by kind."""
    found = {one.kind: one for one in first}
    for one in second:
        before = found.get(one.kind, WorkTotals(one.kind))
        found[one.kind] = replace(
            before,
            fresh_count=before.fresh_count + one.fresh_count,
            fresh_size=before.fresh_size + one.fresh_size,
            fresh_s=before.fresh_s + one.fresh_s,
        )
    return tuple(found[kind] for kind in sorted(found))


def faded(work: tuple[WorkTotals, ...]) -> tuple[WorkTotals, ...]:
    """Earlier work with its reduced weight."""
    return tuple(replace(one, fresh_size=_FADE * one.fresh_size, fresh_s=_FADE * one.fresh_s) for one in work)


@dataclass(frozen=True, slots=True)
class WindowTotals:
    """A window under one limit.

    Attributes:
        from_s: Its beginning, s.
        energy_j: Energy counter at its beginning while it runs; afterwards the energy of its device within it, J.
        elapsed_s: Its length once it has ended.
        work: Requests that began and were answered in it, by kind.
    """

    from_s: float
    energy_j: float
    elapsed_s: float = 0.0
    work: tuple[WorkTotals, ...] = ()

    @property
    def count(self) -> int:
        """Requests answered."""
        return sum(one.fresh_count for one in self.work)

    @property
    def service_s(self) -> float:
        """Sum of the service times of these requests, s."""
        return math.fsum(one.fresh_s for one in self.work)

    @property
    def mean_s(self) -> float:
        """Mean service time of these requests, s; 0 without any."""
        return self.service_s / self.count if self.count else 0.0

    def with_answers(self, answers: tuple[WorkTotals, ...]) -> WindowTotals:
        """The window with further answers."""
        return replace(self, work=add_totals(self.work, answers)) if answers else self

    def ended(self, now_s: float, energy_j: float) -> WindowTotals:
        """The complete window, with the energy since its beginning."""
        return replace(self, elapsed_s=now_s - self.from_s, energy_j=energy_j - self.energy_j)


@dataclass(frozen=True, slots=True)
class LimitComparison:
    """Comparison of two neighbouring windows, as logarithms of limit over full power.

    Attributes:
        slowdown: Logarithm for the service time of the same work; NaN where the windows share too little.
        energy: Logarithm for the joules of the same work; NaN where they did not do about the same amount.
    """

    MOST: ClassVar[int] = 48
    """Number of comparisons that count, the newest."""

    slowdown: float
    energy: float

    @property
    def usable(self) -> bool:
        """Whether both logarithms are known."""
        return math.isfinite(self.slowdown) and math.isfinite(self.energy)


def compare_windows(full: WindowTotals, limited: WindowTotals) -> LimitComparison:
    """The comparison of a window at full power and one under a limit."""
    base = {one.kind: one.seconds_a_size for one in full.work}
    shared = [one for one in limited.work if base.get(one.kind, 0.0) > 0 and one.fresh_size > 0]
    took_s = math.fsum(one.fresh_s for one in shared)
    at_full_s = math.fsum(one.fresh_size * base[one.kind] for one in shared)
    if not (took_s > 0 and at_full_s > 0 and took_s >= _COVERED * limited.service_s):
        return LimitComparison(math.nan, math.nan)
    slowdown = math.log(took_s / at_full_s)
    per_s = (at_full_s / limited.elapsed_s) / (full.service_s / full.elapsed_s)
    if not 1 / _MATCHED <= per_s <= _MATCHED:
        return LimitComparison(slowdown, math.nan)
    power = (limited.energy_j / limited.elapsed_s) / (full.energy_j / full.elapsed_s)
    return LimitComparison(slowdown, math.log(power / per_s))


@dataclass(frozen=True, slots=True)
class LimitRecord:
    """All comparisons of one limit with full power.

    Attributes:
        ratio: The limit, as a share of full power.
        comparisons: The newest ones, oldest first.
    """

    ratio: float
    comparisons: tuple[LimitComparison, ...] = ()

    LEAST: ClassVar[int] = 3
    """Number of comparisons before anything is concluded."""

    def with_comparison(self, one: LimitComparison) -> LimitRecord:
        """The record with a further comparison, if it is usable."""
        if not one.usable:
            return self
        return replace(self, comparisons=(*self.comparisons, one)[-LimitComparison.MOST :])

    @property
    def slowdown(self) -> float:
        """Service time over that at full power: the geometric mean; 1 without a comparison."""
        return math.exp(_mean([one.slowdown for one in self.comparisons]))

    @property
    def energy_ratio(self) -> float:
        """Joules for the same work over those at full power: the geometric mean; 1 without a comparison."""
        return math.exp(_mean([one.energy for one in self.comparisons]))

    def cost(self, eta: float) -> float:
        """Cost of the same work against full power, which costs 1."""
        return eta * self.energy_ratio + (1 - eta) * self.slowdown

    def interval(self) -> tuple[float, float]:
        """The slowdown's interval, each end at 95 %; infinite with too few comparisons."""
        if len(self.comparisons) < self.LEAST:
            return 0.0, math.inf
        number = len(self.comparisons)
        return self._ends(number, _T95[number - 1] if number <= len(_T95) else _T95_MORE)

    def _ends(self, latest: int, quantile: float) -> tuple[float, float]:
        """The slowdown's interval by the newest comparisons."""
        found = [one.slowdown for one in self.comparisons[-latest:]]
        mean = _mean(found)
        spread = math.sqrt(math.fsum((one - mean) ** 2 for one in found) / (len(found) - 1))
        half = quantile * spread / math.sqrt(len(found))
        return math.exp(mean - half), math.exp(mean + half)

    def verdict(self, max_slowdown: float) -> bool | None:
        """Whether the slowdown lies within the bound; None while that is not certain.

        A limit beyond the bound is found within it in fewer than 5 % of its trials.
        """
        number = len(self.comparisons)
        if (quantile := _WITHIN.get(number)) is not None and self._ends(number, quantile)[1] <= max_slowdown:
            return True
        if self.interval()[0] > max_slowdown or number >= LimitComparison.MOST:
            return False
        return False if number >= _HOPELESS and self.slowdown > max_slowdown else None

    def kept(self, max_slowdown: float) -> bool:
        """Whether a limit that was within the bound may be kept: the mean slowdown is within it still."""
        return len(self.comparisons) >= self.LEAST and self.slowdown <= max_slowdown

    def lately_slower(self, max_slowdown: float) -> bool:
        """Whether the latest comparisons lie beyond the bound for certain; no limit is given up by chance alone."""
        enough = [number for number in _LATEST if len(self.comparisons) >= number]
        return any(self._ends(number, _WITHIN[number])[0] > max_slowdown for number in enough)


FULL = LimitRecord(1.0)
"""The record of full power, whose cost is 1."""


def _mean(values: list[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0
