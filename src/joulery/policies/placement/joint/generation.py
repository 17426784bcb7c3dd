"""Patterns for the master problem, and the proof of a lower bound on any plan.

The :class:`~joulery.policies.placement.provisioning.column_generation.Pricer` searches one GPU type at one clock. The
worth of an item is that of its requests at the master's prices, less the cost of their watts and its process's. The
bound scales the prices down until no pattern is worth more than its GPU (Farley, 1990). Dynamic watts do not scale
with the prices, which makes the scaling milder: if no pattern is worth more than ``T`` where its GPU costs ``C``, and
an item's watts cost at least ``ρ`` of what its requests are worth, prices times ``ρ + (1 - ρ) C / T`` are proven.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from joulery.domain.arrays import FloatArray
from joulery.policies.placement.joint.master import Duals, JointMaster
from joulery.policies.placement.joint.problem import JointProblem
from joulery.policies.placement.joint.slice_options import best_partition
from joulery.policies.placement.provisioning.column_generation import Pricer
from joulery.policies.placement.provisioning.packing import NEVER, Pattern

_TRIES = 3
"""Patterns tried for each one wanted; the search lets some through that do not fit."""
_WORTH_RATIO, _DEGENERATE = 1.1, 4
"""Ratio of worth to price of a pattern above which the relaxation counts as degenerate (it falls once enough such
patterns are known), and the factor on the patience for such rounds."""
_LEAST_COST = 1e-9
"""Least cost of a GPU in a search, in units of the objective."""


@dataclass(frozen=True, slots=True)
class JointEffort:
    """Limits on the work of a search: counts rather than seconds, so that the same input gives the same plan.

    Attributes:
        patience: Rounds of column generation that may pass without a gain of ``stall_ratio``.
        stall_ratio: Falls of the relaxation smaller than this count as none.
        beam: Partial patterns kept a level while looking for new patterns.
        patterns: New patterns a round and machine.
        nodes: Partial patterns checked for the bound, at most, for each machine.
        gaps: Ratios by which a pattern may be worth more than its GPU, in the searches that raise the bound.
        gap_ratio: Relative gap at which a bound is close enough.
        near: Patterns added at most, for each machine, because a better plan may need them.
        branchings, seconds: Limits of the integer solver; a plan that took all the seconds may differ between runs.
        wide_ratio: Optimality is not sought where a plan is above the relaxation by more than this.
        alike_from: Number of services from which on those that are alike are planned as one kind.
        together: Services, or kinds of them, that are planned at once; more are planned in batches.
    """

    patience: int = 3
    stall_ratio: float = 0.0005
    beam: int = 60
    patterns: int = 30
    nodes: int = 60_000
    gaps: tuple[float, ...] = (0.1, 0.03, 0.01, 0.003)
    gap_ratio: float = 0.002
    near: int = 400
    branchings: int = 500
    seconds: float = 20.0
    wide_ratio: float = 1.0
    alike_from: int = 25
    together: int = 96


class JointProof(NamedTuple):
    """A bound and the prices that prove it."""

    value: float
    duals: Duals


class JointGenerator:
    """Patterns, prices and bounds of one problem.

    Attributes:
        master: The patterns so far.
    """

    def __init__(self, problem: JointProblem, effort: JointEffort) -> None:
        self.problem, self.effort = problem, effort
        self.master = JointMaster(problem)
        shared = [at for at, p in enumerate(problem.packings) if bool(np.any(p.alone < NEVER))]
        self._pricers = {at: Pricer(problem.packings[at], problem.copies(at)) for at in shared}
        self._gain = np.array([problem.gain(item) for item in problem.items])
        self._rate = np.array([item.rate_rps for item in problem.items])
        self._service = np.array([item.service for item in problem.items])
        for machine, packing in enumerate(problem.packings):
            for item in np.flatnonzero(packing.alone < NEVER).tolist():
                self.add(machine, (item,))

    def generate(self, duals: Duals, gpus: int | None = None) -> Duals:
        """Add patterns until a narrow search finds none worth its GPU, or the relaxation hardly falls any more.

        Args:
            duals: Prices to begin with.
            gpus: How many GPUs there are in all; None for any number.
        """
        stale, best, worth, patience = 0, duals.value, 0.0, self.effort.patience
        while stale < patience * (_DEGENERATE if worth > _WORTH_RATIO else 1) and not self.problem.request.alone:
            worth = 0.0
            for machine in self._pricers:
                price = self._price(machine, duals)
                found = self._pricers[machine].search(
                    self._values(machine, duals), price * (1 + 1e-6), beam=self.effort.beam
                )
                added = self._add_some(machine, found.patterns, self.effort.patterns)
                worth = max([worth, *(found.values[at] / price for at in added[:1])])
            if not worth:
                break
            duals = self.master.relax(gpus)
            fell = duals.value < best * (1 - self.effort.stall_ratio)
            stale, best = (0, duals.value) if fell else (stale + 1, best)
        return duals

    def enrich(self, duals: Duals, slack: float) -> bool:
        """Add patterns whose GPU costs at most ``slack`` more than they are worth.

        A plan that is better than one at ``duals.value + slack`` has no other patterns.

        Returns:
            Whether all such patterns are known now, or proven not to fit.
        """
        complete = True
        for machine in self._pricers:
            packing = self.problem.packings[machine]
            if self.problem.request.alone:
                continue
            threshold = self._price(machine, duals) - slack * (1 + 1e-9) - _LEAST_COST
            pricer, values = self._pricers[machine], self._values(machine, duals)
            found = pricer.search(values, threshold, nodes_max=self.effort.nodes)
            if not found.complete or len(found.patterns) > _TRIES * self.effort.near:
                found = pricer.search(values, threshold, beam=4 * self.effort.beam)
                complete = False
                self._add_some(machine, found.patterns, self.effort.near)
                continue
            self._add_some(machine, found.patterns, len(found.patterns))
            complete = complete and not any(pattern in packing.unsure for pattern in found.patterns)
        return complete

    def prove(self, duals: Duals, gap_ratio: float) -> tuple[JointProof | None, bool]:
        """A bound from a complete search, and whether that search found patterns that lower the relaxation.

        Args:
            duals: The prices to prove with.
            gap_ratio: Ratio by which a pattern may be worth more than its GPU; it lowers the bound by less than that.

        Returns:
            The proof, None when the search was given up; whether patterns were added.
        """
        scale, added = 1.0, 0
        for machine in self._pricers:
            packing = self.problem.packings[machine]
            price, values = self._price(machine, duals), self._values(machine, duals)
            if not bool(np.any(values > 0)):
                continue
            least = self._least_watts_ratio(machine, duals)
            if self.problem.request.alone:
                scale = min(scale, least + (1 - least) * price / max(price, float(values.max())))
                continue
            threshold = price * (1 + gap_ratio)
            found = self._pricers[machine].search(values, threshold, nodes_max=self.effort.nodes)
            if not found.complete:
                return None, added > 0
            possible = (
                value for value, one in zip(found.values, found.patterns, strict=True) if not packing.impossible(one)
            )
            worth = max(threshold, next(possible, 0.0))
            scale = min(scale, least + (1 - least) * price / worth)
            added += len(self._add_some(machine, found.patterns, self.effort.patterns))
        return self._proof(duals, min(scale, self._partition_scale(duals))), added > 0

    def _partition_scale(self, duals: Duals) -> float:
        """The scale of the prices at which no partitioned GPU is worth more than its price: 1 at the relaxation's."""
        problem, scale = self.problem, 1.0
        per_w = problem.objective.per_w + duals.power
        for machine in dict.fromkeys(partition.machine for partition in problem.partitions):
            partitions = [partition.counts for partition in problem.partitions if partition.machine == machine]
            best, least = [0.0] * len(partitions[0]), 1.0
            for one in problem.slices:
                if one.machine != machine:
                    continue
                each = float(duals.demand[one.service] + duals.accuracy[one.service] * problem.gain(one))
                worth, watts = each * one.capacity_rps, per_w * one.request_j * one.capacity_rps
                if worth > watts:
                    best[one.profile] = max(best[one.profile], worth - watts)
                    least = min(least, watts / worth)
            price, worth = self._price(machine, duals), best_partition(partitions, best)
            if worth > price:
                scale = min(scale, least + (1 - least) * price / worth)
        return scale

    def _proof(self, duals: Duals, scale: float) -> JointProof:
        """The bound at scaled prices, as :class:`~joulery.domain.gpu.optimum.PlanCertificate` defines it."""
        problem = self.problem
        scaled = duals._replace(demand=duals.demand * scale, accuracy=duals.accuracy * scale)
        value = float(problem.rates_rps @ scaled.demand) - duals.power * (problem.power_cap_w or 0.0)
        for price, kind in zip(duals.pool.tolist(), problem.fleet, strict=True):
            if kind.gpu_type.available is not None:
                value -= price * kind.gpu_type.available
        return JointProof(value, scaled)

    def _worth(self, duals: Duals) -> FloatArray:
        """Worth of the requests of each item before their watts, float64[items]."""
        each = duals.demand[self._service] + duals.accuracy[self._service] * self._gain
        return np.asarray(each * self._rate, np.float64)

    def _watts(self, machine: int, duals: Duals) -> tuple[FloatArray, FloatArray]:
        """Cost of the watts of each item's requests and of its process, float64[items] each."""
        problem = self.problem
        per_w = problem.objective.per_w + duals.power
        return per_w * problem.request_j[machine] * self._rate, per_w * problem.overhead_w[machine]

    def _values(self, machine: int, duals: Duals) -> FloatArray:
        """Worth of each item on a machine, net of its watts, float64[items]."""
        requests, process = self._watts(machine, duals)
        return np.asarray(np.maximum(self._worth(duals) - requests, 0.0) - process, np.float64)

    def _least_watts_ratio(self, machine: int, duals: Duals) -> float:
        """The least that an item's watts cost, as a ratio of what its requests are worth; of items worth anything."""
        worth, (requests, process) = self._worth(duals), self._watts(machine, duals)
        some = worth - requests - process > 0
        return float(np.min((requests + process)[some] / worth[some], initial=1.0)) if bool(some.any()) else 0.0

    def _price(self, machine: int, duals: Duals) -> float:
        """Cost of an empty GPU at these prices."""
        problem = self.problem
        fleet = problem.machines[machine].fleet
        standing = float(problem.standing_w[machine])
        price = problem.objective.value(standing, problem.fleet[fleet].gpu_type.usd_per_hour, 1)
        return max(price + duals.power * standing + float(duals.pool[fleet]) - duals.gpu_price, _LEAST_COST)

    def add(self, machine: int, pattern: Pattern) -> bool:
        """Add a pattern to the master problem, if it fits and is new."""
        layout = self.problem.packings[machine].fit(pattern)
        return layout is not None and self.master.add(machine, layout)

    def _add_some(self, machine: int, patterns: tuple[Pattern, ...], most: int) -> list[int]:
        """Add the first of some patterns that fit and are new, at most ``most``; return their positions."""
        added: list[int] = []
        for at, pattern in enumerate(patterns[: _TRIES * most]):
            if self.add(machine, pattern):
                added.append(at)
                if len(added) >= most:
                    break
        return added
