"""Counts the work of a job on several nodes by its slowest node, because the other nodes wait for that one.

Nodes differ in their GPUs, so their counts of work cannot be compared. Each is measured at full power first. From then
on the work of the job is counted in seconds at full power: in every interval the lowest speed of a node, as a share of
its own speed at full power, times the length of the interval.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

_NONE: Mapping[str, tuple[float, float]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class SlowestRank:
    """Work rates of the nodes of one job.

    Attributes:
        trial_s: How long the nodes are measured at full power.
        work_s: The job's work, seconds at full power; it grows once all nodes are measured.
        at_s: Time at which the work reached that value, by the clock of the node that counts; NaN before the first
            observation.
        rates: Work a second of each node at full power; empty until all are measured.
    """

    trial_s: float
    work_s: float = 0.0
    at_s: float = math.nan
    rates: Mapping[str, float] = field(default_factory=dict)
    _last: Mapping[str, tuple[float, float]] = field(default_factory=lambda: _NONE)
    _full: Mapping[str, tuple[float, float]] = field(default_factory=lambda: _NONE)

    @property
    def known(self) -> bool:
        """Whether all nodes are measured."""
        return bool(self.rates)

    def seen(self, now_s: float, nodes: Mapping[str, tuple[float, float]], *, full: bool) -> SlowestRank:
        """The state after an observation.

        An interval ends when every node has reported again; a node that reports less work than before, an earlier time,
        or other nodes restart the measurement.

        Args:
            now_s: Time, by the clock of the node that counts.
            nodes: Time of each node by its own clock, and its work so far in a unit of its own.
            full: Whether all nodes have had full power since the last observation.
        """
        last = self._last
        begun = replace(SlowestRank(self.trial_s), at_s=now_s, _last=dict(nodes))
        if nodes.keys() != last.keys():
            return begun
        grown = {name: (at_s - last[name][0], work - last[name][1]) for name, (at_s, work) in nodes.items()}
        if any(not (elapsed_s >= 0 and work >= 0) for elapsed_s, work in grown.values()):
            return begun
        if any(elapsed_s == 0 for elapsed_s, _ in grown.values()):
            return self
        moved = replace(self, at_s=now_s, _last=dict(nodes))
        if self.known:
            speed = min(work / elapsed_s / self.rates[name] for name, (elapsed_s, work) in grown.items())
            return replace(moved, work_s=self.work_s + speed * (now_s - self.at_s))
        if not full:
            return replace(moved, _full=_NONE)
        before = self._full or dict.fromkeys(nodes, (0.0, 0.0))
        sums = {name: (before[name][0] + grown[name][0], before[name][1] + grown[name][1]) for name in nodes}
        done = all(elapsed_s >= self.trial_s and work > 0 for elapsed_s, work in sums.values())
        rates = {name: work / elapsed_s for name, (elapsed_s, work) in sums.items()} if done else {}
        return replace(moved, _full=sums, rates=rates)
