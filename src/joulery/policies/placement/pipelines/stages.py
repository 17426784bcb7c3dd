"""Consecutive units cut into pipeline stages so that the slowest is as fast as can be (AlpaServe, section 4.1)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from joulery.domain.errors import ConfigError, InfeasibleError


@dataclass(frozen=True, slots=True)
class Stages:
    """A cut.

    Attributes:
        bounds: First unit of each stage, and the number of units at the end.
        latency_s: Time of each stage, what it receives included.
    """

    bounds: tuple[int, ...]
    latency_s: tuple[float, ...]

    @property
    def slowest_s(self) -> float:
        """Time of the slowest stage: what limits the rate."""
        return max(self.latency_s)


def split_stages(latency_s: Sequence[float], stages: int, transfer_s: Sequence[float] = ()) -> Stages:
    """The cut of units into non-empty stages whose slowest is fastest.

    ``F(s, k) = min_i max(F(s-1, i), receive(i) + lat(i..k))``, exactly, in O(stages · units²).

    Args:
        latency_s: Time of each unit, >= 0, in order.
        stages: How many stages, >= 1.
        transfer_s: Time to receive what unit ``i + 1`` needs when a stage begins there, one fewer than units; free when
            empty.

    Raises:
        ConfigError: No units, a time below 0, or lengths that do not fit.
        InfeasibleError: More stages than units.
    """
    times = np.asarray(latency_s, np.float64)
    n = len(times)
    receive = np.zeros(max(n - 1, 0)) if not len(transfer_s) else np.asarray(transfer_s, np.float64)
    if n == 0 or stages < 1 or len(receive) != n - 1 or not bool(np.all(times >= 0) and np.all(receive >= 0)):
        raise ConfigError(
            "units cannot be cut into stages",
            got=f"{n} units, {len(receive)} transfers, {stages} stages",
            expected="one unit or more, a transfer between neighbours, one stage or more, no time below 0",
        )
    if stages > n:
        raise InfeasibleError(
            f"{n} units cannot fill {stages} stages", binding="units", nearest=n, hint="ask for fewer stages"
        )
    enter = np.concatenate(([0.0], receive))
    total = np.concatenate(([0.0], np.cumsum(times)))
    # cost[i, k]: a stage of the units i .. k - 1
    cost = total[None, :] - total[:n, None] + enter[:, None]
    cost[np.arange(n)[:, None] >= np.arange(n + 1)[None, :]] = np.inf
    best = np.full(n + 1, np.inf)
    best[0] = 0.0
    starts = []
    for _ in range(stages):
        slowest = np.maximum(best[:n, None], cost)
        starts.append(slowest.argmin(axis=0))
        best = slowest.min(axis=0)
    bounds = [n]
    for start in reversed(starts):
        bounds.append(int(start[bounds[-1]]))
    bounds.reverse()
    return Stages(tuple(bounds), tuple(float(cost[a, b]) for a, b in itertools.pairwise(bounds)))
