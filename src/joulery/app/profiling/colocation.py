"""``joulery profile SERVICE SITE --colocate``: measure co-located models on this machine and fit their interference."""

from __future__ import annotations

import asyncio
import csv
import io
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from joulery.app.profiling.inputs import inputs_for
from joulery.app.profiling.interference_fit import PAIR_COLUMNS, SOLO_COLUMNS
from joulery.app.serving.service import fleet_cores
from joulery.app.wiring.engine import local_engine
from joulery.app.wiring.model_refs import model_ref
from joulery.app.wiring.models import cache_folder
from joulery.config import load
from joulery.config.services import ServiceConfig
from joulery.config.site import Site
from joulery.domain.errors import ConfigError
from joulery.domain.serving.engine import ModelRef
from joulery.domain.serving.tensors import Tensor, TensorSpec
from joulery.perf.interference.calibration import calibrate, starting_profile
from joulery.perf.interference.document import check_profile
from joulery.perf.interference.model import InterferenceProfile
from joulery.runtime.profiling.colocation import Design, Measurements, Progress, cpu_as_gpu, measure_together
from joulery.store.files import write_named

_QUIET_CORES = 0.2
"""Busy cores of other processes above which they disturb the measurement."""


@dataclass(frozen=True, slots=True)
class _Usage:
    """CPU seconds of the machine, and of this process with its ended children, at a moment."""

    machine_s: float
    own_s: float
    at_s: float

    @classmethod
    def now(cls) -> _Usage:
        import psutil

        times = psutil.cpu_times()
        idle_s = times.idle + getattr(times, "iowait", 0.0)
        # Time of guests is in that of users already.
        twice_s = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)
        own = os.times()
        own_s = own.user + own.system + own.children_user + own.children_system
        return cls(sum(times) - idle_s - twice_s, own_s, time.monotonic())

    def others_since(self, before: _Usage) -> float:
        """Mean number of cores that other processes kept busy since an earlier reading."""
        busy_s = (self.machine_s - before.machine_s) - (self.own_s - before.own_s)
        return max(0.0, busy_s / max(self.at_s - before.at_s, 1e-9))


def profile_together(
    file: Path, names: Sequence[str], *, apart: bool, runs: int, output: Path | None, progress: Progress
) -> InterferenceProfile:
    """Measure co-located models on this machine's cores and fit their interference.

    Args:
        file: The site file.
        names: Services or variants; each variant is one model.
        apart: Whether neighbours run on cores of their own.
        runs: Number of batches timed of each instance.
        output: File for the profile; the measurements are written beside it before the fit.
        progress: Called with the number of runs done, the total number and the next one.

    Raises:
        JouleryError: A model or a share is not available, or too little was measured to fit.
    """
    site = load(file)
    models = _models(site, names)
    cores = fleet_cores(site)
    design = Design.on_cores(len(cores), runs=runs) if apart else Design(runs=runs)
    before = _Usage.now()
    found = asyncio.run(_measured(models, cores, design, progress))
    others = _Usage.now().others_since(before)
    if output is not None:  # first of all: measuring takes minutes, and a fit may fail
        write_named(output.with_suffix(".solo.csv"), _table(SOLO_COLUMNS, found.solo))
        write_named(output.with_suffix(".pairs.csv"), _table(PAIR_COLUMNS, found.pairs))
    profile = fitted(found, len(cores), apart=apart)
    if others > _QUIET_CORES:
        busy = f"other processes kept {others:.1f} cores busy meanwhile: measure again on a quiet machine"
        profile = replace(profile, notes=(*profile.notes, busy))
    return profile


def fitted(found: Measurements, cores: int, *, apart: bool = False) -> InterferenceProfile:
    """Fit the interference to the measurements on a number of cores, with its residuals.

    Raises:
        DataError: Too little was measured.
    """
    # Plans give no smaller share than was measured: a tenth under quotas, else a whole core.
    start = starting_profile(cpu_as_gpu(cores, 100.0 / cores if apart else 10.0), found.solo)
    how = "whole cores" if apart else "quotas of the same cores"
    source = f"measured here: {len(found.pairs)} pairs on {how}"
    profile = calibrate(start, found.solo, found.pairs, source=source, monotone=True)
    # What a CPU core has no counterpart of cannot have been fitted: it keeps its neutral value.
    models = {name: replace(model, pcie_contention=1.0) for name, model in profile.models.items()}
    profile = replace(profile, models=models)
    check_profile(profile)
    return profile


async def _measured(
    models: dict[str, ModelRef], cores: tuple[int, ...], design: Design, progress: Progress
) -> Measurements:
    engine = local_engine(cores=cores, deadline_s=120.0)
    try:
        return await measure_together(engine, models, cores, one_request, design, progress=progress)
    finally:
        await engine.close()


def one_request(specs: Sequence[TensorSpec]) -> dict[str, Tensor]:
    """One generated request that fits the declared inputs of a model."""
    return inputs_for(specs, None, count=1)[0]


def _models(site: Site, names: Sequence[str]) -> dict[str, ModelRef]:
    """Models to be measured, by variant.

    Raises:
        ConfigError: No such service or variant, or two models of one name.
    """
    runnable = [service for service in site.services if service.family_config is not None]
    known = [name for service in runnable for name in (service.name, *(v.name for v in service.family.variants))]
    if strange := [name for name in names if name not in known]:
        raise ConfigError("no such service or variant", got=strange[0], expected=", ".join(known) or "a service")
    found: dict[str, ModelRef] = {}
    for service in runnable:
        for name, model in _wanted(service, names).items():
            if found.setdefault(name, model) != model:
                raise ConfigError(f"two models are called {name}", pointer="services", hint="rename one of them")
    return found


def _wanted(service: ServiceConfig, names: Sequence[str]) -> dict[str, ModelRef]:
    cache = cache_folder()
    return {
        variant.name: model_ref(variant.model, cache)
        for variant in service.family.variants
        if service.name in names or variant.name in names
    }


def _table(columns: Sequence[str], rows: Sequence[tuple[object, ...]]) -> str:
    """Table of measurements as CSV, in the format of ``joulery profile --from``."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    return text.getvalue()
