"""Preset ``igniter``: the published provisioning strategy, decision for decision (Alg. 1 and Alg. 2).

Two things make it fast without changing a single decision: a GPU keeps the solo figures of its processes, so a try
recomputes only the processes whose share grew; and no GPU can do better than take a process without anyone's share
growing, so the search stops at the first that does.

Faithful includes its faults: a GPU opened for a process gives it the lower bound unchecked, so a process that throttles
the clock all by itself breaks its promise. Whoever assembles the plan reports that (``policies.provision.predict``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from joulery.domain.provision import Workload
from joulery.perf.interference import GpuCoefficients, InterferenceProfile, ModelCoefficients, launch_delay_ms
from joulery.policies.provision.demand import Part, Size, parts_of, slo_ms
from joulery.policies.provision.predict import Share


class _Process(NamedTuple):
    """The constants of a part that Alg. 2 needs, worked out once; ``limit_ms`` is for execution alone."""

    part: Part
    batch: int
    lower_percent: float
    limit_ms: float
    launch_ms: float
    kernels: float
    work: float
    k4: float
    k5: float
    ability: float
    power_slope: float
    power_offset_w: float
    cache_slope: float
    cache_offset_percent: float
    cache_sensitivity: float


_Solo = tuple[float, float, float]
"""k_act, p and c of a process alone."""


class _Gpu:
    """A GPU being filled: its processes in the order they came, and what each does alone with its present share.

    Attributes:
        delay_ms: Launch delay of a kernel once there is one process more.
        refused: The last kind of process for which there was no room, as long as nothing changed here.
        tensions: For each process, time over limit at full clock once there is one process more, and what that gains
            per percent of L2 that the newcomer uses; the tightest first.
    """

    __slots__ = (
        "cache_percent",
        "delay_ms",
        "power_w",
        "processes",
        "refused",
        "shares",
        "solos",
        "tensions",
        "total_percent",
    )

    def __init__(self) -> None:
        self.processes: list[_Process] = []
        self.shares: list[float] = []
        self.solos: list[_Solo] = []
        self.total_percent = self.power_w = self.cache_percent = self.delay_ms = 0.0
        self.tensions: list[tuple[float, float]] = []
        self.refused: _Process | None = None

    def place(self, process: _Process, shares: list[float], coefficients: GpuCoefficients) -> None:
        """Take a process in; ``shares`` are everyone's from now on."""
        self.processes.append(process)
        self.shares, self.refused = shares, None
        self.solos = solos = [_solo(each, share) for each, share in zip(self.processes, shares, strict=True)]
        self.total_percent = sum(shares)
        self.power_w = sum([power_w for _, power_w, _ in solos])
        self.cache_percent = sum([cache_percent for _, _, cache_percent in solos])
        self.delay_ms = launch_delay_ms(coefficients, len(solos) + 1)
        self.tensions = sorted(
            (
                _tension(each, solo, self.delay_ms, self.cache_percent)
                for each, solo in zip(self.processes, solos, strict=True)
            ),
            reverse=True,
        )


def _tension(process: _Process, solo: _Solo, delay_ms: float, cache_percent: float) -> tuple[float, float]:
    """Time over limit at full clock, and what that gains per percent of L2 more."""
    active_ms, _, own_percent = solo
    stretch_ms = active_ms * process.cache_sensitivity
    time_ms = process.launch_ms + process.kernels * delay_ms + active_ms + stretch_ms * (cache_percent - own_percent)
    return time_ms / process.limit_ms, stretch_ms / process.limit_ms


_ROUNDING = 1e-9
"""Shortcuts leave this much to the exact comparison, so that they never decide what rounding would."""


def plan(workloads: Sequence[Workload], profile: InterferenceProfile) -> tuple[tuple[Share, ...], ...]:
    """Provision one GPU type as the paper does (Alg. 1).

    Args:
        workloads: The services, in the order that breaks ties.
        profile: Coefficients of the GPU type.

    Returns:
        The processes of each GPU, GPUs in the order they were opened, processes in the order they came. The very
        first GPU exists before anything is placed and may stay empty.

    Raises:
        InfeasibleError: A service cannot keep half its SLO on a whole GPU.
        ConfigError: The profile does not know a model.
    """
    dedicated: list[tuple[Share, ...]] = []
    processes: list[_Process] = []
    for index, workload in enumerate(workloads):
        for part, need, own_gpu in parts_of(profile, index, workload):
            if own_gpu:
                dedicated.append((Share(part, 100.0, need.batch),))
            else:
                processes.append(_process(profile.gpu, profile[workload.model], slo_ms(workload) / 2, part, need))
    processes.sort(key=lambda process: -process.lower_percent)
    shared = (
        tuple(Share(each.part, share, each.batch) for each, share in zip(gpu.processes, gpu.shares, strict=True))
        for gpu in _fill(processes, profile.gpu)
    )
    return (*dedicated, *shared)


def _process(gpu: GpuCoefficients, model: ModelCoefficients, half_ms: float, part: Part, need: Size) -> _Process:
    transfer_ms = need.batch * (model.load_bytes + model.feedback_bytes) / gpu.pcie_bytes_per_ms
    return _Process(
        part,
        need.batch,
        need.lower_percent,
        half_ms - transfer_ms,
        model.launch_ms,
        model.kernels,
        need.work,
        model.k4,
        model.k5,
        1000.0 * need.batch,
        model.power_slope,
        model.power_offset_w,
        model.cache_slope,
        model.cache_offset_percent,
        model.cache_sensitivity,
    )


def _solo(process: _Process, share_percent: float) -> _Solo:
    """k_act, p and c of a process alone (Eq. 11)."""
    active_ms = process.work / (share_percent + process.k4) + process.k5
    ability = process.ability / active_ms
    return (
        active_ms,
        process.power_slope * ability + process.power_offset_w,
        process.cache_slope * ability + process.cache_offset_percent,
    )


def _fill(processes: Sequence[_Process], coefficients: GpuCoefficients) -> list[_Gpu]:
    """Alg. 1, lines 3-18: each process to the GPU where the shares grow least, the first of equals."""
    gpus = [_Gpu()]
    open_gpus = list(gpus)
    smallest = processes[-1].lower_percent if processes else 0.0
    kind = None
    for process in processes:
        if kind is None or process[1:] != kind[1:]:
            kind = process
        chosen, shares = _choose(open_gpus, process, kind, coefficients)
        if chosen is None:
            chosen = _Gpu()
            gpus.append(chosen)
            open_gpus.append(chosen)
        chosen.place(process, shares, coefficients)
        if chosen.total_percent + smallest > 100:
            open_gpus.remove(chosen)
    return gpus


def _choose(
    gpus: Sequence[_Gpu], process: _Process, kind: _Process, coefficients: GpuCoefficients
) -> tuple[_Gpu | None, list[float]]:
    """Alg. 1, lines 6-12: the GPU that takes the process with the least growth, and everyone's shares there.

    ``kind`` stands for all processes with the same constants: what refused one of them refuses the next.
    """
    lower, unit = process.lower_percent, coefficients.unit_percent
    solo = active_ms, power_w, cache_percent = _solo(process, lower)
    stretch_ms = active_ms * process.cache_sensitivity
    alone_ms, limit_ms = process.launch_ms + active_ms - _ROUNDING, process.limit_ms
    spare_w = coefficients.power_cap_w - coefficients.idle_w - power_w
    clock_per_w = coefficients.clock_mhz_per_w / coefficients.clock_max_mhz
    room = 100 - lower
    least, chosen, shares = math.inf, None, [lower]
    for gpu in gpus:
        total = gpu.total_percent
        if total > room or gpu.refused is kind:
            continue
        excess_w = gpu.power_w - spare_w
        speed = 1.0 if excess_w <= 0 else 1.0 + clock_per_w * excess_w
        growth, allowed = lower, speed + _ROUNDING
        if alone_ms + process.kernels * gpu.delay_ms + stretch_ms * gpu.cache_percent > limit_ms * speed:
            growth += unit
        for tension, per_percent in gpu.tensions:
            if total + growth > 100 or growth >= least:
                break
            if tension + per_percent * cache_percent > allowed:
                growth += unit
        tried = None
        if total + growth <= 100 and growth < least:
            tried = _allocate(gpu, process, solo, coefficients, min(room, total + least - lower - unit / 2))
        if tried is not None:
            least, chosen, shares = sum(tried) - total, gpu, tried
            if least <= lower:
                break
        elif least == math.inf:
            gpu.refused = kind
    return chosen, shares


def _allocate(
    gpu: _Gpu, process: _Process, solo: _Solo, coefficients: GpuCoefficients, most_percent: float
) -> list[float] | None:
    """Alg. 2: the least shares with which everyone on the GPU keeps the promise.

    All who are late in the same snapshot gain one unit each, until nobody is late. None when the shares of those who
    were here, and what the newcomer gains, come to more than ``most_percent``.
    """
    total, unit = gpu.total_percent, coefficients.unit_percent
    power_w, cache = gpu.power_w + solo[1], gpu.cache_percent + solo[2]
    delay_ms = gpu.delay_ms
    processes, solos, shares = [*gpu.processes, process], [*gpu.solos, solo], [*gpu.shares, process.lower_percent]
    while True:
        excess_w = coefficients.idle_w + power_w - coefficients.power_cap_w
        slowdown = 1.0
        if excess_w > 0:
            clock_mhz = coefficients.clock_max_mhz + coefficients.clock_mhz_per_w * excess_w
            if clock_mhz <= 0:
                return None
            slowdown = coefficients.clock_max_mhz / clock_mhz
        late = [
            i
            for i, (each, (active_ms, _, own)) in enumerate(zip(processes, solos, strict=True))
            if (each.launch_ms + each.kernels * delay_ms + active_ms * (1 + each.cache_sensitivity * (cache - own)))
            * slowdown
            > each.limit_ms
        ]
        if not late:
            return shares
        total += unit * len(late)
        if total > most_percent:
            return None
        for i in late:
            shares[i] += unit
            solos[i] = _solo(processes[i], shares[i])
        power_w = sum([power_w for _, power_w, _ in solos])
        cache = sum([own for _, _, own in solos])
