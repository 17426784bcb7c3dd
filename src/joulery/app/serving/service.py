"""Convert a service of the site file to runtime objects: models on disk, slices of this machine, a policy."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from joulery.app.profiling.inputs import read_arrivals
from joulery.app.serving.ray_nodes.node_slices import first_nodes, node_slices, nodes_of, shares_of_nodes, within_bounds
from joulery.app.serving.split import main_of, shares_of, split_binding
from joulery.app.wiring.gpus import LocalGpus
from joulery.app.wiring.model_refs import model_ref
from joulery.config.fleet import CpuConfig
from joulery.config.loadgen import TraceLoad
from joulery.config.services import (
    CloverPolicy,
    FixedPolicy,
    ServiceConfig,
    SplitPolicy,
)
from joulery.config.site import Mode, Site
from joulery.domain.errors import CapabilityError, ConfigError
from joulery.domain.gpu.layout import Layout, SliceAssignment
from joulery.domain.serving.profile import Profile
from joulery.domain.serving.service import Slice, SliceKind, SloScope
from joulery.perf.layouts import BATCH_RATIO, Predictor, batched_within
from joulery.perf.queues.pull_queue import capacity_rps
from joulery.policies.placement.pools.gpu_groups import first_alone, split
from joulery.policies.serving.consolidation import Consolidation
from joulery.policies.serving.objective import NO_BASE_G_PER_KWH, Objective, ReplanTrigger, ServiceObjectives
from joulery.policies.serving.policy import ServicePolicy
from joulery.policies.serving.search.layout_space import core_partitions, cpu_slices, layouts, slice_menu, unfit_edges
from joulery.policies.serving.search.predictive_search import PredictiveSearch, baseline_layout
from joulery.policies.serving.search.trial_search import TrialSearch
from joulery.policies.serving.search.trials import TrialBudget
from joulery.policies.serving.switchback import Switchback
from joulery.policies.serving.variants.changes import family_of
from joulery.runtime.serving.running_service import PolicyBinding, ServiceSetup

PREDICT = "predict"
CONCURRENCY = 4
"""Default number of concurrent requests to the upstreams of a service."""
_NEVER = 1e6
"""Change of the intensity, as a multiple of the base, that never occurs: disables replanning."""
_LEAST_TRIM_S, _TRIM_SLOS = 1.0, 3.0
"""Smallest trim at the start of a baseline period: in seconds, and as a multiple of the SLO."""


def service_setup(site: Site, config: ServiceConfig, cache: Path, gpus: LocalGpus | None = None) -> ServiceSetup:
    """Set up the service on this machine: build or look up its models, without starting them.

    Args:
        site: The site, for its fleet.
        config: The service.
        cache: Where built models are kept.
        gpus: Its GPU group with the partitions it may use; None for the CPU.

    Raises:
        CapabilityError: The machine has fewer cores than asked for, or a package is missing.
        ConfigError, DataError: A model file is missing or damaged.
        InfeasibleError: There are more layouts than can be tried, or none has as many replicas as asked for.
    """
    cores, cpu = cores_of(site).get(config.name, ()), config.cpu or site.fleet.cpu
    fixed = None if cpu is None else cpu.as_slices()
    assignment: SliceAssignment = {}
    partitions: tuple[tuple[Slice, ...], ...]
    if config.family.is_upstream:
        partitions = ((Slice(SliceKind.WHOLE),) * (config.concurrency or CONCURRENCY),)
    else:
        partitions = (fixed,) if fixed is not None else tuple(map(cpu_slices, core_partitions(len(cores))))
    if gpus is not None:
        assignment = split(gpus.partitions)
        partitions = tuple(assignment)
    if nodes_of(site):
        assignment = node_slices(shares_of_nodes(site)[config.name])
        partitions = tuple(assignment)
    if not config.family.is_upstream:
        partitions = within_bounds(partitions, config)
        assignment = {partition: where for partition, where in assignment.items() if partition in partitions}
    if consolidates(site, config):
        alone = first_nodes(shares_of_nodes(site).get(config.name, ())) if nodes_of(site) else {}
        assignment = {**(alone if gpus is None else first_alone(gpus.partitions)), **assignment}
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
        max_batch=config.max_batch,
        batch_delay_s=config.batch_delay_s,
        replica_cores=cores_beside_upstreams(site).get(config.name, ()),
    )


def cores_of(site: Site) -> dict[str, tuple[int, ...]]:
    """The CPU cores of each service with models on this machine, by name.

    Services with ``cpu`` settings get theirs first; the others get equal parts of the remaining cores, the first ones
    one more. Where there are more of them than cores left, each gets one shared core.

    Raises:
        CapabilityError: The machine has fewer cores than asked for.
        ConfigError: One partition is given for all services together.
    """
    cores, services = fleet_cores(site), [one for one in site.services if _runs_here(one)]
    if len(services) > 1 and site.fleet.cpu is not None and site.fleet.cpu.slices is not None:
        raise ConfigError(
            f"fleet.cpu.slices partitions the cores for one service, the site has {len(services)}",
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


def batch_remarks(setup: ServiceSetup, measured: Profile, used: Profile) -> list[str]:
    """Reasons why variants answer smaller batches than the site file allows, one sentence each.

    Args:
        setup: The service.
        measured: Its profile.
        used: The profile with only the batches that fit the SLO.
    """
    if setup.max_batch == 1:
        return []
    alone = dict.fromkeys(entry.variant for entry in measured.entries if not entry.batches)
    held = [
        f"{entry.variant} {kept.max_batch} on {entry.slice}"
        for entry in measured.entries
        if (kept := used.entry(entry.variant, entry.slice)).max_batch < entry.max_batch
    ]
    found = [f"{setup.name}: {', '.join(alone)} answer one request at a time, for their models take no batches"]
    ratio = f"{100 * BATCH_RATIO:.0f} % of the SLO's latency"
    found += [f"{setup.name}: a batch takes at most {ratio}, so fewer are answered together: {', '.join(held)}"]
    return [text for text, names in zip(found, (alone, held), strict=True) if names]


def shared_cores(cores: Mapping[str, tuple[int, ...]]) -> list[str]:
    """A remark on each core that several services share: each of them is planned as if it had the core alone.

    Args:
        cores: Cores of each service.
    """
    users: dict[int, list[str]] = {}
    for name, mine in cores.items():
        for core in mine:
            users.setdefault(core, []).append(name)
    return [
        f"{' and '.join(names)} share core {core}, and each is planned as if it had it alone; "
        "give the fleet more cores, or run fewer services here"
        for core, names in sorted(users.items())
        if len(names) > 1
    ]


def _runs_here(config: ServiceConfig) -> bool:
    """Whether some models of a service run on this machine, so that it needs cores."""
    family = config.family_config
    return family is None or family.is_mixed or not family.is_upstream


def cores_beside_upstreams(site: Site) -> dict[str, tuple[tuple[int, ...], ...]]:
    """The cores of each replica, by service, for services with variants both on this machine and on other servers.

    A replica has one core, or the cores of a slice of ``cpu.slices``.

    Raises:
        CapabilityError: The machine has fewer cores than asked for.
    """
    mixed = [one for one in site.services if one.family_config is not None and one.family_config.is_mixed]
    return {one.name: _replica_cores(site, one, cores_of(site)[one.name]) for one in mixed}


def _replica_cores(site: Site, config: ServiceConfig, cores: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    cpu = config.cpu or site.fleet.cpu
    sizes = (1,) * len(cores) if cpu is None or cpu.slices is None else cpu.slices
    ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
    return tuple(cores[end - size : end] for size, end in zip(sizes, ends, strict=True))


def _claimed(cpu: CpuConfig | None) -> int:
    """Number of cores that a section requests; 0 where it requests none."""
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


def demand_rps(site: Site, config: ServiceConfig, setup: ServiceSetup, profile: Profile) -> float:
    """The demand to plan for, requests a second: stated by the service or the load, or the load's share of capacity.

    The capacity is that of the most accurate variant on its best partition.

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
        "neither the service nor the load states how many requests to expect",
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
    """Create the policy of a service from its profile.

    A fixed policy is the same policy with a single variant: it still chooses the partition that meets the SLO with the
    fewest joules.

    Args:
        site, config, setup: The site file, this service's section, and its variants and candidates.
        profile: Latency and joules of the variants on the slices.
        settle_s: Seconds in which the service settles after a change.

    Raises:
        ConfigError: No demand is named anywhere.
        DataError: The profile lacks a variant or a slice.
        InfeasibleError: No layout reaches the accuracy asked for.
    """
    profile = batched_within(profile, setup.max_batch, setup.slo.latency_s, setup.slo.quantile)
    rate_rps = demand_rps(site, config, setup, profile)
    accuracy = {variant.name: variant.accuracy_ratio for variant in setup.family.variants}
    predictor = Predictor(profile, accuracy, quantile=setup.slo.quantile, batch_delay_s=setup.batch_delay_s)
    largest = setup.family.largest
    base, metrics = baseline_layout(setup.candidates, largest.name, predictor, setup.slo, rate_rps)
    rule = config.policy
    goals = objectives_from_config(config, largest.accuracy_ratio)
    base_g_per_kwh, replan_ratio = NO_BASE_G_PER_KWH, _NEVER
    if isinstance(rule, CloverPolicy):
        base_g_per_kwh, replan_ratio = rule.base_g_per_kwh, rule.replan_ratio
    policy = ServicePolicy(
        service=setup.name,
        search=PredictiveSearch(
            candidates=_candidates(config, setup),
            predictor=predictor,
            objective=_objective(goals, largest.accuracy_ratio, metrics.energy_j, base_g_per_kwh, site.pue),
        ),
        objectives=goals,
        rate_rps=rate_rps,
        trigger=ReplanTrigger(base_g_per_kwh * site.pue, site.pue, replan_ratio, settle_s=settle_s),
        consolidation=consolidation(site, config, setup),
        family=family_of(accuracy) if isinstance(rule, CloverPolicy) and site.mode is Mode.ACT else (),
    )
    loaded, replica_bytes = kept_loaded(site, config, setup, profile, free_memory_bytes)
    binding = PolicyBinding(policy, predictor, rate_rps, base, metrics, loaded=loaded, replica_bytes=replica_bytes)
    binding = replace(binding, audit=switchback(site, config, setup, base, settle_s))
    if isinstance(rule, SplitPolicy):
        return split_binding(binding, setup, shares_of(config, setup.family))
    if not isinstance(rule, CloverPolicy) or rule.search == PREDICT:
        return binding
    if site.mode is not Mode.ACT:
        remark = (
            f"{setup.name}: search: {rule.search} needs mode: act, which may try layouts on the running service; "
            f"in mode {site.mode} layouts are advised from the profile"
        )
        return replace(binding, remark=remark)
    trying = replace(policy, search=trial_search(rule, setup, predictor, base, site.pue))
    return replace(binding, policy=trying, trials=rule.trials)


def _objective(
    goals: ServiceObjectives, base_accuracy_ratio: float, base_energy_j: float, base_g_per_kwh: float, pue: float
) -> Objective:
    """Objective for layouts, against a baseline of this accuracy and energy on a grid of this intensity."""
    return Objective(
        lambda_ratio=goals.lambda_ratio,
        base_accuracy_ratio=base_accuracy_ratio,
        base_energy_j=base_energy_j,
        base_g_per_kwh=base_g_per_kwh,
        base_pue=pue,
        pue=pue,
    )


def _candidates(config: ServiceConfig, setup: ServiceSetup) -> tuple[Layout, ...]:
    """The layouts that a policy may choose: with fixed shares, those with the main variant on every slice."""
    if isinstance(config.policy, CloverPolicy):
        return tuple(setup.candidates)
    only = {main_of(shares_of(config, setup.family))}
    return tuple(layout for layout in setup.candidates if set(layout.counts) == only)


def consolidates(site: Site, config: ServiceConfig) -> bool:
    """Whether slices of a service may be left empty."""
    return _consolidating(site, config) is not None


def _consolidating(site: Site, config: ServiceConfig) -> CloverPolicy | None:
    rule = config.policy
    return rule if isinstance(rule, CloverPolicy) and rule.consolidate and site.mode is Mode.ACT else None


def consolidation(site: Site, config: ServiceConfig, setup: ServiceSetup) -> Consolidation | None:
    """Rules for leaving slices of a service empty; None where all are filled.

    Raises:
        ConfigError: The service has one GPU or node, or GPUs that other services may run on too.
    """
    rule = _consolidating(site, config)
    if rule is None:
        return None
    if setup.gpus and (len(setup.gpus) == 1 or site.plan.colocate):
        raise ConfigError(
            "whole GPUs are left empty, and "
            + ("services share them here" if site.plan.colocate else f"{config.name} has one"),
            pointer=f"services.{config.name}.policy.consolidate",
            got="true",
            expected="a service with at least two GPUs of its own, or false",
        )
    nodes = shares_of_nodes(site).get(config.name, ())
    if len(nodes) == 1:
        raise ConfigError(
            f"whole nodes are left empty, and {config.name} has one",
            pointer=f"services.{config.name}.policy.consolidate",
            got="true",
            expected="a service with at least two nodes, or false",
        )
    wakes_s = [node.wakes_in_s for node in nodes if node.sleep is not None]
    return Consolidation(
        patience_s=rule.consolidate_after_s,
        gpus=setup.slice_assignment if setup.gpus or nodes else {},
        sleepers=len(wakes_s),
        wakes_s=max(wakes_s, default=0.0),
    )


def switchback(
    site: Site, config: ServiceConfig, setup: ServiceSetup, base: Layout, settle_s: float
) -> Switchback | None:
    """Settings to measure the baseline of a service; None where it is not measured, or is the running layout anyway.

    Requests of an earlier layout have left the queue after a few times the latency of the SLO. The measured part of a
    period is as long as the service takes to settle.

    Args:
        site, config, setup: As of :func:`choose`.
        base: The baseline's layout.
        settle_s: Seconds in which the service settles after a change.
    """
    rule, audit = config.policy, config.audit
    is_baseline = isinstance(rule, FixedPolicy) and rule.variant in (None, setup.family.largest.name)
    if site.mode is not Mode.ACT or not audit.share_ratio > 0 or is_baseline:
        return None
    trim_s = max(_LEAST_TRIM_S, _TRIM_SLOS * setup.slo.latency_s)
    period_s = max(settle_s, trim_s) if audit.period_s is None else audit.period_s
    made = Switchback(base, audit.share_ratio, trim_s, period_s, fixed_slices=bool(setup.gpus), seed=audit.seed)
    return made if audit.period_s is None else replace(made, min_requests=1)


def trial_search(
    rule: CloverPolicy, setup: ServiceSetup, predictor: Predictor, base: Layout, pue: float
) -> TrialSearch:
    """Create the search by trials on the running service.

    Args:
        rule: Settings of the search.
        setup: The service.
        predictor: Accuracy of its variants, and predictions from the profile.
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
        disabled=unfit_edges(menu, {variant.name: variant.memory_bytes for variant in setup.family.variants}),
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
    """Objectives of a service in a site file: weight of carbon, SLO, lowest accuracy."""
    rule, least = config.policy, config.minimum_accuracy_ratio
    lambda_ratio = rule.lambda_ratio if isinstance(rule, CloverPolicy) else 1.0
    if isinstance(rule, CloverPolicy) and rule.accuracy_loss_ratio is not None:
        lambda_ratio, least = 1.0, max(least, best_accuracy_ratio * (1.0 - rule.accuracy_loss_ratio))
    return ServiceObjectives(lambda_ratio, config.slo.as_slo(), least, config.threatened_accuracy_ratio)


def kept_loaded(
    site: Site, config: ServiceConfig, setup: ServiceSetup, profile: Profile, free_bytes: Callable[[], int]
) -> tuple[tuple[str, ...], int]:
    """The variants that each replica keeps loaded, the fastest first, and the memory that it may use for them.

    Empty without a Clover policy in mode act, with a single variant, without memory for them, or where the SLO
    excludes waiting. On a GPU: all variants if their stated memory fits the smallest slice together, else none.

    Args:
        site: The site, for its mode.
        config: The service.
        setup: The service on this machine.
        profile: Times of the variants, for their order.
        free_bytes: Returns the free memory of this machine.
    """
    names = [variant.name for variant in setup.family.variants]
    waits = setup.slo.scope is SloScope.END_TO_END
    given = config.warm_memory_bytes
    if site.mode is not Mode.ACT or not isinstance(config.policy, CloverPolicy) or len(names) < 2 or not waits:
        return (), 0
    if given == 0:
        return (), 0
    mean_s = {name: min(e.loaded.mean_s for e in profile.entries if e.variant == name) for name in names}
    ordered = tuple(sorted(names, key=lambda name: (mean_s[name], name)))
    if setup.gpus:
        needed = [variant.memory_bytes for variant in setup.family.variants]
        slices = [slice_menu(setup.partitions).profiles]
        room = [profile.memory_bytes for profiles in slices for profile in profiles if profile.memory_bytes > 0]
        return (ordered, 0) if all(needed) and room and sum(needed) <= min(room) else ((), 0)
    most = max(len(partition) for partition in setup.partitions)
    total_bytes = free_bytes() / 2 if given is None else given
    return ordered, int(total_bytes / most)


def free_memory_bytes() -> int:
    """Memory that is free on this machine, caches included."""
    import psutil

    return int(psutil.virtual_memory().available)
