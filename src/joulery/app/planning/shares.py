"""Presets best, igniter and baselines: plan services on MPS shares of a site's GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from joulery.app.planning.prices import SPOT_SUFFIX, priced_with_spot
from joulery.config.arrivals import GammaArrivals, PlannedArrivals, PoissonArrivals, RecordedArrivals
from joulery.config.parsing.problem import nearest
from joulery.config.plan import GpuConfig
from joulery.config.services import ServiceConfig
from joulery.config.site import Site
from joulery.domain.errors import ConfigError, DataError
from joulery.domain.gpu.gpu_types import gpu_facts
from joulery.domain.gpu.provisioning import Arrivals, Workload
from joulery.perf import catalog
from joulery.perf.interference.document import from_document
from joulery.perf.interference.model import InterferenceProfile
from joulery.perf.queues.arrival_fit import ArrivalFit, fit_arrivals
from joulery.policies.placement.provisioning.gpu_shares import GpuType
from joulery.policies.placement.provisioning.options import Accounting, Balancer, FailureDomain, Rules
from joulery.store.columns import read_column
from joulery.store.files import require_json

_MAX_MARGIN = 10.0
"""Smallest error ratio of a profile that is too inaccurate to plan with."""


@dataclass(frozen=True, slots=True)
class ShareRequest:
    """Input of a plan of GPU shares.

    Attributes:
        workloads: The services, at the highest of their rates.
        types: The GPU types.
        rules: Constraints to keep and choices to make.
        error_ratio: Margin that covers the errors which the profiles report.
        preset: Name of the policy.
    """

    workloads: tuple[Workload, ...]
    types: tuple[GpuType, ...]
    rules: Rules
    preset: str
    error_ratio: float = 0.0


def share_request(site: Site) -> ShareRequest:
    """Convert a site to a request for a plan of shares.

    Raises:
        ConfigError: A service lacks a setting that the plan needs, or a GPU type has no coefficients.
        DataError: A profile file cannot be used.
    """
    if not site.services:
        raise ConfigError("there is nothing to plan", pointer="services", hint="list at least one service")
    if not site.fleet.gpus:
        raise ConfigError(
            "the fleet has no GPU type to plan with",
            pointer="fleet.gpus",
            expected="at least one, with its price",
            hint="such as fleet: {gpus: [{name: p3.2xlarge, profile: v100, price: 3.06 USD/h}]}",
        )
    spot: frozenset[str] = frozenset()
    if site.fleet.prices is not None:
        site, spot = priced_with_spot(site)
    plan = site.plan
    workloads = tuple(workload_of(site, index, service) for index, service in enumerate(site.services))
    types = tuple(replace(gpu_type_of(index, gpu), spot=gpu.name in spot) for index, gpu in enumerate(site.fleet.gpus))
    error = error_margin(workloads, types, stated=plan.margin_ratio is not None)
    margin = error if plan.margin_ratio is None else plan.margin_ratio
    return ShareRequest(workloads, types, rules_of(site, types, margin), plan.preset, error)


def rules_of(site: Site, types: Sequence[GpuType], margin_ratio: float) -> Rules:
    """Constraints and choices of a site's plan.

    Args:
        site: The site.
        types: Its GPU types.
        margin_ratio: The margin; where the site states none, the published errors of each model apply as well.
    """
    plan = site.plan
    return Rules(
        Accounting(plan.accounting),
        plan.max_batch,
        plan.replicas,
        margin_ratio,
        plan.noise_cv,
        Balancer(plan.balancer),
        FailureDomain(plan.failure_domain),
        {} if plan.margin_ratio is not None else published_margins(types),
    )


def error_margin(workloads: Sequence[Workload], types: Sequence[GpuType], *, stated: bool = False) -> float:
    """The margin that covers the errors which the profiles report: the largest among the models in use.

    Args:
        workloads: The services.
        types: The GPU types.
        stated: Whether the user stated a margin, so that any error is only reported.

    Raises:
        ConfigError: A profile predicts so badly that no margin covers it.
    """
    models = {workload.model for workload in workloads}
    bands = {(kind.name, m): kind.profile.error_band(m) for kind in types for m in models if m in kind.profile.models}
    name, worst = max(bands.items(), key=lambda each: each[1], default=(("", ""), 0.0))
    if worst >= _MAX_MARGIN and not stated:
        raise ConfigError(
            f"the profile of {name[0]} predicts {name[1]} too badly to plan with: "
            f"1 measurement in 20 took {1 + worst:.3g} times as long or longer",
            pointer="fleet.gpus",
            expected=f"less than {1 + _MAX_MARGIN:g} times",
            hint="profile it again, or state a margin: plan: {margin: 20 %}",
        )
    return worst


def published_margins(types: Sequence[GpuType]) -> dict[str, float]:
    """For each model the margin that covers the published error of its coefficients, the worst of the GPU types."""
    worst: dict[str, float] = {}
    for kind in types:
        for model, band in kind.profile.bands.items():
            worst[model] = max(worst.get(model, 0.0), band)
    return worst


def workload_of(site: Site, index: int, service: ServiceConfig) -> Workload:
    """A service of a site at the highest of its rates.

    Raises:
        ConfigError: The service states no rate, or does not state which of its variants to plan for.
    """
    model = _model(index, service)
    return Workload(
        id=service.name,
        model=model,
        slo=service.slo.as_slo(),
        rate_rps=planned_rate_rps(index, service, site.plan.arrivals),
        arrivals=arrivals_of(service.arrivals or site.plan.arrivals, service.slo.latency_s),
        memory_bytes=_process_memory(service, model),
        replicas_min=service.minimum_replicas,
        spot=service.spot,
    )


def _process_memory(service: ServiceConfig, model: str) -> float | None:
    """GPU memory of one process, stated for the service or for its model; None where neither states it."""
    if service.memory_bytes is not None or service.family_config is None:
        return service.memory_bytes
    return next((each.memory_bytes for each in service.family.variants if each.name == model), 0.0) or None


def planned_rate_rps(index: int, service: ServiceConfig, default: PlannedArrivals | None = None) -> float:
    """Rate that a service is planned for: the highest of its rates, or that of the log of its arrivals.

    Raises:
        ConfigError: The service states no rate.
        DataError: Its log cannot be used.
    """
    highest = max((step.rate_rps for step in service.rates), default=service.rate_rps or 0.0)
    arrivals = service.arrivals or default
    if not highest and isinstance(arrivals, RecordedArrivals):
        highest = fitted(arrivals, service.slo.latency_s).rate_rps
    if highest <= 0:
        raise ConfigError(
            f"service {service.name} states no rate to plan for",
            pointer=f"services.{index}.rate",
            expected="a rate such as 40 /s",
        )
    return highest


def _model(index: int, service: ServiceConfig) -> str:
    if service.model is not None:
        return service.model
    variants = service.family.variants
    if len(variants) > 1:
        raise ConfigError(
            f"service {service.name} has {len(variants)} variants, so a plan needs to know which to provide for",
            pointer=f"services.{index}.model",
            expected=" or ".join(variant.name for variant in variants),
        )
    return variants[0].name


def fitted(config: RecordedArrivals, slo_s: float) -> ArrivalFit:
    """Rate and variation of the requests of a log.

    Raises:
        DataError: The log cannot be used, or has too few requests.
    """
    try:
        return fit_arrivals(read_column(config.file, config.column), slo_s)
    except DataError as error:
        raise DataError(error.message, file=error.file or str(config.file), row=error.row, hint=error.hint) from None


def arrivals_of(config: PlannedArrivals, slo_s: float) -> Arrivals:
    """The arrival process of a section; one from a log is fitted for a service with this SLO.

    Raises:
        DataError: The log cannot be used.
    """
    if isinstance(config, RecordedArrivals):
        scv = fitted(config, slo_s).scv_high
        return Arrivals.general(scv) if scv else Arrivals()
    if isinstance(config, PoissonArrivals):
        return Arrivals.poisson()
    if isinstance(config, GammaArrivals) and config.cv > 0:
        return Arrivals.general(config.cv**2)
    return Arrivals()


def gpu_type_of(index: int, gpu: GpuConfig) -> GpuType:
    """The GPU type a site lists, with its coefficients.

    Raises:
        ConfigError: The GPU type has two profiles, or no known profile.
        DataError: Its profile file cannot be used.
    """
    pointer = f"fleet.gpus.{index}"
    if gpu.profile is not None and gpu.profile_file is not None:
        raise ConfigError("a GPU has one profile: from the catalog or from a file", pointer=pointer)
    if gpu.profile_file is not None:
        profile = read_interference(gpu.profile_file)
    else:
        try:
            profile = catalog.profile(gpu.profile or gpu.name.lower())
        except ConfigError as error:
            if gpu.profile is None:
                raise _no_profile(index, gpu.name) from None
            error.pointer = f"{pointer}.profile"
            raise
    return GpuType(gpu.name, profile, gpu.price_usd_per_hour, gpu.available, board_memory(gpu, profile), gpu.per_host)


def _no_profile(index: int, name: str) -> ConfigError:
    """Error for a GPU type without a published interference profile: lists the known types and how to measure one."""
    from joulery.perf.catalog.clover_services import CLOVER_SERVICES
    from joulery.perf.catalog.llm_runs import published_runs

    hint = (
        f"measure your models on it (joulery profile NAME=MODEL --mps GPU -o FILE) and add profile_file: FILE to "
        f"fleet.gpus.{index}"
    )
    try:
        facts = gpu_facts(name.removesuffix(SPOT_SUFFIX))
    except ConfigError:
        near = nearest(name, catalog.names())
        hint = f"did you mean profile: {near}? Else {hint}" if near else f"say what it is (profile: v100), or {hint}"
    else:
        if facts.name in {run.point.gpu.name for run in published_runs()}:
            hint += f"; language models are planned on {facts.name} with published runs (plan.language)"
        elif facts.name.startswith("A100"):
            hint += f"; presets columns and clover plan {', '.join(CLOVER_SERVICES)} on it"
    return ConfigError(
        f"no profile of GPU type {name} is published for models that share a GPU",
        pointer=f"fleet.gpus.{index}.name",
        got=name,
        expected=f"one of {', '.join(catalog.names())}, or a profile of your own",
        hint=hint,
    )


def board_memory(gpu: GpuConfig, profile: InterferenceProfile) -> float | None:
    """Memory of a board as stated, or from the catalog of GPU types; None where neither has it."""
    if gpu.memory_bytes is not None:
        return gpu.memory_bytes
    for name in (gpu.name.removesuffix(SPOT_SUFFIX), profile.gpu.name.partition(" ")[0]):
        with suppress(ConfigError):
            return gpu_facts(name).memory_bytes
    return None


def read_interference(file: Path) -> InterferenceProfile:
    """Read the interference profile in a JSON file.

    Raises:
        DataError: The file cannot be read, or is not an interference profile.
    """
    return from_document(require_json(file), file=str(file))
