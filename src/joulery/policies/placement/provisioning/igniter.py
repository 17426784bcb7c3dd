"""Preset ``igniter``: the published provisioning strategy, decision for decision (Theorem 1, Alg. 1 and Alg. 2).

Three things make it fast without changing a single decision: a GPU keeps the solo figures of its processes, so a try
recomputes only the processes whose share grew; tries that cannot succeed are recognised from a few numbers kept with
each GPU; and no GPU can do better than take a process without anyone's share growing, so the search stops at the first
that does.

Faults of the published strategy are kept: a GPU opened for a process gives it the lower bound unchecked, so a process
that throttles the clock by itself violates its SLO. The plan reports that (:func:`.gpu_shares.violations_of`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from joulery.domain.errors import InfeasibleError
from joulery.domain.gpu.provisioning import Workload
from joulery.perf.interference.model import (
    GpuCoefficients,
    InterferenceProfile,
    ModelCoefficients,
    launch_delay_ms,
    work,
)
from joulery.policies.placement.provisioning.gpu_shares import (
    Figures,
    Process,
    ReplicaLoad,
    Share,
    alone,
    process,
    settle,
    slo_ms,
    slowdown,
    units_of,
)
from joulery.policies.placement.provisioning.options import MAX_REPLICAS

MAX_BATCH = 1024
"""Largest batch: no profile contains larger ones, and the quadratic of Eq. 11 is not valid for them."""
_ROUNDING = 1e-9
"""Margin within which shortcuts leave the decision to the exact comparison, because rounding could change it."""


class Size(NamedTuple):
    """Size of a part when it is alone, by Theorem 1.

    Attributes:
        batch: b_appr (Eq. 17).
        work: gamma, ms percent.
        room_ms: delta: time left of half the SLO for the work itself; <= 0 when the model cannot be that fast.
        units: r_lower (Eq. 18) in units of the GPU type; 0 when ``room_ms`` <= 0.
    """

    batch: int
    work: float
    room_ms: float
    units: int


class _Request(NamedTuple):
    """A part to place: its constants, the units it needs at least, and its figures with those."""

    part: ReplicaLoad
    process: Process
    units: int
    figures: Figures


_Refusals = dict[tuple[int, ...], set[int]]
"""By the state of a GPU (identities of its processes, then their units): processes for which it has no room."""


class _Gpu:
    """A GPU being filled: its processes in the order they were placed, and the solo figures of each with its share.

    Attributes:
        delay_ms: Launch delay of a kernel once there is one process more.
        refused: Constants (by identity) of processes for which there is no room; shared by GPUs in the same state.
        tensions: For each process, the ratio of time to limit at full clock once there is one process more, and its
            growth per percent of L2 that the newcomer uses; the tightest first.
    """

    __slots__ = (
        "cache_percent",
        "delay_ms",
        "figures",
        "parts",
        "power_w",
        "processes",
        "refused",
        "room",
        "tensions",
        "units",
    )

    def __init__(self, room: int) -> None:
        self.room = room
        self.parts: list[ReplicaLoad] = []
        self.processes: list[Process] = []
        self.units: list[int] = []
        self.figures: list[Figures] = []
        self.power_w = self.cache_percent = self.delay_ms = 0.0
        self.tensions: list[tuple[float, float]] = []
        self.refused: set[int] = set()

    def place(self, request: _Request, units: list[int], gpu: GpuCoefficients, refusals: _Refusals) -> None:
        """Add a process; ``units`` are the new units of all processes."""
        self.parts.append(request.part)
        self.processes.append(request.process)
        self.units, self.room = units, units_of(gpu) - sum(units)
        self.refused = refusals.setdefault((*map(id, self.processes), *units), set())
        unit = gpu.unit_percent
        self.figures = figures = [one.figures(n * unit) for one, n in zip(self.processes, units, strict=True)]
        self.power_w = sum([power_w for _, power_w, _ in figures])
        self.cache_percent = sum([own for _, _, own in figures])
        self.delay_ms = launch_delay_ms(gpu, len(figures) + 1)
        self.tensions = sorted(
            (
                _tension(one, own, self.delay_ms, self.cache_percent)
                for one, own in zip(self.processes, figures, strict=True)
            ),
            reverse=True,
        )


def _tension(one: Process, figures: Figures, delay_ms: float, cache_percent: float) -> tuple[float, float]:
    """Ratio of time to limit at full clock, and its growth per additional percent of L2."""
    active_ms, _, own = figures
    stretch_ms = active_ms * one.cache_sensitivity
    time_ms = one.launch_ms + one.kernels * delay_ms + active_ms + stretch_ms * (cache_percent - own)
    return time_ms / one.limit_ms, stretch_ms / one.limit_ms


def plan(
    workloads: Sequence[Workload], profile: InterferenceProfile, max_batch: int = MAX_BATCH
) -> tuple[tuple[Share, ...], ...]:
    """Provision one GPU type as the paper does (Alg. 1).

    Args:
        workloads: The services, in the order that breaks ties.
        profile: Coefficients of the GPU type.
        max_batch: Largest batch; a service that needs a larger one is divided into replicas.

    Returns:
        The processes of each GPU, GPUs in the order they were opened, processes in the order they were placed. The
        very first GPU exists before anything is placed and may stay empty.

    Raises:
        InfeasibleError: A service cannot keep half its SLO on a whole GPU.
        ConfigError: The profile does not contain a model.
    """
    unit = profile.gpu.unit_percent
    dedicated: list[tuple[Share, ...]] = []
    requests: list[_Request] = []
    known: dict[Process, Process] = {}
    for index, workload in enumerate(workloads):
        for part, need, own_gpu in parts_of(profile, index, workload, max_batch):
            if own_gpu:
                dedicated.append((Share(part, 100.0, need.batch),))
            else:
                one = _process(profile.gpu, profile[workload.model], slo_ms(workload) / 2, need)
                one = known.setdefault(one, one)
                requests.append(_Request(part, one, need.units, one.figures(need.units * unit)))
    requests.sort(key=lambda request: -request.units)
    shared = (
        tuple(
            Share(part, units * unit, one.batch)
            for part, one, units in zip(gpu.parts, gpu.processes, gpu.units, strict=True)
        )
        for gpu in _fill(requests, profile.gpu)
    )
    return (*dedicated, *shared)


def _process(gpu: GpuCoefficients, model: ModelCoefficients, half_ms: float, need: Size) -> Process:
    transfer_ms = need.batch * (model.load_bytes + model.feedback_bytes) / gpu.pcie_bytes_per_ms
    shared_ms = half_ms - model.pcie_contention * transfer_ms
    return process(model, need.batch, limit_ms=shared_ms, limit_alone_ms=half_ms - transfer_ms)


def _fill(requests: Sequence[_Request], gpu: GpuCoefficients) -> list[_Gpu]:
    """Alg. 1, lines 3-18: each process to the GPU where the shares grow least, the first of equals."""
    most = units_of(gpu)
    gpus = [_Gpu(most)]
    open_gpus = list(gpus)
    smallest = requests[-1].units if requests else 0
    refusals: _Refusals = {}
    for request in requests:
        chosen, units = _choose(open_gpus, request, gpu)
        if chosen is None:
            chosen = _Gpu(most)
            gpus.append(chosen)
            open_gpus.append(chosen)
        chosen.place(request, units, gpu, refusals)
        if chosen.room < smallest:
            open_gpus.remove(chosen)
    return gpus


def _choose(gpus: Sequence[_Gpu], request: _Request, coefficients: GpuCoefficients) -> tuple[_Gpu | None, list[int]]:
    """Alg. 1, lines 6-12: the GPU that takes the process with the least growth, and the units of all its processes."""
    _, one, lower, (active_ms, power_w, cache_percent) = request
    stretch_ms = active_ms * one.cache_sensitivity
    alone_ms, limit_ms = one.launch_ms + active_ms - _ROUNDING, one.limit_ms
    spare_w = coefficients.power_cap_w - coefficients.idle_w - power_w
    clock_per_w = coefficients.clock_mhz_per_w / coefficients.clock_max_mhz
    least, chosen, best, identity = units_of(coefficients) + 1, None, [lower], id(one)
    for gpu in gpus:
        room = gpu.room
        if lower > room or identity in gpu.refused:
            continue
        excess_w = gpu.power_w - spare_w
        speed = 1.0 if excess_w <= 0 else 1.0 + clock_per_w * excess_w
        allowed = speed + _ROUNDING
        bar = room + 1 if room < least else least
        growth = lower
        if alone_ms + one.kernels * gpu.delay_ms + stretch_ms * gpu.cache_percent > limit_ms * speed:
            growth += 1
        for tension, per_percent in gpu.tensions:
            if growth >= bar:
                break
            if tension + per_percent * cache_percent > allowed:
                growth += 1
        units = _try(gpu, request, coefficients, bar) if growth < bar else None
        if units is not None:
            least, chosen, best = sum(units) - sum(gpu.units), gpu, units
            if least <= lower:
                break
        elif chosen is None:
            gpu.refused.add(identity)
    return chosen, best


def _try(gpu: _Gpu, request: _Request, coefficients: GpuCoefficients, bar: int) -> list[int] | None:
    """Alg. 2 for one process more: the units of all processes, or None once they have grown by ``bar`` or more."""
    if not gpu.processes:
        return _place_alone(request, coefficients, bar)
    units = [*gpu.units, request.units]
    figures = [*gpu.figures, request.figures]
    spare = bar - 1 - request.units
    return units if settle(coefficients, [*gpu.processes, request.process], units, figures, spare) else None


def _place_alone(request: _Request, coefficients: GpuCoefficients, bar: int) -> list[int] | None:
    """Alg. 2 on an empty GPU."""
    one, (active_ms, power_w, _) = request.process, request.figures
    for units in range(request.units, bar):
        active_ms, power_w, _ = one.figures(units * coefficients.unit_percent)
        if (one.launch_alone_ms + active_ms) * slowdown(coefficients, power_w) <= one.limit_alone_ms:
            return [units]
    return None


def parts_of(
    profile: InterferenceProfile, index: int, workload: Workload, max_batch: int = MAX_BATCH
) -> list[tuple[ReplicaLoad, Size, bool]]:
    """The parts that the published code divides a service into, each with its size and whether it has its own GPU.

    A service that fits one GPU stays whole. Otherwise: the largest batch that keeps half the SLO on a whole GPU, a
    replica for every nine tenths of its throughput, and the rest as a part like any other. No part has a batch above
    ``max_batch``; the published code sets no limit, and its profiles reach 32.

    Raises:
        InfeasibleError: Not even a batch of one on a whole GPU is fast enough, or it takes too many replicas.
        ConfigError: The profile does not contain the model.
    """
    model, half_ms = profile[workload.model], slo_ms(workload) / 2
    whole = size(profile, model, half_ms, workload.rate_rps)
    if _fits(profile, whole, max_batch):
        return [(ReplicaLoad(index, 0, 1, workload.rate_rps), whole, False)]
    batch = _largest_batch(profile, model, half_ms, min(whole.batch, max_batch))
    if batch == 0:
        raise too_fast(profile, workload, alone(profile, model, 1, 100.0).total_ms, half_ms)
    per_replica = math.ceil(0.9 * alone(profile, model, batch, 100.0).throughput_rps(batch))
    replicas = math.ceil(workload.rate_rps / per_replica)
    if replicas > MAX_REPLICAS:
        raise too_much(profile, workload, replicas)
    dedicated = Size(batch, work(model, batch), whole.room_ms, units_of(profile.gpu))
    parts = [(ReplicaLoad(index, i, replicas, float(per_replica)), dedicated, True) for i in range(replicas - 1)]
    rest_rps = workload.rate_rps - per_replica * (replicas - 1)
    rest = size(profile, model, half_ms, rest_rps)
    own_gpu = not _fits(profile, rest, max_batch)
    return [*parts, (ReplicaLoad(index, replicas - 1, replicas, rest_rps), dedicated if own_gpu else rest, own_gpu)]


def size(profile: InterferenceProfile, model: ModelCoefficients, half_ms: float, rate_rps: float) -> Size:
    """Appropriate batch and lower bound of the share (Theorem 1, Eqs. 17-18).

    Args:
        profile: Coefficients of the GPU type.
        model: Coefficients of the model.
        half_ms: Half the SLO: the other half is for batching and queueing (constraint 14).
        rate_rps: Demand.
    """
    gpu, rate = profile.gpu, rate_rps / 1000.0
    bandwidth = gpu.pcie_bytes_per_ms
    batch = math.ceil(half_ms * rate * bandwidth / (bandwidth + rate * model.load_bytes))
    gamma = work(model, batch)
    room_ms = half_ms - (model.load_bytes + model.feedback_bytes) * batch / bandwidth - model.k5 - model.launch_ms
    if room_ms <= 0:
        return Size(batch, gamma, room_ms, 0)
    return Size(batch, gamma, room_ms, max(1, math.ceil((gamma / room_ms - model.k4) / gpu.unit_percent)))


def _fits(profile: InterferenceProfile, need: Size, max_batch: int) -> bool:
    """Whether Theorem 1 found a share of one GPU, with a batch within ``max_batch``."""
    return need.room_ms > 0 and need.work > 0 and need.batch <= max_batch and need.units <= units_of(profile.gpu)


def _largest_batch(profile: InterferenceProfile, model: ModelCoefficients, half_ms: float, limit: int) -> int:
    """The largest batch up to ``limit`` that keeps half the SLO on a whole GPU; 0 when none does."""
    best = 0
    for batch in range(1, limit + 1):
        if alone(profile, model, batch, 100.0).total_ms >= half_ms:
            break
        best = batch
    return best


def too_fast(profile: InterferenceProfile, workload: Workload, best_ms: float, allowed_ms: float) -> InfeasibleError:
    """The error for an SLO that no share of the GPU type can meet."""
    return InfeasibleError(
        f"service {workload.id}: {workload.model} takes {best_ms:.3f} ms for a single request on a whole "
        f"{profile.gpu.name}, but {allowed_ms:.3f} ms is all its SLO of {slo_ms(workload):g} ms leaves for a batch",
        binding=f"latency of {workload.id}",
        nearest={"workload": workload.id, "gpu": profile.gpu.name, "best_latency_s": best_ms / 1e3},
        hint="relax its SLO, choose a faster GPU type, or serve a smaller model",
    )


def too_much(profile: InterferenceProfile, workload: Workload, replicas: int) -> InfeasibleError:
    """The error for a rate that takes more than ``MAX_REPLICAS`` replicas."""
    return InfeasibleError(
        f"service {workload.id}: {workload.rate_rps:g} requests/s of {workload.model} take {replicas} replicas on "
        f"{profile.gpu.name}, more than {MAX_REPLICAS}",
        binding=f"rate of {workload.id}",
        nearest={"workload": workload.id, "gpu": profile.gpu.name, "replicas": replicas},
        hint="check the unit of its rate",
    )
