"""Preset muserve: split models into pipeline stages, with a clock for each GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace

from joulery.app.planning.shares import workload_of
from joulery.config.plan import GpuConfig, PipelinesSection
from joulery.config.site import Site
from joulery.domain.errors import ConfigError, DataError, InfeasibleError
from joulery.domain.gpu.clock_profile import ClockProfile
from joulery.domain.gpu.pipeline_plan import PipelinePlan
from joulery.domain.gpu.provisioning import Workload
from joulery.perf.catalog.architectures import architectures, operations_of, published_latency_s
from joulery.perf.catalog.clock_models import clock_model
from joulery.perf.power.clock_curves import V100, ClockModel
from joulery.perf.power.sensitivity import emulated_profile
from joulery.policies.placement.pipelines.partition import PartitionRules
from joulery.policies.placement.pipelines.planner import plan_pipelines
from joulery.policies.placement.pipelines.sharding import Link
from joulery.policies.placement.pipelines.task import DeviceType, PipelineRules
from joulery.store.scores import ScoreDatabase

_MOST_GPUS = 64


@dataclass(frozen=True, slots=True)
class StageRequest:
    """Input of a pipeline plan.

    Attributes:
        workloads: The services.
        profiles: Clock profile of each model.
        device: The GPUs; with a count of 0 the plan chooses the count.
        rules: Constraints to keep and choices to make.
    """

    workloads: tuple[Workload, ...]
    profiles: dict[str, ClockProfile]
    device: DeviceType
    rules: PipelineRules


def stage_request(site: Site) -> StageRequest:
    """Convert a site to a request for pipelines.

    Raises:
        ConfigError: No services, not exactly one GPU type, or a service without a rate.
        DataError: A model has no clock scores, or the database cannot be used.
    """
    section = site.plan.pipelines or PipelinesSection()
    if not site.services:
        raise ConfigError("there is nothing to plan", pointer="services", hint="list at least one service")
    if len(site.fleet.gpus) != 1:
        raise ConfigError(
            "a plan of pipelines needs a fleet of one GPU type",
            pointer="fleet.gpus",
            got=f"{len(site.fleet.gpus)} types",
            expected="one, such as {name: V100, price: 3.06 USD/h, available: 8}",
        )
    gpu = site.fleet.gpus[0]
    if gpu.available == 0:
        raise ConfigError(
            "there is no GPU to plan with", pointer="fleet.gpus.0.available", got="0", expected="1 or more"
        )
    model = _clock_model(gpu)
    workloads = tuple(workload_of(site, index, service) for index, service in enumerate(site.services))
    profiles = _profiles(tuple(dict.fromkeys(workload.model for workload in workloads)), section, model)
    memory = model.memory_bytes if gpu.memory_bytes is None else gpu.memory_bytes
    device = DeviceType(gpu.name, gpu.available or 0, gpu.price_usd_per_hour, section.usable_memory_ratio * memory)
    rules = PipelineRules(
        partition=PartitionRules(section.threshold, link=Link(section.link), launch_s=model.launch_s),
        devices_per_model=section.devices_per_model,
        requests=section.requests,
        seed=section.seed,
        beam=section.beam,
    )
    return StageRequest(workloads, profiles, device, rules)


def plan_stages(request: StageRequest, preset: str) -> PipelinePlan:
    """Plan on the fleet's GPUs; where their number is not stated, on the fewest of 1, 2, 4 … within every SLO.

    Raises:
        ConfigError, InfeasibleError: As :func:`joulery.policies.placement.pipelines.planner.plan_pipelines`.
    """
    if request.device.count:
        return plan_pipelines(preset, request.workloads, request.profiles, request.device, request.rules)
    count = 1
    while True:
        device = replace(request.device, count=count)
        try:
            plan = plan_pipelines(preset, request.workloads, request.profiles, device, request.rules)
        except InfeasibleError:
            if count >= _MOST_GPUS:
                raise
        else:
            if not plan.violations or count >= _MOST_GPUS:
                return plan
        count *= 2


def _clock_model(gpu: GpuConfig) -> ClockModel:
    try:
        return clock_model(gpu.profile or gpu.name)
    except ConfigError as error:
        raise ConfigError(
            error.message,
            pointer=f"fleet.gpus.0.{'name' if gpu.profile is None else 'profile'}",
            got=error.got,
            expected=error.expected,
            hint="name one of these as profile: its clocks, power and memory stand for this GPU",
        ) from None


def _profiles(models: tuple[str, ...], section: PipelinesSection, gpu: ClockModel) -> dict[str, ClockProfile]:
    """Profiles of models from the database where it contains them, else from the catalog of published ones."""
    found: dict[str, ClockProfile] = {}
    if section.scores is not None:
        with ScoreDatabase(section.scores, read_only=True) as database:
            known = {entry.model for entry in database.entries() if entry.device == gpu.name}
            found = {model: database.profile(model, gpu.name) for model in models if model in known}
    for model in models:
        if model in found:
            continue
        if model not in architectures():
            raise DataError(
                f"no clock scores of {model} on {gpu.name}",
                file=None if section.scores is None else str(section.scores),
                hint=f"run: joulery profile {model} --clocks --gpu {gpu.name} --scores FILE; "
                "then name FILE under plan.pipelines.scores",
            )
        latency_s = published_latency_s(model) if gpu is V100 else None
        found[model] = emulated_profile(model, operations_of(model), gpu, latency_s=latency_s)
    clocks = {tuple(profile.clocks_mhz.tolist()) for profile in found.values()}
    if len(clocks) > 1:
        raise DataError(
            f"the clock profiles of {', '.join(found)} are for different clocks",
            hint="profile them all on one device",
        )
    return found
