"""Preset ``joint``: the plan of least watts, grams or dollars over all knobs at once, with a bound on any plan.

Column generation with clocks as GPU types finds patterns, HiGHS finds whole numbers, and a complete search proves the
bound. Where the bound and the plan are close enough, every layout that a better plan could have is added and whole
numbers are solved for again: the plan is then optimal, within the choices and the predictor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from joulery.domain.errors import InfeasibleError
from joulery.domain.gpu.provisioning import PlannedGpu, ProvisionPlan
from joulery.domain.quality import Quality, weakest
from joulery.policies.placement.joint.divisions import grouped
from joulery.policies.placement.joint.generation import JointEffort, JointGenerator, JointProof
from joulery.policies.placement.joint.in_batches import BATCH, plan_joint_batches
from joulery.policies.placement.joint.master import Duals, JointMaster, JointSolution
from joulery.policies.placement.joint.problem import JointFleet, JointProblem, JointRequest, check_request, problem_of
from joulery.policies.placement.joint.result.assignment import assigned_gpus
from joulery.policies.placement.joint.result.certificates import certificate_of, in_whole_gpus
from joulery.policies.placement.joint.result.planned_gpus import gpus_of, on_hosts_of
from joulery.policies.placement.master import SolveStatus
from joulery.policies.placement.provisioning.packing import Pattern

_EXACT_RATIO = 1e-6
"""Relative gap at which a solution in whole numbers is optimal."""
_QUICK_RATIO = 1e-3
"""The same while patterns are still sought."""
_QUICK_PART = 5
"""Divisor of the branchings of the integer solver while patterns are still sought."""
_NEAR_RATIO = 0.02
"""Excess of price over worth up to which slices and partitions are in the first plan, as a part of the relaxation."""
_CUT_SECONDS = 3.0
"""Factor on the time for whole numbers where GPUs are partitioned: branchings should end the search, not seconds."""
_WIDE_RATIO = 0.01
"""Excess of a plan over the relaxation from which patterns are sought at its own number of GPUs."""
_APART_RATIO = 0.004
"""The same for a plan without a proof, which nothing else improves."""
_UNSERVED_RPS = 1e-6
"""Requests a second left out that are rounding."""
_ENOUGH_RATIO = 0.05
"""Excess of a GPU's price over a pattern's worth up to which it is added where no plan serves everything yet."""


def plan_joint(
    request: JointRequest, effort: JointEffort | None = None, others: Sequence[ProvisionPlan] = ()
) -> ProvisionPlan:
    """The best plan that was found, and a lower bound on any plan.

    Args:
        request: The request.
        effort: Limits on the work.
        others: Plans for the same services and GPU types: this plan is no worse than any of them that is a choice of
            ``request``.

    Raises:
        InfeasibleError: A service can be served on none of the types, or there are too few GPUs or too few watts under
            the cap.
        ConfigError: No services or types, two services of one name, or a model unknown to all types.
    """
    effort = effort or JointEffort()
    request = grouped(request, effort.alike_from)
    if len(request.services) > effort.together and not any(each.sliced for each in request.fleet):
        check_request(request)
        return plan_joint_batches(request, lambda one: plan_problem(one, effort)[0], min(BATCH, effort.together))
    problem = problem_of(request)
    known = [pattern for plan in others for pattern in patterns_of(problem, plan)]
    return plan_problem(problem, effort, known)[0]


def plan_problem(
    problem: JointProblem, effort: JointEffort, known: Sequence[tuple[int, Pattern]] = ()
) -> tuple[ProvisionPlan, JointMaster]:
    """As :func:`plan_joint`, for a problem that is derived already.

    Args:
        problem: The problem.
        effort: Limits on the work; without ``gaps`` nothing is proven.
        known: Machines and patterns to begin with; those that do not fit are left out.

    Returns:
        The plan, and the master problem with all patterns found.

    Raises:
        InfeasibleError: There are too few GPUs, or too few watts under the cap.
    """
    generator = JointGenerator(problem, effort)
    for machine, pattern in known:
        generator.add(machine, pattern)
    duals = generator.generate(generator.master.relax())
    proof, duals = _proven(generator, duals)
    near = duals.value * _NEAR_RATIO
    whole = _solve_whole(generator, _QUICK_RATIO, near)
    if _served(whole):
        if effort.gaps:
            best = _improved(generator, proof, whole)
        else:
            if whole.value > duals.value * (1 + _APART_RATIO) and not problem.slices:
                whole = _on_fewer(generator, _at_its_count(generator, whole, sum(whole.counts.values())))
            best = _Best(whole, limit_reached=whole.status is SolveStatus.OPEN)
    else:
        generator.enrich(duals, max(duals.value * _ENOUGH_RATIO, 0.0))
        whole = _solve_whole(generator, _QUICK_RATIO, math.inf)
        limit_reached = whole.status is SolveStatus.OPEN
        if limit_reached and not _served(whole):
            whole = generator.master.rounded_up()
        best = _Best(whole, limit_reached=limit_reached)
    if not _served(best.whole):
        raise infeasible(problem, duals, best.whole)
    return _plan_of(problem, generator, best, proof), generator.master


class _Best(NamedTuple):
    """The best whole numbers.

    Attributes:
        whole: The solution.
        optimal: Whether it is proven optimal.
        branched: Lower bound on any plan, by branch and bound.
        limit_reached: Whether the solver ended at its limit.
    """

    whole: JointSolution
    optimal: bool = False
    branched: float = 0.0
    limit_reached: bool = False


def patterns_of(problem: JointProblem, plan: ProvisionPlan) -> list[tuple[int, Pattern]]:
    """The patterns of a plan, each with its machine; those that the problem does not offer are left out."""
    services = {name: at for at, each in enumerate(problem.services) for name in each.names or (each.workload.id,)}
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


def _solve_whole(generator: JointGenerator, gap_ratio: float, slack: float, beat: float = math.inf) -> JointSolution:
    effort = generator.effort
    seconds = effort.seconds * (_CUT_SECONDS if generator.problem.slices else 1.0)
    few = gap_ratio > _EXACT_RATIO and not generator.problem.slices
    branchings = effort.branchings // (_QUICK_PART if few else 1)
    return generator.master.whole(gap_ratio=gap_ratio, seconds=seconds, branchings=branchings, slack=slack, beat=beat)


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


def _improved(generator: JointGenerator, proof: JointProof, whole: JointSolution) -> _Best:
    """Solve whole numbers again, with all patterns that a better plan could have.

    At the prices of the proof no GPU is worth more than it costs. At those the relaxation ended with, one may be worth
    a little more, and a better plan could have it beside one that costs more than the slack.
    """
    slack = whole.value - proof.value
    if slack <= abs(whole.value) * _EXACT_RATIO:
        return _Best(whole, optimal=True)
    if slack > abs(whole.value) * _WIDE_RATIO and not generator.problem.slices:
        whole = _at_its_count(generator, whole, sum(whole.counts.values()))
        whole = _on_fewer(generator, whole)
        slack = whole.value - proof.value
    if slack > abs(whole.value) * generator.effort.wide_ratio:
        return _Best(whole, limit_reached=whole.status is SolveStatus.OPEN)
    complete = generator.enrich(proof.duals, slack)
    again = _solve_whole(generator, _EXACT_RATIO, slack * (1 + 1e-6), whole.value)
    better = again if _served(again) and again.value <= whole.value else whole
    # What was left out is only in plans that are no better than the first one.
    none_better = not generator.problem.slices and again.status is SolveStatus.INFEASIBLE
    proven = complete and generator.master.divisions_complete and (again.status is SolveStatus.OPTIMAL or none_better)
    branched = min(again.proven, whole.value) if complete else 0.0
    return _Best(better, proven, branched, limit_reached=again.status is SolveStatus.OPEN)


def _at_its_count(generator: JointGenerator, whole: JointSolution, gpus: int) -> JointSolution:
    """Solve whole numbers again, with the patterns that are worth something where there are ``gpus`` GPUs."""
    at_count = generator.generate(generator.master.relax(gpus), gpus)
    generator.enrich(at_count, max(whole.value - at_count.value, 0.0))
    again = _solve_whole(generator, _QUICK_RATIO, math.inf, whole.value)
    return again if _served(again) and again.value <= whole.value else whole


def _on_fewer(generator: JointGenerator, whole: JointSolution) -> JointSolution:
    """Solve whole numbers again with one GPU less at a time, as long as the relaxation shows that it may pay.

    Where rent is most of what a GPU costs, the known patterns do not serve everything on fewer GPUs: further patterns
    have to be found.
    """
    while (gpus := sum(whole.counts.values()) - 1) > 0:
        at_count = generator.master.relax(gpus)
        if float(at_count.unserved.max(initial=0.0)) > _UNSERVED_RPS:
            at_count = generator.generate(at_count, gpus)
        if at_count.value >= whole.value * (1 - _WIDE_RATIO):
            break
        again = _at_its_count(generator, whole, gpus)
        if again is whole or sum(again.counts.values()) > gpus:
            return again
        whole = again
    return whole


def _plan_of(problem: JointProblem, generator: JointGenerator, best: _Best, proof: JointProof) -> ProvisionPlan:
    whole, branched = best.whole, best.branched
    chosen = [(generator.master.patterns[at], count) for at, count in sorted(whole.counts.items())]
    divisions = generator.master.divisions
    if divisions:
        gpus = assigned_gpus(problem, chosen, whole, divisions)
    else:
        gpus = gpus_of(problem, chosen, whole.flows, whole)
    certificate = certificate_of(problem, generator.master, whole, proof)
    value = value_of(problem, gpus)
    bound = min(in_whole_gpus(problem, certificate.bound), value)
    # Cut GPUs hold few instances, so fractions of GPUs are far below whole ones: branch and bound closes most of that.
    branches = bool(problem.slices) and branched > bound
    certificate = replace(
        certificate,
        value=value,
        bound=min(branched, value) if branches else bound,
        relaxed=bound if problem.slices else math.nan,
        method=f"branch and bound over all of them; {certificate.method}" if branches else certificate.method,
        power_w=math.fsum(gpu.power_w for gpu in gpus),
        # Requests of services that are alike are shared out afterwards: that may take more than was solved for.
        optimal=(best.optimal and value <= whole.value * (1 + _EXACT_RATIO)) or bound >= value * (1 - _EXACT_RATIO),
    )
    certificate = replace(certificate, limit_reached=best.limit_reached and not certificate.optimal)
    plan = ProvisionPlan("joint", gpus, quality=quality_of(problem), certificate=certificate)
    return on_hosts_of(problem.request, plan)


def quality_of(problem: JointProblem) -> Quality:
    """Quality of the coefficients behind a plan; never better than modelled."""
    return quality_of_fleet(problem.fleet)


def quality_of_fleet(fleet: Sequence[JointFleet]) -> Quality:
    """Quality of the coefficients of GPU types; never better than modelled."""
    return weakest([Quality.MODELLED, *(each.gpu_type.profile.quality for each in fleet)])


def value_of(problem: JointProblem, gpus: Sequence[PlannedGpu]) -> float:
    """The objective of a plan."""
    power_w = math.fsum(gpu.power_w for gpu in gpus)
    return problem.objective.value(power_w, math.fsum(gpu.usd_per_hour for gpu in gpus), len(gpus))


def infeasible(problem: JointProblem, duals: Duals, whole: JointSolution) -> InfeasibleError:
    """The error for too few GPUs or watts: it names the row that binds, and what the nearest plan leaves out."""
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
    row = problem.request.cap_text if capped else f"number of GPUs: {there}"
    served = math.fsum(whole.counts.values())
    missing = ", ".join(f"{name} ({rate:.4g} /s)" for name, rate in sorted(left.items()))
    if not (relaxed or capped or there):
        return InfeasibleError(
            f"the solver reached its limit before it found a plan; the nearest leaves out {missing}",
            binding="limit of the solver",
            nearest={"gpus": int(served), "unserved_rps": left},
            hint="plan again where the machine has less to do, or plan fewer services at once",
        )
    return InfeasibleError(
        f"no plan {'exists' if relaxed else 'was found'} within the {row}; the nearest leaves out {missing}",
        binding=row,
        nearest={"gpus": int(served), "unserved_rps": left},
        hint="raise the cap" if capped else "raise `available` in the fleet, relax the SLOs, or add a GPU type",
    )
