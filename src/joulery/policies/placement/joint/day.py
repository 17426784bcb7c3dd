"""Joint plans for a load that changes: a plan for each period, with the cost of switching in between.

Candidates are the plans for some of the loads. In each period a candidate's GPUs run at the clocks that are best then,
or sleep; nothing on them moves. A shortest path through periods and candidates weighs what a period costs against what
the change before it costs.

A change keeps capacity: a GPU that is opened, or whose instances change, is woken and loaded beside the old one before
the period begins, and the old one is drained after it has begun. Until then the old plan is whole, from then on the new
one. A clock is set at no cost: up before, down after.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from joulery.domain.errors import InfeasibleError
from joulery.domain.gpu.optimum import PlanObjective
from joulery.domain.gpu.plan_moves import PlanMoves, continued, gpu_moves, moves_between, shape_of
from joulery.domain.gpu.provisioning import PlannedGpu, ProvisionPlan
from joulery.policies.placement.joint.following.successors import GpuSuccessor, KeptLimits, groups_of, kept_choices
from joulery.policies.placement.joint.following.warm import (
    WarmEffort,
    choose,
    chosen_gpus,
    narrowed,
    planned_from,
    replan,
)
from joulery.policies.placement.joint.planner import plan_joint
from joulery.policies.placement.joint.problem import JointProblem, JointRequest, JointService, problem_of

_ALIKE_RATIO = 0.04
"""Loads that differ by less have one candidate."""
_NEAR = 0.1
"""Largest difference of rates, in logarithms, for a warm plan: farther away warm plans are much dearer."""
_CANDIDATES = 14
"""Candidates at most."""
_S_PER_H = 3600.0
_LEAST_GAIN_RATIO = 0.01
"""Least gain, as a ratio, for which a running plan is replaced."""


@dataclass(frozen=True, slots=True)
class SwitchingCosts:
    """Durations of changes; the GPU draws its standing watts meanwhile.

    Attributes:
        wake_s, sleep_s: Time from asleep to ready, and from drained to asleep.
        load_s: Start of a process behind a standby.
    """

    wake_s: float = 60.0
    sleep_s: float = 60.0
    load_s: float = 20.0


@dataclass(frozen=True, slots=True)
class LoadPeriod:
    """A period of constant load.

    Attributes:
        from_s, until_s: Its begin and end, seconds from the start.
        request: The request of the period: rates, and the objective at its price of carbon.
    """

    from_s: float
    until_s: float
    request: JointRequest

    @property
    def hours(self) -> float:
        """Its length, hours."""
        return (self.until_s - self.from_s) / _S_PER_H


@dataclass(frozen=True, slots=True)
class DayPeriod:
    """A period and its plan.

    Attributes:
        period: The period with its request.
        plan: The plan that runs.
        moves: Moves from the period before; None for the first.
        value: The plan's objective.
        switching: Cost of the change to it, objective times hours.
        candidate: Index of the candidate whose GPUs run.
    """

    period: LoadPeriod
    plan: ProvisionPlan
    moves: PlanMoves | None
    value: float
    switching: float
    candidate: int


@dataclass(frozen=True, slots=True)
class DayPlan:
    """Plans for a whole series of loads; all totals in objective times hours.

    Attributes:
        periods: The periods, in order.
        peak_total: Total of the plan for the highest load, all the time.
        hourly_total: Total of separate plans for each period, changes included.
        hourly_switching: Cost of the changes in ``hourly_total``.
    """

    periods: tuple[DayPeriod, ...]
    peak_total: float
    hourly_total: float
    hourly_switching: float

    @property
    def total(self) -> float:
        """Cost of the series, changes included."""
        return math.fsum(each.value * each.period.hours + each.switching for each in self.periods)

    @property
    def switching(self) -> float:
        """Cost of the changes in the total."""
        return math.fsum(each.switching for each in self.periods)

    @property
    def against_ratio(self) -> float:
        """Ratio of the total to the lower of ``peak_total`` and ``hourly_total``."""
        return self.total / min(self.peak_total, self.hourly_total)


def switching_cost(
    request: JointRequest, old: Sequence[PlannedGpu], new: Sequence[PlannedGpu], costs: SwitchingCosts
) -> float:
    """Cost of a change, objective times hours; infinite where a type has too few GPUs to keep capacity."""
    moves = moves_between(old, new)
    objective = request.objective
    came, left = list[PlannedGpu](), [old[at] for at in set(range(len(old))) - set(moves.same_gpu)]
    for gpu, source in zip(new, moves.same_gpu, strict=True):
        if source is None:
            came.append(gpu)
        elif sum(gpu_moves([shape_of(e) for e in old[source].instances], [shape_of(e) for e in gpu.instances])):
            came.append(gpu)
            left.append(old[source])
    for kind in request.fleet:
        most = kind.gpu_type.available
        side_by_side = sum(gpu.type == kind.gpu_type.name for gpu in (*old, *came))
        if most is not None and came and side_by_side > most:
            return math.inf

    seconds = [(costs.wake_s + costs.load_s) * _standing_cost(objective, gpu) for gpu in came]
    seconds += [costs.sleep_s * _standing_cost(objective, gpu) for gpu in left]
    return math.fsum(seconds) / _S_PER_H


class PlanGain(NamedTuple):
    """Gain from a change to another plan.

    Attributes:
        held, after: The objective at today's rates, of the plan in force with its clocks, and of the other.
        change: Cost of the change, objective times hours.
        lasts_s: How long the other plan is assumed to last, s.
    """

    held: float
    after: float
    change: float
    lasts_s: float

    @property
    def ratio(self) -> float:
        """Gain an hour, as a ratio of the objective of the plan in force."""
        return (self.held - self.after) / self.held if self.held > 0 else 0.0

    @property
    def worthwhile(self) -> bool:
        """Whether it gains enough, and more than the change costs."""
        pays = (self.held - self.after) * self.lasts_s / _S_PER_H > self.change
        return pays and self.ratio >= _LEAST_GAIN_RATIO


def gain_of(
    objective: PlanObjective,
    before: Sequence[PlannedGpu],
    after: Sequence[PlannedGpu],
    rates_rps: Mapping[str, float],
    lasts_s: float,
    costs: SwitchingCosts | None = None,
) -> PlanGain:
    """Gain from a change to another plan at today's rates; a share that is resized costs nothing.

    Args:
        objective: What is minimised today.
        before: The plan in force.
        after: The plan for today's rates.
        rates_rps: Today's rates, by service.
        lasts_s: How long these rates are assumed to last.
        costs: How long changes take.
    """
    costs = costs or SwitchingCosts()
    moves = moves_between(before, after)
    left = [before[at] for at in set(range(len(before))) - set(moves.same_gpu)]
    came = [gpu for gpu, source in zip(after, moves.same_gpu, strict=True) if source is None]
    seconds = [(costs.wake_s + costs.load_s) * _standing_cost(objective, gpu) for gpu in came]
    seconds += [costs.sleep_s * _standing_cost(objective, gpu) for gpu in left]
    watts = math.fsum(gpu.power_w for gpu in after)
    new = objective.value(watts, math.fsum(gpu.usd_per_hour for gpu in after), len(after))
    return PlanGain(_scaled(objective, before, rates_rps), new, math.fsum(seconds) / _S_PER_H, lasts_s)


def _standing_cost(objective: PlanObjective, gpu: PlannedGpu) -> float:
    """Standing cost of a GPU without requests."""
    watts = gpu.idle_w + gpu.host_w + math.fsum(each.overhead_w for each in gpu.instances)
    return objective.value(watts, gpu.usd_per_hour, 1)


def plan_day(
    periods: Sequence[LoadPeriod],
    costs: SwitchingCosts | None = None,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> DayPlan:
    """Plan a series of loads.

    Args:
        periods: The periods, in order, one after the other.
        costs: How long changes take.
        progress: Called with the number of plans made and their total number.

    Raises:
        InfeasibleError: Some period, or the peak, cannot be served.
        ConfigError: As :func:`joulery.policies.placement.joint.planner.plan_joint`.
    """
    costs = costs or SwitchingCosts()
    peak = plan_joint(peak_request([each.request for each in periods]))
    own = _own_plans(periods, peak, progress)
    candidates = _candidates(peak, own)
    problems = [problem_of(narrowed(each.request, plan)) for each, plan in zip(periods, own, strict=True)]
    runs = [[_awake(problem, candidate) for candidate in candidates] for problem in problems]
    runs = [[*some, plan] for some, plan in zip(runs, own, strict=True)]
    path = _shortest(periods, runs, costs)
    found = _path_periods(periods, [runs[at][index] for at, index in enumerate(path)], path, costs)
    hourly = _path_periods(periods, own, range(len(own)), costs)
    return DayPlan(
        found,
        math.fsum(_held(each, peak) * each.hours for each in periods),
        math.fsum(each.value * each.period.hours + each.switching for each in hourly),
        math.fsum(each.switching for each in hourly),
    )


def peak_request(requests: Sequence[JointRequest]) -> JointRequest:
    """A request with every service at its highest rate."""
    most: dict[str, JointService] = {}
    for each in (service for request in requests for service in request.services):
        known = most.get(each.workload.id)
        if known is None or known.workload.rate_rps < each.workload.rate_rps:
            most[each.workload.id] = each
    return replace(requests[0], services=tuple(most.values()))


def with_rates(request: JointRequest, rates_rps: Mapping[str, float]) -> JointRequest:
    """The request at other rates, by service; other services keep theirs."""

    def at_rate(each: JointService) -> JointService:
        rate_rps = rates_rps.get(each.workload.id, each.workload.rate_rps)
        return replace(each, workload=replace(each.workload, rate_rps=rate_rps))

    return replace(request, services=tuple(at_rate(each) for each in request.services))


def _candidates(peak: ProvisionPlan, own: Sequence[ProvisionPlan]) -> list[ProvisionPlan]:
    """The peak's plan and those of the loads in between, the highest first; loads that are nearly equal once."""
    found, last = [peak], math.inf
    for plan in sorted(own, key=_load, reverse=True):
        if _load(plan) < last * (1 - _ALIKE_RATIO):
            found.append(plan)
            last = _load(plan)
    step = max(1, math.ceil(len(found) / _CANDIDATES))
    return found[::step]


def _own_plans(
    periods: Sequence[LoadPeriod], peak: ProvisionPlan, progress: Callable[[int, int], None]
) -> list[ProvisionPlan]:
    """A plan for each period: made afresh, or warm from one for nearly the same rates."""
    afresh: list[tuple[JointRequest, ProvisionPlan]] = []
    own = []
    for at, each in enumerate(periods):
        near = min(
            ((_distance(each.request, request), index) for index, (request, _) in enumerate(afresh)), default=None
        )
        if near is not None and near[0] <= _NEAR:
            own.append(replan(each.request, afresh[near[1]][1]).plan)
        else:
            plan = plan_joint(each.request, others=[peak])
            afresh.append((each.request, plan))
            own.append(plan)
        progress(at + 1, len(periods))
    return own


def _distance(one: JointRequest, other: JointRequest) -> float:
    """The largest difference of a service's rates, in logarithms; infinite where other services are served."""
    rates = {each.workload.id: each.workload.rate_rps for each in one.services}
    others = {each.workload.id: each.workload.rate_rps for each in other.services}
    if rates.keys() != others.keys():
        return math.inf
    return max(abs(math.log(rates[name] / others[name])) for name in rates)


def _load(plan: ProvisionPlan) -> float:
    """Load that a plan serves, measured by the power of its requests, W."""
    return math.fsum(each.requests_w for gpu in plan.gpus for each in gpu.instances)


def _awake(problem: JointProblem, candidate: ProvisionPlan) -> ProvisionPlan | None:
    """A candidate's GPUs at the best clocks for a period, those not needed asleep; None where they do not suffice."""
    assert candidate.certificate is not None
    groups, others = groups_of(problem, candidate.gpus)
    if others or problem.slices:
        return None
    limits = KeptLimits(problem, candidate.certificate.rates_rps)
    choices: list[GpuSuccessor] = []
    for source, group in enumerate(groups):
        choices.append(GpuSuccessor(source, -1, (), len(group.gpu.instances), 0.0, 0.0))
        choices += kept_choices(problem, source, group, group.gpu.instances, limits)
    counts, flows = choose(problem, groups, choices, None, WarmEffort())
    return planned_from(problem, chosen_gpus(problem, choices, counts, flows)) if counts else None


def _held(period: LoadPeriod, peak: ProvisionPlan) -> float:
    """The objective of the peak's plan, with its clocks, at a period's rates: its requests are scaled."""
    rates = {each.workload.id: each.workload.rate_rps for each in period.request.services}
    return _scaled(period.request.objective, peak.gpus, rates)


def _scaled(objective: PlanObjective, gpus: Sequence[PlannedGpu], rates: Mapping[str, float]) -> float:
    """The objective of a plan's GPUs at other rates; requests of services without a rate are left out."""
    most: dict[str, float] = {}
    for each in (one for gpu in gpus for one in gpu.instances):
        most[each.workload] = most.get(each.workload, 0.0) + each.rate_rps
    watts = math.fsum(
        gpu.idle_w
        + gpu.host_w
        + math.fsum(e.overhead_w + e.requests_w * rates.get(e.workload, 0.0) / most[e.workload] for e in gpu.instances)
        for gpu in gpus
    )
    return objective.value(watts, math.fsum(gpu.usd_per_hour for gpu in gpus), len(gpus))


def _value(period: LoadPeriod, plan: ProvisionPlan) -> float:
    watts = math.fsum(gpu.power_w for gpu in plan.gpus)
    return period.request.objective.value(watts, plan.usd_per_hour, len(plan.gpus))


def _shortest(
    periods: Sequence[LoadPeriod], runs: Sequence[Sequence[ProvisionPlan | None]], costs: SwitchingCosts
) -> list[int]:
    """The index of the plan that runs in each period, for the least total.

    Raises:
        InfeasibleError: No sequence keeps every service, its changes included.
    """
    best: dict[int, tuple[float, tuple[int, ...]]] = {}
    for at, (period, some) in enumerate(zip(periods, runs, strict=True)):
        following: dict[int, tuple[float, tuple[int, ...]]] = {}
        for index, plan in enumerate(some):
            if plan is None:
                continue
            cost = _value(period, plan) * period.hours
            if at == 0:
                following[index] = (cost, (index,))
                continue
            for was, (total, path) in best.items():
                before = runs[at - 1][was]
                assert before is not None
                change = switching_cost(period.request, before.gpus, plan.gpus, costs)
                if total + change + cost < following.get(index, (math.inf, ()))[0]:
                    following[index] = (total + change + cost, (*path, index))
        best = following
    if not best:
        raise InfeasibleError(
            "no sequence of plans keeps every service within its SLO while GPUs change",
            binding="number of GPUs",
            hint="raise `available` in the fleet: a change needs old and new GPUs side by side",
        )
    return list(min(best.values())[1])


def _path_periods(
    periods: Sequence[LoadPeriod],
    plans: Sequence[ProvisionPlan | None],
    indices: Sequence[int],
    costs: SwitchingCosts,
) -> tuple[DayPeriod, ...]:
    found: list[DayPeriod] = []
    for period, plan, index in zip(periods, plans, indices, strict=True):
        assert plan is not None
        value = _value(period, plan)
        if not found:
            found.append(DayPeriod(period, plan, None, value, 0.0, index))
            continue
        before = found[-1].plan.gpus
        plan = replace(plan, gpus=continued(before, plan.gpus))
        moves = moves_between(before, plan.gpus)
        found.append(
            DayPeriod(period, plan, moves, value, switching_cost(period.request, before, plan.gpus, costs), index)
        )
    return tuple(found)
