"""``kind: batched-serving``: plans for services on shared GPUs, judged under the same requests."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from joulery.app.simulation import BLANK, Overrides, Paragraph, Played, Progress, ResultTable, paragraph
from joulery.config.arrivals import ArrivalsConfig, GammaArrivals, PoissonArrivals, RecordedArrivals
from joulery.config.scenario import BatchedServingScenario, PlanConfig, SimulatedService
from joulery.domain.errors import ConfigError
from joulery.domain.format import UNKNOWN, si
from joulery.domain.gpu import provisioning as provision
from joulery.perf.catalog import profile
from joulery.perf.queues.arrival_fit import REQUESTS_MIN, fit_arrivals
from joulery.policies.placement.provisioning.rules import Accounting, Rules
from joulery.sim.core.arrivals import ArrivalSource, RateSeries, Recorded, Renewal
from joulery.sim.core.comparison import MeanInterval, interval, paired
from joulery.sim.placement.batched_serving import Neighbours, Service, ServiceVerdict, Trial
from joulery.sim.placement.gpu import InterferenceTruth
from joulery.sim.placement.plan_trials import PlacedService, Plan, make_plan, trials
from joulery.store.columns import read_column

ACCEPTS: frozenset[str] = frozenset()

Verdicts = Mapping[str, Sequence[ServiceVerdict]]


def play(scenario: BatchedServingScenario, overrides: Overrides, progress: Progress) -> Played:
    """Judge every plan under every seed.

    Raises:
        ConfigError: An unknown policy, profile or model.
        DataError: A log of arrivals cannot be used.
        InfeasibleError: A policy finds no plan, or a plan asks for more power than leaves a clock.
    """
    seeds = range(overrides.seeds or scenario.seeds)
    plans = _plans(scenario, overrides.policies)
    services = [
        Service(service.name, _arrivals(service, service.arrivals or scenario.arrivals), service.slo.as_slo())
        for service in scenario.services
    ]
    trial = Trial(
        warmup_s=scenario.warmup_s,
        end_s=scenario.warmup_s + scenario.length_s,
        noise_cv=scenario.noise_cv,
        neighbours=Neighbours(scenario.neighbours),
    )
    found: dict[str, list[ServiceVerdict]] = {name: [] for name in plans}
    running = trials(
        services,
        {service.name: service.model for service in scenario.services},
        plans,
        InterferenceTruth(profile(scenario.truth)),
        trial,
        seeds,
        scenario.batching_delay_s,
    )
    for done, (name, _, verdict) in enumerate(running, 1):
        found[name].append(verdict)
        progress(done, len(seeds) * len(plans))
    return Played(_document(scenario, plans, found), _view(scenario, plans, found))


def _plans(scenario: BatchedServingScenario, policies: Sequence[str]) -> dict[str, Plan]:
    """The plans to compare, by name: the file's, or those that ``--policy`` names."""
    listed = {plan.name: plan for plan in scenario.plans}
    chosen = [listed.get(name) or PlanConfig(name=name, policy=name) for name in policies] or list(scenario.plans)
    if len({plan.name for plan in chosen}) != len(chosen):
        raise ConfigError("a policy stands twice", got=", ".join(policies), hint="name each policy once")
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
    return {plan.name: _plan(plan, workloads, scenario.gpu) for plan in chosen}


def _plan(plan: PlanConfig, workloads: Sequence[provision.Workload], gpu: str) -> Plan:
    if plan.policy is None:
        return tuple(
            tuple(PlacedService(each.service, each.share_ratio, each.batch) for each in gpu) for gpu in plan.gpus
        )
    rules = Rules(Accounting(plan.accounting), margin_ratio=plan.margin_ratio, noise_cv=plan.noise_cv)
    return make_plan(plan.policy, workloads, profile(plan.profile or gpu), rules)


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


def _document(scenario: BatchedServingScenario, plans: Mapping[str, Plan], found: Verdicts) -> dict[str, Any]:
    first = next(iter(plans))
    return {
        "scenario": scenario.name,
        "kind": scenario.kind,
        "quality": "simulated",
        "planned_with": scenario.gpu,
        "truth": scenario.truth,
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
                "p50_s": _finite(one.p50_s),
                "tail_s": _finite(one.tail_s),
                "quantile": one.slo.quantile,
                "slo_s": one.slo.latency_s,
                "violated": one.violated,
            }
            for one in verdict.services
        ],
        "gpu": [
            {
                "clock_mhz": _finite(gpu.clock_mhz),
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


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


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
        f"{scenario.length_s:g} s; planned with {scenario.gpu}, simulated on {scenario.truth}",
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
