"""The restricted master problem: how many GPUs of each known pattern, and which requests go where.

Rows: every service's flows add up to its rate; a flow (service, variant, machine) is no larger than the rate its
instances are provided for; flows weighted by accuracy keep the floor; GPUs of a type stay within the available number;
all watts stay within the cap. Demand is a right-hand side only, so patterns stay valid when demand changes. A request
may go unserved at a prohibitive price, so that there is always a solution.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from joulery.domain.arrays import FloatArray
from joulery.policies.placement.joint.divisions import divisions_of
from joulery.policies.placement.joint.gpu_counts import WholeNumbers, solve_at_once, solve_by_count
from joulery.policies.placement.joint.problem import JointProblem
from joulery.policies.placement.joint.slice_options import SliceOption
from joulery.policies.placement.joint.spread import spread_rows, spread_slices
from joulery.policies.placement.master import SolveStatus, add_row, make_whole, new_model, run
from joulery.policies.placement.provisioning.packing import PackedGpu, Pattern

_UNSERVED = 1e3
"""Price of a request a second that is left out, as a multiple of its cost on a GPU of its own."""
_TINY = 1e-7
"""Requests a second below which a flow is rounding."""


class Duals(NamedTuple):
    """Prices of the rows, each from 0.

    Attributes:
        value: The relaxation's optimum.
        demand: What one more request a second of each service costs, float64[services].
        accuracy: What a request a second costs more for each unit by which its service's accuracy floor is raised.
        pool: What one more GPU of each type would save, float64[types].
        power: What one more watt under the cap would save.
        unserved: Requests a second left out, float64[services].
        gpu_price: What one more GPU costs where their number is fixed; below 0 where more of them save.
        gpus: Number of GPUs, partitioned ones included.
    """

    value: float
    demand: FloatArray
    accuracy: FloatArray
    pool: FloatArray
    power: float
    unserved: FloatArray
    gpu_price: float = 0.0
    gpus: float = 0.0


class KnownPattern(NamedTuple):
    """A pattern of the master problem: its machine and its layout."""

    machine: int
    layout: PackedGpu

    @property
    def key(self) -> tuple[int, Pattern]:
        """Identity of the pattern."""
        return self.machine, self.layout.pattern


class Flow(NamedTuple):
    """Requests of a service answered by one variant on one machine; on slices, by one option (-1 for shares)."""

    service: int
    variant: int
    machine: int
    option: int = -1


class JointSolution(NamedTuple):
    """A solution in whole GPUs.

    Attributes:
        counts: Number of GPUs of each known pattern, by its index; zeros are left out.
        flows: Requests a second of every flow.
        value: Its objective.
        unserved: Requests a second left out, float64[services].
        status: Proof status of the solver.
        slices: Number of slices that run each option, by its index; zeros are left out.
        partitions: Number of GPUs with each MIG partition, by its index; zeros are left out.
        proven: Lower bound over the same columns, by the solver's branch and bound.
        divisions: Number of services that each division serves, by its index; of services that stand for several.
        spread: Number of slices used of each :class:`SpreadSlices`, by its index; where replicas stay apart.
    """

    counts: Mapping[int, int]
    flows: Mapping[Flow, float]
    value: float
    unserved: FloatArray
    status: SolveStatus
    slices: Mapping[int, int] = {}
    partitions: Mapping[int, int] = {}
    proven: float = 0.0
    divisions: Mapping[int, int] = {}
    spread: Mapping[int, int] = {}


class SliceMoves(NamedTuple):
    """Running slices by the shape of their instances, and limits on their changes.

    Attributes:
        shapes: Indices of the options of one shape, and how many slices run it.
        most: Most slices that may be started or stopped.
        slices: Fixed number of slices that run each option, by its index, 0 for all others; not fixed where empty.
        partitions: Fixed number of GPUs with each partition, by its index, 0 for all others; not fixed where empty.
    """

    shapes: tuple[tuple[tuple[int, ...], int], ...]
    most: int
    slices: Mapping[int, int] = {}
    partitions: Mapping[int, int] = {}


class JointMaster:
    """Collects patterns and solves over them.

    Attributes:
        patterns: The patterns, in the order they were added.
        divisions: Ways to serve one of several services that are alike.
        divisions_complete: Whether there are no others.
    """

    def __init__(self, problem: JointProblem) -> None:
        self.problem = problem
        self.patterns: list[KnownPattern] = []
        self._known: set[tuple[int, Pattern]] = set()
        self._flows = _flows_of(problem)
        self._index = {flow: at for at, flow in enumerate(self._flows)}
        self._first = len(self._flows) + len(problem.services)
        self._spread = spread_slices(problem)
        self._layout_count = len(problem.slices) + len(problem.partitions) + len(self._spread)
        self._partitions_end = self._first + len(problem.slices) + len(problem.partitions)
        self._reduced = np.zeros(self._layout_count)
        self._unserved = _unserved_price(problem)
        self.divisions, self.divisions_complete = divisions_of(problem)
        self._lp, self._rows = self._empty()

    def add(self, machine: int, layout: PackedGpu) -> bool:
        """Add a pattern; return False when it was added before."""
        known = KnownPattern(machine, layout)
        if known.key in self._known:
            return False
        self._known.add(known.key)
        self.patterns.append(known)
        self._add_pattern(self._lp, known)
        return True

    def pattern_w(self, known: KnownPattern) -> float:
        """Standing watts of a GPU of a pattern: idle board, host, and the processes without requests."""
        problem = self.problem
        overhead = problem.overhead_w[known.machine]
        return float(problem.standing_w[known.machine]) + math.fsum(overhead[i] for i in known.layout.pattern)

    def pattern_cost(self, known: KnownPattern) -> float:
        """Cost of one GPU of a pattern without requests."""
        problem = self.problem
        kind = problem.fleet[problem.machines[known.machine].fleet].gpu_type
        return problem.objective.value(self.pattern_w(known), kind.usd_per_hour, 1)

    def relax(self, gpus: int | None = None) -> Duals:
        """The linear optimum over the patterns so far; with ``gpus`` GPUs in all, if their number is given."""
        low, high = (0.0, self._lp.inf) if gpus is None else (float(gpus), float(gpus))
        self._lp.changeRowBounds(self._rows.count, low, high)
        run(self._lp)
        problem, solution = self.problem, self._lp.getSolution()
        dual = np.array(solution.row_dual, np.float64)
        services, types = len(problem.services), len(problem.fleet)
        rows = self._rows
        flows = len(self._flows)
        values = np.array(solution.col_value, np.float64)
        self._reduced = np.array(solution.col_dual, np.float64)[self._first : self._first + self._layout_count]
        first_partition = self._first + len(problem.slices)
        power = -dual[rows.power] if problem.power_cap_w is not None else 0.0
        return Duals(
            value=float(self._lp.getInfo().objective_function_value),
            demand=np.maximum(dual[rows.demand : rows.demand + services], 0.0),
            accuracy=np.maximum(dual[rows.floor : rows.floor + services], 0.0),
            pool=np.maximum(-dual[rows.pool : rows.pool + types], 0.0),
            power=max(float(power), 0.0),
            unserved=values[flows : flows + services],
            gpu_price=0.0 if gpus is None else float(dual[rows.count]),
            gpus=float(
                values[first_partition : self._partitions_end].sum() + values[self._first + self._layout_count :].sum()
            ),
        )

    def whole(
        self,
        *,
        gap_ratio: float,
        seconds: float,
        branchings: int,
        slack: float = math.inf,
        beat: float = math.inf,
        moves: SliceMoves | None = None,
    ) -> JointSolution:
        """The best whole numbers over the patterns so far, within the limits on work.

        Args:
            gap_ratio, seconds, branchings: Limits of the solver.
            slack: Slices and partitions that cost more than this beyond their worth, at the prices of the last
                relaxation, are left out: no plan that is less than this above the relaxation has any.
            beat: Cost of the best known solution; without a cheaper one, nothing is returned. Ignored on slices.
            moves: Running slices, and how many of them may change; None for any number.
        """
        mip, _ = self._empty(gap_ratio=gap_ratio, seconds=seconds, nodes=branchings)
        for known in self.patterns:
            self._add_pattern(mip, known)
        first = self._first + self._layout_count
        for at in np.flatnonzero(self._reduced > slack).tolist():
            mip.changeColBounds(self._first + at, 0.0, 0.0)
        last = first + len(self.patterns)
        self._add_divisions(mip, first)
        if moves is not None:
            self._add_moves(mip, moves)
        make_whole(mip, range(self._first, last + len(self.divisions)))
        # Cut GPUs are chosen by slices, whose whole numbers decide: there the solver's own branching proves more.
        found = (
            solve_at_once(mip)
            if self.problem.slices
            else solve_by_count(mip, range(first, last), gap_ratio, branchings, beat)
        )
        if not len(found.values):
            return JointSolution({}, {}, math.inf, self.problem.rates_rps, found.status)
        return self._solution(found)

    def rounded_up(self) -> JointSolution:
        """The relaxation with every GPU and slice rounded up, for use when a limit ended the solver without a plan.

        It serves nothing where services stand for several, or where there are too few GPUs for it.
        """
        model, _ = self._empty()
        for known in self.patterns:
            self._add_pattern(model, known)
        nothing = JointSolution({}, {}, math.inf, self.problem.rates_rps, SolveStatus.OPEN)
        if self.divisions or run(model) is not SolveStatus.OPTIMAL:
            return nothing
        whole = np.ceil(np.array(model.getSolution().col_value, np.float64)[self._first :] - _TINY)
        for at, count in enumerate(whole.tolist(), self._first):
            model.changeColBounds(at, count, count)
        if run(model) is not SolveStatus.OPTIMAL:
            return nothing
        values, value = np.array(model.getSolution().col_value, np.float64), model.getInfo().objective_function_value
        return self._solution(WholeNumbers(values, float(value), 0.0, SolveStatus.OPEN))

    def _solution(self, found: WholeNumbers) -> JointSolution:
        values, value, proven, status = found
        first_partition, first = self._first + len(self.problem.slices), self._first + self._layout_count
        last = first + len(self.patterns)
        unserved = values[len(self._flows) : self._first]
        slices = _counted(values[self._first : first_partition])
        partitions, spread = (
            _counted(values[first_partition : self._partitions_end]),
            _counted(values[self._partitions_end : first]),
        )
        counts, divided = _counted(values[first:last]), _counted(values[last : last + len(self.divisions)])
        flows = {flow: float(x) for flow, x in zip(self._flows, values, strict=False) if x > _TINY}
        return JointSolution(counts, flows, value, unserved, status, slices, partitions, proven, divided, spread)

    def _add_divisions(self, mip: Any, first: int) -> None:
        """Require a division for each of several services that are alike; patterns provide the instances.

        Args:
            mip: The model, its patterns in the columns from ``first`` on.
            first: Index of the first of these columns.
        """
        if not self.divisions:
            return
        last = first + len(self.patterns)
        for _ in self.divisions:
            mip.addCol(0.0, 0.0, mip.inf, 0, np.zeros(0, np.int32), np.zeros(0))
        used: dict[int, dict[int, float]] = defaultdict(dict)
        for at, division in enumerate(self.divisions):
            for item, count in Counter(division.items).items():
                used[item][last + at] = -float(count)
        for at, known in enumerate(self.patterns):
            for item, count in Counter(known.layout.pattern).items():
                if item in used:
                    used[item][first + at] = float(count)
        for entries in used.values():
            add_row(mip, 0.0, mip.inf, list(entries), list(entries.values()))
        for service in sorted({division.service for division in self.divisions}):
            held = self.problem.services[service]
            mine = [last + at for at, division in enumerate(self.divisions) if division.service == service]
            columns = [*mine, len(self._flows) + service]
            add_row(mip, held.count, mip.inf, columns, [*(1.0 for _ in mine), 1 / held.workload.rate_rps])

    def _add_moves(self, mip: Any, moves: SliceMoves) -> None:
        """Limit the slices that are started and stopped to the moves, and fix slices and partitions where given."""
        first, changed = mip.getNumCol(), list[int]()
        for at, (options, running) in enumerate(moves.shapes):
            for i in options:  # slices that run may be more than serve today's rate: stopping one would be a move
                most = max(self._most(self.problem.slices[i]), running)
                mip.changeColBounds(self._first + i, 0.0, float(most))
            changed += [first + 2 * at, first + 2 * at + 1]
            for _ in range(2):
                mip.addCol(0.0, 0.0, mip.inf, 0, np.zeros(0, np.int32), np.zeros(0))
            columns = [*(self._first + i for i in options), *changed[-2:]]
            add_row(mip, float(running), float(running), columns, [*(1.0 for _ in options), -1.0, 1.0])
        add_row(mip, 0.0, float(moves.most), changed, [1.0] * len(changed))
        first_partition = self._first + len(self.problem.slices)
        for start, end, fixed in (
            (self._first, first_partition, moves.slices),
            (first_partition, self._partitions_end, moves.partitions),
        ):
            for at in range(start, end) if fixed else ():
                mip.changeColBounds(at, float(fixed.get(at - start, 0)), float(fixed.get(at - start, 0)))

    def _empty(self, **limits: Any) -> tuple[Any, _Rows]:
        """A model with flows, the price of unserved requests, slices and partitions, before any pattern."""
        problem, model = self.problem, new_model(**limits)
        services, types, flows = len(problem.services), len(problem.fleet), len(self._flows)
        costs = [problem.objective.per_w * self._request_j(flow) for flow in self._flows]
        for cost, most in (
            *((cost, model.inf) for cost in costs),
            *zip(self._unserved.tolist(), problem.rates_rps.tolist(), strict=True),
            *self._layout_columns(),
        ):
            model.addCol(cost, 0.0, most, 0, np.zeros(0, np.int32), np.zeros(0))
        rows = _Rows(flows, services, types)
        for at, flow in enumerate(self._flows):
            provided = [] if flow.option < 0 else [problem.slices[flow.option].capacity_rps]
            add_row(model, 0.0, model.inf, [at, *(self._first + flow.option for _ in provided)], [-1.0, *provided])
        rates = problem.rates_rps.tolist()
        for at in range(services):
            mine = [i for i, flow in enumerate(self._flows) if flow.service == at] + [flows + at]
            add_row(model, rates[at], model.inf, mine, [1.0] * len(mine))
        for at, service in enumerate(problem.services):
            mine = [i for i, flow in enumerate(self._flows) if flow.service == at and service.floor_ratio > 0]
            gains = [service.variants[self._flows[i].variant].accuracy_ratio - service.floor_ratio for i in mine]
            add_row(model, 0.0, model.inf, mine, gains)
        for at, kind in enumerate(problem.fleet):
            most = kind.gpu_type.available
            mine = [self._first + i for i in self._partitions_of(at)]
            add_row(model, -model.inf, model.inf if most is None else float(most), mine, [1.0] * len(mine))
        partitions = list(range(self._first + len(problem.slices), self._partitions_end))
        add_row(model, 0.0, model.inf, partitions, [1.0] * len(partitions))
        if problem.power_cap_w is not None:
            joules = [self._request_j(flow) for flow in self._flows]
            standing = [float(problem.standing_w[partition.machine]) for partition in problem.partitions]
            add_row(model, -model.inf, problem.power_cap_w, [*range(flows), *partitions], [*joules, *standing])
        for entries in [*self._slice_rows(), *spread_rows(problem, self._spread)]:
            add_row(model, 0.0, model.inf, [self._first + i for i in entries], list(entries.values()))
        for some, limit in problem.partition_limits:
            limited = [self._first + len(problem.slices) + at for at in some]
            add_row(model, 0.0, float(limit), limited, [1.0] * len(limited))
        return model, rows

    def _layout_columns(self) -> list[tuple[float, float]]:
        """Cost and greatest number of each slice option, of each partition and of each spread variable."""
        problem = self.problem
        found = [(0.0, float(self._most(one))) for one in problem.slices]
        for partition in problem.partitions:
            kind = problem.fleet[problem.machines[partition.machine].fleet].gpu_type
            cost = problem.objective.value(float(problem.standing_w[partition.machine]), kind.usd_per_hour, 1)
            found.append((cost, math.inf))
        return [*found, *((0.0, math.inf) for _ in self._spread)]

    def _most(self, one: SliceOption) -> int:
        """Number of slices with an option that serve all of its service."""
        return math.ceil(self.problem.services[one.service].workload.rate_rps / one.capacity_rps - 1e-9)

    def _partitions_of(self, fleet: int) -> list[int]:
        """Columns of the partitions of a GPU type, counted from the first slice option."""
        problem = self.problem
        first = len(problem.slices)
        return [
            first + at
            for at, partition in enumerate(problem.partitions)
            if problem.machines[partition.machine].fleet == fleet
        ]

    def _slice_rows(self) -> list[dict[int, float]]:
        """For each machine and kind of slice: the slices that partitions provide, less those that options use."""
        problem, first = self.problem, len(self.problem.slices)
        rows: dict[tuple[int, int], dict[int, float]] = {}
        for at, partition in enumerate(problem.partitions):
            for profile, count in enumerate(partition.counts):
                rows.setdefault((partition.machine, profile), {}).update({first + at: float(count)} if count else {})
        for at, one in enumerate(problem.slices):
            rows[(one.machine, one.profile)][at] = -1.0
        return list(rows.values())

    def _add_pattern(self, model: Any, known: KnownPattern) -> None:
        problem, rows = self.problem, self._rows
        provided: Counter[int] = Counter()
        entries: dict[int, float] = {}
        for item, count in Counter(known.layout.pattern).items():
            each = problem.items[item]
            row = self._index[Flow(each.service, each.variant, known.machine)]
            entries[row] = entries.get(row, 0.0) + count * each.rate_rps
            provided[item] += count
        entries[rows.pool + problem.machines[known.machine].fleet] = 1.0
        entries[rows.count] = 1.0
        if problem.power_cap_w is not None:
            entries[rows.power] = self.pattern_w(known)
        model.addCol(
            self.pattern_cost(known),
            0.0,
            model.inf,
            len(entries),
            np.fromiter(entries, np.int32),
            np.fromiter(entries.values(), np.float64),
        )

    def _request_j(self, flow: Flow) -> float:
        problem = self.problem
        if flow.option >= 0:
            return problem.slices[flow.option].request_j
        machine = problem.machines[flow.machine]
        return machine.clocked.request_j(problem.services[flow.service].variants[flow.variant].model)


def _counted(values: FloatArray) -> dict[int, int]:
    """Whole numbers by index, those above 0."""
    return {at: int(n) for at, n in enumerate(np.rint(values)) if n > 0}


class _Rows:
    """First row of each kind; capacity rows of flows come first."""

    def __init__(self, flows: int, services: int, types: int) -> None:
        self.demand = flows
        self.floor = flows + services
        self.pool = flows + 2 * services
        self.count = self.pool + types
        self.power = self.count + 1


def _flows_of(problem: JointProblem) -> list[Flow]:
    """Every service, variant and machine for which some item fits."""
    found = dict.fromkeys(
        Flow(item.service, item.variant, machine)
        for machine, packing in enumerate(problem.packings)
        for at, item in enumerate(problem.items)
        if packing.alone[at] <= packing.capacity
    )
    slices = [Flow(one.service, one.variant, one.machine, at) for at, one in enumerate(problem.slices)]
    return [*found, *slices]


def _unserved_price(problem: JointProblem) -> FloatArray:
    """A price no plan would pay, per request a second: a multiple of what a GPU of its own would cost, per service."""
    prices = np.zeros(len(problem.services))
    for machine, packing in enumerate(problem.packings):
        kind = problem.fleet[problem.machines[machine].fleet].gpu_type
        for at, item in enumerate(problem.items):
            if packing.alone[at] > packing.capacity:
                continue
            watts = problem.standing_w[machine] + problem.overhead_w[machine, at]
            watts += problem.request_j[machine, at] * item.rate_rps
            cost = problem.objective.value(float(watts), kind.usd_per_hour, 1) / item.rate_rps
            prices[item.service] = max(prices[item.service], cost)
    for one in problem.slices:
        kind = problem.fleet[problem.machines[one.machine].fleet].gpu_type
        watts = problem.standing_w[one.machine] + one.request_j * one.capacity_rps
        cost = problem.objective.value(float(watts), kind.usd_per_hour, 1) / one.capacity_rps
        prices[one.service] = max(prices[one.service], cost)
    return np.asarray(_UNSERVED * np.maximum(prices, 1e-6), np.float64)
