"""A service of the site file as what the runtime works with: models on disk, slices of this machine, a policy."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from joulery.app.profiling.inputs import read_arrivals
from joulery.app.wiring.gpus import LocalGpus
from joulery.app.wiring.models import lite_file
from joulery.config.fleet import CpuConfig
from joulery.config.loadgen import TraceLoad
from joulery.config.services import CloverPolicy, ModelConfig, OnnxModel, PythonModel, ServiceConfig
from joulery.config.site import Mode, Site
from joulery.domain.errors import CapabilityError, ConfigError
from joulery.domain.gpu.layout import Layout
from joulery.domain.serving.engine import ModelKind, ModelRef
from joulery.domain.serving.profile import Profile
from joulery.perf.layouts import Predictor
from joulery.perf.queues.pull_queue import capacity_rps
from joulery.policies.placement.pools.gpu_groups import SliceAssignment, split
from joulery.policies.serving.layout_space import core_partitions, cpu_slices, layouts, misfits, slice_menu
from joulery.policies.serving.objective import Objective, ReplanTrigger, ServiceObjectives
from joulery.policies.serving.policy import ServicePolicy
from joulery.policies.serving.predictive_search import PredictiveSearch, baseline_layout
from joulery.policies.serving.trial_search import TrialSearch
from joulery.policies.serving.trials import TrialBudget
from joulery.runtime.serving.running_service import PolicyBinding, ServiceSetup

PREDICT = "predict"
_NEVER = 1e6
"""A move of the intensity, as a multiple of the base, that does not happen."""


def service_setup(site: Site, config: ServiceConfig, cache: Path, gpus: LocalGpus | None = None) -> ServiceSetup:
    """The service on this machine; models are built or looked up, nothing is started.

    Args:
        site: For the fleet.
        config: The service.
        cache: Where built models are kept.
        gpus: Its GPU group with the partitions it may use; None for the CPU.

    Raises:
        CapabilityError: The machine has fewer cores than asked for, or a package is missing.
        ConfigError, DataError: A model file is missing or damaged.
        InfeasibleError: There are more layouts than can be tried.
    """
    cores, cpu = cores_of(site)[config.name], config.cpu or site.fleet.cpu
    fixed = None if cpu is None else cpu.as_slices()
    partitions = (fixed,) if fixed is not None else tuple(cpu_slices(cut) for cut in core_partitions(len(cores)))
    assignment: SliceAssignment = {}
    if gpus is not None:
        assignment = split(gpus.partitions)
        partitions = tuple(assignment)
    family = config.family.as_family(config.name)
    names = [variant.name for variant in family.variants]
    return ServiceSetup(
        name=config.name,
        owner=config.owner,
        family=family,
        models={variant.name: model_ref(variant.model, cache) for variant in config.family.variants},
        slo=config.slo.as_slo(),
        cores=cores,
        partitions=partitions,
        candidates=layouts(partitions, names),
        gpus=() if gpus is None else gpus.names,
        slice_assignment=assignment,
    )


def cores_of(site: Site) -> dict[str, tuple[int, ...]]:
    """The CPU cores of each service, by name.

    What services say under ``cpu`` comes first; the others get equal parts of what is left, the first ones the odd
    cores. Where there are more of them than cores left, each gets one core that it shares.

    Raises:
        CapabilityError: The machine has fewer cores than asked for.
        ConfigError: One partition is given for all services together.
    """
    cores, services = fleet_cores(site), site.services
    if len(services) > 1 and site.fleet.cpu is not None and site.fleet.cpu.slices is not None:
        raise ConfigError(
            f"fleet.cpu.slices cuts the cores for one service, the site has {len(services)}",
            pointer="fleet.cpu.slices",
            hint="give each service its partition: cpu: {slices: [1]}",
        )
    claims = {service.name: _claimed(service.cpu) for service in services}
    left = len(cores) - sum(claims.values())
    if left < 0:
        raise CapabilityError(
            f"the services ask for {sum(claims.values())} CPU cores together, {len(cores)} may be used here",
            resource="CPU cores",
            hint="give them fewer under services.*.cpu",
        )
    others = [name for name, claim in claims.items() if not claim]
    for index, name in enumerate(others):
        claims[name] = max(1, left // len(others) + (index < left % len(others)))
    found, at = {}, 0
    for name, claim in claims.items():
        found[name] = tuple(sorted(cores[(at + k) % len(cores)] for k in range(claim)))
        at += claim
    return found


def _claimed(cpu: CpuConfig | None) -> int:
    """Cores a section asks for; 0 where it says nothing."""
    if cpu is None:
        return 0
    return cpu.cores or sum(cpu.slices or ())


def fleet_cores(site: Site) -> tuple[int, ...]:
    """The CPU cores that joulery may use here.

    Raises:
        CapabilityError: The machine has fewer than asked for.
    """
    here = tuple(sorted(os.sched_getaffinity(0)))
    wanted = _claimed(site.fleet.cpu) or len(here)
    if wanted > len(here):
        raise CapabilityError(
            f"the site asks for {wanted} CPU cores, {len(here)} may be used here",
            resource="CPU cores",
            hint=f"set fleet.cpu.cores to {len(here)} or less",
        )
    return here[:wanted]


def model_ref(config: ModelConfig, cache: Path) -> ModelRef:
    """What a variant loads; a built-in model is built into ``cache`` the first time.

    Raises:
        CapabilityError, DataError: A built-in model cannot be built.
    """
    if isinstance(config, OnnxModel):
        return ModelRef(ModelKind.ONNX, str(config.path))
    if isinstance(config, PythonModel):
        options = json.dumps(config.options, sort_keys=True) if config.options else ""
        return ModelRef(ModelKind.PYTHON, config.target, options)
    return ModelRef(ModelKind.ONNX, str(lite_file(f"lite{config.size}", cache)))


def demand_rps(site: Site, config: ServiceConfig, setup: ServiceSetup, profile: Profile) -> float:
    """The demand to plan for: the service's own, else that of the load, in requests or as a share of the capacity.

    The capacity is what the most accurate variant can serve on the partition that suits it best.

    Raises:
        ConfigError: Neither the service nor the load names one.
        DataError: The load's recorded arrivals cannot be read.
    """
    load = site.load_of(config)
    if config.rate_rps is not None:
        return config.rate_rps
    rate_rps: float | None = getattr(load, "rate_rps", None)
    if rate_rps is not None:
        return rate_rps
    if isinstance(load, TraceLoad):
        times_s = read_arrivals(load.path)
        within = times_s[times_s < load.duration_s]
        return max(len(within), 1) / load.duration_s
    share: float | None = getattr(load, "utilisation_ratio", None)
    if share is not None:
        return share * largest_capacity_rps(setup, profile)
    raise ConfigError(
        "neither the service nor the load says how many requests to expect",
        pointer=f"services.{config.name}.rate",
        expected="such as rate: 40 /s",
    )


def largest_capacity_rps(setup: ServiceSetup, profile: Profile) -> float:
    """Requests a second that the most accurate variant can serve on the partition that suits it best."""
    largest = setup.family.largest.name
    return max(capacity_rps([profile.entry(largest, piece) for piece in partition]) for partition in setup.partitions)


def choose(
    site: Site, config: ServiceConfig, setup: ServiceSetup, profile: Profile, *, settle_s: float = 5.0
) -> PolicyBinding:
    """The policy of a service, with a profile in hand.

    A fixed policy is the same policy with one variant to choose from: it still picks the partition that keeps the SLO
    with the fewest joules.

    Raises:
        ConfigError: No demand is named anywhere.
        DataError: The profile lacks a variant or a slice.
        InfeasibleError: No layout reaches the accuracy asked for.
    """
    rate_rps = demand_rps(site, config, setup, profile)
    accuracy = {variant.name: variant.accuracy_ratio for variant in setup.family.variants}
    predictor = Predictor(profile, accuracy, quantile=setup.slo.quantile)
    largest = setup.family.largest
    base, metrics = baseline_layout(setup.candidates, largest.name, predictor, setup.slo, rate_rps)
    rule = config.policy
    candidates: Sequence[Layout] = setup.candidates
    goals = objectives_from_config(config, largest.accuracy_ratio)
    base_g_per_kwh, replan_ratio = 1.0, _NEVER
    if isinstance(rule, CloverPolicy):
        base_g_per_kwh, replan_ratio = rule.base_g_per_kwh, rule.replan_ratio
    else:
        only = {rule.variant or largest.name}
        candidates = [layout for layout in candidates if set(layout.counts) == only]
    policy = ServicePolicy(
        service=setup.name,
        search=PredictiveSearch(
            candidates=tuple(candidates),
            predictor=predictor,
            objective=Objective(
                lambda_ratio=goals.lambda_ratio,
                base_accuracy_ratio=largest.accuracy_ratio,
                base_energy_j=metrics.energy_j,
                base_g_per_kwh=base_g_per_kwh,
                base_pue=site.pue,
                pue=site.pue,
            ),
        ),
        objectives=goals,
        rate_rps=rate_rps,
        trigger=ReplanTrigger(base_g_per_kwh * site.pue, site.pue, replan_ratio, settle_s=settle_s),
    )
    if not isinstance(rule, CloverPolicy) or rule.search == PREDICT:
        return PolicyBinding(policy, predictor, rate_rps, base, metrics)
    if site.mode is not Mode.ACT:
        remark = (
            f"{setup.name}: search: {rule.search} needs mode: act, which may try layouts on the running service; "
            f"in mode {site.mode} layouts are advised from the profile"
        )
        return PolicyBinding(policy, predictor, rate_rps, base, metrics, remark=remark)
    trying = replace(policy, search=trial_search(rule, setup, predictor, base, site.pue))
    return PolicyBinding(trying, predictor, rate_rps, base, metrics, rule.trials)


def trial_search(
    rule: CloverPolicy, setup: ServiceSetup, predictor: Predictor, base: Layout, pue: float
) -> TrialSearch:
    """The search by trials on the running service.

    Args:
        rule: How to search.
        setup: The service.
        predictor: Accuracy of its variants, and what the profile predicts.
        base: The baseline.
        pue: Facility energy per IT energy.
    """
    trials, menu = rule.trials, slice_menu(setup.partitions)
    return TrialSearch(
        accuracy_ratio=predictor.accuracy_ratio,
        menu=menu,
        devices=1,
        baseline=base,
        base_g_per_kwh=rule.base_g_per_kwh,
        disabled=misfits(menu, {variant.name: variant.memory_bytes for variant in setup.family.variants}),
        base_pue=pue,
        pue=pue,
        method=rule.search,
        seed=trials.seed,
        budget=TrialBudget(
            count=trials.count,
            clock_s=trials.clock_s,
            longest_s=trials.longest_s,
            min_requests=trials.min_requests,
            energy_tolerance_ratio=trials.energy_tolerance_ratio,
        ),
        predictor=predictor,
    )


def objectives_from_config(config: ServiceConfig, best_accuracy_ratio: float) -> ServiceObjectives:
    """Objectives of a service in a site file: weight of carbon, SLO, accuracy never to go below."""
    rule, least = config.policy, config.minimum_accuracy_ratio
    lambda_ratio = rule.lambda_ratio if isinstance(rule, CloverPolicy) else 1.0
    if isinstance(rule, CloverPolicy) and rule.accuracy_loss_ratio is not None:
        lambda_ratio, least = 1.0, max(least, best_accuracy_ratio * (1.0 - rule.accuracy_loss_ratio))
    return ServiceObjectives(lambda_ratio, config.slo.as_slo(), least)
