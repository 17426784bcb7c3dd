"""A simulated GPU cut into slices: what runs on one slice does not feel the others, processes of one slice share it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from joulery.domain.gpu.provisioning import PlannedGpu
from joulery.perf.slices import BatchCurve, SlicedGpu, SliceProcess
from joulery.sim.placement.gpu import Conditions, Effect, SimulatedProcess


class SliceTenants(NamedTuple):
    """Processes of one slice.

    Attributes:
        curves: What the slice does to one process, two ... of the model at once.
        slice_w: What the slice adds to the board while its kernels execute.
    """

    curves: tuple[BatchCurve, ...]
    slice_w: float


@dataclass(frozen=True, slots=True)
class SlicedTruth:
    """Measured batches as the law of a simulated GPU; a process is slowed by those of its slice while they execute.

    Attributes:
        tenants: By the name under which the processes of a slice run.
        idle_w: Power while nothing executes.
        clock_mhz: The clock.
        speed: The same as a ratio of the highest.
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


def sliced_truth(gpu: PlannedGpu, sliced: SlicedGpu) -> SlicedTruth:
    """How a planned GPU behaves: the three-number form of each measured curve, which is not what the planner took.

    Args:
        gpu: A GPU of a plan, each instance on a slice.
        sliced: What was measured of its type.
    """
    clock_mhz = gpu.clock_mhz if gpu.clock_set_mhz is None else gpu.clock_set_mhz
    speed = clock_mhz / gpu.clock_max_mhz
    tenants = {}
    for each in gpu.instances:
        profile = sliced.menu[each.slice]
        curves = tuple(curve.fitted() for curve in sliced.table.of(each.model, profile.size))
        tenants[tenant_name(each.workload, each.replica)] = SliceTenants(curves, sliced.slice_w(profile, speed))
    return SlicedTruth(tenants, gpu.idle_w, clock_mhz, speed)


def tenant_name(workload: str, replica: int) -> str:
    """The name under which the processes of an instance run in the simulation."""
    return f"{workload}#{replica}"
