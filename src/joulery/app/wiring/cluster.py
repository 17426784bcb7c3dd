"""Open the cluster, the policy and the energy sources of training jobs, from the ``jobs`` section of a site."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from joulery.adapters.clusters.local import LocalBackend, Slot
from joulery.adapters.clusters.progress import Progress, output_pattern
from joulery.app.node_agent import job_meter, machine_gpus
from joulery.app.wiring.carbon import carbon_source
from joulery.app.wiring.models import cache_folder
from joulery.app.wiring.site_meters import meter_specs
from joulery.config.jobs import JobsConfig, SlotsConfig, SlurmRestConfig
from joulery.config.site import Site
from joulery.domain.cluster import ClusterSnapshot
from joulery.domain.errors import CapabilityError, ConfigError
from joulery.domain.ports import CarbonSource, ClusterBackend
from joulery.policies.training.green import LEAN, Green, green_paper
from joulery.policies.training.service_order import ShiftRule
from joulery.runtime.schedule.energy import FirstSource, StatedPower
from joulery.runtime.schedule.spool import SpoolReader
from joulery.store.jobs import JobBook

if TYPE_CHECKING:
    from pathlib import Path

    from joulery.adapters.clusters.slurm_rest import RestPlace
    from joulery.runtime.schedule.energy import Totals


_CEILING_QUANTA = 14
"""Quanta of the average job's service beyond which more carbon does not lower a job's rank: 7 h of half hours."""
_AGENT_S = 120.0
"""Time for a node agent, which samples every 30 s, to report a job before its power is assumed."""


def jobs_of(site: Site) -> JobsConfig:
    """The ``jobs`` section.

    Raises:
        ConfigError: The site has none.
    """
    if site.jobs is None:
        raise ConfigError("this site has no jobs section", pointer="jobs", hint="add, for this machine: jobs: {}")
    return site.jobs


def one_cluster(site: Site, name: str | None) -> Site:
    """Return the site with the jobs of one of its clusters; unchanged if it lists none and none is named.

    Folders that several clusters may share (the default state folder, meters and progress) get a folder of the
    cluster's name, because clusters number their jobs alike.

    Raises:
        ConfigError: There is no such cluster, or the site lists several and none is named.
    """
    names = [cluster.name for cluster in site.clusters]
    if name is None and len(names) == 1:
        name = names[0]
    if name is None and not names:
        return site
    if name not in names:
        what = "which cluster?" if name is None else "this site lists no such cluster"
        raise ConfigError(what, pointer="--cluster", got=name, expected=", ".join(names) or "none: it has jobs alone")
    jobs = next(cluster.jobs for cluster in site.clusters if cluster.name == name)
    kueue = jobs.kueue.model_copy(
        update={"progress": None if jobs.kueue.progress is None else jobs.kueue.progress / name}
    )
    slurm = jobs.slurm.model_copy(
        update={
            "cluster": name,
            "meters": None if jobs.slurm.meters is None else jobs.slurm.meters / name,
            "progress": None if jobs.slurm.progress is None else jobs.slurm.progress / name,
        }
    )
    state = jobs.state if "state" in jobs.model_fields_set else jobs.state / name
    own = {"slurm": slurm, "kueue": kueue, "state": state}
    return site.model_copy(update={"clusters": (), "jobs": jobs.model_copy(update=own)})


def cluster_backend(jobs: JobsConfig) -> ClusterBackend:
    """Open the cluster that a ``jobs`` section describes.

    Raises:
        CapabilityError: The cluster cannot be used from here.
    """
    if jobs.backend == "local":
        return local_backend(jobs)
    if jobs.backend == "kueue":
        return kueue_backend(jobs)
    from joulery.adapters.clusters.slurm import open_slurm

    return open_slurm(
        partitions=jobs.slurm.partitions,
        user_range=jobs.slurm.user_range,
        progress=Progress(jobs.slurm.progress, _pattern(jobs)),
        timeout_s=jobs.slurm.timeout_s,
        resubmit=jobs.slurm.resubmit,
        reason_in_comment=jobs.slurm.reason_in_comment,
        conf=jobs.slurm.conf,
        cluster=jobs.slurm.cluster,
        rest=None if jobs.slurm.rest is None else _rest_place(jobs.slurm.rest, jobs.slurm.timeout_s),
    )


def kueue_backend(jobs: JobsConfig) -> ClusterBackend:
    """Open the Kueue cluster that a ``jobs`` section describes.

    Raises:
        CapabilityError: The API server does not answer, or refuses access.
        ConfigError: The kubeconfig is wrong.
    """
    from joulery.adapters.clusters.kueue.backend import KueueScope, open_kueue

    config = jobs.kueue
    scope = KueueScope(config.resource, config.queues, config.progress)
    return open_kueue(scope, kubeconfig=config.kubeconfig, context=config.context, timeout_s=config.timeout_s)


def priority_step(jobs: JobsConfig) -> float:
    """Points of the cluster's own priority per priority class; 0 for a single class."""
    steps = {"slurm": jobs.slurm.priority_step, "kueue": jobs.kueue.priority_step}
    return steps.get(jobs.backend, 0.0)


def _rest_place(config: SlurmRestConfig, timeout_s: float) -> RestPlace:
    from joulery.adapters.clusters.slurm_rest import RestPlace

    return RestPlace(
        url=config.url or "",
        socket=config.socket,
        user=config.user or "",
        token=lambda: os.environ.get(config.token_env, ""),
        timeout_s=timeout_s,
    )


def _pattern(jobs: JobsConfig) -> re.Pattern[str] | None:
    return None if jobs.output_pattern is None else output_pattern(jobs.output_pattern)


def progress_folder(site: Site) -> Path:
    """The folder from which the scheduler reads progress.

    Raises:
        ConfigError: The site names no folder for it.
    """
    folder = jobs_of(site).slurm.progress
    if folder is None:
        raise ConfigError("names no folder for progress", pointer="jobs.slurm.progress", hint="name a shared folder")
    return folder


def local_backend(jobs: JobsConfig) -> LocalBackend:
    """Open the backend of this machine.

    Raises:
        ConfigError: This machine has fewer cores or GPUs than the section asks for.
        CapabilityError: No GPU answers.
    """
    slots = machine_slots(jobs.slots)
    return LocalBackend(JobBook(jobs.state), slots, grace_s=jobs.grace_s, pattern=_pattern(jobs))


def machine_slots(slots: SlotsConfig) -> tuple[Slot, ...]:
    """The slots of this machine.

    Raises:
        ConfigError: This machine has fewer cores or GPUs than the section asks for.
        CapabilityError: No GPU answers.
    """
    if slots.kind == "gpu":
        boards = machine_gpus()
        count = len(boards) if slots.count is None else slots.count
        if count > len(boards):
            raise ConfigError(f"this machine has {len(boards)} GPUs", pointer="jobs.slots.count", got=str(count))
        return tuple(Slot(gpu=board) for board in boards[:count])
    cores = sorted(os.sched_getaffinity(0))
    count = len(cores) // slots.cores if slots.count is None else slots.count
    if count * slots.cores > len(cores) or count < 1:
        raise ConfigError(
            f"{max(1, count)} slots of {slots.cores} cores need more than the {len(cores)} cores there are",
            pointer="jobs.slots",
            hint=f"write a jobs.slots.count of at most {len(cores) // slots.cores}, or fewer jobs.slots.cores",
        )
    return tuple(Slot(cores=tuple(cores[at * slots.cores : (at + 1) * slots.cores])) for at in range(count))


def site_intensity(site: Site) -> CarbonSource | None:
    """Open the site's source of carbon intensity; None where it has none."""
    return None if site.carbon is None else carbon_source(site.carbon, cache_folder())


def green_policy(jobs: JobsConfig) -> Green:
    """Create the policy that a ``jobs`` section describes.

    Raises:
        ConfigError: A value is out of range.
    """
    config = jobs.policy
    quantum_s = jobs.quantum_s
    own_bounds = Green(preempt_after_s=quantum_s, progress_after_s=quantum_s, ceiling_gpu_s=_CEILING_QUANTA * quantum_s)
    policy = green_paper() if config.kind == "green-paper" else own_bounds
    if config.kind in LEAN:
        policy = replace(policy, **LEAN[config.kind], name=config.kind)
    if config.gamma is not None or config.price_ratio is not None:
        policy = replace(policy, price_ratio=config.price_ratio)
    if config.by_progress is not None:
        policy = replace(policy, progress_after_s=quantum_s if config.by_progress else None)
    own: dict[str, Any] = {
        "gamma": config.gamma,
        "shift": None if config.shift is None else ShiftRule(config.shift),
        "hysteresis": config.hysteresis,
        "profile_cache": config.profiles,
        "ceiling_gpu_s": config.ceiling_s,
        "levels": config.levels,
        "oldest_share": config.oldest_share,
        "ageing_s": config.ageing_s,
        "preempt_after_s": config.preempt_after_s,
        "delay_ratio": config.delay_ratio,
        "order": config.order,
    }
    return replace(
        policy,
        mu=config.mu,
        theta=config.theta,
        cap=policy.cap if config.cap is None else config.cap,
        carbon_gamma=config.carbon_gamma,
        starve_ratio=config.starve,
        node_gpus=config.node_slots,
        **{knob: value for knob, value in own.items() if value is not None},
    )


def energy_source(site: Site, backend: ClusterBackend, note: Callable[[str], None]) -> FirstSource:
    """Open the source of jobs' energy: this machine's meters or the node agents, else a stated power."""
    jobs = jobs_of(site)
    sources: list[Callable[[ClusterSnapshot], Totals]] = []
    if isinstance(backend, LocalBackend):
        try:
            meter = job_meter(meter_specs(site.meters), backend.metered, len(machine_slots(jobs.slots)))
            sources.append(meter.read)
        except CapabilityError as error:
            note(f"jobs are not metered: {error}")
    elif jobs.backend == "slurm" and jobs.slurm.meters is not None:
        sources.append(SpoolReader(jobs.slurm.meters, note).read)
    if jobs.power is not None:
        after_s = _AGENT_S if jobs.backend == "slurm" and jobs.slurm.meters is not None else 0.0
        sources.append(StatedPower(jobs.power.slot_w, jobs.power.share_w, after_s=after_s).read)
    if not sources:
        note("jobs have no meter and no stated power (jobs.power): there are no footprints, and no job grows")
    return FirstSource(sources)
