"""Profile the variants of a service, or one of them, on slices of this machine's cores."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from joulery.app.profiling.service_profile import measure_profile
from joulery.app.serving.service import service_setup
from joulery.app.wiring.models import cache_folder
from joulery.app.wiring.site_meters import meter_specs
from joulery.config import load
from joulery.config.services import ServiceConfig
from joulery.config.site import Site
from joulery.domain.errors import ConfigError
from joulery.domain.serving.profile import Profile
from joulery.policies.serving.search.layout_space import cpu_slices
from joulery.runtime.profiling.slice_timings import Plan
from joulery.runtime.serving.running_service import ServiceSetup


def profile_on_slices(
    file: Path,
    what: str,
    core_lists: Sequence[str],
    *,
    warmup: int,
    runs: int,
    progress: Callable[[int, int, str], None],
) -> Profile:
    """Measure the variants of a service in worker processes as they are served.

    Args:
        file: The site file.
        what: A service of the site, or one variant.
        core_lists: Partitions of the cores, such as ``1,1``; those of the site when empty.
        warmup: Requests before the timed ones.
        runs: Requests timed on each slice, alone and loaded.
        progress: Receives ``(done, of, next step)``.

    Raises:
        ConfigError: The site has no such service or variant, or a partition does not fit the cores.
    """
    site = load(file)
    config, variants = _named(site, what)
    sent = site.load_of(config)
    setup = _narrowed(service_setup(site, config, cache_folder()), variants, core_lists)
    folder = None if sent is None else sent.inputs
    plan = Plan(warmup=warmup, alone=runs, loaded=runs)
    measured = measure_profile(setup, folder=folder, meters=meter_specs(site.meters), plan=plan, progress=progress)
    return asyncio.run(measured)


def _named(site: Site, what: str) -> tuple[ServiceConfig, tuple[str, ...]]:
    """Find the named service, and the variants to measure."""
    runnable = [service for service in site.services if service.family_config is not None]
    for service in runnable:
        names = tuple(variant.name for variant in service.family.variants)
        if what == service.name:
            return service, names
        if what in names:
            return service, (what,)
    known = [name for service in runnable for name in (service.name, *(v.name for v in service.family.variants))]
    raise ConfigError(
        "no such service or variant",
        got=what,
        expected=", ".join(known) or "a site with services",
        hint="language models are fitted from measured runs: joulery profile --from RUNS"
        if site.language_models
        else "",
    )


def _narrowed(setup: ServiceSetup, variants: Sequence[str], core_lists: Sequence[str]) -> ServiceSetup:
    """The service setup reduced to some variants and to given partitions of its cores."""
    partitions = tuple(cpu_slices(_cores(core_list, len(setup.cores))) for core_list in core_lists) or setup.partitions
    return replace(setup, models={name: setup.models[name] for name in variants}, partitions=partitions, candidates=())


def _cores(core_list: str, most: int) -> tuple[int, ...]:
    """Parse the cores of each slice of a partition.

    Raises:
        ConfigError: The text is not a partition of this number of cores.
    """
    try:
        cores = tuple(int(part) for part in core_list.split(","))
    except ValueError:
        cores = ()
    if not cores or min(cores) < 1 or sum(cores) > most:
        raise ConfigError(
            "not a partition of the cores",
            pointer="--slices",
            got=core_list,
            expected=f"such as 1,1: at most {most} in all",
        )
    return cores
