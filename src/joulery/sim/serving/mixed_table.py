"""A service whose GPUs may differ: configurations of all GPUs together, each simulated on its first trial.

The paper describes graphs that add up over GPUs (section 4.2) and searches one GPU's alone. Here the space is the one
it describes: 18,688 or 107,825 configurations of two A100s. These are not tabulated. The oracle searches the rows
that the closed form ranks best.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import overload

import numpy as np

from joulery.domain.arrays import FloatArray
from joulery.domain.errors import ConfigError
from joulery.perf.queues.pull_model import predict
from joulery.policies.placement.pools.problem import Machine, PoolService, edges_of
from joulery.policies.serving.search.annealing import TrialMetrics
from joulery.policies.serving.search.configuration_graph import GraphSpace, summed_odds
from joulery.policies.serving.search.layout_space import LayoutSpace
from joulery.sim.core.streams import Streams
from joulery.sim.placement.pool_trial import judge
from joulery.sim.serving.trial_table import Bench

_SHORTLIST = 60
"""Rows kept for each weight of carbon, by the closed form."""
_WEIGHTS = (0.002, 0.01, 0.03, 0.1, 0.3, 1.0)
"""Joules against accuracy, from accuracy almost alone to joules almost alone."""
_BATCH = 8192


class SimulatedTrials(Sequence[TrialMetrics]):
    """Metrics of each row, simulated at their first use."""

    def __init__(self, service: PoolService, machine: Machine, space: GraphSpace, gpus: int) -> None:
        self._space, self._idle_w = space, gpus * machine.idle_w
        self._judge = judge((service,), (machine,), Streams(0), requests=2000)
        self._known: dict[int, TrialMetrics] = {}

    def __len__(self) -> int:
        return len(self._space)

    @overload
    def __getitem__(self, row: int, /) -> TrialMetrics: ...
    @overload
    def __getitem__(self, row: slice, /) -> Sequence[TrialMetrics]: ...
    def __getitem__(self, row: int | slice, /) -> TrialMetrics | Sequence[TrialMetrics]:
        """The metrics of a row."""
        if isinstance(row, slice):
            return [self[at] for at in range(*row.indices(len(self)))]
        if row not in self._known:
            instances = self._space.instances(self._space.graphs[row])
            used = tuple((0, profile, variant) for variant, profile in instances)
            self._known[row] = self._judge(0, used, self._idle_w)
        return self._known[row]


class _Powered(Sequence[float]):
    """Joules a request of each row while every GPU of the baseline is powered."""

    def __init__(self, tried: SimulatedTrials, more_j: float) -> None:
        self._tried, self._more_j = tried, more_j

    def __len__(self) -> int:
        return len(self._tried)

    @overload
    def __getitem__(self, row: int, /) -> float: ...
    @overload
    def __getitem__(self, row: slice, /) -> Sequence[float]: ...
    def __getitem__(self, row: int | slice, /) -> float | Sequence[float]:
        """Joules a request."""
        if isinstance(row, slice):
            return [self[at] for at in range(*row.indices(len(self)))]
        return self._tried[row].energy_j + self._more_j


def mixed(one: Bench) -> Bench:
    """The same service with a configuration of its own for each GPU.

    Raises:
        ConfigError: Only a table of the service is known, not what a request costs; or it runs on more than two GPUs.
    """
    if one.costs is None:
        raise ConfigError(
            f"GPUs that differ need what a request of {one.table.service} costs, not only a table of trials",
            hint="put profile.csv beside model.json, or leave out --profile",
        )
    if one.table.gpus != 2:
        raise ConfigError(
            "every configuration of all GPUs is listed for two GPUs",
            got=f"{one.table.gpus} GPUs",
            hint="for more use the scheme columns",
        )
    space = one.space.plus(one.space)
    odds = summed_odds(space, one.space, one.odds, one.space, one.odds)
    costs, rate = one.costs, 1.0 / one.interarrival_s
    machine = Machine(one.menu.gpu, one.menu, costs.idle_w)
    service = PoolService(one.table.service, costs, rate, one.table.base_latency_s, one.table.base_accuracy_ratio)
    tried = SimulatedTrials(service, machine, space, one.table.gpus)
    more_j = (one.pool_gpus - one.table.gpus) * costs.idle_w / rate
    return Bench(
        table=one.table,
        layouts=LayoutSpace(space, one.menu, 1, odds),
        metrics=tried,
        same_gpus_j=_Powered(tried, more_j),
        interarrival_s=one.interarrival_s,
        accuracy_ratio=one.accuracy_ratio,
        costs=costs,
        shortlist=_shortlist(space, service, machine, one.table.base_energy_j),
    )


def _shortlist(space: GraphSpace, service: PoolService, machine: Machine, base_j: float) -> tuple[int, ...]:
    """The rows that the closed form finds best at some weight of carbon, within the limit or a little above it."""
    latency, energy, accuracy = _in_closed_form(space, service, machine)
    near = latency <= 1.05 * service.limit_s
    found: set[int] = set()
    for weight in _WEIGHTS:
        score = -weight * energy / base_j + (1 - weight) * accuracy / service.base_accuracy_ratio
        ranked = np.argsort(np.where(near, -score, math.inf), kind="stable")[:_SHORTLIST]
        found.update(int(row) for row in ranked if near[row])
    return tuple(sorted(found))


def _in_closed_form(
    space: GraphSpace, service: PoolService, machine: Machine
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Latency, dynamic joules and accuracy of every row."""
    edges, costs = edges_of(service, (machine,)), service.costs
    columns = [
        space.variants.index(variant) * len(space.profiles) + space.profiles.index(profile)
        for variant, profile in zip(edges.variant, edges.profile, strict=True)
    ]
    parts = []
    for begin in range(0, len(space), _BATCH):
        counts = space.graphs[begin : begin + _BATCH][:, columns].astype(np.float64)
        one = np.ones(len(counts))
        found = predict(
            counts,
            edges.host_s,
            edges.gpu_s,
            costs.contention * one,
            costs.jitter_s * one,
            costs.size_cv * one,
            service.rate_rps * one,
        )
        parts.append((found.latency_s, found.share @ edges.joules, found.share @ edges.accuracy_ratio))
    latency, energy, accuracy = (np.concatenate(each) for each in zip(*parts, strict=True))
    return latency, energy, accuracy
