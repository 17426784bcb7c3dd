"""Preset ``joint``: the plan of least watts, grams or dollars over all knobs at once, and how far from optimal it is.

Column generation with clocks as GPU types, whole numbers by HiGHS, and a search that misses nothing for the bound.
Where the bound and the plan are close enough, every layout that a better plan could have is added and whole numbers are
solved for again: the plan is optimal then, within the choices and the predictor.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from joulery.domain.errors import InfeasibleError
from joulery.domain.gpu.optimum import CertifiedCost, CertifiedInstance, CertifiedPattern, PlanCertificate
from joulery.domain.gpu.provisioning import LatencyParts, PlannedGpu, PlannedInstance, ProvisionPlan
from joulery.domain.quality import Quality, weakest
from joulery.perf.instances import ServingInstance, neighbourhood, predict_gpu
from joulery.perf.interference.model import Latency, demand_w
from joulery.policies.placement.highs import SolveStatus
from joulery.policies.placement.joint.cut_gpus import certified_cuts, certified_slices, cut_gpus, numbered
from joulery.policies.placement.joint.generation import JointEffort, JointGenerator, JointProof
from joulery.policies.placement.joint.master import Duals, Flow, JointSolution, KnownPattern
from joulery.policies.placement.joint.problem import JointProblem, JointRequest, problem_of
from joulery.policies.placement.provisioning.packing import PackedGpu, Pattern

_EXACT_RATIO = 1e-6
"""Relative gap at which a solution in whole numbers is optimal."""
_QUICK_RATIO = 1e-3
"""The same while patterns are still sought."""
_NEAR_RATIO = 0.02
"""How far from worth their price slices and cuts may be that the first plan is made of, as a part of the bound."""
_CUT_SECONDS = 3.0
"""How many times longer whole numbers may take where GPUs are cut: branchings are to end the search, not seconds."""
_UNSERVED_RPS = 1e-6
"""Requests a second left out that are rounding."""
_PATTERNS_MAX = 400
"""Patterns exported beside those of the plan, at most."""
_ENOUGH_RATIO = 0.05
"""How far from worth their GPU patterns may be that are added where no plan serves everything yet."""


def plan_joint(
    request: JointRequest, effort: JointEffort | None = None, others: Sequence[ProvisionPlan] = ()
) -> ProvisionPlan:
    """The best plan that was found, and a bound on any.

    Args:
        request: What is asked.
        effort: How hard to try.
        others: Plans for the same services and GPU types: this plan is no worse than any of them that is a choice of
            ``request``.

    Raises:
        InfeasibleError: A service can be served on none of the types, or the GPUs there are, or the watts under the
            cap, do not suffice.
        ConfigError: No services or types, two services of one name, or a model that no type knows.
    """
    effort = effort or JointEffort()
    problem = problem_of(request)
    generator = JointGenerator(problem, effort)
    for plan in others:
        for machine, pattern in patterns_of(problem, plan):
            generator.add(machine, pattern)
    duals = generator.generate(generator.master.relax())
    proof, duals = _proven(generator, duals)
    near = duals.value * _NEAR_RATIO
    whole = _whole(generator, _QUICK_RATIO, near)
    optimal, branched = False, 0.0
    if _served(whole):
        whole, optimal, branched = _improved(generator, duals, whole)
    else:
        generator.enrich(duals, max(duals.value * _ENOUGH_RATIO, 0.0))
        whole = _whole(generator, _QUICK_RATIO, math.inf)
    if not _served(whole):
        raise infeasible(problem, duals, whole)
    return _plan_of(problem, generator, whole, proof, optimal, branched)


def patterns_of(problem: JointProblem, plan: ProvisionPlan) -> list[tuple[int, Pattern]]:
    """The patterns of a plan, each with its machine; those that are no choice of the problem are left out."""
    services = {each.workload.id: at for at, each in enumerate(problem.services)}
    index = {(item.service, item.variant, round(1 / item.part)): at for at, item in enumerate(problem.items)}
    found = []
    for gpu in plan.gpus:
        at_mhz = gpu.clock_max_mhz if gpu.clock_set_mhz is None else gpu.clock_set_mhz
        machines = [
            at
            for at, each in enumerate(problem.machines)
            if each.gpu_type.name == gpu.type and math.isclose(each.clocked.clock_mhz, at_mhz)
        ]
        items = []
        for one in gpu.instances:
            service = services.get(one.workload, -1)
            models = [each.model for each in problem.services[service].variants] if service >= 0 else []
            if one.model in models:
                provided = one.rate_rps if math.isnan(one.provided_rps) else one.provided_rps
                count = round(problem.services[service].workload.rate_rps / provided)
                items.append(index.get((service, models.index(one.model), count), -1))
        if any(one.slice for one in gpu.instances):
            continue  # every choice on slices is known to the master problem already
        if machines and len(items) == len(gpu.instances) and min(items, default=-1) >= 0:
            found.append((machines[0], tuple(sorted(items))))
    return found


def _whole(generator: JointGenerator, gap_ratio: float, slack: float) -> JointSolution:
    effort = generator.effort
    seconds = effort.seconds * (_CUT_SECONDS if generator.problem.slices else 1.0)
    return generator.master.whole(gap_ratio=gap_ratio, seconds=seconds, branchings=effort.branchings, slack=slack)


def _served(whole: JointSolution) -> bool:
    return bool(np.all(whole.unserved <= _UNSERVED_RPS)) and math.isfinite(whole.value)


def _proven(generator: JointGenerator, duals: Duals) -> tuple[JointProof, Duals]:
    """The best bound over all gaps, and the prices the relaxation ended with."""
    best = JointProof(0.0, duals._replace(demand=0 * duals.demand, accuracy=0 * duals.accuracy, pool=0 * duals.pool))
    for gap_ratio in generator.effort.gaps:
        more = True
        while more:
            proof, more = generator.prove(duals, gap_ratio)
            if proof is not None and proof.value > best.value:
                best = proof
            if more:
                duals = generator.generate(generator.master.relax())
        if proof is None or best.value >= duals.value * (1 - generator.effort.gap_ratio):
            break
    return best, duals


def _improved(generator: JointGenerator, duals: Duals, whole: JointSolution) -> tuple[JointSolution, bool, float]:
    """Whole numbers again, with all that a better plan could have.

    Returns:
        The better solution; whether it is proven optimal; what no plan has less than, by branch and bound.
    """
    slack = whole.value - duals.value
    if slack <= abs(whole.value) * _EXACT_RATIO:
        return whole, True, 0.0
    complete = generator.enrich(duals, slack)
    again = _whole(generator, _EXACT_RATIO, slack * (1 + 1e-6))
    better = again if _served(again) and again.value <= whole.value else whole
    # What was left out is only in plans that are no better than the first one.
    return better, complete and again.status is SolveStatus.OPTIMAL, min(again.proven, whole.value) if complete else 0.0


def _plan_of(
    problem: JointProblem,
    generator: JointGenerator,
    whole: JointSolution,
    proof: JointProof,
    optimal: bool,
    branched: float,
) -> ProvisionPlan:
    chosen = [(generator.master.patterns[at], count) for at, count in sorted(whole.counts.items())]
    gpus = gpus_of(problem, chosen, whole.flows, whole)
    certificate = _certificate(problem, generator, whole, proof)
    value = value_of(problem, gpus)
    bound = min(_in_whole_gpus(problem, certificate.bound), value)
    # Cut GPUs hold few instances, so fractions of GPUs are far below whole ones: branch and bound closes most of that.
    branches = bool(problem.slices) and branched > bound
    certificate = replace(
        certificate,
        value=value,
        bound=min(branched, value) if branches else bound,
        relaxed=bound if problem.slices else math.nan,
        method=f"branch and bound over all of them; {certificate.method}" if branches else certificate.method,
        power_w=math.fsum(gpu.power_w for gpu in gpus),
        optimal=optimal or bound >= value * (1 - _EXACT_RATIO),
    )
    return ProvisionPlan("joint", gpus, quality=quality_of(problem), certificate=certificate)


def quality_of(problem: JointProblem) -> Quality:
    """How well the coefficients behind a plan are known; never better than modelled."""
    return weakest([Quality.MODELLED, *(each.gpu_type.profile.quality for each in problem.fleet)])


def value_of(problem: JointProblem, gpus: Sequence[PlannedGpu]) -> float:
    """The objective of a plan."""
    power_w = math.fsum(gpu.power_w for gpu in gpus)
    return problem.objective.value(power_w, math.fsum(gpu.usd_per_hour for gpu in gpus), len(gpus))


def gpus_of(
    problem: JointProblem,
    chosen: Sequence[tuple[KnownPattern, int]],
    flows: Mapping[Flow, float],
    cut: JointSolution | None = None,
) -> tuple[PlannedGpu, ...]:
    """The GPUs of some patterns, with what is predicted of every instance.

    Args:
        problem: The problem.
        chosen: Patterns and how many GPUs of each.
        flows: Requests a second of every flow; spread over its instances by what they are provided for.
        cut: The solution whose cut GPUs come first; None for none.
    """
    first, started = ([], {}) if cut is None else cut_gpus(problem, cut)
    provided: dict[Flow, float] = defaultdict(float)
    for known, count in chosen:
        for item in known.layout.pattern:
            provided[_flow(problem, known, item)] += count * problem.items[item].rate_rps
    filled = {flow: min(1.0, flows.get(flow, 0.0) / rate) for flow, rate in provided.items()}
    gpus, replicas = [], _Replicas(problem, chosen, filled, started)
    for known, count in chosen:
        layout = problem.packings[known.machine].tightest(known.layout.pattern) or known.layout
        gpus += [gpu for _ in range(count) if (gpu := _gpu(problem, known, layout, filled, replicas)) is not None]
    names = {problem.services[at].workload.id: count for at, count in replicas.count.items()}
    return (*numbered(first, names), *gpus)


def _flow(problem: JointProblem, known: KnownPattern, item: int) -> Flow:
    each = problem.items[item]
    return Flow(each.service, each.variant, known.machine)


class _Replicas:
    """Numbers the instances of every service."""

    def __init__(
        self,
        problem: JointProblem,
        chosen: Sequence[tuple[KnownPattern, int]],
        filled: Mapping[Flow, float],
        started: Mapping[int, int],
    ) -> None:
        self.count: dict[int, int] = defaultdict(int, started)
        self._next: dict[int, int] = defaultdict(int, started)
        for known, count in chosen:
            for item in known.layout.pattern:
                if filled[_flow(problem, known, item)] > 0:
                    self.count[problem.items[item].service] += count

    def number(self, service: int) -> int:
        """The next instance's number, from 0."""
        self._next[service] += 1
        return self._next[service] - 1


class PlacedInstance(NamedTuple):
    """One instance of a GPU, chosen.

    Attributes:
        service, variant: Indices.
        units: Its share, in units of the GPU type.
        batch: Largest batch.
        limit_ms: What executing a full batch may take, ms.
        provided_rps: The rate that it keeps within the SLO.
        rate_rps: The rate that it gets.
        replica, replicas: Its number, and how many its service has.
    """

    service: int
    variant: int
    units: int
    batch: int
    limit_ms: float
    provided_rps: float
    rate_rps: float
    replica: int = 0
    replicas: int = 1


def _gpu(
    problem: JointProblem, known: KnownPattern, layout: PackedGpu, filled: Mapping[Flow, float], replicas: _Replicas
) -> PlannedGpu | None:
    """One GPU of the plan; None where no request comes to it."""
    placed = []
    for item, option, units in zip(layout.pattern, layout.options, layout.units, strict=True):
        each = problem.items[item]
        ratio = filled[_flow(problem, known, item)]
        if ratio > 0:
            count = replicas.count[each.service]
            number = replicas.number(each.service)
            limit_ms, batch, rate = option.process.limit_ms, option.process.batch, each.rate_rps
            placed.append(
                PlacedInstance(each.service, each.variant, units, batch, limit_ms, rate, ratio * rate, number, count)
            )
    return gpu_of(problem, known.machine, placed) if placed else None


def gpu_of(problem: JointProblem, machine_index: int, placed: Sequence[PlacedInstance]) -> PlannedGpu:
    """A GPU with these instances, and what is predicted of each."""
    machine = problem.machines[machine_index]
    gpu, unit = machine.clocked, machine.gpu_type.profile.gpu.unit_percent
    models = [problem.services[each.service].variants[each.variant].model for each in placed]
    serving = [
        ServingInstance(model, each.units * unit, each.batch, each.rate_rps)
        for model, each in zip(models, placed, strict=True)
    ]
    found = predict_gpu(gpu, serving)
    shared = len(serving) > 1
    instances = []
    for each, one, times, power in zip(placed, serving, found.times, found.powers, strict=True):
        service = problem.services[each.service]
        evenly = service.workload.arrivals.scv == 0
        wait_s = (one.batch - 1) / each.provided_rps if evenly else 0.0
        coefficients = gpu.profile[one.model]
        transfer = one.batch / gpu.profile.gpu.pcie_bytes_per_ms * (coefficients.pcie_contention if shared else 1.0)
        instances.append(
            PlannedInstance(
                workload=service.workload.id,
                model=one.model,
                replica=each.replica,
                replicas=each.replicas,
                rate_rps=one.rate_rps,
                share_ratio=one.share_percent / 100.0,
                batch=one.batch,
                max_delay_s=wait_s,
                wait_s=wait_s if evenly else math.nan,
                parts=_parts(times),
                limit_s=(each.limit_ms + (coefficients.load_bytes + coefficients.feedback_bytes) * transfer) / 1e3,
                throughput_rps=times.throughput_rps(one.batch),
                slo_s=service.workload.slo.latency_s,
                accuracy_ratio=service.variants[each.variant].accuracy_ratio,
                overhead_w=power.overhead_w,
                requests_w=power.requests_w,
                provided_rps=each.provided_rps,
            )
        )
    demand = demand_w(gpu.profile.gpu, neighbourhood(gpu, serving))
    return PlannedGpu(
        type=machine.gpu_type.name,
        usd_per_hour=machine.gpu_type.usd_per_hour,
        clock_mhz=found.clock_mhz,
        clock_max_mhz=gpu.clock_max_mhz,
        demand_w=demand,
        power_w=found.board_w,
        instances=tuple(instances),
        clock_set_mhz=gpu.clock_mhz,
        # Under a cap on watts a higher clock would take what other GPUs need.
        clock_ceiling_mhz=gpu.clock_max_mhz if problem.power_cap_w is None else gpu.clock_mhz,
        idle_w=found.idle_w,
        host_w=found.host_w,
    )


def _parts(times: Latency) -> LatencyParts:
    return LatencyParts(
        load_s=times.load_ms / 1e3,
        schedule_s=times.schedule_ms / 1e3,
        active_s=times.active_ms / 1e3,
        throttle_s=(times.gpu_ms - times.schedule_ms - times.active_ms) / 1e3,
        feedback_s=times.feedback_ms / 1e3,
    )


def _certificate(
    problem: JointProblem, generator: JointGenerator, whole: JointSolution, proof: JointProof
) -> PlanCertificate:
    """The bound and its prices; the plan's own figures are filled in by the caller."""
    names = [each.workload.id for each in problem.services]
    duals = proof.duals
    known = generator.master.patterns
    order = [*sorted(whole.counts), *(at for at in range(len(known)) if at not in whole.counts)]
    return PlanCertificate(
        objective=problem.objective,
        value=0.0,
        bound=proof.value,
        method=_method(problem),
        optimal=False,
        power_w=0.0,
        demand_price=dict(zip(names, duals.demand.tolist(), strict=True)),
        accuracy_price=dict(zip(names, duals.accuracy.tolist(), strict=True)),
        pool_price={each.gpu_type.name: price for each, price in zip(problem.fleet, duals.pool.tolist(), strict=True)},
        power_price=duals.power,
        rates_rps={each.workload.id: each.workload.rate_rps for each in problem.services},
        floors_ratio={each.workload.id: each.floor_ratio for each in problem.services},
        available={each.gpu_type.name: each.gpu_type.available for each in problem.fleet},
        power_cap_w=problem.power_cap_w,
        costs=_costs(problem),
        patterns=tuple(
            _pattern(problem, known[at], whole.counts.get(at, 0)) for at in order[: len(whole.counts) + _PATTERNS_MAX]
        ),
        slices=certified_slices(problem),
        cuts=certified_cuts(problem, whole),
    )


def _in_whole_gpus(problem: JointProblem, bound: float) -> float:
    """A bound on dollars alone, rounded up to whole GPUs of one price."""
    prices = {each.gpu_type.usd_per_hour for each in problem.fleet}
    objective = problem.objective
    if objective.per_w > 0 or objective.per_gpu > 0 or len(prices) > 1 or not (step := objective.per_usd * min(prices)):
        return bound
    return math.ceil(bound / step - 1e-6) * step


def _method(problem: JointProblem) -> str:
    clocks = max(len(each.clocks_mhz) for each in problem.fleet)
    choices = []
    if problem.items:
        most = max(math.ceil(1 / item.part - 1e-9) for item in problem.items)
        choices.append("services whole" if most == 1 else f"instances for 1/1 to 1/{most} of a service's rate")
    if problem.slices:
        cuts = len({cut.counts for cut in problem.cuts})
        choices.append(f"{len(problem.slices)} choices of model, slice, processes and batch, {cuts} cuts of a GPU")
    choices.append("the highest clock" if clocks == 1 else f"{clocks} clocks a GPU")
    if problem.request.alone:
        choices.append("an instance a GPU")
    return f"{', '.join(choices)}; no layout of a GPU is worth more than it costs; within the predictor"


def _costs(problem: JointProblem) -> tuple[CertifiedCost, ...]:
    found: dict[tuple[int, int, int], CertifiedCost] = {}
    for at, machine in enumerate(problem.machines):
        for index, item in enumerate(problem.items):
            if problem.packings[at].alone[index] > problem.packings[at].capacity:
                continue
            service = problem.services[item.service]
            variant = service.variants[item.variant]
            found[(item.service, item.variant, at)] = CertifiedCost(
                service.workload.id,
                variant.model,
                machine.gpu_type.name,
                machine.clocked.clock_mhz,
                float(problem.request_j[at, index]),
                variant.accuracy_ratio,
            )
    return tuple(found.values())


def _pattern(problem: JointProblem, known: KnownPattern, count: int) -> CertifiedPattern:
    machine = problem.machines[known.machine]
    unit = machine.gpu_type.profile.gpu.unit_percent
    instances = []
    for item, option, units in zip(known.layout.pattern, known.layout.options, known.layout.units, strict=True):
        each = problem.items[item]
        service = problem.services[each.service]
        instances.append(
            CertifiedInstance(
                service.workload.id,
                service.variants[each.variant].model,
                each.rate_rps,
                float(problem.overhead_w[known.machine, item]),
                units * unit / 100.0,
                option.process.batch,
            )
        )
    standing_w = float(problem.standing_w[known.machine])
    return CertifiedPattern(machine.gpu_type.name, machine.clocked.clock_mhz, standing_w, count, tuple(instances))


def infeasible(problem: JointProblem, duals: Duals, whole: JointSolution) -> InfeasibleError:
    """The error for GPUs or watts that do not suffice: the row that binds, and what the nearest plan leaves out."""
    relaxed = bool(np.any(duals.unserved > _UNSERVED_RPS))
    left = {
        each.workload.id: float(rate)
        for each, rate in zip(problem.services, whole.unserved.tolist(), strict=True)
        if rate > _UNSERVED_RPS
    }
    there = ", ".join(
        f"{each.gpu_type.available} {each.gpu_type.name}"
        for each in problem.fleet
        if each.gpu_type.available is not None
    )
    capped = problem.power_cap_w is not None and (duals.power > 0 or not there)
    row = f"power cap of {problem.power_cap_w:g} W" if capped else f"number of GPUs: {there}"
    served = math.fsum(whole.counts.values())
    missing = ", ".join(f"{name} ({rate:.4g} /s)" for name, rate in sorted(left.items()))
    return InfeasibleError(
        f"no plan {'exists' if relaxed else 'was found'} within the {row}; the nearest leaves out {missing}",
        binding=row,
        nearest={"gpus": int(served), "unserved_rps": left},
        hint="raise the cap" if capped else "raise `available` in the fleet, relax the SLOs, or add a GPU type",
    )
