"""``kind: batched-serving``: simulate plans for services on shared GPUs with the same requests."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from joulery.app.planning.shares import read_interference
from joulery.app.simulation import BLANK, Overrides, Paragraph, Progress, ResultTable, ScenarioResult, paragraph
from joulery.config.arrivals import ArrivalsConfig, GammaArrivals, PoissonArrivals, RecordedArrivals
from joulery.config.scenario import BatchedServingScenario, PlanConfig, SimulatedService
from joulery.domain.errors import ConfigError, DataError
from joulery.domain.format import UNKNOWN, si
from joulery.domain.gpu import provisioning as provision
from joulery.domain.gpu.provisioning import PlannedGpu
from joulery.domain.json_numbers import known_number
from joulery.perf.catalog import profile
from joulery.perf.interference.model import InterferenceProfile
from joulery.perf.queues.arrival_fit import REQUESTS_MIN, fit_arrivals
from joulery.policies.placement.provisioning.options import Accounting, Balancer, Rules
from joulery.sim.core.arrivals import ArrivalSource, RateSeries, Recorded, Renewal
from joulery.sim.core.comparison import MeanInterval, interval, paired
from joulery.sim.placement.batched_serving import Neighbours, Service, ServiceVerdict, Trial
from joulery.sim.placement.gpu import GpuTruth, InterferenceTruth
from joulery.sim.placement.plan_judge import truth_at
from joulery.sim.placement.plan_trials import PlacedService, Plan, make_plan, plan_of, trials
from joulery.store.columns import read_column
from joulery.store.plans import read_plan

ACCEPTS: frozenset[str] = frozenset()

Verdicts = Mapping[str, Sequence[ServiceVerdict]]


def run(scenario: BatchedServingScenario, overrides: Overrides, progress: Progress) -> ScenarioResult:
    """Simulate every plan with every seed.

    Raises:
        ConfigError: An unknown policy, profile or model.
        DataError: A log of arrivals cannot be used.
        InfeasibleError: A policy finds no plan, or a plan needs more power than any clock allows.
    """
    seeds = range(overrides.seeds or scenario.seeds)
    truth = _profile(scenario.truth, scenario.truth_file)
    plans, truths = _plans(scenario, overrides.policies, truth)
    services = [
        Service(service.name, _arrivals(service, service.arrivals or scenario.arrivals), service.slo.as_slo())
        for service in scenario.services
    ]
    trial = Trial(
        warmup_s=scenario.warmup_s,
        end_s=scenario.warmup_s + scenario.length_s,
        noise_cv=scenario.noise_cv,
        neighbours=Neighbours(scenario.neighbours),
        at_random=scenario.balancer == "random",
    )
    found: dict[str, list[ServiceVerdict]] = {name: [] for name in plans}
    running = trials(
        services,
        {service.name: service.model for service in scenario.services},
        plans,
        InterferenceTruth(truth),
        trial,
        seeds,
        scenario.batching_delay_s,
        truths,
    )
    for done, (name, _, verdict) in enumerate(running, 1):
        found[name].append(verdict)
        progress(done, len(seeds) * len(plans))
    return ScenarioResult(_document(scenario, plans, found), _view(scenario, plans, found))


def _profile(name: str, file: Path | None) -> InterferenceProfile:
    """Read the profile in a file, or that of the catalog if there is no file.

    Raises:
        ConfigError: The catalog has no profile of that name.
        DataError: The file cannot be read, or is not a profile.
    """
    return profile(name) if file is None else read_interference(file)


def _plans(
    scenario: BatchedServingScenario, policies: Sequence[str], truth: InterferenceProfile
) -> tuple[dict[str, Plan], dict[str, Sequence[GpuTruth]]]:
    """The plans to compare by name (from the scenario, or of ``--policy``), and the true profiles of plan files."""
    listed = {plan.name: plan for plan in scenario.plans}
    chosen = [listed.get(name) or PlanConfig(name=name, policy=name) for name in policies] or list(scenario.plans)
    if len({plan.name for plan in chosen}) != len(chosen):
        raise ConfigError("a policy is listed twice", got=", ".join(policies), hint="name each policy once")
    workloads = [
        provision.Workload(
            service.name,
            service.model,
            service.slo.as_slo(),
            service.rate_rps,
            _expected(service.arrivals or scenario.arrivals, service.slo.as_slo().latency_s),
        )
        for service in scenario.services
    ]
    plans: dict[str, Plan] = {}
    truths: dict[str, Sequence[GpuTruth]] = {}
    for config in chosen:
        if config.file is None:
            plans[config.name] = _plan(config, workloads, scenario)
        else:
            gpus = read_plan(config.file).shares()
            _check_services(gpus, workloads, config.file)
            plans[config.name] = plan_of(gpus)
            truths[config.name] = [truth_at(truth, gpu.clock_set_mhz) for gpu in gpus]
    return plans, truths


def _check_services(gpus: Sequence[PlannedGpu], workloads: Sequence[provision.Workload], file: Path) -> None:
    """Refuse a plan file whose services differ from the scenario's, or with several GPU types."""
    known, planned = {each.id for each in workloads}, {one.workload for gpu in gpus for one in gpu.instances}
    if known != planned:
        name = min(known ^ planned)
        where = "the plan serves it, the scenario does not" if name in planned else "the plan does not serve it"
        raise DataError(f"service {name}: {where}", file=str(file), hint="the scenario lists the services of its plans")
    types = sorted({gpu.type for gpu in gpus})
    if len(types) > 1:
        raise DataError(
            f"the plan has GPUs of {len(types)} types ({', '.join(types)}), and all simulated GPUs behave by one truth",
            file=str(file),
            hint="plan with one GPU type to simulate the plan",
        )


def _plan(plan: PlanConfig, workloads: Sequence[provision.Workload], scenario: BatchedServingScenario) -> Plan:
    if plan.policy is None:
        return tuple(
            tuple(PlacedService(each.service, each.share_ratio, each.batch) for each in gpu) for gpu in plan.gpus
        )
    rules = Rules(
        Accounting(plan.accounting),
        plan.max_batch,
        plan.replicas,
        plan.margin_ratio,
        plan.noise_cv,
        Balancer(plan.balancer),
    )
    if plan.profile is not None or plan.profile_file is not None:
        known = _profile(plan.profile or scenario.gpu, plan.profile_file)
    else:
        known = _profile(scenario.gpu, scenario.gpu_file)
    return make_plan(plan.policy, workloads, known, rules)


def _expected(config: ArrivalsConfig, slo_s: float) -> provision.Arrivals:
    """The arrival process that a planner assumes."""
    if isinstance(config, GammaArrivals):
        return provision.Arrivals.general(config.cv**2)
    if isinstance(config, RecordedArrivals):
        times = read_column(config.file, config.column)
        return provision.Arrivals.general(fit_arrivals(times, slo_s).scv_high if len(times) >= REQUESTS_MIN else 1.0)
    return provision.Arrivals.poisson() if isinstance(config, PoissonArrivals) else provision.Arrivals()


def _arrivals(service: SimulatedService, config: ArrivalsConfig) -> ArrivalSource:
    if isinstance(config, RecordedArrivals):
        return Recorded(read_column(config.file, config.column))
    rate = RateSeries.constant(service.rate_rps)
    if service.rates:
        rate = RateSeries([step.from_s for step in service.rates], [step.rate_rps for step in service.rates])
    if isinstance(config, GammaArrivals):
        return Renewal(rate, config.cv)
    return Renewal(rate, 1.0 if isinstance(config, PoissonArrivals) else 0.0)


def _called(name: str, file: Path | None) -> str:
    """Name of a profile in the output."""
    return name if file is None else file.name


def _document(scenario: BatchedServingScenario, plans: Mapping[str, Plan], found: Verdicts) -> dict[str, Any]:
    first = next(iter(plans))
    return {
        "scenario": scenario.name,
        "kind": scenario.kind,
        "quality": "simulated",
        "planned_with": _called(scenario.gpu, scenario.gpu_file),
        "truth": _called(scenario.truth, scenario.truth_file),
        "balancer": scenario.balancer,
        "window_s": scenario.length_s,
        "summary": [
            {
                "policy": name,
                "gpus": len(plan),
                "violations": _violations(found[name]).as_dict(),
                "power_w": _power(found[name]).as_dict(),
                "violations_against_first": paired(_counts(found[name]), _counts(found[first])).as_dict(),
                "power_w_against_first": paired(_powers(found[name]), _powers(found[first])).as_dict(),
            }
            for name, plan in plans.items()
        ],
        "results": [
            {"policy": name, "seed": seed, **_verdict(plans[name], verdict)}
            for name in plans
            for seed, verdict in enumerate(found[name])
        ],
    }


def _verdict(plan: Plan, verdict: ServiceVerdict) -> dict[str, Any]:
    return {
        "gpus": len(plan),
        "violations": list(verdict.violations),
        "power_w": verdict.power_w,
        "energy_j": verdict.energy_j,
        "services": [
            {
                "name": one.name,
                "requests": one.requests,
                "unanswered": one.unanswered,
                "offered_rps": one.offered_rps,
                "throughput_rps": one.throughput_rps,
                "p50_s": known_number(one.p50_s),
                "tail_s": known_number(one.tail_s),
                "quantile": one.slo.quantile,
                "slo_s": one.slo.latency_s,
                "violated": one.violated,
            }
            for one in verdict.services
        ],
        "gpu": [
            {
                "clock_mhz": known_number(gpu.clock_mhz),
                "energy_j": gpu.energy_j,
                "idle_j": gpu.idle_j,
                "instances": [
                    {
                        "service": placed.service,
                        "share_ratio": placed.share_ratio,
                        "batch": placed.batch,
                        "mean_batch": each.mean_batch,
                        "utilisation_ratio": each.utilisation_ratio,
                        "dynamic_j": each.dynamic_j,
                    }
                    for placed, each in zip(row, gpu.instances, strict=True)
                ],
            }
            for row, gpu in zip(plan, verdict.gpus, strict=True)
        ],
    }


def _counts(verdicts: Sequence[ServiceVerdict]) -> list[float]:
    return [float(len(verdict.violations)) for verdict in verdicts]


def _powers(verdicts: Sequence[ServiceVerdict]) -> list[float]:
    return [verdict.power_w for verdict in verdicts]


def _violations(verdicts: Sequence[ServiceVerdict]) -> MeanInterval:
    return interval(_counts(verdicts))


def _power(verdicts: Sequence[ServiceVerdict]) -> MeanInterval:
    return interval(_powers(verdicts))


_TOTALS = ("plan", "GPUs", "SLO violations", "power", "against the first")


def _view(
    scenario: BatchedServingScenario, plans: Mapping[str, Plan], found: Verdicts
) -> list[Paragraph | ResultTable]:
    seeds = len(next(iter(found.values())))
    arrivals = " and ".join(kind for kind, _ in groupby(sorted(_kinds(scenario))))
    heading = paragraph(
        (f"{scenario.name}: ", "bold"),
        f"{len(scenario.services)} services, {arrivals} arrivals, {seeds} seed{'s' if seeds > 1 else ''} of "
        f"{scenario.length_s:g} s; planned with {_called(scenario.gpu, scenario.gpu_file)}, simulated on "
        f"{_called(scenario.truth, scenario.truth_file)}"
        + (", requests reach replicas at random" if scenario.balancer == "random" else ""),
    )
    totals = ResultTable(_TOTALS, left=_TOTALS, wide=True)
    first = next(iter(plans))
    for name, plan in plans.items():
        difference = paired(_powers(found[name]), _powers(found[first]))
        totals.add(
            name,
            str(len(plan)),
            f"{_between(_violations(found[name]), '')} of {len(scenario.services)}",
            _between(_power(found[name]), "W"),
            UNKNOWN if name == first else _between(difference, "W", sign="+"),
        )
    return [heading, BLANK, totals, BLANK, _tails(scenario, found), paragraph(("every number is simulated", "dim"))]


def _tails(scenario: BatchedServingScenario, found: Verdicts) -> ResultTable:
    """Latency at the SLO quantile, the worst of the seeds, service by service."""
    table = ResultTable(titles := ("service", "SLO", *found), left=titles, wide=True)
    for index, service in enumerate(scenario.services):
        cells: list[Paragraph] = []
        for verdicts in found.values():
            worst = max((verdict.services[index] for verdict in verdicts), key=lambda one: one.tail_s)
            cells.append(paragraph((si(worst.tail_s, "s"), "red" if worst.violated else "")))
        quantile = f"p{100 * service.slo.quantile_ratio:g}"
        table.add(f"{service.name} ({service.model})", f"{quantile} {si(service.slo.latency_s, 's')}", *cells)
    return table


def _kinds(scenario: BatchedServingScenario) -> list[str]:
    return [(service.arrivals or scenario.arrivals).kind for service in scenario.services]


def _between(value: MeanInterval, unit: str, sign: str = "") -> str:
    if not math.isfinite(value.mean):
        return UNKNOWN
    half = f" ± {value.half_width:.2g}" if value.half_width > 0 else ""
    return f"{value.mean:{sign}.4g}{half} {unit}".strip()
