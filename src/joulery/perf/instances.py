"""Predictor of a serving process on a share of a GPU at a clock: its time, its power and the rate that it sustains.

The model of :mod:`joulery.perf.interference.model` (Eqs. 1-11 of iGniter) includes neighbours and the power cap, but
not a set clock. Here a GPU type is held at a clock ``φ = f / F``::

    time  = transfer + launch + active / φ^e · (1 + α · L2 use of the others), then slowed by the power cap
    power = idle(φ) + host + Σ (overhead · busy + joules a request · requests a second)
    clock = min(clock set, clock the power cap leaves)

with ``e`` the model's clock elasticity. :func:`at_clock` puts all of it into coefficients, so the same equations and
the same searches serve every clock. At full clock they are the equations of the paper, without neighbours those of a
process that has the GPU to itself, and with a batch of one the queue serves request by request: tests hold it to that.

How power and voltage follow the clock is taken from a measured V100 (:mod:`joulery.perf.power.clock_curves`), stretched
over the GPU type's own clocks: *assumed* for every other type. The work of a batch is assumed to draw its power at
saturation; host watts are those that the user states, 0 otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from joulery.domain.errors import ConfigError
from joulery.domain.serving.service import Slo
from joulery.perf.interference.model import (
    InterferenceProfile,
    Latency,
    ModelCoefficients,
    Neighbourhood,
    clock_mhz,
    colocated_latency,
    solo,
)
from joulery.perf.power.clock_curves import V100, ClockModel
from joulery.perf.queues.batch_queue import late_ratio

_HALVINGS = 40
"""Bisection steps in the search for a capacity."""


@dataclass(frozen=True, slots=True)
class ClockedGpu:
    """A GPU type held at one clock.

    Attributes:
        profile: Coefficients with which Eqs. 1-11 give the times at this clock; the type's own at full clock.
        clock_mhz: The clock that is set.
        clock_max_mhz: The type's highest.
        power_cap_w: The board's own limit.
        idle_w: Power of the idle board at this clock.
        host_w: Watts of the host that a powered GPU adds, as stated.
    """

    profile: InterferenceProfile
    clock_mhz: float
    clock_max_mhz: float
    power_cap_w: float
    idle_w: float
    host_w: float = 0.0

    def overhead_w(self, model: str) -> float:
        """Power a process of the model draws while it executes, beside the joules of its requests."""
        return self.profile[model].power_offset_w

    def request_j(self, model: str) -> float:
        """Dynamic joules of one request of the model."""
        return self.profile[model].power_slope


def clocks_mhz(profile: InterferenceProfile, levels: int, curve: ClockModel = V100) -> tuple[float, ...]:
    """Clocks worth choosing among: from the highest down to where the voltage stops falling, highest first.

    Args:
        profile: The GPU type.
        levels: Number of clocks; 1 for the highest alone.
        curve: Model whose voltage curve is stretched over the type's clocks.
    """
    highest = profile.gpu.clock_max_mhz
    knee = highest * curve.knee_mhz / curve.max_mhz
    return tuple(float(mhz) for mhz in np.linspace(highest, knee, levels)) if levels > 1 else (highest,)


def at_clock(
    profile: InterferenceProfile,
    set_mhz: float | None = None,
    *,
    host_w: float = 0.0,
    elasticity: Mapping[str, float] | None = None,
    curve: ClockModel = V100,
) -> ClockedGpu:
    """A GPU type held at a clock.

    The launch of kernels does not depend on the set clock; a further reduction by the power cap slows everything, as in
    Eq. 4. The use of the L2 cache is kept at its value at full clock, which is the cautious assumption.

    Args:
        profile: The type at full clock.
        set_mhz: The clock; the highest when None.
        host_w: Watts of the host for each powered GPU.
        elasticity: Elasticity of each model's time to the clock, 0 to 1; 1, all of it, for those left out.
        curve: Model whose voltage and idle power are stretched over the type's clocks.

    Raises:
        ConfigError: The type cannot run at this clock, or the host watts are not a number from 0.
    """
    gpu = profile.gpu
    highest = gpu.clock_max_mhz
    set_mhz = highest if set_mhz is None else set_mhz
    if not 0 <= host_w < math.inf:
        raise ConfigError("watts of a host are a number from 0", got=str(host_w), expected="such as 60 W")
    if not 0 < set_mhz <= highest * (1 + 1e-9):
        raise ConfigError(
            f"{gpu.name} cannot run at this clock", got=f"{set_mhz:g} MHz", expected=f"above 0, at most {highest:g} MHz"
        )
    if set_mhz >= highest:
        return ClockedGpu(profile, highest, highest, gpu.power_cap_w, gpu.idle_w, host_w)
    ratio = set_mhz / highest
    stretched = ratio * curve.max_mhz
    dynamic = float(curve.dynamic_ratio(stretched)[0])
    idle_w = gpu.idle_w * float(curve.idle_power_w(stretched)[0] / curve.idle_power_w(curve.max_mhz)[0])
    # min(f, F + a (d - P)) with a < 0 is f + a (d - P') beyond P' = P + (F - f) / |a|: the cap bites later.
    later_w = (highest - set_mhz) / -gpu.clock_mhz_per_w if gpu.clock_mhz_per_w < 0 else math.inf
    felt = {} if elasticity is None else elasticity
    models = {name: _slower(model, ratio ** felt.get(name, 1.0), dynamic) for name, model in profile.models.items()}
    held = replace(gpu, clock_max_mhz=set_mhz, power_cap_w=gpu.power_cap_w + later_w, idle_w=idle_w)
    return ClockedGpu(replace(profile, gpu=held, models=models), set_mhz, highest, gpu.power_cap_w, idle_w, host_w)


def _slower(model: ModelCoefficients, speed: float, dynamic: float) -> ModelCoefficients:
    """Coefficients of a model whose kernels run at ``speed`` and draw ``dynamic`` of their power at full clock."""
    return replace(
        model,
        k1=model.k1 / speed,
        k2=model.k2 / speed,
        k3=model.k3 / speed,
        k5=model.k5 / speed,
        power_slope=model.power_slope * dynamic / speed,
        power_offset_w=model.power_offset_w * dynamic,
        cache_slope=model.cache_slope / speed,
    )


class ServingInstance(NamedTuple):
    """One serving process of a GPU.

    Attributes:
        model: The model it runs.
        share_percent: Its share of the SMs.
        batch: Largest batch.
        rate_rps: Requests a second that it gets.
    """

    model: str
    share_percent: float
    batch: int
    rate_rps: float


class InstancePower(NamedTuple):
    """Power that one process adds to its GPU, W: by its presence, and by its requests."""

    overhead_w: float
    requests_w: float


class GpuPrediction(NamedTuple):
    """Prediction for a GPU with all its processes.

    Attributes:
        clock_mhz: The clock while all of it executes.
        times: Latency of a full batch of each process.
        idle_w, host_w: Power of the idle board, and of the host.
        powers: Power that each process adds.
        board_w: Mean power of the board and its host; the parts and idle add up to it.
    """

    clock_mhz: float
    times: tuple[Latency, ...]
    idle_w: float
    host_w: float
    powers: tuple[InstancePower, ...]
    board_w: float


def neighbourhood(gpu: ClockedGpu, instances: Sequence[ServingInstance]) -> Neighbourhood:
    """The sums that affect every process of the GPU."""
    around = Neighbourhood()
    for each in instances:
        around = around.with_process(solo(gpu.profile[each.model], each.batch, each.share_percent))
    return around


def predict_gpu(gpu: ClockedGpu, instances: Sequence[ServingInstance]) -> GpuPrediction:
    """Predict the times and the power of a GPU with the given processes.

    For their power beside the requests, processes are counted as always executing: this is an upper bound, and it keeps
    the optimiser's problem linear.

    Raises:
        ConfigError: A model is unknown.
    """
    around = neighbourhood(gpu, instances)
    times = tuple(
        colocated_latency(
            gpu.profile.gpu,
            gpu.profile[each.model],
            each.batch,
            solo(gpu.profile[each.model], each.batch, each.share_percent),
            around,
        )
        for each in instances
    )
    powers = tuple(
        InstancePower(gpu.overhead_w(each.model), gpu.request_j(each.model) * each.rate_rps) for each in instances
    )
    dynamic_w = math.fsum(each.overhead_w + each.requests_w for each in powers)
    room_w = gpu.power_cap_w - gpu.idle_w
    if dynamic_w > room_w:  # the board never draws more than its limit: the parts are scaled to what it does draw
        powers = tuple(InstancePower(*(watts * room_w / dynamic_w for watts in each)) for each in powers)
        dynamic_w = room_w
    return GpuPrediction(
        clock_mhz=max(0.0, clock_mhz(gpu.profile.gpu, around)),
        times=times,
        idle_w=gpu.idle_w,
        host_w=gpu.host_w,
        powers=powers,
        board_w=gpu.idle_w + gpu.host_w + dynamic_w,
    )


def capacity_rps(times_s: Sequence[float], slo: Slo, scv: float = 1.0) -> float:
    """The highest rate of random requests at which a process stays within its SLO.

    Whenever the process is free it takes all waiting requests, at most the largest batch.

    Args:
        times_s: Seconds of a batch of 1, 2 ... requests.
        slo: The latency and its quantile.
        scv: Squared coefficient of variation of the gaps between requests; 1 for Poisson.

    Returns:
        Requests a second; 0 where not even a single request is in time.
    """
    late = 1.0 - slo.quantile
    if not times_s or not times_s[0] <= slo.latency_s or not math.isfinite(times_s[-1]):
        return 0.0
    low, high = 0.0, len(times_s) / times_s[-1]
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if late_ratio(middle, scv, times_s, slo.latency_s) <= late else (low, middle)
        if high - low <= 1e-4 * high:
            break
    return low
