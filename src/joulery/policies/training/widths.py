"""Chooses the number of GPUs of a job: as many as still pay (NSDI'25, section 5.1), or the cheapest at a price of time.

As published a job grows while its efficiency stays above ``gamma`` of that on its fewest GPUs, and stops at the first
number that does not pay. Efficiency may rise again beyond that number, as from three GPUs to six on nodes of two.

With a **price** of completion time a second of a job on n GPUs costs its power and that price, and does work in
proportion to its speed. The number of GPUs at which work costs least is the job's part of the least energy at a mean
completion time: the price is the Lagrange multiplier of that bound. Efficiency and power are those measured on earlier
jobs of the kind; one job of a kind at a time tries the next number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import fmean
from types import MappingProxyType

import numpy as np

from joulery.domain.arrays import FloatArray, IntArray
from joulery.policies.training.allocation import ClusterView
from joulery.policies.training.queues import TrackedJob

Points = Mapping[int, Mapping[int, float]]
"""A measured figure of each kind of job, by its number of GPUs."""
NO_POINTS: Points = MappingProxyType({})
_TRIED_RATIO = 1.3
"""A kind is not tried on more GPUs where its last number costs more than this multiple of its least cost."""
_KEPT_NARROW_S = 4 * 3600.0
"""From this run time on the hour does not keep a job narrow: the longest jobs would take longest."""
_CHANGED = 0.01
_NEW_WEIGHT = 0.125
"""Weight of a job's measurement of one round in the figure of its kind: an early outlier fades in a few rounds."""
_MOST_SWING = 4.0
"""Largest factor by which the hour changes the price."""
_LONG_S = 36_000.0
_LONG_MARGIN = 0.05


@dataclass(frozen=True, slots=True)
class WidthPrices:
    """Cost of a second of a job beside its energy.

    Attributes:
        completion_w: Price of a second of its completion time, W.
        gpu_w: Price of a second of one of its GPUs while other jobs wait for it, W.
        hour_ratio: Mean intensity over that of now: in a dirty hour energy counts for more, and so time for less.
    """

    completion_w: float
    gpu_w: float = 0.0
    hour_ratio: float = 1.0

    def cost(self, degradation: float, job_w: float, gpus: int) -> float:
        """Cost of work on a number of GPUs, relative to its energy on the fewest."""
        return (1.0 + (self.completion_w + self.gpu_w * gpus) * self.hour_ratio / job_w) / degradation


@dataclass(frozen=True, slots=True, eq=False)
class JobWidths:
    """The rule by which jobs are sized in one round.

    Attributes:
        profile: Degradation of each kind by number of GPUs, as far as jobs of it were measured.
        power_w: Power of a job of each kind by number of GPUs, W.
        gamma: Least degradation at which a job still grows.
        cap: Most GPUs of a job.
        node_gpus: Beyond one node a job grows by whole nodes of this many GPUs; None to grow GPU by GPU.
        fixed_gpus: Number of GPUs of every job; None to scale.
        prices: Prices by which kinds that were measured are sized; None for gamma.
    """

    profile: Points
    power_w: Points
    gamma: float
    cap: int
    node_gpus: int | None = None
    fixed_gpus: int | None = None
    prices: WidthPrices | None = None
    trying: set[int] = field(default_factory=set)
    """Kinds of which a job tries a new number of GPUs in this round."""

    def newcomer(self, kind: int, most: int, least: int = 1) -> TrackedJob:
        """The record of a new job: on its fewest GPUs, or on as many as the profile of its kind supports."""
        most = max(least, min(most, self.cap))
        if self.fixed_gpus is not None:
            return TrackedJob(True, max(least, min(self.fixed_gpus, most)))
        if (costs := self._costs(kind, least, most, self.prices)) and self.prices is not None:
            return TrackedJob(self._untried(kind, least, most) is not None, min(costs, key=lambda n: (costs[n], n)))
        points, gpus = self.profile.get(kind, {}), least
        while (wider := self.wider(gpus)) <= most and points.get(wider, 0.0) >= self.gamma:
            gpus = wider
        return TrackedJob(wider <= most and wider not in points, gpus)

    def grown(
        self, known: TrackedJob, kind: int, most: int, remaining_s: float, restart_s: float, least: int = 1
    ) -> TrackedJob:
        """The record of a job that was measured: on more GPUs, or in the lower queue with the best number."""
        if self.fixed_gpus is not None:
            return replace(known, upper=False)
        most = max(least, min(most, self.cap))
        if self.prices is not None and (costs := self._costs(kind, least, most, self.prices)):
            untried = self._untried(kind, least, most)
            tried_now = kind in self.trying and len(costs) > 1  # every job may be the first to grow
            if untried is None or tried_now or remaining_s / known.gpus < 2.0 * restart_s:
                return replace(known, upper=False, gpus=min(costs, key=lambda n: (costs[n], n)))
            self.trying.add(kind)
            return replace(known, gpus=untried)
        bar = self.gamma - (_LONG_MARGIN if remaining_s > _LONG_S else 0.0)
        if known.degradation < bar:
            return replace(known, upper=False, gpus=max(least, self.narrower(known.gpus)))
        wider = self.wider(known.gpus)
        if wider > most or remaining_s / known.gpus < 2.0 * restart_s:
            return replace(known, upper=False)
        return replace(known, gpus=wider)

    def wider(self, gpus: int) -> int:
        """The next number of GPUs a job grows to."""
        if self.node_gpus is None or gpus < self.node_gpus:
            return gpus + 1
        return (gpus // self.node_gpus + 1) * self.node_gpus

    def narrower(self, gpus: int) -> int:
        """The next smaller number of GPUs."""
        if self.node_gpus is None or gpus <= self.node_gpus:
            return gpus - 1
        return (-(-gpus // self.node_gpus) - 1) * self.node_gpus

    def within(self, gpus: int, room: int, least: int) -> int:
        """The largest number of GPUs, at most ``room``, that a job on ``gpus`` may shrink to; at least ``least``."""
        while gpus > room:
            gpus = self.narrower(gpus)
        return max(gpus, least)

    def wanted(self, kind: int, most: int, least: int, executed_s: float) -> int:
        """The number of GPUs for a settled job; a dirty hour does not keep a long job narrow."""
        if self.prices is not None and self.prices.hour_ratio < 1 and executed_s >= _KEPT_NARROW_S:
            return replace(self, prices=replace(self.prices, hour_ratio=1.0)).newcomer(kind, most, least).gpus
        return self.newcomer(kind, most, least).gpus

    def _costs(self, kind: int, least: int, most: int, prices: WidthPrices | None) -> dict[int, float]:
        """Cost of work on each number of GPUs that was measured; empty for kinds that were not."""
        if prices is None:
            return {}
        points, power_w = self.profile.get(kind, {}), self.power_w.get(kind, {})
        return {n: prices.cost(points[n], power_w[n], n) for n in points if least <= n <= most and n in power_w}

    def _untried(self, kind: int, least: int, most: int) -> int | None:
        """The next number of GPUs to try; None where all are known, or the last one cost far more than the best."""
        assert self.prices is not None
        # What is tried must not depend on the hour, or it would be tried again in the next one.
        costs = self._costs(kind, least, most, WidthPrices(self.prices.completion_w))
        gpus, lowest = least, float("inf")
        while gpus <= most:
            if gpus not in costs:
                return gpus
            if costs[gpus] > _TRIED_RATIO * lowest:
                return None
            lowest = min(lowest, costs[gpus])
            gpus = self.wider(gpus)
        return None


def prices(price_ratio: float | None, power_w: Points, view: ClusterView, waiting: int) -> WidthPrices | None:
    """The prices of a round.

    Args:
        price_ratio: Price of a second of completion time, as a share of what the average kind draws on its fewest GPUs;
            None for no prices.
        power_w: Power of each kind by number of GPUs.
        view: The cluster.
        waiting: Number of jobs that wait for GPUs: a second of a GPU delays each of them for its part of a second.
    """
    if price_ratio is None or not power_w:
        return None
    completion_w = price_ratio * fmean(points[min(points)] for points in power_w.values())
    hour_ratio = 1.0
    if view.hour is not None:
        hour_ratio = view.mean_g_per_kwh / max(view.g_per_kwh, view.mean_g_per_kwh / _MOST_SWING)
    return WidthPrices(completion_w, completion_w * waiting / view.gpus, max(hour_ratio, 1.0 / _MOST_SWING))


def with_measured(profile: Points, view: ClusterView) -> Points:
    """The degradation of each kind, updated by this round's jobs; a known figure follows slowly."""
    rows = np.flatnonzero((view.kind >= 0) & (view.running > 0) & ~np.isnan(view.degradation))
    return _followed(profile, view, rows, view.degradation)


def with_power(power_w: Points, view: ClusterView) -> Points:
    """The power of each kind, updated by this round's jobs; a known power follows slowly."""
    if view.job_w is None:
        return power_w
    rows = np.flatnonzero((view.kind >= 0) & (view.running > 0) & (view.job_w > 0) & ~np.isnan(view.degradation))
    return _followed(power_w, view, rows, view.job_w)


def _followed(points: Points, view: ClusterView, rows: IntArray, values: FloatArray) -> Points:
    """The points with those of some rows of a view: new ones as they are, known ones moved towards them."""
    learnt: dict[int, dict[int, float]] = {}
    kinds, counts = view.kind[rows].tolist(), view.running[rows].tolist()
    for kind, gpus, value in zip(kinds, counts, values[rows].tolist(), strict=True):
        own = learnt.get(kind, points.get(kind, {}))
        known = own.get(gpus, 0.0)
        if abs(value - known) > _CHANGED * known:
            learnt[kind] = {**own, gpus: known + _NEW_WEIGHT * (value - known) if known else value}
    return MappingProxyType({**points, **learnt}) if learnt else points
