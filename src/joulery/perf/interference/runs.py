"""Runs under MPS that profile a model on a GPU, and the coefficients they give (iGniter, section 3.1).

There are nine solo runs a model (three batches by three shares) and one run of two copies, as in the paper. The use of
the L2 cache comes from a kernel profiler, or else from an estimate that is labelled as one. Two more co-location runs
are not fitted: they test the profile's predictions. One to five copies of one model give the hardware coefficients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from joulery.domain.errors import DataError
from joulery.perf.interference.document import check_profile
from joulery.perf.interference.fit import (
    CachePoint,
    CopiesPoint,
    GpuRuns,
    ModelRuns,
    SoloPoint,
    TwoCopies,
    fit_gpu,
    fit_model,
    solo_fit,
)
from joulery.perf.interference.model import (
    GpuCoefficients,
    InterferenceProfile,
    ModelCoefficients,
    ModelFit,
    Neighbourhood,
    colocated_latency,
    solo,
)

FASTEST_CACHE_PERCENT = 30.0
"""L2 utilisation assumed for a model at its highest measured throughput, where no profiler measured it."""
BATCHES, SHARES = (1, 16, 32), (10.0, 50.0, 100.0)
MIDDLE = (16, 50.0)
"""The run that two copies are compared with."""


class ShareRun(NamedTuple):
    """One configuration and its measurements.

    Attributes:
        copies: Equal processes at once.
        batch: Batch size of each.
        share_percent: Share of the SMs of each.
        latency_ms: Time of one batch in the process, transfers included.
        power_w: Mean power of the board meanwhile.
        clock_mhz: Mean SM clock meanwhile.
    """

    copies: int
    batch: int
    share_percent: float
    latency_ms: float
    power_w: float
    clock_mhz: float


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """Properties of a GPU board.

    Attributes:
        name: The vendor's name of the board.
        power_cap_w, clock_max_mhz, idle_w: Its limits, and its idle power.
        pcie_bytes_per_ms: Speed of a transfer.
        unit_percent: Smallest step of a share.
    """

    name: str
    power_cap_w: float
    clock_max_mhz: float
    idle_w: float
    pcie_bytes_per_ms: float
    unit_percent: float = 2.5


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts of a model known before it runs.

    Attributes:
        name: Its name in plans.
        load_bytes, feedback_bytes: Input and result of one request.
        kernels: Kernels of one inference; 0 where no profiler counted them.
        launch_ms: Their total launch delay when alone; 0 where unknown.
        cache_percent: ``(batch, use of the L2 cache in percent)`` alone on the whole GPU, of every batch in
            :data:`BATCHES`; empty where no profiler read it.
    """

    name: str
    load_bytes: float
    feedback_bytes: float
    kernels: float = 0.0
    launch_ms: float = 0.0
    cache_percent: tuple[tuple[int, float], ...] = ()


def configurations(*, hardware: bool) -> tuple[tuple[int, int, float], ...]:
    """``(copies, batch, share in percent)`` of every run.

    Args:
        hardware: True for a GPU whose own coefficients are not known yet.
    """
    grid = tuple((1, batch, share) for batch in BATCHES for share in SHARES)
    copies = tuple((count, MIDDLE[0], 20.0) for count in range(1, 6)) if hardware else ()
    return (*grid, (2, *MIDDLE), (2, BATCHES[0], MIDDLE[1]), (2, BATCHES[-1], MIDDLE[1]), *copies)


def profile_of_runs(
    facts: GpuFacts, model: ModelFacts, runs: Sequence[ShareRun], base: InterferenceProfile, *, hardware: bool
) -> InterferenceProfile:
    """Add one model to the profile of a GPU.

    Args:
        facts: The board.
        model: The model.
        runs: The measured runs, in any order.
        base: The profile whose other models and GPU coefficients are kept, unless ``hardware``. Its launch delays under
            co-location are kept in any case, for they take a kernel profiler to measure.
        hardware: True where the runs include those of one to five copies.

    Raises:
        DataError: The runs do not determine the coefficients, or give impossible ones.
    """
    notes = [] if hardware else list(base.notes)
    fastest_mhz = max(run.clock_mhz for run in runs)
    if hardware and fastest_mhz < facts.clock_max_mhz - 1:
        notes.append(
            f"{facts.name} never ran faster than {fastest_mhz:.0f} MHz here, which is taken for its full clock; "
            f"it lists {facts.clock_max_mhz:.0f} MHz"
        )
        facts = replace(facts, clock_max_mhz=fastest_mhz)
    gpu = _hardware(facts, model, runs, base, notes) if hardware else base.gpu
    fitted = _model(gpu, model, runs, notes)
    fits = (solo_fit(gpu, model.name, fitted, _points(gpu, model, runs)), *_checked(gpu, model.name, fitted, runs))
    others = {} if hardware else {name: each for name, each in base.models.items() if name != model.name}
    kept = () if hardware else tuple(fit for fit in base.fits if fit.model != model.name)
    profile = replace(
        base,
        gpu=gpu,
        models={**others, model.name: fitted},
        form="igniter",
        source=f"measured under MPS on {facts.name}: {len(runs)} runs of {model.name}",
        fits=(*kept, *fits),
        notes=tuple(dict.fromkeys(notes)),
        bands={name: band for name, band in base.bands.items() if name in others},
    )
    check_profile(profile)
    return profile


def _hardware(
    facts: GpuFacts, model: ModelFacts, runs: Sequence[ShareRun], base: InterferenceProfile, notes: list[str]
) -> GpuCoefficients:
    """The GPU's coefficients; launch delays are the base's, clock against power is measured."""
    copies = sorted(run for run in runs if (run.batch, run.share_percent) == (MIDDLE[0], 20.0))
    slope, offset = base.gpu.delay_ms_per_neighbour, base.gpu.delay_offset_ms
    waits = [0.0, *(slope * count + offset for count in range(2, len(copies) + 1))]
    points = [
        CopiesPoint(run.power_w, run.clock_mhz, wait * facts.clock_max_mhz / run.clock_mhz)
        for run, wait in zip(copies, waits, strict=False)
    ]
    notes.append(f"launch delays under co-location are those of {base.gpu.name}: no kernel profiler measured them here")
    notes.append("transfers are taken to reach a fixed share of the PCIe link's speed")
    described = GpuRuns(
        facts.name,
        facts.power_cap_w,
        facts.clock_max_mhz,
        facts.idle_w,
        facts.pcie_bytes_per_ms,
        facts.unit_percent,
        points,
    )
    try:
        return fit_gpu(described)
    except DataError as error:
        if "full clock" not in error.message:
            raise
        notes.append(f"clock against power is that of {base.gpu.name}: {model.name} throttles the board from the start")
        free = [point._replace(clock_mhz=facts.clock_max_mhz) for point in points]
        return replace(fit_gpu(replace(described, copies=free)), clock_mhz_per_w=base.gpu.clock_mhz_per_w)


def _points(gpu: GpuCoefficients, model: ModelFacts, runs: Sequence[ShareRun]) -> list[SoloPoint]:
    """The solo runs of the grid, without the times of transfers."""
    grid = {(run.batch, run.share_percent): run for run in runs if run.copies == 1}
    missing = [(batch, share) for batch in BATCHES for share in SHARES if (batch, share) not in grid]
    if missing:
        raise DataError(f"{model.name}: no solo run of batch {missing[0][0]} at {missing[0][1]:g} %")
    return [
        SoloPoint(batch, share, _gpu_ms(gpu, model, grid[batch, share]), run.power_w, run.clock_mhz)
        for batch in BATCHES
        for share in SHARES
        for run in (grid[batch, share],)
    ]


def _gpu_ms(gpu: GpuCoefficients, model: ModelFacts, run: ShareRun) -> float:
    transfers_ms = (model.load_bytes + model.feedback_bytes) * run.batch / gpu.pcie_bytes_per_ms
    if run.latency_ms - transfers_ms - model.launch_ms <= 0:
        raise DataError(
            f"{model.name}: a batch of {run.batch} took {run.latency_ms:g} ms, of which transfers and launches alone "
            f"would be {transfers_ms + model.launch_ms:g} ms"
        )
    return run.latency_ms - transfers_ms


def _model(gpu: GpuCoefficients, model: ModelFacts, runs: Sequence[ShareRun], notes: list[str]) -> ModelCoefficients:
    points = _points(gpu, model, runs)
    ability = [1000.0 * point.batch / (point.gpu_ms - model.launch_ms) for point in points]
    cache, percent = _cache(gpu, model, points, ability, notes)
    if not model.kernels:
        notes.append(f"{model.name}: kernels were not counted; their launch is part of the time on the GPU")
    two = next((run for run in runs if (run.copies, run.batch, run.share_percent) == (2, *MIDDLE)), None)
    if two is None:
        raise DataError(f"{model.name}: no run of two copies of batch {MIDDLE[0]} at {MIDDLE[1]:g} %")
    at = next(index for index, point in enumerate(points) if (point.batch, point.share_percent) == MIDDLE)
    alone_ms = (points[at].gpu_ms - model.launch_ms) * min(points[at].clock_mhz / gpu.clock_max_mhz, 1.0)
    waits_ms = model.kernels * (2 * gpu.delay_ms_per_neighbour + gpu.delay_offset_ms)
    beside_ms = max(_gpu_ms(gpu, model, two) - model.launch_ms - waits_ms, alone_ms)
    measured = ModelRuns(
        model.load_bytes,
        model.feedback_bytes,
        model.kernels,
        model.launch_ms,
        points,
        cache,
        TwoCopies(alone_ms, beside_ms, two.clock_mhz, percent),
    )
    return _possible(fit_model(gpu, measured), model.name, notes)


def _cache(
    gpu: GpuCoefficients,
    model: ModelFacts,
    points: Sequence[SoloPoint],
    ability: Sequence[float],
    notes: list[str],
) -> tuple[list[CachePoint], float]:
    """Use of the L2 cache at three runs, and at the run that two copies are compared with, in percent."""
    read = dict(model.cache_percent)
    at = {(int(point.batch), point.share_percent): index for index, point in enumerate(points)}
    if not read:
        notes.append(f"{model.name}: use of the L2 cache is estimated from throughput, no cache profiler read it")
        percent = [FASTEST_CACHE_PERCENT * rate / max(ability) for rate in ability]
        wanted = [at[key] for key in zip(BATCHES, SHARES, strict=True)]
        cache = [CachePoint(*points[index][:3], percent[index]) for index in wanted]
        return cache, percent[at[MIDDLE]]
    if missing := [batch for batch in BATCHES if batch not in read]:
        raise DataError(f"{model.name}: use of the L2 cache was not read at batch {missing[0]}")

    def full_clock_ms(point: SoloPoint) -> float:
        # A profiler runs kernels one by one, at a clock no power cap lowers: so must the time they are set against.
        return (point.gpu_ms - model.launch_ms) * min(point.clock_mhz / gpu.clock_max_mhz, 1.0)

    whole = [points[at[batch, max(SHARES)]] for batch in BATCHES]
    cache = [
        CachePoint(point.batch, point.share_percent, full_clock_ms(point) + model.launch_ms, read[int(point.batch)])
        for point in whole
    ]
    middle, alike = points[at[MIDDLE]], points[at[MIDDLE[0], max(SHARES)]]
    return cache, read[MIDDLE[0]] * full_clock_ms(alike) / full_clock_ms(middle)


def _possible(found: ModelCoefficients, name: str, notes: list[str]) -> ModelCoefficients:
    """Set coefficients that noise made negative to 0: a neighbour never helps, more work never takes less power."""
    for key in ("k5", "power_slope", "cache_slope", "cache_sensitivity"):
        if getattr(found, key) < 0:
            notes.append(f"{name}: {key} came out as {getattr(found, key):.3g}, within noise of 0; taken as 0")
            found = replace(found, **{key: 0.0})
    return found


def _checked(
    gpu: GpuCoefficients, name: str, model: ModelCoefficients, runs: Sequence[ShareRun]
) -> tuple[ModelFit, ...]:
    """Errors of the predictions for runs of two copies that are not part of the fit."""
    errors = []
    for run in runs:
        if run.copies == 2 and run.batch != MIDDLE[0]:
            own = solo(model, run.batch, run.share_percent)
            around = Neighbourhood().with_process(own).with_process(own)
            errors.append(colocated_latency(gpu, model, run.batch, own, around).total_ms / run.latency_ms - 1)
    return (ModelFit(name, "held-out pairs", tuple(errors)),) if errors else ()
