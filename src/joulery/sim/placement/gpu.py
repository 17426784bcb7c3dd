"""A simulated GPU: slowdown of co-located processes, clock and power.

This is the *truth* of a simulation. It has parameters of its own: a plan made with one interference profile can be
judged on a GPU that behaves by another. One rule combines the clock that is set and the power cap::

    clock = min(clock set, clock the power cap leaves)

On a GPU with MIG slices, processes of different slices are independent; processes of one slice share it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from joulery.domain.errors import ConfigError, InfeasibleError
from joulery.perf.interference.model import InterferenceProfile, Neighbourhood, clock_mhz, colocated_latency, solo
from joulery.perf.slice_table import BatchCurve, SliceProcess


class SimulatedProcess(NamedTuple):
    """One serving process on a GPU.

    Attributes:
        model: Which model it runs.
        share_ratio: Its share of the GPU (MPS active thread share), 0 to 1.
        batch: Requests in the batch it executes.
    """

    model: str
    share_ratio: float
    batch: int


class Effect(NamedTuple):
    """Effect of a GPU on one of its processes.

    Attributes:
        load_s: Input of a batch to the GPU; overlaps with execution.
        busy_s: Execution and feedback of the batch: what occupies the process.
        dynamic_w: Power it adds while it executes.
    """

    load_s: float
    busy_s: float
    dynamic_w: float


class Conditions(NamedTuple):
    """A GPU while a given set of processes executes.

    Attributes:
        effects: One per process, in order.
        clock_mhz: The clock it runs at.
    """

    effects: tuple[Effect, ...]
    clock_mhz: float


class GpuTruth(Protocol):
    """True behaviour of a GPU."""

    @property
    def idle_w(self) -> float:
        """Power while nothing executes."""
        ...

    def conditions(self, executing: Sequence[SimulatedProcess]) -> Conditions:
        """The clock and the effect on each process while the given processes execute together.

        Raises:
            ConfigError: A model is unknown.
            InfeasibleError: The processes need so much power that no clock is left.
        """
        ...


@dataclass(frozen=True, slots=True)
class InterferenceTruth:
    """iGniter's equations as the true behaviour of a simulated GPU, usually with other coefficients than the planner's.

    Attributes:
        profile: Coefficients of the truth.
        clock_limit_mhz: Clock that is set; None for the highest.
        dynamic_ratio: Dynamic power at a clock, as a ratio of that at the highest, against the clock as a ratio of the
            highest. The default keeps the voltage: no less is saved below the knee of any voltage curve.
    """

    profile: InterferenceProfile
    clock_limit_mhz: float | None = None
    dynamic_ratio: Callable[[float], float] = float

    def __post_init__(self) -> None:
        highest = self.profile.gpu.clock_max_mhz
        if self.clock_limit_mhz is not None and not 0 < self.clock_limit_mhz <= highest:
            raise ConfigError(
                f"{self.profile.gpu.name} cannot run at this clock",
                got=f"{self.clock_limit_mhz:g} MHz",
                expected=f"above 0, at most {highest:g} MHz",
            )

    @property
    def idle_w(self) -> float:
        """Power while nothing executes."""
        return self.profile.gpu.idle_w

    def conditions(self, executing: Sequence[SimulatedProcess]) -> Conditions:
        """iGniter's Eqs. 1-11 for the executing processes; the clock is the lower of the one set and the cap's."""
        gpu = self.profile.gpu
        highest = gpu.clock_max_mhz
        limit = highest if self.clock_limit_mhz is None else self.clock_limit_mhz
        scale = self.dynamic_ratio(limit / highest) if limit < highest else 1.0
        solos = [solo(self.profile[each.model], each.batch, 100.0 * each.share_ratio) for each in executing]
        around = Neighbourhood()
        for own in solos:
            around = around.with_process(own)
        clock = min(limit, clock_mhz(gpu, around._replace(power_w=scale * around.power_w)))
        if clock <= 0:
            demand_w = gpu.idle_w + scale * around.power_w
            raise InfeasibleError(
                f"the processes on one {gpu.name} ask for {demand_w:.0f} W: no clock is left",
                binding=f"power cap of {gpu.power_cap_w:g} W",
                hint="put fewer processes on the GPU or give them smaller shares",
            )
        capped = min(scale, (gpu.power_cap_w - gpu.idle_w) / around.power_w) if around.power_w > 0 else scale
        unthrottled = around._replace(power_w=0.0)
        effects = []
        for each, own in zip(executing, solos, strict=True):
            times = colocated_latency(gpu, self.profile[each.model], each.batch, own, unthrottled)
            busy_ms = times.gpu_ms * (highest / clock) + times.feedback_ms
            effects.append(Effect(times.load_ms / 1e3, busy_ms / 1e3, capped * own.power_w))
        return Conditions(tuple(effects), clock)


class SliceTenants(NamedTuple):
    """Processes of one slice.

    Attributes:
        curves: Batch times of one process, two ... of the model at once on the slice.
        slice_w: Power that the slice adds to the board while its kernels execute.
    """

    curves: tuple[BatchCurve, ...]
    slice_w: float


@dataclass(frozen=True, slots=True)
class SlicedTruth:
    """Measured batches as the true behaviour of a simulated GPU; executing processes of a slice slow one another.

    Attributes:
        tenants: By the name under which the processes of a slice run.
        idle_w: Power while nothing executes.
        clock_mhz: The clock.
        speed: The clock as a ratio of the highest.
    """

    tenants: Mapping[str, SliceTenants]
    idle_w: float
    clock_mhz: float
    speed: float

    def conditions(self, executing: Sequence[SimulatedProcess]) -> Conditions:
        """The time of each batch beside the other processes of its slice that execute now."""
        together = Counter(each.model for each in executing)
        effects = []
        for each in executing:
            tenants = self.tenants[each.model]
            known = [curve for curve in tenants.curves if curve.processes >= together[each.model]]
            curve = known[0] if known else tenants.curves[-1]
            running = SliceProcess(curve, each.batch, self.speed)
            busy_s = running.time_s(each.batch)
            kernels_s = min(each.batch * running.kernel_s, busy_s)
            effects.append(Effect(0.0, busy_s, tenants.slice_w * kernels_s / busy_s))
        return Conditions(tuple(effects), self.clock_mhz)
